"""The options of a run as they are typed: names, types, a config's values, limits of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from persia_sim.words.fields import field_types


def within(record: Any, least: float, most: float, *names: str, prefix: str = "") -> None:
    """Raise ValueError for the first of these fields outside [least, most]; None is not given."""
    for name in names:
        value = getattr(record, name)
        if value is None:
            continue
        if value < least:
            raise ValueError(f"{prefix}{name} must be >= {least:,}, got {value}")
        if value > most:
            raise ValueError(f"{prefix}{name} must be <= {most:,}, got {value}")


def above_zero(record: Any, most: float, *names: str, prefix: str = "") -> None:
    """Raise ValueError for the first of these fields outside (0, most]."""
    for name in names:
        value = getattr(record, name)
        if not 0 < value <= most:
            raise ValueError(f"{prefix}{name} must be > 0 and <= {most:,}, got {value}")


_FLAT = ("sync", "engine", "evaluation", "checkpoint")
"""Groups whose options stand without a prefix."""


def option_kinds(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of a run as it is typed behind its dashes, and its annotation."""
    for name, kind in field_types(group).items():
        if is_dataclass(kind):
            yield from option_kinds(kind, prefix if name in _FLAT else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".replace("_", "-"), kind


@cache
def _python_names() -> tuple[re.Pattern[str], dict[str, str]]:
    """How options may be called in a message: a.b.c_d, b.c_d or c_d, where that is one option."""
    from runtime.config.train import TrainConfig  # its groups are told in messages, too

    found: dict[str, set[str]] = {}
    for typed, _ in option_kinds(TrainConfig):
        parts = typed.replace("-", "_").split(".")
        for start in range(len(parts)):
            name = ".".join(parts[start:])
            if "_" in name or "." in name:  # a bare word may mean what it says
                found.setdefault(name, set()).add(f"--{typed}")
    one = {name: min(options) for name, options in found.items() if len(options) == 1}
    words = "|".join(re.escape(name) for name in sorted(one, key=len, reverse=True))
    return re.compile(rf"(?<![\w./-])({words})(?![\w/-]|\.\w)"), one


def as_typed(text: str) -> str:
    """A message with the options in it as they are typed.

    >>> as_typed("initial_mean is 0.5: only with initial normal; data.passes too")
    '--rows.initial-mean is 0.5: only with initial normal; --data.passes too'
    """
    pattern, options = _python_names()
    return pattern.sub(lambda found: options[found[1]], text)


def option_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of a config as it is typed behind its dashes, and its value."""
    for name in config.__dataclass_fields__:
        value = getattr(config, name)
        if is_dataclass(value):
            yield from option_values(value, prefix if name in _FLAT else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".replace("_", "-"), value
