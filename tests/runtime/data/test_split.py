from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.schema import Column, Schema
from runtime.data.split import Split

PARTS: tuple[Any, ...] = ("train", "validation", "test")


def parts_of(path: Path, split: Split, skip_bad_rows: bool = False) -> dict[str, list[int]]:
    """Row numbers of each part of a file whose column x holds the row number."""
    columns = (Column(name="row"), Column(name="x", kind="numeric", log=False))
    made = FileSource(
        schema=Schema(name="made", columns=columns, split=split, file=path.name),
        folder=path.parent,
        skip_bad_rows=skip_bad_rows,
    )
    return {p: [int(x) for b in made.chunks(p) for x in b.dense[:, 0]] for p in PARTS}


def numbered_file(path: Path, n_rows: int, half: str = "b") -> Path:
    rows = [
        f"{n},{n},{n % 2},{'a' if n * 2 <= n_rows else half},{n * 10}" for n in range(1, n_rows + 1)
    ]
    path.write_text("\n".join(["row,x,label,part,time", *rows]) + "\n")
    return path


def test_a_threshold_splits_by_value(tmp_path):
    parts = parts_of(numbered_file(tmp_path / "d.csv", 6), Split(column="time", test_from=50))
    assert parts == {"train": [1, 2, 3, 4], "validation": [], "test": [5, 6]}


def test_a_text_names_the_test_rows(tmp_path):
    parts = parts_of(numbered_file(tmp_path / "d.csv", 6), Split(column="part", test_equals="b"))
    assert parts["train"] == [1, 2, 3]
    assert parts["test"] == [4, 5, 6]


def test_a_row_without_a_split_value_belongs_to_no_part(tmp_path):
    path = numbered_file(tmp_path / "d.csv", 8)
    path.write_text(path.read_text().replace("2,2,0,a,", "2,2,0,,"))
    split = Split(column="part", test_equals="b")
    with pytest.raises(DataError, match=r"row 2, column part: ''; the split compares .* with 'b'"):
        parts_of(path, split)
    parts = parts_of(path, split, skip_bad_rows=True)
    assert (parts["train"], parts["test"]) == ([1, 3, 4], [5, 6, 7, 8])


def test_the_last_fraction_tests(tmp_path):
    parts = parts_of(numbered_file(tmp_path / "d.csv", 10), Split(test_fraction=0.2))
    assert parts["test"] == [9, 10]


def test_the_border_of_the_last_fraction_is_rounded(tmp_path):
    parts = parts_of(numbered_file(tmp_path / "d.csv", 20), Split(test_fraction=0.12))
    assert parts["test"] == [19, 20], "20 * 0.88 = 17.6: 18 rows train"


def test_a_random_split_draws_as_numpy_does_in_one_go(tmp_path):
    split = Split(test_fraction=0.3, random_seed=1)
    parts = parts_of(numbered_file(tmp_path / "d.csv", 1000), split)
    drawn = np.random.default_rng(1).random(1000) < 0.3
    assert parts["test"] == (np.flatnonzero(drawn) + 1).tolist()


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
def test_a_skipped_row_does_not_move_the_random_split_of_the_others(
    tmp_path, monkeypatch, block_bytes
):
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", block_bytes)
    path = numbered_file(tmp_path / "d.csv", 200)
    split = Split(test_fraction=0.3, random_seed=1)
    before = parts_of(path, split)
    lines = path.read_text().splitlines()
    lines[50], lines[90] = "torn", lines[90].replace(",90,", ",bad,", 1)
    path.write_text("\n".join(lines) + "\n")
    after = parts_of(path, split, skip_bad_rows=True)
    assert after == {p: [n for n in rows if n not in (50, 90)] for p, rows in before.items()}


def test_small_blocks_do_not_move_any_split(tmp_path, monkeypatch):
    path = numbered_file(tmp_path / "d.csv", 3000)
    splits = (
        Split(test_fraction=0.3, random_seed=1, validation_fraction=0.1),
        Split(test_fraction=0.3, validation_fraction=0.1),
        Split(column="time", test_from=20_000, validation_fraction=0.1),
    )
    before = [parts_of(path, split) for split in splits]
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 1000)
    assert [parts_of(path, split) for split in splits] == before


@given(
    n_rows=st.integers(2, 60),
    fraction=st.floats(0.01, 0.9),
    validation=st.floats(0, 0.9),
    seed=st.none() | st.integers(0, 5),
)
def test_every_row_is_in_exactly_one_part(tmp_path_factory, n_rows, fraction, validation, seed):
    path = numbered_file(tmp_path_factory.mktemp("split") / "d.csv", n_rows)
    split = Split(test_fraction=fraction, random_seed=seed, validation_fraction=validation)
    try:
        parts = parts_of(path, split)
    except ValueError as error:
        assert "part is empty" in str(error) or "part holds one class" in str(error)
        return
    assert sorted(parts["train"] + parts["validation"] + parts["test"]) == list(
        range(1, n_rows + 1)
    )
    if parts["train"] and parts["validation"]:
        assert max(parts["train"]) < min(parts["validation"])


def test_a_split_needs_one_way_of_deciding():
    with pytest.raises(ValueError, match=r"either column and test_from, .*got none of them"):
        Split()
    with pytest.raises(ValueError, match="got column and test_from and test_fraction"):
        Split(column="day", test_from=1, test_fraction=0.1)
    with pytest.raises(ValueError, match=r"must be < 1, got 1.5"):
        Split(test_fraction=1.5)
