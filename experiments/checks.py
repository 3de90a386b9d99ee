"""Checks that the options of every study share."""

from __future__ import annotations


def at_least(least: float, **values: float | None) -> None:
    """Raise ValueError naming the first option below ``least``; None is not given."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")


def not_empty(**values: tuple[object, ...]) -> None:
    """Raise ValueError naming the first option that is an empty list."""
    for name, value in values.items():
        if not value:
            raise ValueError(f"{name} needs one value or more")
