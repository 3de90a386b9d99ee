"""A schema of the user's own, read from a TOML file.

name = "mine"
file = "clicks.csv"                        # relative to this file; parquet, CSV, also .gz;
                                           # or a pattern: "day-*.parquet", in order of names
labels = ["clicked"]
group = "user"                             # GAUC by this column of ids; may be left out
split = { column = "day", test_from = 7 }  # or test_from = 2024-05-01, a date;
                                           # or { column = "part", test_equals = "test" };
                                           # or { test_fraction = 0.2, random_seed = 1 };
                                           # or { test_file = "test.csv",
                                           #      validation_file = "valid.csv" }
line_breaks = true                         # quoted values hold some; else leave it out

columns = [
    "user", "item",                        # categories: a name is enough
    { name = "tags", kind = "multi" },     # or a table a column: [[columns]]
]
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from runtime.data.errors import DataError, nearest
from runtime.data.regular import regular_file
from runtime.data.schema import Column, Join, Schema, Split

LARGEST_SCHEMA_BYTES = 1 << 20
"""A thousand columns take a tenth of it; whatever is larger is no schema."""

T = TypeVar("T")


def read_schema(path: Path) -> tuple[Schema, Path]:
    """The schema, and the folder its data files are relative to."""
    table = _toml(path)
    if "folder" in table:
        raise DataError(
            f"{path}: folder is not read in a schema file: file is relative to the schema's place"
        )
    parsed = dict(table)
    for key, kind in (("columns", Column), ("joins", Join)):
        if key in table:
            if not isinstance(table[key], list):
                raise DataError(f"{path}: {key} must be a list of tables ([[{key}]])")
            items = [
                {"name": i} if kind is Column and isinstance(i, str) else i for i in table[key]
            ]
            parsed[key] = [_build(kind, item, f"{path}: {key}") for item in items]
    if "split" in table:
        parsed["split"] = _build(Split, table["split"], f"{path}: split")
    return _build(Schema, parsed, str(path)), path.parent


def _toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        size_bytes = regular_file(path).st_size
    except DataError as error:
        raise DataError(f"cannot read the schema {path}: {error}") from error
    if size_bytes > LARGEST_SCHEMA_BYTES:
        raise DataError(
            f"{path} has {size_bytes:,} bytes, a schema at most {LARGEST_SCHEMA_BYTES:,}:"
            " is it the data itself? Name the schema that describes it"
        )
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not TOML: it is no UTF-8 text ({error.reason} at byte {error.start});"
            " save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path} is not TOML that can be read: nested too deeply") from error
    except ValueError as error:  # also a whole number of thousands of digits
        raise DataError(f"{path} is not TOML: {error}") from error


def _build(kind: type[T], table: Any, where: str) -> T:
    """One dataclass from one table; every key must be known, and what it requires."""
    if not isinstance(table, dict):
        raise DataError(f"{where}: expected a table of keys and values, got {table!r}")
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise DataError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
    for name, f in known.items():
        if name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise DataError(f"{where}: the key {name!r} is missing")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    try:
        return kind(**arguments)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
