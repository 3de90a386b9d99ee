"""SGD whose rows, or all of whose weights, miss exactly the last tau updates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from experiments.staleness.logistic import Logistic, Weights, square_norm


@dataclass(frozen=True, slots=True)
class Measured:
    """What the theorem bounds, and what it assumes, per seed."""

    square_norm: np.ndarray
    """[S]: mean over the updates of ||grad f(w_t)||^2."""
    variance: float
    """The largest variance of a sample's gradient that a seed met where gradients were taken."""
    loss: np.ndarray
    """[S]: f at the end."""


def looked_at(updates: int) -> np.ndarray:
    """Updates at which the whole gradient is computed: all at the start, then ever fewer."""
    early = np.geomspace(1, updates, min(updates, 24)).round() - 1
    evenly = np.linspace(0, updates - 1, min(updates, 24)).round()
    return np.unique(np.concatenate([early, evenly])).astype(np.int64)


def train(
    problem: Logistic,
    *,
    seeds: int,
    updates: int,
    batch: int,
    step: float,
    tau: int,
    dense_late: bool,
) -> Measured:
    """Train S seeds side by side from zero. The same seed draws the same samples for every tau.

    ``dense_late``: the dense weights miss the updates, too (async). The mean over updates is that
    of the straight lines between the updates that `looked_at` names.
    """
    draws = [np.random.default_rng([seed, batch]) for seed in range(seeds)]
    now, late = problem.start(seeds), problem.start(seeds)
    flying: deque[Weights] = deque()
    places, squares, variance = looked_at(updates), [], 0.0
    wanted = set(places.tolist())
    for t in range(updates):
        read = Weights(late.rows, late.dense if dense_late else now.dense)
        if t in wanted:
            squares.append(square_norm(problem.gradient(now)))
            variance = max(variance, float(problem.variance(read).max()))
        drawn = np.stack([draw.integers(0, len(problem.labels), batch) for draw in draws])
        found = problem.gradient(read, drawn)
        flying.append(found)
        now = _moved(now, found, step)
        if len(flying) > tau:
            late = _moved(late, flying.popleft(), step)
    curve = np.array(squares)
    mean = curve[0] if len(places) == 1 else np.trapezoid(curve, places, axis=0) / (updates - 1)
    return Measured(mean, variance, problem.loss(now))


def _moved(weights: Weights, gradient: Weights, step: float) -> Weights:
    return Weights(weights.rows - step * gradient.rows, weights.dense - step * gradient.dense)
