"""Rows that begin with vectors of a file: ``--rows.initial vectors.parquet``.

They are there from the first step on, as if just created: so the ids of the file have its vectors
wherever they are read, on any number of servers, and every other id has its drawn value (law 10).
Checkpoints hold them like all rows, and the facts of the run the digest of the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from persia_sim.base.rules import Refused
from runtime.checkpoint.shard import load_vectors
from runtime.data.batch import Layout
from runtime.data.errors import DataError
from runtime.data.files import content_of, files_of
from runtime.data.items import read_keyed
from runtime.data.parquet import parquet_batches, parquet_file
from runtime.data.source import Source
from runtime.embedding.config import TableConfig
from runtime.embedding.store import EmbeddingStore
from runtime.files import write_arrays

VECTOR, ID = "vector", "id"


def begin_with_files(store: EmbeddingStore, source: Source, run: Path | None) -> dict[str, str]:
    """Fill tables of an empty store whose initial rows are a file's; per table the SHA-256 of it.

    ``run``: the folder of the run, which all servers see; None: all are on this host. Raises
    DataError for a file that cannot be used.
    """
    digests: dict[str, str] = {}
    for name, table in store.tables.items():
        if not table.initial_file:
            continue
        file = Path(table.initial)
        ids, values = _read(file, table, store.layout, source)
        with tempfile.TemporaryDirectory(dir=None if run is None else run.absolute()) as folder:
            path = Path(folder) / "vectors"
            digest = write_arrays(path, {}, {"ids": ids, "values": values}).digest
            store.at_each_server(load_vectors, table=name, file=str(path), digest=digest)
        digests[name] = content_of(file)
    return digests


def _read(
    file: Path, table: TableConfig, layout: Layout, source: Source
) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [n] and [n, dim]: by the ids of an export's table, or by the values of a column."""
    with parquet_file(file) as content:
        names = content.schema_arrow.names
    if VECTOR not in names:
        raise DataError(f"{file} has the columns {', '.join(names)}, and none is called {VECTOR}")
    read = [VECTOR, ID] if ID in names else [VECTOR]
    parts = list(parquet_batches(file, read, 1 << 17))
    vectors = [value for part in parts for value in part[VECTOR].to_pylist()]
    sizes = {len(value) if isinstance(value, list) else 0 for value in vectors}
    if sizes != {table.dim}:
        raise Refused(
            f"{table.name}.dim",
            f"is {table.dim}, and the vectors of {file} have {', '.join(map(str, sorted(sizes)))}"
            " numbers; they must be as long",
        )
    values = np.array(vectors, table.dtype)
    if not np.isfinite(values).all():
        raise DataError(f"{file} holds a vector with a number that is not finite; leave it out")

    # Ids as batches have them, or values that become ids as those of the data do.
    if ID in names:
        ids = np.concatenate([np.asarray(part[ID].to_pylist(), np.uint64) for part in parts])
        if len(np.unique(ids)) < len(ids):
            raise DataError(f"{file} has an id twice; a file of vectors has one row an id")
        return ids, values
    files = files_of(source)
    if files is None:
        raise DataError(f"{file} needs a column {ID}, since the data have no columns")
    keyed = read_keyed(files.schema, file)
    if layout.fields[keyed.place].table != table.name:
        raise DataError(
            f"{file} has vectors of column {keyed.name}, whose table is"
            f" {layout.fields[keyed.place].table}, not {table.name};"
            " say --tables.NAME.initial of that table"
        )
    return keyed.ids, values
