"""An exported model: a folder with a manifest, the dense network and a parquet file per table.

The folder appears whole or not at all: it is filled under another name beside its place. The
manifest names each file with its digest. Reading it runs no code of the folder (see `network`).
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from persia_sim.base.files import unfinished_folder
from persia_sim.base.rules import require
from persia_sim.base.schema import Count, check_fields, parse
from runtime.checkpoint.lineage import Lineage, TrainedOn
from runtime.checkpoint.places import TRAINED
from runtime.checkpoint.sketches import read_sketches, write_sketches
from runtime.data.batch import Batch, Layout
from runtime.data.schema import Schema
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import TableConfig
from runtime.files import (
    BrokenFileError,
    digest_of,
    flush_folder,
    read_sealed,
    write_sealed,
)
from runtime.models.inputs import InputShape
from runtime.object_store import ensure_file
from runtime.serving.graph import drawn, inputs_of, require_libraries
from runtime.serving.network import (
    NETWORK,
    WEIGHTS,
    Precision,
    Score,
    dtype_of,
    read_network,
    write_network,
)
from runtime.serving.trained import Trained, Vectors, read_vectors, write_vectors

FORMAT = "persia-testbed-model-5"
MANIFEST = "manifest.json"
README = "README.md"
ROWS = "rows"
_TRIED = (1, 2, 3, 1000)
"""Samples on which a network is tried after its export."""
_MOST_MANIFEST_BYTES = 2**20
_MOST_TASKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the manifest of an export says beside its digest."""

    format: str
    layout: Layout
    schema: dict[str, Any]
    """Schema of the data, as the run kept it; empty where the data were no table."""
    tables: dict[str, dict[str, Any]]
    seed: int
    model: str
    model_code: str | None = None
    """Checksum of the code that it was trained with, as `code_sha256` has it."""
    precision: Precision
    why_no_graph: str
    """Why there is no `dense.onnx`; empty where there is one."""
    tried_on: Count
    """Samples on which it predicted what the model does; 0 without it."""
    tried_on_test_rows: bool
    """Whether they were of the test part of the run, or made up."""
    furthest: float
    """How far its predictions were from the model's, at most, of a number beyond 1 as a share."""
    updates: Count
    samples: Count
    files: dict[str, str]
    """Digests, by the path in the folder."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """How the network is given what, for other programs (docs/export.md); nothing here reads it."""
    lineage: Lineage = field(default_factory=Lineage)
    """What trained it, and the models that it was started from; none of an older export."""

    def __post_init__(self) -> None:
        check_fields(self)
        count = len(self.layout.tasks)
        rule = f"an export has at most {_MOST_TASKS} of them"
        require(count <= _MOST_TASKS, "the number of layout.tasks", count, rule)


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


def export(trained: Trained, folder: Path, rows: Batch | None = None) -> Exported:
    """Write the folder; nothing is left behind when that fails.

    ``rows``: samples on which the network is tried after it was written; None: on made-up ones.
    """
    refuse_place(folder)
    require_libraries()
    with unfinished_folder(folder) as fresh:
        (fresh / ROWS).mkdir()

        # The rows of each table.
        counts = {}
        for name, (ids, values, _) in trained.worker.store.export().items():
            write_vectors(fresh / ROWS / file_of(name), trained.tables[name], ids, values)
            counts[name] = len(ids)

        # The network, as plainly as it can be written down, and tried.
        shape = _shape(trained.learner.layout, trained.tables)
        config = trained.config
        precision = config.engine.precision
        tried = _made_up(shape, precision) if rows is None else _of_rows(trained, rows)
        network = write_network(fresh, trained.learner.model, shape, precision, tried)
        has_graph = not network.why_no_graph

        # What the folder says of itself, for programs and for people.
        state = trained.checkpoint.state
        manifest = Manifest(
            format=FORMAT,
            files={},
            layout=trained.learner.layout,
            schema=state.facts.get("data_schema", {}),
            tables={name: asdict(table) for name, table in trained.tables.items()},
            model=config.model.name,
            model_code=state.facts.get("model_code"),
            precision=precision,
            seed=config.seed,
            why_no_graph=network.why_no_graph,
            tried_on=len(tried[-1][0]) if has_graph else 0,
            tried_on_test_rows=has_graph and rows is not None,
            furthest=network.furthest if has_graph else 0.0,
            updates=state.updates,
            samples=state.samples,
            inputs=_inputs(shape, precision, state.facts.get("data_schema", {})),
            lineage=trained.checkpoint.trained_on().lineage,
        )
        write_sketches(fresh / TRAINED, trained.checkpoint.sketches())
        (fresh / README).write_text(_readme(manifest, counts))

        # On the disk before it has its name: a folder of that name is whole.
        files = {
            p.relative_to(fresh).as_posix(): p for p in sorted(fresh.rglob("*")) if p.is_file()
        }
        file_bytes = sum(file.stat().st_size for file in files.values())
        for file in files.values():
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        digests = {name: digest_of(file) for name, file in files.items() if name != README}
        manifest = replace(manifest, files=digests)
        write_sealed(fresh / MANIFEST, manifest)
        flush_folder(fresh / ROWS)
        refuse_place(folder)
        fresh.rename(folder)
        flush_folder(folder.parent)
    return Exported(manifest, counts, file_bytes)


def _of_rows(trained: Trained, rows: Batch) -> list[tuple[np.ndarray, FieldVectors]]:
    """Dense features and vectors of the first samples, of several numbers of them."""
    worker = trained.worker
    parts = [rows.rows(0, min(count, rows.size)) for count in _TRIED]
    return [(part.dense, worker.pool(worker.store.peek(part))) for part in parts]


def _made_up(shape: InputShape, precision: str) -> list[tuple[np.ndarray, FieldVectors]]:
    inputs = inputs_of(shape, dtype_of(precision))
    long = [field.name for field in shape.layout.fields if field.pooling == "sequence"]
    result = []
    for count in _TRIED:
        dense, pooled, *rest = drawn(inputs, count).values()
        sequences = dict(zip(long, rest[: len(long)], strict=True))
        masks = dict(zip(long, rest[len(long) :], strict=True))
        result.append((dense, FieldVectors(pooled, sequences, masks)))
    return result


def file_of(table: str) -> str:
    """The name of a table's file; a table may have any name.

    >>> file_of("rows"), file_of("a/b")
    ('rows.parquet', 'a%2Fb.parquet')
    """
    plain_name = re.sub(r"[^\w.-]", lambda c: "".join(f"%{b:02X}" for b in c[0].encode()), table)
    return f"{plain_name}.parquet"


def read_export(
    folder: Path,
) -> tuple[Layout, dict[str, Vectors], Score, dict[str, Any], str, str]:
    """All that a `runtime.inference.Model` is made of; `BrokenFileError` naming the file that
    cannot be trusted, ValueError where the network is no graph."""
    # Every file that is needed, and each the one that was written.
    file = folder / MANIFEST
    manifest = _manifest_in(folder)
    if manifest.why_no_graph:
        raise ValueError(
            f"{folder} has the rows and the weights of {manifest.model}, and no {NETWORK}"
            f" ({manifest.why_no_graph}): open the run itself, which imports the class"
        )
    needed = {WEIGHTS, NETWORK, *(f"{ROWS}/{file_of(name)}" for name in manifest.tables)}
    if not needed <= set(manifest.files) <= needed | {TRAINED}:
        raise BrokenFileError(f"{file}: files are {sorted(manifest.files)}, not {sorted(needed)}")
    for name, digest in manifest.files.items():
        ensure_file(folder / name, digest)

    # Rows of each table, then the network over them.
    absent = sorted({field.table for field in manifest.layout.fields} - set(manifest.tables))
    if absent:
        raise BrokenFileError(f"{file}: its fields use tables that it does not have: {absent}")
    tables = {}
    for name, document in manifest.tables.items():
        config = parse(TableConfig, document, f"{file}: tables.{name}")
        if config.name != name:
            raise BrokenFileError(f"{file}: table {name!r} is called {config.name!r}, too")
        ids, values = read_vectors(folder / ROWS / file_of(name), config)
        tables[name] = Vectors(config, manifest.seed, ids, values)
    shape = _shape(manifest.layout, {name: vectors.config for name, vectors in tables.items()})
    network = read_network(folder, shape, manifest.precision)
    # A graph computes in float32, also where the training was in 16 bits.
    precision = "float32" if manifest.precision == "bfloat16" else manifest.precision
    return manifest.layout, tables, network, manifest.schema, manifest.model, precision


def _manifest_in(folder: Path) -> Manifest:
    file = folder / MANIFEST
    what = "manifest of an exported model"
    return read_sealed(Manifest, file, FORMAT, what, _MOST_MANIFEST_BYTES)


def read_trained_on(folder: Path) -> TrainedOn | None:
    """The samples that trained an export; None of one from before this was kept."""
    manifest = _manifest_in(folder)
    if TRAINED not in manifest.files:
        return None
    of_run, before = read_sketches(folder / TRAINED, manifest.files[TRAINED])
    return TrainedOn(lineage=manifest.lineage, rows=of_run.behind(before))


def _shape(layout: Layout, tables: dict[str, TableConfig]) -> InputShape:
    return InputShape(layout=layout, dims={name: table.dim for name, table in tables.items()})


def _inputs(shape: InputShape, precision: str, schema: dict[str, Any]) -> dict[str, Any]:
    """What stands where in the inputs of the network; and by which rule values become ids."""
    # Columns of one group share the number that stands in the top bits of their ids.
    layout = shape.layout
    numbers = tuple(range(len(layout.fields)))
    if schema:
        numbers = parse(Schema, {"name": "exported", **schema}, "the schema").field_numbers

    # Where each field's row stands in `pooled`.
    fields = []
    for number, one in zip(numbers, layout.fields, strict=True):
        described = {**asdict(one), "number": number, "dim": shape.dims[one.table]}
        if one.pooling != "sequence":
            place = shape.columns(one.name)
            described["columns"] = [place.start, place.stop]
        fields.append(described)
    return {
        "network": [
            {"name": one.name, "type": one.type, "shape": ["samples", *one.shape]}
            for one in inputs_of(shape, dtype_of(precision))
        ],
        "dense": list(layout.dense),
        "fields": fields,
        "id": "number << 56 | hash & (2**56 - 1)",
        "hash": "splitmix64 of a whole number, else 8 bytes of BLAKE2b, little-endian",
        "absent": "the hash of the empty text; an empty list holds that one",
        "log": "sign(x) * ln(1 + |x|)",
        "output": "logits of layout.tasks",
    }


def _readme(manifest: Manifest, rows: dict[str, int]) -> str:
    # What lies in the folder, file by file.
    fields = ", ".join(field.name for field in manifest.layout.fields)
    tables = "\n".join(
        f"- `{ROWS}/{file_of(name)}`: {count:,} rows of table {name}, sorted by id; columns id"
        f" (uint64) and vector ({manifest.tables[name]['dim']} floats)"
        for name, count in rows.items()
    )
    dense = [f"- `{WEIGHTS}`: the weights of the dense network, a `{manifest.model}`"]
    if manifest.why_no_graph:
        dense += [f"- no `{NETWORK}`: {manifest.why_no_graph}"]
    else:
        kind = "test" if manifest.tried_on_test_rows else "made-up"
        dense += [
            f"- `{NETWORK}`: the network, which gives logits, for onnxruntime and others; it holds"
            f" no code. On {manifest.tried_on:,} {kind} samples its predictions were within"
            f" {manifest.furthest:.2g} of the model's"
        ]
    if manifest.precision == "bfloat16":
        dense += [
            f"  The model was trained in {manifest.precision}, `{NETWORK}` computes in float32"
        ]

    # How to use it.
    return f"""# A trained model

Trained on {manifest.samples:,} samples in {manifest.updates:,} dense updates. Fields:
{fields}. Dense features: {", ".join(manifest.layout.dense) or "none"}.
Predicts: {", ".join(manifest.layout.tasks)}.

{tables}
{chr(10).join(dense)}
- `{MANIFEST}`: what is what, with the digest of each file

An id without a row has its initial value, a function of seed, table and id. How values become ids,
and what the network is given, stands in `inputs` of `{MANIFEST}`, and step by step in the project's
page "Format of an export".

```python
from runtime.inference import open_model

model = open_model("this folder")
model.lookup("{next(iter(rows))}", [1, 2, 3])   # vectors [3, dim]
model.predict(batch)                # probabilities [samples, tasks]
model.predict_frame(frame)          # the same, of a table with the columns of the training data
```
"""
