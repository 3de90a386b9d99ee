"""What the fields of a table's configuration may hold: one sentence with name, value and rule."""

from __future__ import annotations

import math

from persia_sim.words.rules import require

MOST_INT64 = 2**63 - 1


def require_whole(name: str, value: object, least: int, most: int, rule: str = "") -> None:
    """A whole number from ``least`` to ``most``; ``rule`` says the limits in other words."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole, name, repr(value), "must be a whole number (an int)")
    assert isinstance(value, int)
    said = rule or f"must be {least} to {most}"
    require(least <= value <= most, name, value, said)


def require_finite(name: str, value: object) -> None:
    """A number that is neither infinite nor NaN."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, name, repr(value), "must be a number")
    assert isinstance(value, int | float)
    require(math.isfinite(value), name, value, "must be a finite number")


def require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the names that a `Literal` lists."""
    require(value in choices, name, repr(value), f"must be one of {', '.join(choices)}")


def require_used(name: str, value: object, default: object, used: bool, where: str) -> None:
    """What nothing reads must be left at its default, so that what is accepted is meant."""
    require(used or value == default, name, value, f"only used with {where}", "remove it")
