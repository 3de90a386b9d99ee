"""What identifies data: every key of a schema is told, and what differs is named."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import date

import pytest

from runtime.data.schema import DECIDES_NOTHING, Column, DrawnItems, Join, Schema, document
from runtime.data.source import Provenance, differences, refuse_other_data
from runtime.data.split import Split

COLUMNS = (
    Column(name="user"),
    Column(name="tags", kind="multi"),
    Column(name="price", kind="numeric"),
)
SCHEMA = Schema(name="mine", columns=COLUMNS, split=Split(column="day", test_from=8), file="a.csv")
SPLITS = {
    "column": Split(column="week", test_from=8),
    "test_from": Split(column="day", test_from=date(2024, 5, 1)),
    "test_equals": Split(column="day", test_equals="8"),
    "test_fraction": Split(test_fraction=0.1),
    "random_seed": Split(test_fraction=0.1, random_seed=3),
    "by_group": Split(test_fraction=0.1, random_seed=3, by_group=True),
    "leave_one_out": Split(leave_one_out="test_only"),
    "test_file": Split(test_file="b.csv"),
    "validation_file": Split(test_file="b.csv", validation_file="c.csv"),
    "validation_fraction": Split(column="day", test_from=8, validation_fraction=0.1),
}
OF_KIND = {
    "categorical": {"kind": "bucket", "modulo": 7, "with_column": "x", "table": "t"},
    "multi": {"separator": "|", "pooling": "mean", "group": "g"},
    "sequence": {"max_length": 3},
    "bucket": {"buckets_per_e": 2.0},
    "numeric": {"log": False, "fill": 0.0},
}  # fmt: skip
KEYS = {
    "columns": COLUMNS[:2],
    "labels": ("click",),
    "regression": ("label",),
    "optional": ("label",),
    "weight": "importance",
    "tasks": ("click",),
    "file": "b.csv",
    "group": "user",
    "joins": (Join(file="b.csv", left="user", right="id"),),
    "missing": ("",),
    "delimiter": ";",
    "header": ("a", "b"),
    "line_breaks": True,
    "negatives": DrawnItems(items="b.csv", count=2),
    "quotes": False,
    "format": "recbole",
}


def test_every_key_of_a_schema_is_in_its_document_or_says_why_not():
    assert set(KEYS) | {"split"} | set(DECIDES_NOTHING) == {f.name for f in fields(Schema)}
    assert set(SPLITS) == {f.name for f in fields(Split)}
    told = {"name", *(key for keys in OF_KIND.values() for key in keys)}
    assert told == {f.name for f in fields(Column)}


@pytest.mark.parametrize("key", KEYS)
def test_another_value_of_a_key_is_other_data(key):
    told = differences(document(SCHEMA), document(replace(SCHEMA, **{key: KEYS[key]})))
    assert len(told) == 1
    assert key in told[0] or told == ["column price is gone"]


@pytest.mark.parametrize("key", DECIDES_NOTHING)
def test_what_decides_nothing_is_the_same_data(key):
    value = {"md5": ("0" * 32,)}.get(key, "other")
    assert not differences(document(SCHEMA), document(replace(SCHEMA, **{key: value})))


@pytest.mark.parametrize("key", SPLITS)
def test_another_split_is_told_by_its_keys(key):
    schema = replace(SCHEMA, group="user")
    told = differences(document(schema), document(replace(schema, split=SPLITS[key])))
    assert any(text.startswith(f"split: {key} was ") for text in told)


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in OF_KIND.items() for key in keys]
)
def test_another_value_of_a_columns_key_is_told_with_the_column(kind, key):
    two = (Column(name="also", group="g"), Column(name="too", group="g"))
    was, is_ = (
        document(replace(SCHEMA, columns=(Column(name="c", **keys), *two)))
        for keys in ({"kind": kind}, {"kind": kind} | {key: OF_KIND[kind][key]})
    )
    told = differences(was, is_)
    assert any(text.startswith(f"column c: {key} was ") for text in told)


def test_differences_are_told_column_by_column():
    price = replace(COLUMNS[2], log=False)
    edited = replace(SCHEMA, columns=(COLUMNS[1], COLUMNS[0], price, Column(name="device")))
    assert differences(document(SCHEMA), document(edited)) == [
        "column device is new",
        "column price: log was true, is false",
        "the columns stand in another order (tags where user was), which decides the ids of each",
    ]


def test_a_run_goes_on_only_with_the_schema_and_the_split_that_it_began_with():
    now = Provenance(name="mine", sha256="1", split="", schema=document(SCHEMA))
    before = {"data_sha256": "1", "data_schema": document(SCHEMA)}
    refuse_other_data(before, now)
    with pytest.raises(ValueError, match="has changed since the run began"):
        refuse_other_data(before | {"data_sha256": "2"}, now)
    moved = replace(SCHEMA, split=Split(column="day", test_from=5))
    with pytest.raises(ValueError, match=r"split: test_from was 8, is 5\. Rows that have trained"):
        refuse_other_data(before, replace(now, schema=document(moved)))


@pytest.mark.parametrize("change", [{"sha256": "2"}, {"split": "x"}, {"schema": {"file": "b"}}])
def test_the_digest_of_a_provenance_is_of_bytes_split_and_schema(change):
    known = Provenance(name="mine", sha256="1", split="", schema={"file": "a"})
    assert replace(known, **change).digest != known.digest
    assert replace(known, name="other", rows_skipped=3).digest == known.digest
