"""The options of a run as they are typed: their names, their types, and a config's values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from persia_sim.words.fields import field_types

_FLAT = ("sync", "engine", "evaluation", "checkpoint")
"""Groups whose options stand without a prefix."""


def option_kinds(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of a run as it is typed behind its dashes, and its annotation."""
    for name, kind in field_types(group).items():
        if is_dataclass(kind):
            yield from option_kinds(kind, prefix if name in _FLAT else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".replace("_", "-"), kind


def option_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of a config as it is typed behind its dashes, and its value."""
    for name in config.__dataclass_fields__:
        value = getattr(config, name)
        if is_dataclass(value):
            yield from option_values(value, prefix if name in _FLAT else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".replace("_", "-"), value
