"""Laws of what stages cost, fitted to measurements; affine ones as a profile's file has them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class LawPoint:
    """One measurement: the quantities that a law is linear in, and the seconds at them."""

    at: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """Seconds as a sum of quantities, each with a non-negative factor."""

    terms: Mapping[str, float]
    spread: float
    """Standard deviation of (law / measured - 1)."""

    def __call__(self, at: Mapping[str, float]) -> float:
        """Seconds at these quantities."""
        return sum(each * at[name] for name, each in self.terms.items())


def fit_law(names: Sequence[str], points: Sequence[LawPoint]) -> LinearLaw:
    """The law of these quantities that is nearest, relative to each measurement.

    >>> points = [LawPoint({"one": 1.0, "ids": n}, 2e-6 + 3e-9 * n) for n in (10, 100, 1000)]
    >>> law = fit_law(("one", "ids"), points)
    >>> round(1e6 * law.terms["one"], 6), round(1e9 * law.terms["ids"], 6)
    (2.0, 3.0)
    """
    from scipy.optimize import nnls  # late: half a second

    # Every row is divided by its seconds, so that the law is sought whose ratio to them is 1.
    seconds = np.maximum([p.seconds for p in points], 1e-9)
    table = np.array([[p.at[name] for name in names] for p in points]) / seconds[:, None]
    scale = np.maximum(table.max(0), 1e-30)
    weights, _ = nnls(table / scale, np.ones(len(points)))
    off = table / scale @ weights - 1
    terms = dict(zip(names, (weights / scale).tolist(), strict=True))
    return LinearLaw(terms, float(off.std()))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of one stage for one number of items."""

    items: float
    seconds: float


def median_of(seconds: list[float]) -> float:
    """The median without the first two, which warm up."""
    return statistics.median(seconds[min(2, len(seconds) - 1) :])


def fit(points: list[Measurement]) -> dict[str, Any]:
    """The affine law with non-negative terms that is nearest relative to each measurement."""
    items = [float(p.items) for p in points]
    law = fit_law(
        ("one", "items"), [LawPoint({"one": 1.0, "items": p.items}, p.seconds) for p in points]
    )
    return {
        "fixed_s": law.terms["one"],
        "per_item_s": law.terms["items"],
        "spread": law.spread,
        "fitted_items": [min(items), max(items)],
    }


def fit_fixed(points: list[Measurement]) -> dict[str, Any]:
    """The median of all measurements: what a call costs holds no ids, and the spread says how far
    that is true."""
    seconds = [p.seconds for p in points]
    items = [p.items for p in points]
    fixed_s = statistics.median(seconds)
    spread = float(np.std(seconds)) / max(fixed_s, 1e-9)
    return {"fixed_s": fixed_s, "spread": spread, "fitted_items": [min(items), max(items)]}


def fit_bytes(points: list[Measurement]) -> dict[str, Any]:
    """Fit (see `fit`) where items are bytes: of a copy, or that each rank brings to a sum."""
    law = fit(points)
    return {"fixed_s": law["fixed_s"], "per_byte_s": law["per_item_s"], "spread": law["spread"]}


def fit_reads(points: Sequence[LawPoint]) -> dict[str, dict[str, Any]]:
    """What a server needs to find rows, and what it needs more to make one."""
    law = fit_law(("one", "distinct", "created"), points)
    items = [point.at["distinct"] for point in points]
    about = {"spread": law.spread, "fitted_items": [min(items), max(items)]}
    found = {"fixed_s": law.terms["one"], "per_item_s": law.terms["distinct"]}
    made = {"fixed_s": 0.0, "per_item_s": law.terms["created"]}
    return {"server_lookup": found | about, "server_create": made | about}
