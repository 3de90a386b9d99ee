"""Limits of numbers, said in one way."""

from __future__ import annotations

from typing import Any


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
