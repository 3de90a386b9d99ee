"""JSON and TOML files that become dataclasses: read with care, held to the declared fields.

What is wrong with one is told in a sentence with the file, the field, the value and the rule.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from persia_sim.words.fields import field_types, fit, nearest, told

MOST_BYTES = 64 * 2**20
T = TypeVar("T")


def read_document(path: Path) -> Any:
    """The content of a file: TOML when it is called so, else JSON.

    Raises ValueError naming the file when it is no plain file of at most 64 MiB, no UTF-8, not
    well-formed, or when it gives a key twice or a number that is not finite; OSError when it cannot
    be read.
    """
    size = path.stat().st_size
    if not path.is_file():  # a pipe would hold us for ever
        raise ValueError(f"{path} is not a plain file; name a .json or .toml file")
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes: a document has at most {MOST_BYTES:,}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a document of ours") from None
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ValueError(f"{path} is not well-formed {kind}: {error}") from None


def parse(kind: type[T], document: Any, where: str) -> T:
    """A dataclass from nested mappings; what is left out takes its default.

    Raises ValueError naming ``where`` for a key that the dataclass does not have (with the nearest
    it has), a value of another type, a missing field, and what its own checks refuse.
    """
    try:
        return cast(T, _build(kind, document, ""))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _build(kind: Any, document: Any, prefix: str) -> Any:
    if not isinstance(document, Mapping):
        name = prefix.rstrip(".") or "the document"
        raise ValueError(f"{name} must be a table of names and values, got {told(document)}")
    types = field_types(kind)
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in types:
            raise ValueError(f"{prefix}{key} is not known; {nearest(str(key), types)}")
        name = f"{prefix}{key}"
        if is_dataclass(types[key]):
            values[key] = _build(types[key], value, f"{name}.")
        else:
            values[key] = fit(value, types[key], name)
    for key, field in kind.__dataclass_fields__.items():
        if key not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{key} is missing; add it")
    return kind(**values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")
