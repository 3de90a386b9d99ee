"""Options of studies: each field's annotation holds its rule, and what several have stands here.

An error says name, rule and value. A rule across fields belongs into a study's own `check`.
"""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import tyro


class Rule(NamedTuple):
    """What holds of a value, in its annotation; ``hold`` raises ValueError by its name."""

    hold: Callable[[str, Any], None]


def within(least: float, most: float) -> Rule:
    """A number of a closed range."""

    def hold(name: str, value: float) -> None:
        if not value >= least:  # so that NaN is outside
            raise ValueError(f"{name} must be >= {least:,}, got {value}")
        if value > most:
            raise ValueError(f"{name} must be <= {most:,}, got {value}")

    return Rule(hold)


def one_of(names: Iterable[str], or_else: str = "") -> Rule:
    """A word of a list; ``or_else``: what may be given instead, for the sentence."""
    words = tuple(names)

    def hold(name: str, value: str) -> None:
        if value not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}{or_else}, got {value!r}")

    return Rule(hold)


def _above_zero(name: str, value: float) -> None:
    if not (0 < value < math.inf):
        raise ValueError(f"{name} must be > 0 and finite, got {value}")


def _not_empty(name: str, value: tuple[object, ...]) -> None:
    if not value:
        raise ValueError(f"{name} must hold one value or more, got none")


MOST = 10_000_000
"""Steps, samples of a batch, windows: more is a slip of the finger, not a study."""
T = TypeVar("T")
Some = Annotated[tuple[T, ...], Rule(_not_empty)]
Positive = Annotated[float, Rule(_above_zero)]
Count = Annotated[int, within(1, MOST)]
Tau = Annotated[int, within(0, MOST)]
TestRows = Annotated[int, within(2, 10**12)]
Samples = Annotated[int, within(1, 10**12)]
"""Of a whole run."""
Seeds = Annotated[int, within(1, 1_000)]
PairedSeeds = Annotated[int, within(2, 1_000)]
"""An interval needs two."""
Jobs = Annotated[int, within(1, 1_024)]
Ranks = Annotated[int, within(1, 100_000)]
SimulatedSteps = Annotated[int, within(8, 100_000)]
"""Fewer have no steady state to measure."""


def default_jobs() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Of every study and bench."""

    out: Annotated[
        Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/ and the study's name)")
    ] = None
    """Folder of the results."""

    def __post_init__(self) -> None:
        if self.out is None:
            study = type(self).__module__.rpartition(".")[2].replace("_", "-")
            object.__setattr__(self, "out", Path("runs") / study)
        for name, kind in _annotations(type(self)).items():
            _hold(name, getattr(self, name), kind)
        self.check()

    def check(self) -> None:
        """Rules across fields. Raises ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(StudyOptions):
    """Of a study that does only what its folder lacks."""

    dry_run: bool = False
    """Print the plan and stop; a second run does only what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel(Planned):
    """Of a study whose points run in processes of their own."""

    jobs: Jobs = field(default_factory=default_jobs)
    """Points at a time."""


@cache
def _annotations(options: type) -> dict[str, Any]:
    return typing.get_type_hints(options, include_extras=True)


def _hold(name: str, value: Any, kind: Any) -> None:
    """Hold a value, and every value of a list, against the rules of its annotation."""
    parts = get_args(kind)
    if value is None:
        return
    if get_origin(kind) in (Union, types.UnionType):
        _hold(name, value, parts[0])
    elif get_origin(kind) is tuple:
        for item in value:
            _hold(name, item, parts[0])
    elif get_origin(kind) is Annotated:
        for rule in parts[1:]:
            if isinstance(rule, Rule):
                rule.hold(name, value)
        _hold(name, value, parts[0])
