"""An exported model: a folder with a manifest, the dense network and a parquet file per table.

The folder appears whole or not at all: it is filled under another name beside its place. The
manifest names each file with its digest.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from persia_sim.words.schema import Count, parse
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.files import (
    BrokenFileError,
    check_file,
    digest_of,
    flush_folder,
    read_sealed,
    write_sealed,
)
from runtime.models.imported import refuse_code_in
from runtime.models.inputs import InputShape
from runtime.models.networks import build_model
from runtime.run.folder import plain
from runtime.serving.network import (
    PROGRAM,
    WEIGHTS,
    Scorer,
    read_program,
    read_weights,
    write_network,
)
from runtime.serving.trained import Trained
from runtime.serving.vectors import Vectors, read_vectors, write_vectors

FORMAT = "persia-testbed-model-2"
MANIFEST, README, ROWS = "manifest.json", "README.md", "rows"


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
    dense: Literal["dense.pt2", "dense.pt"]
    """The file of the network: a program or weights."""
    why_weights: str
    """Why it is mere weights; empty when it is a program."""
    updates: Count
    samples: Count
    files: dict[str, str]
    """Digests, by the path in the folder."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What one export wrote."""

    folder: Path
    dense: str
    """The file of the dense network: a program or weights."""
    why_weights: str
    """Why it is mere weights; empty when it is a program."""
    rows: dict[str, int]
    """Per table."""
    file_bytes: int


def refuse_place(folder: Path) -> None:
    """Raise ValueError where an export would overwrite something, OSError where none can be."""
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"out {folder} is there already; an export overwrites nothing: name another"
        )
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
        shape = _shape(trained.layout, trained.tables)
        config = trained.config
        dense, why = write_network(fresh, trained.learner.model, shape, config.engine.precision)
        state = trained.checkpoint.state
        content = {
            "format": FORMAT,
            "layout": plain(trained.layout),
            "schema": state.facts.get("data_schema", {}),
            "tables": {name: asdict(table) for name, table in trained.tables.items()},
            "seed": config.seed,
            "model": config.model.name,
            "model_code": state.facts.get("model_code"),
            "hidden": list(config.model.hidden),
            "precision": config.engine.precision,
            "dense": dense,
            "why_weights": why,
            "updates": state.updates,
            "samples": state.samples,
        }
        (fresh / README).write_text(_readme(content, counts))
        files = {
            p.relative_to(fresh).as_posix(): p for p in sorted(fresh.rglob("*")) if p.is_file()
        }
        file_bytes = sum(file.stat().st_size for file in files.values())
        for file in files.values():
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        digests = {name: digest_of(file) for name, file in files.items() if name != README}
        write_sealed(fresh / MANIFEST, content | {"files": digests})
        flush_folder(fresh / ROWS)
        refuse_place(folder)
        fresh.rename(folder)
        flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return Exported(folder, dense, why, counts, file_bytes)


def file_of(table: str) -> str:
    """The name of a table's file; a table may have any name.

    >>> file_of("rows"), file_of("a/b")
    ('rows.parquet', 'a%2Fb.parquet')
    """
    plain_name = re.sub(r"[^\w.-]", lambda c: "".join(f"%{b:02X}" for b in c[0].encode()), table)
    return f"{plain_name}.parquet"


@dataclass(frozen=True, slots=True)
class Opened:
    """What `read_export` found."""

    layout: Layout
    tables: dict[str, Vectors]
    network: Any
    """Takes dense features, pooled vectors, sequences and masks; gives logits."""
    precision: str
    schema: dict[str, Any]


def is_export(folder: Path) -> bool:
    """Whether the folder looks like an export."""
    return (folder / MANIFEST).is_file()


def read_export(folder: Path, on_warning: Callable[[str], None] = lambda text: None) -> Opened:
    """Everything in the folder; `BrokenFileError` naming the file that cannot be trusted.

    ``on_warning`` is told whose code is run, where the network is mere weights.
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
    if told.dense == WEIGHTS:
        refuse_code_in(folder, told.model, on_warning, told.model_code)
    network = _network(folder, told, tables)
    return Opened(told.layout, tables, network, told.precision, told.schema)


def _network(folder: Path, told: Manifest, tables: dict[str, Vectors]) -> Any:
    if told.dense == PROGRAM:
        return read_program(folder / PROGRAM)
    shape = _shape(told.layout, {name: vectors.config for name, vectors in tables.items()})
    model = build_model(told.model, shape, told.hidden, told.seed)
    read_weights(folder / WEIGHTS, model)
    return Scorer(model, told.precision).eval()


def _shape(layout: Layout, tables: dict[str, TableConfig]) -> InputShape:
    return InputShape(layout=layout, dims={name: table.dim for name, table in tables.items()})


def _readme(content: dict[str, Any], rows: dict[str, int]) -> str:
    names = [field["name"] for field in content["layout"]["fields"]]
    tables = "\n".join(
        f"- `{ROWS}/{file_of(name)}`: {count:,} rows of table {name}, sorted by id; columns id"
        f" (uint64) and vector ({content['tables'][name]['dim']} floats)"
        for name, count in rows.items()
    )
    dense = f"- `{PROGRAM}`: the dense network, a `torch.export` program; it gives logits"
    if content["dense"] == WEIGHTS:
        dense = (
            f"- `{WEIGHTS}`: the weights of the dense network (a state dict of model"
            f" `{content['model']}`); `torch.export` did not take it: {content['why_weights']}"
        )
    return f"""# A trained model

Trained on {content["samples"]:,} samples in {content["updates"]:,} dense updates. Fields:
{", ".join(names)}. Dense features: {", ".join(content["layout"]["dense"]) or "none"}.
Predicts: {", ".join(content["layout"]["tasks"])}.

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
