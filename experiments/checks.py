"""Checks that the options of every study share: each says name, value and rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from persia_sim.words.rules import Refused
from persia_sim.words.schema import Within

COUNT = (1, 10_000_000)
"""Of steps, samples of a batch, windows: more is a slip of the finger, not a study."""
TAU = (0, COUNT[1])
ROWS = (2, 10**12)
SEEDS = (1, 1_000)
JOBS = (1, 1_024)
RANKS = (1, 100_000)
SIMULATED_STEPS = (8, 100_000)
"""Fewer have no steady state to measure."""


def between(least: float, most: float, **values: float | None) -> None:
    """Raise `Refused` naming the first option outside the closed range; None is not given.

    >>> between(1, 3, seeds=0)
    Traceback (most recent call last):
    persia_sim.words.rules.Refused: seeds must be >= 1, got 0
    """
    for name, value in values.items():
        if value is not None and (rule := Within(least, most).rule(value)):
            raise Refused(name, f"{rule}, got {value}")


def positive(**values: float | None) -> None:
    """Raise ValueError naming the first option that is not a finite number above 0."""
    for name, value in values.items():
        if value is not None and not (0 < value < math.inf):
            raise ValueError(f"{name} must be > 0 and finite, got {value}")


def each_between(least: float, most: float, **lists: Iterable[float]) -> None:
    """The same as `between` for every value of a list."""
    for name, values in lists.items():
        for value in values:
            between(least, most, **{name: value})


def all_positive(**lists: Iterable[float]) -> None:
    """The same as `positive` for every value of a list."""
    for name, values in lists.items():
        for value in values:
            positive(**{name: value})


def not_empty(**values: tuple[object, ...]) -> None:
    """Raise ValueError naming the first option that is an empty list."""
    for name, value in values.items():
        if not value:
            raise ValueError(f"{name} must hold one value or more, got none")


def each_known(table: Mapping[str, object], **lists: Iterable[str]) -> None:
    """The same as `known` for every value of a list."""
    for option, names in lists.items():
        for name in names:
            known(table, **{option: name})


def known(table: Mapping[str, object], *, or_else: str = "", **names: str) -> None:
    """Raise ValueError naming the first option that is no key of ``table``, with the keys.

    ``or_else``: what may be given instead, for the sentence.
    """
    for option, name in names.items():
        if name not in table:
            choices = " ".join([", ".join(table), *([or_else] if or_else else [])])
            raise ValueError(f"{option} must be one of {choices}, got {name!r}")
