"""Schemas and files with mistakes drawn at random: read as meant, or refused in one clear error."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.open import open_source

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

BASE: dict[str, Any] = {
    "name": "s",
    "file": "d.csv",
    "labels": ["click", "buy"],
    "tasks": ["c", "b"],
    "delimiter": ";",
    "missing": ["", "?"],
    "split": {"column": "day", "test_from": 3, "validation_fraction": 0.1},
    "columns": [
        {"name": "user", "group": "g"},
        {"name": "friend", "group": "g", "table": "rows"},
        {"name": "hour", "modulo": 24},
        {"name": "tags", "kind": "multi", "separator": "|", "pooling": "mean"},
        {"name": "seen", "kind": "sequence", "separator": "|", "max_length": 2},
        {"name": "age", "kind": "bucket", "buckets_per_e": 2.0},
        {"name": "price", "kind": "numeric", "fill": 0.5, "log": True},
    ],
}
# By kind, the options that are read; written from the documentation, not from the program.
READ = {
    "categorical": {"table", "group", "with_column", "modulo"},
    "multi": {"table", "group", "separator", "pooling"},
    "sequence": {"table", "group", "separator", "max_length"},
    "bucket": {"table", "group", "buckets_per_e"},
    "numeric": {"fill", "log"},
}
ROWS = [
    f"u{n};u{n + 1};{n * 7};a|b|c;x|y|z;{n};{n / 2};{n % 6};{n % 2};{n // 6 % 2}" for n in range(48)
]
TEXT = "\n".join(["user;friend;hour;tags;seen;age;price;day;click;buy", *ROWS]).encode()

SCALARS = st.sampled_from(
    [
        True, False, 0, 1, -1, 2, 3, 10**6, 2**63, 10**30, 0.0, 0.5, 1.0, -0.5, 1e300, math.inf,
        -math.inf, math.nan, "", " ", "?", "x", "day", "click", "user", "rows", "multi", "numeric",
        "sum", "2013-02-09", "3", "\0", "\n", "a" * 300, "../d.csv", "d.parquet", "/dev/zero",
        date(2013, 2, 9), datetime(2013, 2, 9, 1), time(1), [], ["click"], ["click", "click"],
        [["x"]], [1], {}, {"a": 1}, "sequence", "bucket", ";", "||", "\t",
    ]
)  # fmt: skip
KEYS = st.sampled_from(
    sorted({k for c in BASE["columns"] for k in c})
    + sorted(set(BASE["split"]) | set(BASE))
    + ["with_column", "test_equals", "test_fraction", "random_seed", "header", "joins", "folder"]
    + ["kinds", "lables", "test_form", "maxid", ""]
)


def toml(value: Any) -> str:
    """A TOML value; tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)


@st.composite
def mutated_schemas(draw: st.DrawFn) -> dict[str, Any]:
    """The base with one to three mistakes: a key dropped, renamed, replaced, added or doubled."""
    schema = copy.deepcopy(BASE)
    for _ in range(draw(st.integers(1, 3))):
        columns = schema.get("columns")
        tables = [schema] + [t for t in [schema.get("split")] if isinstance(t, dict)]
        tables += [c for c in columns if isinstance(c, dict)] if isinstance(columns, list) else []
        table = draw(st.sampled_from(tables))
        match draw(st.sampled_from(["drop", "rename", "replace", "add", "double"])):
            case "drop" if table:
                del table[draw(st.sampled_from(sorted(table)))]
            case "rename" if table:
                table[draw(KEYS)] = table.pop(draw(st.sampled_from(sorted(table))))
            case "replace" if table:
                table[draw(st.sampled_from(sorted(table)))] = draw(SCALARS)
            case "double" if isinstance(columns, list) and columns:
                columns.append(copy.deepcopy(draw(st.sampled_from(columns))))
            case _:
                table[draw(KEYS)] = draw(SCALARS)
    return schema


@contextmanager
def data_folder(schema: str, text: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "s.toml").write_text(schema)
        (Path(name) / "d.csv").write_bytes(text)
        yield Path(name)


def both_parts(folder: Path, *, skip: bool) -> tuple[Any, list[Batch]] | None:
    """The source and its parts, or None where it was refused; in words, with a file's name."""
    try:
        source = open_source(str(folder / "s.toml"), skip_bad_rows=skip)
        parts = [Batch.concat(list(source.chunks(part))) for part in ("train", "test")]
        seen = source.provenance()
    except DataError as error:
        words = str(error)
        assert len(words) > 30
        assert str(folder) in words or "/dev/zero" in words or "'" in words
        return None
    assert skip or seen.rows_skipped == 0
    assert seen.train_rows is not None
    assert parts[0].size <= seen.train_rows
    return source, parts


def assert_sound(source: Any, parts: list[Batch]) -> None:
    """What was accepted can be trained on."""
    n_fields = len(source.layout.fields)
    for batch in parts:
        assert np.isfinite(batch.dense).all()
        assert set(np.unique(batch.labels[:, 0])) == {0, 1}
        bags = len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1
        assert bags == batch.size * n_fields
        assert batch.dense.shape == (batch.size, len(source.layout.dense))


def test_the_base_without_a_mistake_is_read():
    lines = "\n".join(f"{key} = {toml(value)}" for key, value in BASE.items())
    with data_folder(lines, TEXT) as folder:
        found = both_parts(folder, skip=False)
        assert found is not None
        assert [p.size for p in found[1]] == [22, 24]  # 24 train, of which 2 validate


@settings(max_examples=120)
@given(mutated_schemas())
def test_a_schema_with_mistakes_is_meant_or_refused(schema):
    lines = "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in schema.items())
    with data_folder(lines, TEXT) as folder:
        found = both_parts(folder, skip=False)
    if found is None:
        return
    assert_sound(*found)
    for column in schema["columns"]:
        assert set(column) <= {"name", "kind"} | READ[column.get("kind", "categorical")]
        assert math.isfinite(column.get("fill", 0))
    assert len({c["name"] for c in schema["columns"]}) == len(schema["columns"])
    groups = [c["group"] for c in schema["columns"] if "group" in c]
    assert all(groups.count(group) > 1 for group in groups)
    labels = schema.get("labels", ["label"])
    assert len(set(labels)) == len(labels)
    assert schema["split"].get("column") not in labels
    ways = {"test_from", "test_equals", "test_fraction"} & set(schema["split"])
    assert len(ways) == 1
    assert "column" in schema["split"] or ways == {"test_fraction"}
    assert "random_seed" not in schema["split"] or ways == {"test_fraction"}


PIECES = st.sampled_from(
    [
        b"", b"\0", b"\r", b"\n", b"\r\n", b'"', b'""', b";", b";;", b"|", b"\xff", b"\xfe\xff",
        b"\xef\xbb\xbf", b"nan", b"inf", b"-", b"1e400", b"1_0", b"?", b" ", b"9" * 25, b"0.5",
        "\N{ARABIC-INDIC DIGIT SEVEN}".encode(), b"\x1a",
    ]
)  # fmt: skip


@st.composite
def mutated_texts(draw: st.DrawFn) -> bytes:
    """The file with up to four pieces put in, or over what stood there, or cut off."""
    text = TEXT
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(text)))
        over = draw(st.sampled_from([0, 0, 1, 2, 30]))
        text = text[:place] + draw(PIECES) + text[place + over :]
    return text[: draw(st.sampled_from([len(text), len(text), len(text) // 2]))]


@pytest.mark.long
@settings(max_examples=300)
@given(mutated_texts(), st.booleans())
def test_a_file_with_mistakes_is_read_or_refused(text, skip):
    lines = "\n".join(f"{key} = {toml(value)}" for key, value in BASE.items())
    with data_folder(lines, text) as folder:
        found = both_parts(folder, skip=skip)
    if found is None:
        return
    assert_sound(*found)
    assert sum(p.size for p in found[1]) <= len(ROWS) + 8


@settings(max_examples=60)
@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_bytes_that_nobody_meant_are_refused(schema, text, skip):
    lines = "\n".join(f"{key} = {toml(value)}" for key, value in BASE.items())
    with data_folder(lines, text) as folder:
        assert both_parts(folder, skip=skip) is None
        (folder / "s.toml").write_bytes(schema)
        assert both_parts(folder, skip=skip) is None
