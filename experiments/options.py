"""Options of studies: each field's annotation holds its rule, and what several have stands here.

An error says name, rule and value. A rule across fields belongs into a study's own `_check`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

from experiments.catalogue import STUDIES
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within, check_fields, shown
from persia_sim.base.vocabulary import Mode


class OneOf:
    """A word of a list that is no type, as `Within` is of numbers; ``or_else``: what may be given
    instead, for the sentence."""

    def __init__(self, words: Iterable[str], or_else: str = "") -> None:
        self._words = tuple(words)
        self._or_else = or_else

    def rule(self, value: str) -> str:
        """The rule that the word breaks; "": none."""
        rule = f"must be one of {', '.join(self._words)}{self._or_else}"
        return "" if value in self._words else rule


class _NotEmpty:
    def rule(self, value: tuple[object, ...]) -> str:
        return "" if value else "must hold one value or more"


def hold(name: str, value: Any, rule: Within | OneOf) -> None:
    """Raise `Refused` for a value that breaks a rule, by its name."""
    if broken := rule.rule(value):
        raise Refused(name, f"{broken}, got {shown(value)}")


REFERENCE = Mode.SYNC
"""The mode that all others are held against."""
STUDIED = Mode.HYBRID
"""The mode that the project is about."""
MOST = 10_000_000
"""The largest count: more is a slip of the finger, not a study."""
T = TypeVar("T")
Some = Annotated[tuple[T, ...], _NotEmpty()]
Positive = Annotated[float, Within(0, inf, without="least")]
Count = Annotated[int, Within(1, MOST)]
Tau = Annotated[int, Within(0, MOST)]
TestRows = Annotated[int, Within(2, 10**12)]
Samples = Annotated[int, Within(1, 10**12)]
"""Samples of a whole run."""
Seeds = Annotated[int, Within(1, 1_000)]
PairedSeeds = Annotated[int, Within(2, 1_000)]
"""Seeds of a study that shows an interval, which needs two."""
Jobs = Annotated[int, Within(1, 1_024)]
Ranks = Annotated[int, Within(1, 100_000)]
SimulatedSteps = Annotated[int, Within(8, 100_000)]
"""Steps of a simulated run: fewer have no steady state to measure."""


def default_jobs() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Options of every study and bench; a value that a list holds twice counts once."""

    out: Path | None = None
    """Folder of the results, as runs/mine; else runs/ and the study's name."""

    def __post_init__(self) -> None:
        if self.out is None:
            object.__setattr__(self, "out", Path("runs") / self.study)
        check_fields(self)
        for name in (one.name for one in fields(self)):
            if isinstance(value := getattr(self, name), tuple):  # twice would be two runs of a seed
                object.__setattr__(self, name, tuple(dict.fromkeys(value)))
        self._check()

    @property
    def study(self) -> str:
        """The study's name, after its module."""
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def _check(self) -> None:
        """Rules across fields. Raises ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(StudyOptions):
    """Options of a study that can say beforehand what it would do."""

    dry_run: bool = False
    """Print the plan with its minutes, and stop."""

    def duration(self, *factors: str, share: float = 1.0) -> str:
        """In words, how long the study takes: the catalogue's minutes of its defaults, times what
        these options are of theirs (a list counts its values), times a further ``share``."""
        default = type(self)()
        for name in factors:
            share *= _size(getattr(self, name)) / _size(getattr(default, name))
        seconds = 60 * (STUDIES[self.study].minutes or 0) * share
        shown = f"{seconds / 60:,.2g} min" if seconds >= 60 else f"{max(1, seconds):.0f} s"
        return f"about {shown} on 2 cores, processes that start among them"


def _size(value: Any) -> float:
    return len(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel(Planned):
    """Options of a study whose points run in processes of their own; a second run does only what is
    missing."""

    jobs: Jobs = field(default_factory=default_jobs)
    """Points at a time; else one per core."""
