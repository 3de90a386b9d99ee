"""What a stage costs on this host: one law for all configurations, fitted to the profiled ones.

seconds = fixed + per item + per item and float of its row; for the dense network fixed + per input
+ per operation + per weight. The fixed part is Python's: it does not grow with the batch, and the
interpreter's lock is held meanwhile. Every law says how well it fits and where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.validating.cases import Held
from experiments.validating.stages import OF_A_MODE, STAGES, Stages
from persia_sim.words.vocabulary import Mode

TERMS = {
    "load": ("one", "shards", "occurrences"),
    "read": ("one", "shards", "distinct", "distinct_floats", "created"),
    "read_ahead": ("one", "distinct", "created"),
    "refresh": ("one", "distinct", "created"),
    "pool": ("one", "occurrences", "occurrence_floats"),
    "forward": ("one", "inputs", "flops"),
    "backward": ("one", "inputs", "flops", "dense_params"),
    "check": ("one", "inputs", "dense_params"),
    "update": ("one", "dense_params"),
    "scatter": ("one", "shards", "occurrences", "occurrence_floats"),
    "push": ("one", "shards", "distinct", "distinct_floats"),
    "add_gradient": ("one", "dense_params"),
    "pull": ("one", "dense_params"),
    "sleep": ("one", "asked_s"),
}
"""What each law is linear in."""
LOCKLESS = ("backward",)
"""Stages whose fixed part is C++, too: the whole backward pass is one call that has let go of the
interpreter."""
LATE = "_late"
"""Behind a stage's name: its law in modes whose stages lie on three threads. What one of them has
written another finds in no cache of its own core, and what it frees another one allocated."""
SERVED = "_served"
"""Behind a stage's name: its law where rows lie in a server process. Reading is then the whole call
by the clock: request, the server's work (that on the push before it, too), and the answer."""
OF_SERVED = ("load", "read", "pool", "scatter")
"""Stages that have such a law; the update of the rows is in the next call."""
_ROWS, _IDS, _NETWORK = ("distinct", "dim"), ("occurrences", "dim"), ("samples", "dense_params")
RANGES = {
    "load": ("occurrences",),
    "read": _ROWS,
    "read_ahead": _ROWS,
    "refresh": _ROWS,
    "pool": _IDS,
    "forward": _NETWORK,
    "backward": _NETWORK,
    "check": _NETWORK,
    "update": ("dense_params",),
    "scatter": _IDS,
    "push": _ROWS,
    "add_gradient": ("dense_params",),
    "pull": ("dense_params",),
    "sleep": ("asked_s",),
}
"""Quantities outside whose measured range a law is extrapolated."""
MISSING = (
    "transport: calls of a server process in sync with one rank only, where nothing hides them",
    "loader: samples are drawn before a run (the stream draws 16,384 at once, a burst that no mean"
    " describes)",
    "copy: the host's memory is the device's, nothing moves",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: the quantities of `TERMS` and `RANGES`, and the seconds."""

    at: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class HostLaw:
    """A linear law with non-negative terms."""

    terms: Mapping[str, float]
    spread: float
    """Standard deviation of (law / measured - 1)."""
    points: int
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, at: Mapping[str, float]) -> float:
        """Seconds."""
        return sum(each * at[name] for name, each in self.terms.items())

    @property
    def fixed_s(self) -> float:
        """What does not grow with the batch, of one server."""
        return sum(self.terms.get(name, 0.0) for name in ("one", "shards"))

    def outside(self, at: Mapping[str, float]) -> list[str]:
        """The quantities at which the law was not measured."""
        return [n for n, (low, high) in self.ranges.items() if not low <= at[n] <= high]


def quantities(held: Held) -> dict[str, float]:
    """What the laws are linear in, of one rank's batch."""
    return {
        "one": 1.0,
        "shards": held.shards,
        "samples": held.samples,
        "inputs": held.samples * held.inputs,
        "occurrences": held.occurrences,
        "occurrence_floats": held.occurrences * held.dim,
        "distinct": held.distinct,
        "distinct_floats": held.distinct * held.dim,
        "created": held.distinct * held.created,
        "dense_params": held.dense_params,
        "flops": held.flops,
        "dim": held.dim,
    }


def fit_law(stage: str, points: Sequence[Point]) -> HostLaw:
    """Nearest relative to each measurement."""
    from scipy.optimize import nnls  # late: half a second

    stage = stage.removesuffix(LATE).removesuffix(SERVED)
    names = TERMS[stage]
    seconds = np.maximum([p.seconds for p in points], 1e-9)
    table = np.array([[p.at[name] for name in names] for p in points]) / seconds[:, None]
    scale = np.maximum(table.max(0), 1e-30)
    found, _ = nnls(table / scale, np.ones(len(points)))
    ranges = {
        name: (min(p.at[name] for p in points), max(p.at[name] for p in points))
        for name in RANGES[stage]
    }
    off = table / scale @ found - 1
    terms = dict(zip(names, (found / scale).tolist(), strict=True))
    return HostLaw(terms, float(off.std()), len(points), ranges)


@dataclass(frozen=True, slots=True)
class Costs:
    """The stages of one rank's batch alone on a core."""

    stages: Stages
    python: Stages
    """Of these the fixed parts: the interpreter's lock is held."""
    extrapolated: tuple[str, ...]
    """Quantities that are outside the range of laws, and whose."""


def costs_by_law(
    laws: Mapping[str, HostLaw], held: Held, mode: Mode, ranks: int, served: bool = False
) -> Costs:
    """What a batch of one of so many ranks costs; ``served``: by server processes."""
    at = quantities(held)
    late = LATE if mode.reads_late_rows else ""
    names = {stage: stage + late for stage in STAGES if stage not in OF_A_MODE}
    if mode is Mode.LOOKAHEAD:
        names |= {"read": "read_ahead", "refresh": "refresh"}
    if mode is Mode.ASYNC:
        names |= {"pull": "pull"}
    if served:
        names |= {stage: stage + SERVED for stage in OF_SERVED}
        del names["push"]
    used = {name: laws[name] for name in names.values()}
    seconds = {f"{stage}_s": laws[name](at) for stage, name in names.items()}
    python = {f"{s}_s": 0.0 if s in LOCKLESS else laws[n].fixed_s for s, n in names.items()}
    if served:
        seconds["push_s"] = python["push_s"] = 0.0
    if ranks > 1 and mode.has_barrier:
        used["add_gradient"] = laws["add_gradient"]
        seconds["update_s"] += (ranks - 1) * laws["add_gradient"](at)
    outside: dict[str, list[str]] = {}
    for name, law in used.items():
        for quantity in law.outside(at):
            outside.setdefault(quantity, []).append(name.removesuffix(LATE))
    flags = tuple(f"{quantity} of {', '.join(names)}" for quantity, names in outside.items())
    return Costs(Stages(**seconds), Stages(**python), flags)
