"""Files that a pattern names, and files of their own for each part."""

from __future__ import annotations

import gzip
from dataclasses import replace
from hashlib import md5
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime.data.batch import Batch
from runtime.data.catalogue import CATALOGUE
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.open import CachedSource, open_source
from runtime.data.schema import Column, Schema
from runtime.data.split import Split

ROWS = 90
CUTS = (0, 20, 50, ROWS)
LAST = Split(test_fraction=0.3)
SPLITS = {
    "by place": LAST,
    "by a draw": Split(test_fraction=0.3, random_seed=4),
    "by a column": Split(column="day", test_from=5),
    "with validation": replace(LAST, validation_fraction=0.25),
}


def lines() -> list[str]:
    draw = np.random.default_rng(2)
    found = []
    for row in range(ROWS):
        user, item, label = draw.integers(9), draw.integers(30), draw.integers(2)
        found.append(f"{user},{item},{row % 7},{label}\n")
    return found


CRITEO = [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
HEADER = "user,item,day,label\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One file with all rows, and the same rows in three: text, and parquet."""
    found = tmp_path_factory.mktemp("files")
    rows = lines()
    (found / "whole.csv").write_text(HEADER + "".join(rows))
    for number, (start, end) in enumerate(pairwise(CUTS)):
        text = HEADER + "".join(rows[start:end])
        (found / f"part-{number}.csv").write_text(text)
        (found / f"packed-{number}.csv.gz").write_bytes(gzip.compress(text.encode()))
        cells = [line.strip().split(",") for line in rows[start:end]]
        columns = zip(HEADER.strip().split(","), zip(*cells, strict=True), strict=True)
        table = pa.table({name: list(map(int, values)) for name, values in columns})
        pq.write_table(table, found / f"shard-{number}.parquet")
    return found


def source(folder: Path, file: str, split: Split, **changes) -> FileSource:
    schema = Schema(
        name="mine", columns=(Column(name="user"), Column(name="item")), split=split, file=file
    )
    return FileSource(schema=schema, folder=folder, **changes)


def rows_of(found: FileSource | CachedSource, part: str) -> list[tuple]:
    chunks = list(found.chunks(part))
    if not chunks:
        return []
    whole = Batch.concat(chunks)
    ids = whole.ids.reshape(whole.size, -1)
    return [(*map(int, i), float(label[0])) for i, label in zip(ids, whole.labels, strict=True)]


@pytest.mark.parametrize("file", ["part-*.csv", "packed-?.csv.gz", "shard-[0-9].parquet"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
def test_files_of_a_pattern_are_one_table_in_the_order_of_their_names(folder, file, split):
    one, several = source(folder, "whole.csv", split), source(folder, file, split)
    for part in ("train", "validation", "test"):
        assert rows_of(several, part) == rows_of(one, part)
    assert several.provenance().train_rows == one.provenance().train_rows


def test_day_10_comes_after_day_9(tmp_path):
    for day in range(1, 12):
        (tmp_path / f"day-{day}.csv").write_text(f"user,item,label\n{day},{day},{day % 2}\n")
    found = source(tmp_path, "day-*.csv", Split(test_fraction=0.1))
    assert [path.stem for path in found.main_files] == [f"day-{day}" for day in range(1, 12)]


def test_files_of_their_own_are_their_parts(folder):
    split = Split(test_file="part-2.csv", validation_file="part-1.csv")
    found = source(folder, "part-0.csv", split)
    whole = source(folder, "whole.csv", LAST)
    in_order = rows_of(whole, "train") + rows_of(whole, "test")
    parts = ("train", "validation", "test")
    for part, (start, end) in zip(parts, pairwise(CUTS), strict=True):
        assert rows_of(found, part) == in_order[start:end]
    assert found.provenance().split == (
        "test part-2.csv, train the main file; validation: part-1.csv"
    )
    assert (found.provenance().train_rows, found.provenance().test_rows) == (20, 40)


def test_a_share_of_the_training_files_validates(folder):
    split = Split(test_file="part-2.csv", validation_fraction=0.4)
    found = source(folder, "part-[01].csv", split)
    assert [len(rows_of(found, part)) for part in ("train", "validation", "test")] == [30, 20, 40]


def test_an_error_names_the_file_and_its_own_row(folder, tmp_path):
    for file in folder.glob("part-*.csv"):
        (tmp_path / file.name).write_text(file.read_text())
    broken = (tmp_path / "part-1.csv").read_text().splitlines()
    broken[3] = "1,2,3,yes"
    (tmp_path / "part-1.csv").write_text("\n".join(broken) + "\n")
    with pytest.raises(DataError, match=r"part-1\.csv, row 3, column label: 'yes'"):
        rows_of(source(tmp_path, "part-*.csv", SPLITS["by a column"]), "train")
    skipped = source(tmp_path, "part-*.csv", SPLITS["by a column"], skip_bad_rows=True)
    sizes = [len(rows_of(skipped, part)) for part in ("train", "test")]
    assert sum(sizes) == ROWS - 1
    assert skipped.provenance().rows_skipped == 1


def test_a_file_without_a_column_is_named_before_any_row_is_read(folder, tmp_path):
    (tmp_path / "part-0.csv").write_text((folder / "part-0.csv").read_text())
    (tmp_path / "part-1.csv").write_text("user,day,label\n1,2,0\n")
    with pytest.raises(DataError, match=r"part-1\.csv has no column 'item'"):
        rows_of(source(tmp_path, "part-*.csv", LAST), "train")


def test_what_is_wrong_with_patterns_is_said(folder):
    with pytest.raises(DataError, match=r"no file in .* matches 'none-\*\.csv'"):
        rows_of(source(folder, "none-*.csv", LAST), "train")
    twice = Split(test_file="part-*.csv")
    with pytest.raises(DataError, match=r"part-0\.csv is of the train and of the test part"):
        rows_of(source(folder, "part-0.csv", twice), "train")


def test_every_file_counts_in_the_checksum_and_in_what_is_kept(folder, tmp_path):
    place = tmp_path / "data"
    place.mkdir()
    for file in folder.glob("part-*.csv"):
        (place / file.name).write_text(file.read_text())
    split = Split(test_file="part-2.csv")
    first = source(place, "part-[01].csv", split)
    before = CachedSource(first, tmp_path / "kept")
    read = rows_of(before, "test")
    assert rows_of(CachedSource(first, tmp_path / "kept"), "test") == read
    sums = first.provenance().sha256
    text = (place / "part-2.csv").read_text().splitlines()
    (place / "part-2.csv").write_text("\n".join([text[0], *text[:0:-1]]) + "\n")
    again = source(place, "part-[01].csv", split)
    assert again.provenance().sha256 != sums
    assert rows_of(CachedSource(again, tmp_path / "kept"), "test") == read[::-1]


def test_a_split_with_known_checksums_refuses_other_files(folder):
    split = Split(test_file="part-2.csv", validation_file="part-1.csv")
    found = source(folder, "part-0.csv", split)
    sums = tuple(md5((folder / f"part-{n}.csv").read_bytes()).hexdigest() for n in range(3))
    same = replace(found, schema=replace(found.schema, md5=sums))
    assert same.provenance().train_rows == 20
    other = replace(found, schema=replace(found.schema, md5=(sums[0], sums[2], sums[2])))
    with pytest.raises(DataError, match=r"part-1\.csv has md5 .* that of mine is .* other data"):
        other.provenance()
    with pytest.raises(ValueError, match="md5 must be texts of 32 small hexadecimal digits"):
        replace(found.schema, md5=("X" * 32,))


@pytest.mark.parametrize(
    ("name", "header", "line"),
    [
        ("criteo_x1", ["label", *CRITEO], ["0.25"] * 13 + ["7"] * 26),
        ("avazu_x1", ["label", *(f"feat_{n}" for n in range(1, 23))], ["12"] * 22),
        ("criteo_x4", ["Label", *CRITEO], ["", "3", *(["-1"] * 11), "05db9164", *([""] * 25)]),
    ],
)
def test_bars_splits_read_three_files_of_their_format(tmp_path, name, header, line):
    place = tmp_path / name
    place.mkdir()
    for file, rows in (("train", 4), ("valid", 2), ("test", 3)):
        body = [",".join([str(row % 2), *line]) for row in range(rows)]
        (place / f"{file}.csv").write_text("\n".join([",".join(header), *body]) + "\n")
    schema = CATALOGUE[name]()
    assert len(schema.md5) == 3
    with pytest.raises(DataError, match=r"train\.csv has md5"):
        open_source(name, data_dir=tmp_path).provenance()
    found = FileSource(schema=replace(schema, md5=()), folder=place)
    sizes = [sum(b.size for b in found.chunks(p)) for p in ("train", "validation", "test")]
    assert sizes == [4, 2, 3]
