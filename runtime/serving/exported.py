"""An exported model: a folder with a manifest, the dense network and a parquet file per table.

The folder appears whole or not at all: it is filled under another name beside its place. The
manifest names each file with its digest. The network is a `torch.export` program where it can be
one, else its weights.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from persia_sim.words.files import read_regular
from persia_sim.words.schema import Count, parse
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.store import FieldVectors
from runtime.files import (
    BrokenFileError,
    check_file,
    digest_of,
    flush_folder,
    read_sealed,
    write_sealed,
)
from runtime.models.imported import refuse_code_in
from runtime.models.inputs import Embeddings, InputShape, predictions
from runtime.models.networks import build_model
from runtime.rank.learner import autocast
from runtime.serving.trained import Trained, Vectors, read_vectors, write_vectors

FORMAT = "persia-testbed-model-3"
MANIFEST, README, ROWS = "manifest.json", "README.md", "rows"
DenseFile = Literal["dense.pt2", "dense.pt"]
PROGRAM: DenseFile = "dense.pt2"
WEIGHTS: DenseFile = "dense.pt"
_EXAMPLE = 3  # samples; torch takes 0 and 1 for constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the manifest of an export says beside its digest."""

    format: str
    layout: Layout
    schema: dict[str, Any]
    """Of the data, as the run kept it; empty where the data were no table."""
    tables: dict[str, dict[str, Any]]
    seed: int
    model: str
    model_code: str | None = None
    """Checksum of the code that it was trained with, as `code_sha256` has it."""
    hidden: tuple[Count, ...]
    precision: Literal["float32", "float64", "bfloat16", "float16", "tf32"]
    dense: DenseFile
    """The file of the network: a program or weights."""
    why_weights: str
    """Why it is mere weights; empty when it is a program."""
    updates: Count
    samples: Count
    files: dict[str, str]
    """Digests, by the path in the folder."""


class Exported(NamedTuple):
    """What one export wrote."""

    manifest: Manifest
    rows: dict[str, int]
    """Per table."""
    file_bytes: int


def refuse_place(folder: Path) -> None:
    """Raise ValueError where an export would overwrite something, OSError where none can be."""
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"--out {folder} is there already; nothing is overwritten: name another")
    folder.parent.mkdir(parents=True, exist_ok=True)


def export(trained: Trained, folder: Path) -> Exported:
    """Write the folder; nothing is left behind when that fails."""
    refuse_place(folder)
    fresh = folder.parent / f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    fresh.mkdir()
    try:
        (fresh / ROWS).mkdir()
        counts = {}
        for name, (ids, values, _) in trained.worker.store.export().items():
            write_vectors(fresh / ROWS / file_of(name), trained.tables[name], ids, values)
            counts[name] = len(ids)
        shape = _shape(trained.learner.layout, trained.tables)
        config = trained.config
        dense, why = write_network(fresh, trained.learner.model, shape, config.engine.precision)
        state = trained.checkpoint.state
        manifest = Manifest(
            format=FORMAT, files={}, layout=trained.learner.layout,
            schema=state.facts.get("data_schema", {}),
            tables={name: asdict(table) for name, table in trained.tables.items()},
            model=config.model.name, model_code=state.facts.get("model_code"),
            hidden=config.model.hidden, precision=config.engine.precision, seed=config.seed,
            dense=dense, why_weights=why, updates=state.updates, samples=state.samples,
        )  # fmt: skip
        (fresh / README).write_text(_readme(manifest, counts))
        files = {
            p.relative_to(fresh).as_posix(): p for p in sorted(fresh.rglob("*")) if p.is_file()
        }
        file_bytes = sum(file.stat().st_size for file in files.values())
        for file in files.values():
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        digests = {name: digest_of(file) for name, file in files.items() if name != README}
        write_sealed(fresh / MANIFEST, replace(manifest, files=digests))
        flush_folder(fresh / ROWS)
        refuse_place(folder)
        fresh.rename(folder)
        flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return Exported(manifest, counts, file_bytes)


def file_of(table: str) -> str:
    """The name of a table's file; a table may have any name.

    >>> file_of("rows"), file_of("a/b")
    ('rows.parquet', 'a%2Fb.parquet')
    """
    plain_name = re.sub(r"[^\w.-]", lambda c: "".join(f"%{b:02X}" for b in c[0].encode()), table)
    return f"{plain_name}.parquet"


def read_export(
    folder: Path, on_warning: Callable[[str], None]
) -> tuple[Layout, dict[str, Vectors], Any, str, dict[str, Any]]:
    """All that a `runtime.inference.Model` is made of; `BrokenFileError` naming the file that
    cannot be trusted. ``on_warning`` is told whose code is run, where the network is mere weights.
    """
    file = folder / MANIFEST
    told = read_sealed(Manifest, file, FORMAT, "manifest of an exported model")
    needed = {told.dense, *(f"{ROWS}/{file_of(name)}" for name in told.tables)}
    if set(told.files) != needed:
        raise BrokenFileError(f"{file}: files are {sorted(told.files)}, not {sorted(needed)}")
    for name, digest in told.files.items():
        check_file(folder / name, digest)
    absent = sorted({field.table for field in told.layout.fields} - set(told.tables))
    if absent:
        raise BrokenFileError(f"{file}: its fields use tables that it does not have: {absent}")
    tables = {}
    for name, document in told.tables.items():
        config = parse(TableConfig, document, f"{file}: tables.{name}")
        ids, values = read_vectors(folder / ROWS / file_of(name), config)
        tables[name] = Vectors(config, told.seed, ids, values)
    if told.dense == PROGRAM:
        network = read_program(folder / PROGRAM)
    else:
        refuse_code_in(folder, told.model, on_warning, told.model_code)
        shape = _shape(told.layout, {name: vectors.config for name, vectors in tables.items()})
        model = build_model(told.model, shape, told.hidden, told.seed)
        read_weights(folder / WEIGHTS, model)
        network = Scorer(model, told.precision).eval()
    return told.layout, tables, network, told.precision, told.schema


def _shape(layout: Layout, tables: dict[str, TableConfig]) -> InputShape:
    return InputShape(layout=layout, dims={name: table.dim for name, table in tables.items()})


def _readme(told: Manifest, rows: dict[str, int]) -> str:
    fields = ", ".join(field.name for field in told.layout.fields)
    tables = "\n".join(
        f"- `{ROWS}/{file_of(name)}`: {count:,} rows of table {name}, sorted by id; columns id"
        f" (uint64) and vector ({told.tables[name]['dim']} floats)"
        for name, count in rows.items()
    )
    dense = f"- `{PROGRAM}`: the dense network, a `torch.export` program; it gives logits"
    if told.dense == WEIGHTS:
        dense = (
            f"- `{WEIGHTS}`: the weights of the dense network (a state dict of model"
            f" `{told.model}`); `torch.export` did not take it: {told.why_weights}"
        )
    return f"""# A trained model

Trained on {told.samples:,} samples in {told.updates:,} dense updates. Fields:
{fields}. Dense features: {", ".join(told.layout.dense) or "none"}.
Predicts: {", ".join(told.layout.tasks)}.

{tables}
{dense}
- `{MANIFEST}`: what is what, with the digest of each file

An id without a row has its initial value, a function of seed, table and id.

```python
from runtime.inference import open_model

model = open_model("this folder")
model.lookup("{next(iter(rows))}", [1, 2, 3])   # vectors [3, dim]
model.predict(batch)                # probabilities [samples, tasks]
model.predict_frame(frame)          # the same, of a table with the columns of the training data
```
"""


class Scorer(nn.Module):
    """A network whose input is plain tensors, computing in the precision of its training."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self._precision = model, precision

    def forward(
        self, dense: Tensor, pooled: Tensor, sequences: dict[str, Tensor], masks: dict[str, Tensor]
    ) -> Tensor:
        """Logits [B, T]."""
        with autocast("cpu", self._precision):
            logits: Tensor = self.model(dense, Embeddings(pooled, sequences, masks))
        return logits


def score_with(
    network: Callable[..., Tensor], dtype: torch.dtype, layout: Layout
) -> Callable[[np.ndarray, FieldVectors], np.ndarray]:
    """By a `Scorer` or a loaded program: dense features [B, D] and vectors to what is predicted,
    float64 [B, T]."""

    def score(dense: np.ndarray, vectors: FieldVectors) -> np.ndarray:
        def to(array: np.ndarray) -> Tensor:
            return torch.tensor(array, dtype=dtype)  # a copy: a network may work in place

        sequences = {name: to(array) for name, array in vectors.sequences.items()}
        masks = {name: torch.from_numpy(mask) for name, mask in vectors.masks.items()}
        with torch.inference_mode():
            logits = network(to(dense), to(vectors.pooled), sequences, masks)
            return predictions(logits, layout)

    return score


def write_network(
    folder: Path, model: nn.Module, shape: InputShape, precision: str
) -> tuple[DenseFile, str]:
    """Write one of the two files; gives its name and, of mere weights, why they are that.

    The program takes any number of samples and gives the bytes of the network, or it is not taken.
    """
    scorer = Scorer(model, precision).eval()
    dtype = torch.float64 if precision == "float64" else torch.float32
    reason = ""
    for strict in (False, True):
        content = io.BytesIO()  # torch's own writer aborts the process where the disk is full
        try:
            with _quiet():
                program = _exported(scorer, shape, dtype, strict)
                torch.export.save(program, content)
                _compare(content, scorer, shape, dtype)
        except Exception as error:  # whatever stops it, the weights can be had
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            (folder / PROGRAM).write_bytes(content.getbuffer())
            return PROGRAM, ""
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    (folder / WEIGHTS).write_bytes(content.getbuffer())
    return WEIGHTS, reason


def read_program(file: Path) -> Callable[..., Tensor]:
    """The program that `write_network` wrote; `BrokenFileError` for any other content."""
    try:
        return _program(io.BytesIO(read_regular(file)))
    except Exception as error:  # torch has a dozen kinds for a damaged file
        raise BrokenFileError(f"{file} is not a torch.export program: {error}") from None


def read_weights(file: Path, model: nn.Module) -> None:
    """Fill the network; `BrokenFileError` when they are of another one."""
    try:
        content = io.BytesIO(read_regular(file))
        model.load_state_dict(torch.load(content, map_location="cpu", weights_only=True))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BrokenFileError(f"{file} does not hold the network's weights: {reason}") from None


def _exported(scorer: Scorer, shape: InputShape, dtype: torch.dtype, strict: bool) -> Any:
    samples = torch.export.Dim("samples")
    example = _example(shape, dtype, _EXAMPLE)
    dynamic = tuple(
        {name: {0: samples} for name in one} if isinstance(one, dict) else {0: samples}
        for one in example
    )
    return torch.export.export(scorer, example, dynamic_shapes=dynamic, strict=strict)


def _program(content: BinaryIO) -> Callable[..., Tensor]:
    content.seek(0)
    with _quiet():
        program: Callable[..., Tensor] = torch.export.load(content).module()
    return program


def _compare(content: BinaryIO, scorer: Scorer, shape: InputShape, dtype: torch.dtype) -> None:
    found = _program(content)
    for samples in (1, _EXAMPLE + 2):
        example = _example(shape, dtype, samples)
        with torch.inference_mode():
            far = float((found(*example) - scorer(*example)).abs().max())
        if not far <= 1e-6:
            raise ValueError(f"the exported program's logits differ by {far:.2g}")


def _example(shape: InputShape, dtype: torch.dtype, samples: int) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=dtype)

    layout: Layout = shape.layout
    long = [f for f in layout.fields if f.pooling == "sequence"]
    sequences = {f.name: numbers(samples, f.max_length, shape.dims[f.table]) for f in long}
    masks = {name: torch.ones(rows.shape[:2], dtype=torch.bool) for name, rows in sequences.items()}
    return (
        numbers(samples, len(layout.dense)),
        numbers(samples, sum(shape.pooled_dims)),
        sequences,
        masks,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch tells its failures twice; here they become one reason."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
