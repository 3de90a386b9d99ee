"""Documents that become dataclasses, held to the declared fields.

What is wrong with one is told in a sentence with the file, the field, the value and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_origin

from persia_sim.words.fields import field_types, fit, nearest, told

T = TypeVar("T")


def parse(kind: type[T], document: Any, where: str, *, others: bool = False) -> T:
    """A dataclass from nested mappings; what is left out takes its default.

    Raises ValueError naming ``where`` for a key that the dataclass does not have (with the nearest
    it has; with ``others`` it is passed over), a value of another type, a missing field, and what
    its own checks refuse.
    """
    if others and isinstance(document, Mapping):
        document = {key: document[key] for key in document if key in field_types(cast(Any, kind))}
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
        values[key] = _value(types[key], value, f"{prefix}{key}")
    for key, field in kind.__dataclass_fields__.items():
        if key not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{key} is missing; add it")
    return kind(**values)


def _value(kind: Any, value: Any, name: str) -> Any:
    """A field's value; dataclasses are built from mappings, also within tuples."""
    if is_dataclass(kind):
        return _build(kind, value, f"{name}.")
    inner = get_args(kind)
    if get_origin(kind) is tuple and is_dataclass(inner[0]) and isinstance(value, list | tuple):
        return tuple(_value(inner[0], item, f"{name}[{k}]") for k, item in enumerate(value))
    return fit(value, kind, name)
