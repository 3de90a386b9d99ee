"""What a schema may say: every option must be read, meant, and in its range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from runtime.data.schema import LARGEST_FEATURE, Column, Join, Schema
from runtime.data.split import Split
from tests.refusals import assert_names_last

HALF = Split(test_fraction=0.5)


def made(**changes: Any) -> Schema:
    settings: dict[str, Any] = {"name": "s", "columns": (Column(name="x"),), "split": HALF}
    return Schema(**(settings | changes))


# Each option with a value that its kinds take, and the kinds that read it.
OPTIONS: dict[str, tuple[Any, set[str]]] = {
    "separator": ("|", {"multi", "sequence"}),
    "pooling": ("mean", {"multi"}),
    "max_length": (3, {"sequence"}),
    "buckets_per_e": (2.0, {"bucket"}),
    "log": (False, {"numeric"}),
    "fill": (1.0, {"numeric"}),
    "modulo": (9, {"categorical"}),
    "with_column": ("y", {"categorical"}),
    "table": ("t", {"categorical", "bucket", "multi", "sequence"}),
    "group": ("g", {"categorical", "bucket", "multi", "sequence"}),
}


@pytest.mark.parametrize("kind", ["categorical", "bucket", "multi", "sequence", "numeric"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_the_kind_does_not_read_is_refused(option, kind):
    value, kinds = OPTIONS[option]
    given: dict[str, Any] = {option: value}
    if kind in kinds:
        assert getattr(Column(name="x", kind=kind, **given), option) == value
        return
    with pytest.raises(ValueError, match=f"{option} is for columns of kind .* column x is {kind}"):
        Column(name="x", kind=kind, **given)


def test_an_option_that_the_kind_reads_has_its_default_and_no_other_has_one():
    filled = {
        kind: {o for o in OPTIONS if getattr(Column(name="x", kind=kind), o) is not None}
        for kind in ("categorical", "bucket", "multi", "sequence", "numeric")
    }
    assert filled == {
        "categorical": {"table"},
        "bucket": {"table", "buckets_per_e"},
        "multi": {"table", "separator", "pooling"},
        "sequence": {"table", "separator", "max_length"},
        "numeric": {"log"},
    }
    bag, history = Column(name="x", kind="multi"), Column(name="x", kind="sequence")
    assert (bag.separator, bag.pooling, history.max_length) == (",", "sum", 10)
    assert Column(name="x", kind="bucket").buckets_per_e == 3.0


BAD_COLUMNS: list[dict[str, Any]] = [
    {"kind": "catgorical"}, {"kind": "bucket", "buckets_per_e": math.nan},
    {"kind": "bucket", "buckets_per_e": math.inf}, {"kind": "bucket", "buckets_per_e": 0.0},
    {"kind": "bucket", "buckets_per_e": 1e300}, {"kind": "numeric", "fill": math.nan},
    {"kind": "numeric", "fill": -math.inf}, {"kind": "numeric", "log": False, "fill": 1e39},
    {"kind": "sequence", "max_length": 0}, {"kind": "sequence", "max_length": 10**9},
    {"kind": "sequence", "max_length": 2.5}, {"kind": "multi", "separator": ""},
    {"kind": "multi", "pooling": "avg"}, {"modulo": 2**63}, {"modulo": -1}, {"modulo": True},
    {"table": ""}, {"with_column": "x"},
]  # fmt: skip
"""The last key is named, with its value and the column."""


@pytest.mark.parametrize("changes", BAD_COLUMNS)
def test_a_column_out_of_its_range_is_refused(changes):
    with pytest.raises(ValueError, match=r"\bcolumn '?x\b") as told:
        Column(**({"name": "x"} | changes))
    assert_names_last(str(told.value), changes)


def test_a_fill_value_may_be_large_where_its_logarithm_is_kept():
    assert Column(name="x", kind="numeric", fill=1e300).fill == 1e300
    assert float(np.float32(LARGEST_FEATURE)) == LARGEST_FEATURE
    assert float(np.finfo(np.float32).max) == LARGEST_FEATURE


TWO = (Column(name="x"), Column(name="x", kind="bucket"))
BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"columns": TWO}, r"different names, got \['x'\] twice"),
    ({"columns": ()}, "columns has 0 of numbers and none of ids"),
    ({"labels": ()}, "labels is empty; name a column"),
    (
        {"labels": ("?",)},
        "labels holds '?', as `data schema` writes where no column holds 0 and 1; name",
    ),
    ({"labels": ("a", "a")}, "labels must be different, got 'a' twice"),
    ({"labels": ("a", "b"), "tasks": ("t", "t")}, "tasks must be different, got 't' twice"),
    ({"labels": ("a", "b"), "tasks": ("t",)}, "2 labels and 1 tasks"),
    ({"labels": "a"}, "labels must be a list, got 'a'"),
    ({"labels": ("x",)}, r"\['x'\] are labels"),
    ({"columns": (Column(name="x", with_column="label"),)}, r"\['label'\] are labels"),
    ({"split": Split(column="label", test_from=1)}, "'label', which is a label"),
    ({"split": Split(column="part", test_equals="?")}, "'?' is one of the texts that mean"),
    ({"file": ""}, "file is empty"),
    ({"name": ""}, "name is empty"),
    ({"delimiter": ";"}, "delimiter is for text files"),
    ({"file": "d.csv", "delimiter": "||"}, r"one ASCII character, .* got '\|\|'"),
    ({"file": "d.csv", "delimiter": ""}, "one ASCII character"),
    ({"file": "d.csv", "delimiter": '"'}, "one ASCII character"),
    ({"file": "d.csv", "delimiter": "\n"}, "one ASCII character"),
    ({"file": "d.csv", "delimiter": "é"}, "one ASCII character"),
    ({"file": "d.csv", "delimiter": "\0"}, "one ASCII character"),
    ({"header": ("x", "label")}, "header is for text files"),
    ({"file": "d.csv", "header": ("x", "x")}, "got 'x' twice"),
    ({"file": "d.csv", "header": ()}, "got none"),
    ({"columns": (Column(name="x", group="g"), Column(name="y"))}, "group g has one column, x"),
    (
        {"columns": (Column(name="x", group="g"), Column(name="y", group="g", table="t"))},
        r"group g share rows, got tables \['rows', 't'\]",
    ),
    ({"columns": tuple(Column(name=f"c{n}") for n in range(256))}, "at most 255 id columns fit"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SCHEMAS)
def test_a_schema_that_cannot_be_meant_is_refused(changes, message):
    with pytest.raises(ValueError, match=message.replace("'?'", r"'\?'")):
        made(**changes)


def test_a_delimiter_is_read_where_only_a_joined_table_is_text():
    join = Join(file="side.csv", left="x", right="x")
    assert made(joins=(join,), delimiter=";").delimiter == ";"
    assert made(columns=tuple(Column(name=f"c{n}") for n in range(255))).layout.fields[254]


BAD_SPLITS: list[dict[str, Any]] = [
    {"test_fraction": 0.1, "validation_file": "v"}, {"test_file": ""}, {"test_fraction": 0.0},
    {"test_fraction": 1}, {"test_fraction": math.nan}, {"test_fraction": "0.2"},
    {"test_fraction": 0.2, "random_seed": -1}, {"test_fraction": 0.2, "random_seed": 2**63},
    {"test_fraction": 0.2, "random_seed": True}, {"test_fraction": 0.2, "validation_fraction": 1.0},
    {"test_fraction": 0.2, "validation_fraction": -0.1}, {"column": "d", "test_from": "last"},
    {"column": "d", "test_from": "2013-02-30"}, {"column": "d", "test_from": math.inf},
    {"column": "d", "test_from": "1e400"}, {"column": "d", "test_equals": 3},
]  # fmt: skip
"""The last key is named, with its value."""
CONTRADICTIONS: list[dict[str, Any]] = [
    {"test_file": "t", "validation_file": "v", "validation_fraction": 0.1}, {"column": "d"},
    {"test_file": "t", "random_seed": 1}, {"column": "d", "test_from": 3, "random_seed": 1},
    {"test_fraction": 0.2, "column": "d"}, {"column": "d", "test_from": 3, "test_equals": "x"},
    {"test_from": 3}, {"column": "d", "test_from": 10**400}, {},
]  # fmt: skip
"""Each of the keys decides: what is wrong with them together names the last."""


@pytest.mark.parametrize("settings", BAD_SPLITS)
def test_a_split_that_cannot_be_meant_is_refused(settings):
    with pytest.raises(ValueError) as told:
        Split(**settings)
    assert_names_last(str(told.value), settings)


@pytest.mark.parametrize("settings", CONTRADICTIONS)
def test_keys_of_a_split_that_do_not_go_together_are_named(settings):
    with pytest.raises(ValueError) as told:
        Split(**settings)
    assert [*settings, "none of them"][-2 if settings else -1] in str(told.value)
