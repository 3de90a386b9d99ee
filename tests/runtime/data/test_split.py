"""Splits: by value however it is written, by place, by chance; and no row is lost or twice read."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.open import open_source
from runtime.data.rows import at_least, threshold_of
from runtime.data.schema import Column, Schema
from runtime.data.split import Split
from runtime.preparing.check import check

PARTS: tuple[Any, ...] = ("train", "validation", "test")


def source_of(path: Path, split: Split, skip_bad_rows: bool = False) -> FileSource:
    columns = (Column(name="row"), Column(name="x", kind="numeric", log=False))
    schema = Schema(name="made", columns=columns, split=split, file=path.name)
    return FileSource(schema=schema, folder=path.parent, skip_bad_rows=skip_bad_rows)


def parts_of(path: Path, split: Split, skip_bad_rows: bool = False) -> dict[str, list[int]]:
    """Row numbers of each part of a file whose column x holds the row number."""
    made = source_of(path, split, skip_bad_rows)
    return {p: [int(x) for b in made.chunks(p) for x in b.dense[:, 0]] for p in PARTS}


def numbered_file(path: Path, n_rows: int, half: str = "b") -> Path:
    rows = [
        f"{n},{n},{n % 2},{'a' if n * 2 <= n_rows else half},{n * 10}" for n in range(1, n_rows + 1)
    ]
    path.write_text("\n".join(["row,x,label,part,time", *rows]) + "\n")
    return path


def test_a_text_names_the_test_rows(tmp_path):
    parts = parts_of(numbered_file(tmp_path / "d.csv", 6), Split(column="part", test_equals="b"))
    assert parts["train"] == [1, 2, 3]
    assert parts["test"] == [4, 5, 6]
    blank = numbered_file(tmp_path / "e.csv", 6, half=" b ")
    assert parts_of(blank, Split(column="part", test_equals="b")) == parts


@pytest.mark.parametrize("split", [{"test_equals": "b"}, {"test_from": "2"}])
def test_a_value_that_missing_lists_is_refused_because_of_missing(tmp_path, split):
    """It is written as the split wants it, so a remedy about its writing would help nobody."""
    path = numbered_file(tmp_path / "d.csv", 8)
    path.write_text(path.read_text().replace("5,5,1,b,50", "5,5,1,7,7"))
    made = source_of(path, Split(column="part" if "test_equals" in split else "time", **split))
    made = replace(made, schema=replace(made.schema, missing=("", "7")))
    with pytest.raises(DataError) as caught:
        list(made.chunks("train"))
    said = f"{made.schema.split.rule}, and the schema's missing lists this one as no value"
    assert f"row 5, column {made.schema.split.column}: '7'; {said}" in str(caught.value)
    found, _ = check(made)
    assert any(said in one.notes for one in found)


def test_a_row_without_a_split_value_belongs_to_no_part(tmp_path):
    path = numbered_file(tmp_path / "d.csv", 8)
    path.write_text(path.read_text().replace("2,2,0,a,", "2,2,0,,"))
    split = Split(column="part", test_equals="b")
    with pytest.raises(DataError, match=r"row 2, column part: ''; the split compares .* with 'b'"):
        parts_of(path, split)
    parts = parts_of(path, split, skip_bad_rows=True)
    assert (parts["train"], parts["test"]) == ([1, 3, 4], [5, 6, 7, 8])
    path = numbered_file(tmp_path / "e.csv", 16)
    path.write_text(path.read_text().replace("2,2,0,a,", "2,2,0,,"))
    parts = parts_of(path, replace(split, validation_fraction=0.3), skip_bad_rows=True)
    assert (parts["train"], parts["validation"]) == ([1, 3, 4, 5, 6], [7, 8])  # 0.3 of 7, rounded


@pytest.mark.parametrize(("rows", "fraction", "train"), [(10, 0.2, 8), (20, 0.12, 18)])
def test_the_last_fraction_tests_and_its_border_is_rounded(tmp_path, rows, fraction, train):
    """20 * 0.88 = 17.6: 18 rows train."""
    parts = parts_of(numbered_file(tmp_path / "d.csv", rows), Split(test_fraction=fraction))
    assert parts["test"] == list(range(train + 1, rows + 1))


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
    torn = range(3, 200, 7)  # also the first row of a block
    lines[90] = lines[90].replace(",90,", ",bad,", 1)
    for row in torn:
        lines[row] = "torn"
    path.write_text("\n".join(lines) + "\n")
    after = parts_of(path, split, skip_bad_rows=True)
    assert after == {p: [n for n in rows if n not in (*torn, 90)] for p, rows in before.items()}


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


def reached(array: pa.Array, threshold: Any, missing: tuple[str, ...] = ("",)) -> list[Any]:
    """True, False, or None where the value does not compare."""
    above, unusable = at_least(array, threshold_of(threshold), missing)
    return [None if u else bool(a) for a, u in zip(above, unusable, strict=True)]


def split_file(folder: Path, values: list[str], test_from: str) -> Any:
    lines = [f"{value},{n % 2},{n}" for n, value in enumerate(values)]
    (folder / "d.csv").write_text("\n".join(["when,label,n", *lines]) + "\n")
    (folder / "d.toml").write_text(
        f'name = "d"\nfile = "d.csv"\nsplit = {{ column = "when", test_from = {test_from} }}\n'
        '[[columns]]\nname = "n"\nkind = "numeric"\nlog = false\n[[columns]]\nname = "when"\n'
    )
    return open_source(str(folder / "d.toml"))


def both_parts(source: Any) -> dict[str, list[int]]:
    """Numbers of the lines in each part, the first is 0."""
    parts = ("train", "test")
    return {p: [int(x) for b in source.chunks(p) for x in b.dense[:, 0]] for p in parts}


DAYS = ["2013-02-08", "2013-02-07", "2013-02-09", "2013-02-10", "2014-01-01", "2012-12-31"]


NUMBERS = ["8", "10", "9.0", "-1", "0", "100"]


@pytest.mark.parametrize(
    ("values", "test_from", "tested", "words"),
    [
        *(
            (DAYS, day, [2, 3, 4], "2013-02-09 (as dates)")
            for day in ('"2013-02-09"', "2013-02-09", "2013-02-09T00:00:00")
        ),
        *((NUMBERS, nine, [1, 2, 5], None) for nine in ("9", '"9"', "9.0", '"9.0"')),
    ],
)
def test_what_is_below_trains_and_it_and_all_above_test_however_it_is_quoted(
    tmp_path, values, test_from, tested, words
):
    source = split_file(tmp_path, values, test_from)
    trained = [n for n in range(6) if n not in tested]
    assert both_parts(source) == {"train": trained, "test": tested}
    if words is not None:
        assert source.provenance().split == f"train when < {words}, test the others"


NO_DATES = ["2013-2-9", "09.02.2013", "2013-02-30", "20130209", "", "today"]
NO_NUMBERS = ["1_0", "nan", "inf", "1e400", "0x9", "٩", "nine"]


@pytest.mark.parametrize(
    ("values", "test_from", "value", "rule"),
    [
        *((DAYS, '"2013-02-09"', value, "as dates: write YYYY") for value in NO_DATES),
        *((NUMBERS, "9", value, "as numbers: write") for value in NO_NUMBERS),
    ],
)
def test_a_value_that_does_not_compare_is_a_bad_row(tmp_path, values, test_from, value, rule):
    source = split_file(tmp_path, [*values, value], test_from)
    with pytest.raises(DataError, match=rf"row 7, column when: '{value}'; .* {rule}"):
        list(source.chunks("train"))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(-(2**63), 2**64 - 1))
def test_whole_numbers_of_64_bits_compare_exactly_as_text_and_as_integers(values, threshold):
    expected = [v >= threshold for v in values]
    assert reached(pa.array(values, pa.int64()), threshold) == expected
    assert reached(pa.array([str(v) for v in values]), threshold) == expected
    assert reached(pa.array([str(v) for v in values]).dictionary_encode(), threshold) == expected


INSTANTS = st.datetimes(min_value=datetime(1700, 1, 1), max_value=datetime(2200, 1, 1))


@given(st.lists(INSTANTS, min_size=1), INSTANTS)
def test_times_compare_to_the_microsecond_as_text_and_as_timestamps(values, threshold):
    expected = [v >= threshold for v in values]
    assert reached(pa.array(values, pa.timestamp("us")), threshold) == expected
    assert reached(pa.array([v.isoformat(sep=" ") for v in values]), threshold) == expected
    assert reached(pa.array([v.isoformat() for v in values]), threshold.isoformat()) == expected
    seconds = [v.replace(microsecond=0) for v in values]
    assert reached(pa.array(seconds, pa.timestamp("s")), threshold) == [
        v >= threshold for v in seconds
    ]


def test_a_day_is_its_midnight_in_every_type():
    days = [date(2013, 2, 8), date(2013, 2, 9), None]
    for kind in (pa.date32(), pa.date64(), pa.timestamp("ns")):
        assert reached(pa.array(days).cast(kind), "2013-02-09") == [False, True, None]
    assert reached(pa.array(days), datetime(2013, 2, 9, 0, 0, 1)) == [False, False, None]


def test_times_with_a_zone_compare_as_instants_and_with_such_alone():
    threshold = "2013-02-09T01:00:00+01:00"  # midnight in UTC
    texts = ["2013-02-09T00:00:00Z", "2013-02-08 23:59:59+00:00", "2013-02-09T12:00:00"]
    assert reached(pa.array(texts), threshold) == [True, False, None]
    assert reached(pa.array(texts), "2013-02-09") == [None, None, True]
    zone = timezone(timedelta(hours=1))
    stamps = [datetime(2013, 2, 9, tzinfo=UTC), datetime(2013, 2, 8, 23, 59, tzinfo=UTC)]
    array = pa.array(stamps, pa.timestamp("us", "Europe/Berlin"))
    assert reached(array, datetime(2013, 2, 9, 1, tzinfo=zone)) == [True, False]
    assert reached(array, "2013-02-09") == [None, None]
