from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.ids import MISSING, hash_integers, join_hashes, tag
from runtime.data.schema import Column, Schema
from runtime.data.split import Split
from tests.oracles.reference.initial import hash_text

COLUMNS = (
    Column(name="user"),
    Column(name="page"),
    Column(name="tags", kind="multi", separator="|"),
    Column(name="age", kind="bucket"),
    Column(name="price", kind="numeric", log=False),
)
GOOD: dict[str, list[Any]] = {
    "user": [7, -2, 7, 2**62, 0, 5],
    "page": ["home", "", "007", "7", "été", "home"],
    "tags": ["1|2", "", "b", "b|1|b", "2", "1"],
    "age": [0, 30, 31, -4, 99, 18],
    "price": [1.5, 0.0, -2.25, 3.0, 1e9, 0.125],
    "day": [1, 2, 3, 4, 5, 6],
    "label": [0, 1, 1, 0, 0, 1],
}


def schema(**changes: Any) -> Schema:
    settings: dict[str, Any] = {
        "name": "made",
        "columns": COLUMNS,
        "split": Split(column="day", test_from=5),
        "file": "data.csv",
    }
    return Schema(**(settings | changes))


def write_csv(folder: Path, columns: dict[str, list[Any]], name: str = "data.csv") -> Path:
    rows = [",".join(columns)]
    rows += [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path = folder / name
    text = "\n".join(rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def source(folder: Path, table: dict[str, list[Any]] | None = None, **changes: Any) -> FileSource:
    skip = changes.pop("skip_bad_rows", False)
    write_csv(folder, table or GOOD)
    return FileSource(schema=schema(**changes), folder=folder, skip_bad_rows=skip)


def and_test_rows(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns with two rows more, which ``last_two`` takes for the test part."""
    more = {name: values[-2:] for name, values in columns.items()} | {"label": [0, 1]}
    return {name: values + more[name] for name, values in columns.items()}


def last_two(columns: dict[str, list[Any]]) -> Split:
    n_rows = len(next(iter(columns.values())))
    return Split(test_fraction=2 / n_rows)


def whole(made: FileSource, part: Any = "train") -> Batch:
    return Batch.concat(list(made.chunks(part)))


def bags(batch: Batch, field: int, n_fields: int) -> list[list[int]]:
    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    return [
        batch.ids[offsets[b] : offsets[b + 1]].tolist()
        for b in range(field, batch.size * n_fields, n_fields)
    ]


def test_every_kind_of_column_becomes_what_it_should(tmp_path):
    batch = whole(source(tmp_path))
    users = tag(0, hash_integers(np.array(GOOD["user"][:4])))
    assert bags(batch, 0, 4) == [[int(u)] for u in users]
    one = [int(tag(2, np.array([hash_text(t)], np.uint64))[0]) for t in ("1", "2", "b")]
    none = int(tag(2, np.array([MISSING]))[0])
    assert bags(batch, 2, 4) == [[one[0], one[1]], [none], [one[2]], [one[2], one[0], one[2]]]
    steps = tag(3, hash_integers(np.array([0, 10, 10, -4])))  # 3 ln 31, 3 ln 32, -3 ln 5
    assert bags(batch, 3, 4) == [[int(s)] for s in steps]
    assert batch.dense[:, 0].tolist() == [1.5, 0.0, -2.25, 3.0]
    assert batch.labels[:, 0].tolist() == [0, 1, 1, 0]


def test_csv_gzip_and_parquet_of_the_same_rows_give_the_same_batches(tmp_path):
    table = pa.table({**GOOD, "tags": [t.split("|") if t else [] for t in GOOD["tags"]]})
    pq.write_table(table, tmp_path / "data.parquet")
    write_csv(tmp_path, GOOD, "data.csv.gz")
    first = whole(source(tmp_path))
    for name in ("data.csv.gz", "data.parquet"):
        again = whole(FileSource(schema=schema(file=name), folder=tmp_path))
        assert (again.ids == first.ids).all()
        assert (again.offsets == first.offsets).all()
        assert (again.dense == first.dense).all()
        assert (again.labels == first.labels).all()


def test_a_group_shares_ids_and_a_joined_column_makes_them_differ(tmp_path):
    columns = {"tour": ["a", "b"], "x": [5, 5], "y": [5, 6], "label": [0, 1], "day": [1, 1]}
    both = (
        Column(name="x", group="player", with_column="tour"),
        Column(name="y", group="player", with_column="tour"),
        Column(name="tour"),
    )
    columns = and_test_rows(columns)
    made = source(tmp_path, columns, columns=both, split=last_two(columns))
    x, y, tour = whole(made).ids.reshape(2, 3).T.tolist()
    assert x[0] == y[0] != x[1]
    joined = join_hashes(hash_integers(np.array([5])), np.array([hash_text("a")], np.uint64))
    assert x[0] == int(tag(0, joined)[0])
    assert {t >> 56 for t in tour} == {2}


def test_a_sequence_keeps_its_order_and_its_newest_ids(tmp_path):
    columns = and_test_rows({"s": ["c|d|a|b|a", "a"], "label": [0, 1]})
    made = source(
        tmp_path,
        columns,
        columns=(Column(name="s", kind="sequence", separator="|", max_length=3),),
        split=last_two(columns),
    )
    expected = tag(0, np.array([hash_text(t) for t in "abaa"], np.uint64)).tolist()
    assert whole(made).ids.tolist() == expected
    assert made.layout.fields[0].pooling == "sequence"


BAD_VALUES = [
    ("price", "cheap", "a numeric column needs a finite number"),
    ("price", "nan", "a numeric column needs a finite number"),
    ("price", "", "a numeric column needs a finite number"),
    ("price", "1e39", "that float32 can hold"),
    ("price", "inf", "a numeric column needs a finite number"),
    ("age", "old", "a bucket column needs a finite number"),
    ("label", "2", "a label must be 0 or 1, and other classes are made these, not skipped"),
    ("label", "", "a label must be 0 or 1"),
    ("label", "nan", "a label must be 0 or 1"),
    ("day", "Monday", "the split compares this column with 5"),
    ("user", "1.5", "must be a whole number"),
]


@pytest.mark.parametrize(("column", "value", "rule"), BAD_VALUES)
def test_a_bad_value_is_an_error_or_is_counted_and_skipped(tmp_path, column, value, rule):
    columns: dict[str, list[Any]] = {k: list(v) for k, v in GOOD.items()}
    columns["user"] = [1, 2, 3, 4, 5, 6]
    columns[column][2] = value
    limited = (Column(name="user", modulo=99), *COLUMNS[1:])
    with pytest.raises(DataError) as caught:
        whole(source(tmp_path, columns, columns=limited))
    text = str(caught.value)
    for word in (str(tmp_path / "data.csv"), "row 3", f"column {column}", repr(value), rule):
        assert word in text
    assert ("missing lists this one" in text) == (value == "")
    made = source(tmp_path, columns, columns=limited, skip_bad_rows=True)
    kept = whole(made)
    assert kept.labels[:, 0].tolist() == [0, 1, 0]
    assert kept.dense[:, 0].tolist() == [1.5, 0.0, 3.0]
    assert len(bags(kept, 2, 4)[-1]) == 3
    assert made.provenance().rows_skipped == 1
    whole(made)
    assert made.provenance().rows_skipped == 1, "a second pass must not count again"


MISFIT = "column {} of type .* does not fit the schema"
BAD_PARQUET: list[tuple[str, list[Any], str]] = [
    ("label", [0, None, 1, 0, 0, 1], "row 2, column label: None; a label must be 0 or 1"),
    ("price", [[1.0]] * 6, "row 1, column price"),
    ("user", [[1]] * 6, MISFIT.format("user")),
    ("user", [b"\xff"] * 6, MISFIT.format("user")),
    ("page", [{"a": 1}] * 6, MISFIT.format("page")),
    *(
        (name, [date(2022, 5, 1)] * 6, rf"row 1, column {name}: datetime\.date")
        for name in ("age", "price", "label", "day")
    ),
]


@pytest.mark.parametrize(("column", "values", "message"), BAD_PARQUET)
def test_a_parquet_column_that_does_not_fit_is_an_error(tmp_path, column, values, message):
    pq.write_table(pa.table({**GOOD, column: values}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=message):
        whole(FileSource(schema=schema(file="data.parquet"), folder=tmp_path))


DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("data.parquet", lambda file: file[:20], "truncated or of another format"),
    ("data.parquet", lambda file: file[:2000], "truncated or of another format"),
    ("data.parquet", lambda file: file[:4] + bytes(1996) + file[2000:], "cannot be read"),
    ("data.csv.gz", lambda file: file[:-30], "cannot be read"),
]


@pytest.mark.parametrize(("name", "damaged", "message"), DAMAGE)
def test_a_damaged_file_is_an_error(tmp_path, name, damaged, message):
    many = pa.table({k: v * 500 for k, v in GOOD.items()})
    pq.write_table(many, tmp_path / "data.parquet", compression="zstd")
    write_csv(tmp_path, GOOD, "data.csv.gz")
    (tmp_path / name).write_bytes(damaged((tmp_path / name).read_bytes()))
    with pytest.raises(DataError, match=rf"(?s){name}.*{message}"):
        whole(FileSource(schema=schema(file=name), folder=tmp_path))


def test_a_parquet_file_without_rows_is_an_error(tmp_path):
    pq.write_table(pa.table({k: v[:0] for k, v in GOOD.items()}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="holds no rows"):
        whole(FileSource(schema=schema(file="data.parquet"), folder=tmp_path))


def test_a_missing_column_names_the_nearest_one(tmp_path):
    columns = {("prize" if k == "price" else k): v for k, v in GOOD.items()}
    with pytest.raises(DataError, match="no column 'price'; did you mean prize"):
        whole(source(tmp_path, columns))


def test_a_truncated_csv_is_an_error_or_its_torn_row_is_skipped(tmp_path):
    path = write_csv(tmp_path, GOOD)
    path.write_bytes(path.read_bytes()[:-8])
    made = FileSource(schema=schema(split=Split(column="day", test_from=4)), folder=tmp_path)
    with pytest.raises(DataError, match=r"data\.csv, row 6"):
        whole(made, "test")
    made.skip_bad_rows = True
    with pytest.raises(DataError, match=r"test part holds one class .* 2 rows of 0 and 0 of 1"):
        whole(made, "test")
    made.schema = schema(split=Split(column="day", test_from=3))
    assert whole(made, "test").size == 3
    assert made.provenance().rows_skipped == 1


def test_row_numbers_stay_right_after_skipped_lines(tmp_path):
    path = write_csv(tmp_path, GOOD)
    lines = path.read_text().splitlines()
    lines[1:1] = ["torn"]  # row 1
    lines[6] = lines[6].replace("1000000000.0", "much")  # row 6
    path.write_text("\n".join(lines))
    made = FileSource(schema=schema(split=Split(test_fraction=0.4)), folder=tmp_path)
    with pytest.raises(DataError, match=r"row 1: .*Expected 7 columns, got 1"):
        whole(made)
    made.skip_bad_rows = True
    assert whole(made, "test").size == 2
    assert made.provenance().rows_skipped == 2
    made.skip_bad_rows = False
    path.write_text("\n".join([lines[0], *lines[2:]]))
    with pytest.raises(DataError, match="row 5, column price: 'much'"):
        whole(made, "test")


def test_a_part_without_rows_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"test part is empty.*\n.*day < 50"):
        whole(source(tmp_path, split=Split(column="day", test_from=50)), "test")


def test_provenance_has_the_sha256_of_the_bytes_and_the_split_in_words(tmp_path):
    made = source(tmp_path)
    seen = made.provenance()
    assert seen.sha256 == hashlib.sha256((tmp_path / "data.csv").read_bytes()).hexdigest()
    assert seen.split == "train day < 5, test the others"
    assert (
        FileSource(schema=schema(), folder=tmp_path, rows=2)
        .provenance()
        .split.endswith("of train the first 2 samples")
    )


@pytest.mark.long
def test_a_file_streams_in_memory_far_below_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 1 << 14)
    many = {name: values * 50_000 for name, values in GOOD.items()}
    path = write_csv(tmp_path, many)
    made = FileSource(schema=schema(split=Split(test_fraction=0.01)), folder=tmp_path)
    peak_bytes = 0
    before_bytes = pa.total_allocated_bytes()
    for batch in made.chunks("train"):
        held_bytes = sum(a.nbytes for a in (batch.ids, batch.offsets, batch.dense, batch.labels))
        peak_bytes = max(peak_bytes, held_bytes + pa.total_allocated_bytes() - before_bytes)
    assert peak_bytes < path.stat().st_size / 2


def test_a_file_that_is_left_while_a_thread_reads_ahead_does_not_abort_the_process(tmp_path):
    """pyarrow's thread that lets go of a function of Python when Python has ended aborts all."""
    path = tmp_path / "clicks.csv"
    path.write_text("user\n" + "1234567\n" * 64)
    script = f"""
import sys, time
from pathlib import Path
from runtime.data import table

class Slow(table.OpenQuotes):
    def __call__(self, *arguments):
        time.sleep(0.3)
        return super().__call__(*arguments)

table.OpenQuotes, table.CSV_BLOCK_BYTES = Slow, 64
rows = table.TableFile(path=Path({str(path)!r}), delimiter=",", skip_bad_rows=True).stream(["user"])
next(rows)
rows.close()
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
