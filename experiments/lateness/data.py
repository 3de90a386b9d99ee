"""The data of the study's streams: which files they are, and cuts that are sets of their own.

``options`` are those of the study.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lateness.runs import StreamData
from experiments.lateness.streams import BY_USER, OWN, Stream
from experiments.points import keys_apart, write_schema
from persia_sim.base.files import atomic_write, toml_value
from runtime.config import DataConfig


def config_of_data(stream: Stream, options: Any) -> DataConfig:
    """Which data set a stream is, and the folder in which it lies."""
    return DataConfig(name=stream.name, dir=None if stream.is_drawn else options.data_dir)


def data_of(stream: Stream, options: Any, split: str = OWN) -> StreamData:
    """What a stream's data are on this machine; of a stream that is cut, the cut is made."""
    from runtime.data.catalogue import CATALOGUE, find_folder
    from runtime.data.open import open_source  # late: a second to import
    from runtime.data.schema import schema_keys

    # A drawn stream has as many rows as it is asked for.
    config = config_of_data(stream, options)
    facts = open_source(config.name, config.dir, keep=True).provenance()
    if stream.is_drawn:
        rows = (stream.updates or 0) * stream.batch
        return StreamData(stream.name, facts.sha256, rows)

    # Of files, the content and the schema decide, and how much of the end is taken.
    found = schema_keys(CATALOGUE[stream.name].path)
    keys = {k: value for k, value in found.items() if k not in ("download", "name")}
    parts = [facts.sha256, keys, stream.last_rows, *filter(None, [split])]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    train_rows = facts.train_rows or 0
    if split:
        schema = CATALOGUE[stream.name]()
        source = find_folder(schema, config.dir) / schema.file
        folder = options.out / "data" / digest[:16]
        cut, train_rows = cut_by(source, keys, split, stream.clock, folder)
        return StreamData(str(cut), digest, train_rows)
    if stream.last_rows is None or stream.last_rows >= train_rows:
        return StreamData(stream.name, digest, train_rows, config.dir)

    # Cut the end off into a file of its own, named by all that decides it.
    schema = CATALOGUE[stream.name]()
    source = find_folder(schema, config.dir) / schema.file
    cut = cut_last(source, keys, stream.last_rows, train_rows, options.out / "data" / digest[:16])
    return StreamData(str(cut), digest, stream.last_rows)


def fields_of(data: StreamData) -> tuple[str, ...]:
    """The fields of a stream, in the order of its schema."""
    from runtime.data.open import open_source  # late: a second to import

    return tuple(field.name for field in open_source(data.name, data.folder).layout.fields)


def tables_apart(data: StreamData, options: Any, without: str = "") -> StreamData:
    """The same samples by a schema in which every field has a table of its own, as it must have to
    be fresh alone; ``without``: a field that is left out."""
    keys, file = keys_apart(DataConfig(name=data.name, dir=data.folder))
    keys["columns"] = [column for column in keys["columns"] if column["name"] != without]
    text = f"{data.sha256} {json.dumps(keys, sort_keys=True, default=str)}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    written = options.out / "data" / digest[:16] / "apart.toml"
    if not written.is_file():
        write_schema(written, {**keys, "name": "apart", "file": str(file)})
    return StreamData(str(written), digest, data.train_rows)


def cut_last(
    source: Path, keys: dict[str, object], rows: int, train_rows: int, folder: Path
) -> Path:
    """Write the last ``rows`` of the training part and the test part behind it as a data set of
    its own; the path of its schema. The test part is what follows ``train_rows`` in the file."""
    import pyarrow.parquet as pq  # late, as all of the data

    schema = folder / "cut.toml"
    if not schema.is_file():
        table = pq.read_table(source)
        _write_cut(table.slice(train_rows - rows), len(table) - train_rows, keys, schema)
    return schema


TEST_SHARE = 5
"""A test part is one sample in so many: of the whole stream, or of each user's."""


def cut_by(
    source: Path, keys: dict[str, object], split: str, clock: str, folder: Path
) -> tuple[Path, int]:
    """Write a stream's rows in the order of time with another test part behind them: the last fifth
    of all, or of each user's. The path of the schema, and how many rows train.

    ``clock``: the column that rows are put in order by; empty where they lie in it.
    """
    import pyarrow.parquet as pq  # late, as all of the data

    # In time order; rows of one instant stay as they lie.
    table = pq.read_table(source)
    if clock:
        table = table.take(np.argsort(table[clock].to_numpy(), kind="stable"))

    # Of each user the last fifth, or the last fifth of all.
    rows = len(table)
    judges = np.arange(rows) >= rows - rows // TEST_SHARE
    if split == BY_USER:
        _, user = np.unique(table[str(keys["group"])].to_numpy(), return_inverse=True)
        by_user = np.argsort(user, kind="stable")
        counts = np.bincount(user)
        place = np.empty(rows, int)
        place[by_user] = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)
        judges = place >= (counts - counts // TEST_SHARE)[user]

    # Rows that train first, as the schema of a cut has it.
    schema = folder / "cut.toml"
    if not schema.is_file():
        ordered = table.take(np.argsort(judges, kind="stable"))
        _write_cut(ordered, int(judges.sum()), keys, schema)
    return schema, rows - int(judges.sum())


def _write_cut(table: Any, test_rows: int, keys: dict[str, object], schema: Path) -> None:
    """Write a table whose last rows judge, and its schema beside it."""
    import pyarrow.parquet as pq  # late, as all of the data

    schema.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(schema.parent / "data.parquet") as file:
        pq.write_table(table, file)
    document = {**keys, "name": "cut", "file": "data.parquet"}
    document["split"] = {"test_fraction": test_rows / len(table)}
    with atomic_write(schema) as file:
        file.write("".join(f"{k} = {toml_value(v)}\n" for k, v in document.items()).encode())
