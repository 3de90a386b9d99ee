"""A schema of the user's own, read from a TOML file.

name = "mine"
file = "clicks.csv"                        # relative to this file; parquet, CSV, also .gz
labels = ["clicked"]
split = { column = "day", test_from = 7 }  # or { test_fraction = 0.2, random_seed = 1 }

[[columns]]
name = "user"

[[columns]]
name = "tags"
kind = "multi"
"""

from __future__ import annotations

import tomllib
import types
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from runtime.data.errors import DataError, nearest
from runtime.data.schema import Column, Join, Schema, Split

T = TypeVar("T")


def read_schema(path: Path) -> tuple[Schema, Path]:
    """The schema, and the folder its data files are relative to."""
    try:
        text = path.read_text()
    except OSError as error:
        raise DataError(f"cannot read the schema {path}: {error.strerror}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path} is not TOML: {error}") from error
    parsed = dict(table)
    for key, kind in (("columns", Column), ("joins", Join)):
        if key in table:
            if not isinstance(table[key], list):
                raise DataError(f"{path}: {key} must be a list of tables ([[{key}]])")
            parsed[key] = [_build(kind, item, f"{path}: {key}") for item in table[key]]
    if "split" in table:
        parsed["split"] = _build(Split, table["split"], f"{path}: split")
    return _build(Schema, parsed, str(path)), path.parent


def _build(kind: type[T], table: Any, where: str) -> T:
    """One dataclass from one table; every key must be known and of the right type."""
    if not isinstance(table, dict):
        raise DataError(f"{where}: expected a table of keys and values, got {table!r}")
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for key, value in table.items():
        if key not in known:
            raise DataError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
        if not _fits(value, hints[key]):
            expected = getattr(hints[key], "__name__", str(hints[key]))
            raise DataError(f"{where}: {key} = {value!r} is not of type {expected}")
    for name, f in known.items():
        if name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise DataError(f"{where}: the key {name!r} is missing")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    try:
        return kind(**arguments)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value (lists stand for tuples) is of the annotated type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
