"""Logistic regression on ids, every constant known, by SGD whose rows or weights are late.

A sample is one id of each field and a few dense features x with ||x|| <= 1; its logit is the sum of
its ids' rows (one number each) and d.x. Its loss is that of logistic regression and
``ridge`` / 2 (sum of its rows squared + ||d||^2), so that a sample's gradient is 0 outside its own
rows, as the theorem wants it. The samples are a finite population, drawn from with replacement:
expectations over it are exact sums.

Shape letters: S seeds, N samples, B of them drawn, F fields, R rows of all fields, k dense ones.
Weights of S runs side by side are one array [S, R + k]: the rows, then the dense ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from experiments.theory import Problem

DENSE = 4
RIDGE = 1e-3
VARIANCE_MARGIN = 1.25
"""Assumed variance over that of the start; a table has the largest that was met."""


@dataclass(frozen=True, slots=True)
class Logistic:
    """A population of samples."""

    ids: np.ndarray
    """int64 [N, F], rows of all fields numbered through."""
    dense: np.ndarray
    """[N, k]"""
    labels: np.ndarray
    """[N], 0 or 1"""
    rows: int
    """R"""

    @property
    def shares(self) -> np.ndarray:
        """The share of samples that read each row, [R]."""
        return np.bincount(self.ids.ravel(), minlength=self.rows) / len(self.ids)

    def start(self, seeds: int) -> np.ndarray:
        """Weights at the start, [S, R + k]: all zero."""
        return np.zeros((seeds, self.rows + self.dense.shape[1]))

    @property
    def smoothness(self) -> float:
        """L: the Hessian of a sample is at most (F + ||x||^2) / 4 + ridge."""
        fields = self.ids.shape[1]
        return float((fields + np.square(self.dense).sum(axis=1).max()) / 4 + RIDGE)

    def loss(self, weights: np.ndarray) -> np.ndarray:
        """Loss f over the whole population, [S]."""
        logits, rows = self._logits(weights, self.ids[None], self.dense[None])
        ridge = np.square(rows).sum(-1).mean(-1) + np.square(weights[:, self.rows :]).sum(-1)
        return (np.logaddexp(0.0, logits) - self.labels * logits).mean(-1) + RIDGE / 2 * ridge

    def gradient(self, read: np.ndarray, drawn: np.ndarray | None = None) -> np.ndarray:
        """Mean gradient [S, R + k] of the samples ``drawn`` [S, B]; else grad f."""
        # The samples: those drawn, or (None adds an axis) the population for all seeds.
        ids = self.ids[drawn]
        x = self.dense[drawn]
        labels = self.labels[drawn]

        # A sample's gradient of each row that it reads: its error, and the ridge of that row.
        logits, rows_read = self._logits(read, ids, x)
        error = (_sigmoid(logits) - labels) / labels.shape[1]
        per_id = error[..., None] + RIDGE / labels.shape[1] * rows_read

        # Add up by row, for all seeds at once: each seed's rows are numbered behind the last's.
        seeds = len(read)
        place = np.broadcast_to(ids + self.rows * np.arange(seeds)[:, None, None], per_id.shape)
        rows = np.bincount(place.ravel(), per_id.ravel(), seeds * self.rows)
        dense = (error[..., None] * x).sum(axis=1) + RIDGE * read[:, self.rows :]
        return np.concatenate([rows.reshape(seeds, self.rows), dense], axis=1)

    def square_norm(self, weights: np.ndarray) -> np.ndarray:
        """Squared norm of weights or gradients, [S]: rows and dense ones summed apart."""
        squares = np.square(weights)
        return squares[:, : self.rows].sum(-1) + squares[:, self.rows :].sum(-1)

    def variance(self, read: np.ndarray) -> np.ndarray:
        """Variance E ||grad F - grad f||^2 of one sample's gradient, [S]."""
        logits, rows = self._logits(read, self.ids[None], self.dense[None])
        error = (_sigmoid(logits) - self.labels)[..., None]
        of_dense = error * self.dense + RIDGE * read[:, None, self.rows :]
        square = np.square(error + RIDGE * rows).sum(-1) + np.square(of_dense).sum(-1)
        return square.mean(-1) - self.square_norm(self.gradient(read))

    def least_loss(self) -> float:
        """The least value of f, by L-BFGS."""
        from scipy.optimize import minimize  # late: half a second

        def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
            return float(self.loss(flat[None])[0]), self.gradient(flat[None])[0]

        options = {"maxiter": 2000}
        optimum = minimize(value, self.start(1)[0], jac=True, method="L-BFGS-B", options=options)
        return float(optimum.fun)

    def problem(self) -> Problem:
        """The constants of the theorem, from zero weights."""
        start = self.start(1)
        return Problem(
            smoothness=self.smoothness,
            variance=VARIANCE_MARGIN * float(self.variance(start)[0]),
            gap=float(self.loss(start)[0]) - self.least_loss(),
        )

    def _logits(
        self, weights: np.ndarray, ids: np.ndarray, x: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [S, B], and the rows that each sample reads [S, B, F]."""
        rows = weights[np.arange(len(weights))[:, None, None], ids]
        return rows.sum(-1) + (x * weights[:, None, self.rows :]).sum(-1), rows


def made(
    values: tuple[int, ...],
    exponent: float,
    samples: int,
    seed: int = 0,
    popular: float | None = None,
) -> Logistic:
    """A population: each field's ids are Zipf-distributed over so many values, a truth is planted.

    Exponent 0 is uniform: every row is rare. The larger it is, the hotter a field's first row.
    ``popular``: instead, the first id of the last field stands in just this share of the samples,
    all others are equally rare and nothing is dense, so that alpha alone is turned.
    """
    # Ids of each field: Zipf-distributed, or equally often each.
    draw = np.random.default_rng([seed, samples, *values])
    ids = np.empty((samples, len(values)), np.int64)
    for field, count in enumerate(values):
        if popular is None:
            weight = np.arange(1.0, count + 1) ** -exponent
            ids[:, field] = draw.choice(count, samples, p=weight / weight.sum())
        else:
            ids[:, field] = draw.permutation(np.arange(samples) % count)

    # The first id of the last field stands in just its share of the samples.
    if popular is not None:
        others = 1 + np.arange(samples) % (values[-1] - 1)
        others[: round(popular * samples)] = 0
        ids[:, -1] = draw.permutation(others)

    # Rows of all fields are numbered through; dense features have norm 1 at most.
    ids += np.concatenate([[0], np.cumsum(values)[:-1]])
    x = draw.standard_normal((samples, DENSE)) * (popular is None)
    x /= np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))

    # Labels are drawn by a planted truth of the same form.
    truth = draw.normal(0.0, 1.0, sum(values))
    logits = truth[ids].sum(axis=1) / np.sqrt(len(values)) * 1.5 + x @ draw.normal(0, 1, DENSE)
    labels = (draw.random(samples) < _sigmoid(logits)).astype(float)
    return Logistic(ids, x, labels, sum(values))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Gradients that the theorem bounds, and the variance that it assumes, per seed."""

    square_norm: np.ndarray
    """Mean over the updates of ||grad f(w_t)||^2, [S]."""
    variance: float
    """The largest variance of a sample's gradient that a seed met where gradients were taken."""
    loss: np.ndarray
    """Loss f at the end, [S]."""


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
) -> GradientNorms:
    """Train S seeds side by side from zero. The same seed draws the same samples for every tau.

    ``dense_late``: the dense weights miss the updates, too (async). The mean over updates is that
    of the straight lines between the updates that `looked_at` names.
    """
    # Weights as they are, and as they are read; gradients in between are on their way.
    draws = [np.random.default_rng([seed, batch]) for seed in range(seeds)]
    now = problem.start(seeds)
    late = problem.start(seeds)
    flying: deque[np.ndarray] = deque()
    places = looked_at(updates)
    wanted = set(places.tolist())
    squares = []
    variance = 0.0
    fresh = now.shape[1] if dense_late else problem.rows  # from here on weights are read in time

    for t in range(updates):
        # Late rows, and dense weights that are late or not.
        read = late.copy()
        read[:, fresh:] = now[:, fresh:]

        # At some updates: the whole gradient, and the variance where gradients are taken.
        if t in wanted:
            squares.append(problem.square_norm(problem.gradient(now)))
            variance = max(variance, float(problem.variance(read).max()))

        # One step of SGD, which those that read see tau updates later.
        drawn = np.stack([draw.integers(0, len(problem.labels), batch) for draw in draws])
        flying.append(problem.gradient(read, drawn))
        now = now - step * flying[-1]
        if len(flying) > tau:
            late = late - step * flying.popleft()

    # The mean over all updates, by straight lines between those that were looked at.
    curve = np.array(squares)
    mean = curve[0] if len(places) == 1 else np.trapezoid(curve, places, axis=0) / (updates - 1)
    return GradientNorms(mean, variance, problem.loss(now))


HALVINGS = 6
"""Halvings of a bracket of a factor of 64 around the closed form of one row alone: 7 % are left."""
DELAYS_A_RUN = 12
LEAST_UPDATES = 300
SWINGS = 0.1
"""Share of the largest gradient that a row ever had: with so much left at the end it has not
settled."""


def largest_stable_step(problem: Logistic, tau: int) -> float:
    """The largest learning rate of whole gradients at which the most popular row settles, though
    all rows are tau updates late; by bisection. ``problem`` has no dense features.

    A row alone, with curvature h, is stable below (2 / h) sin(pi / (4 tau + 2)).
    """
    row = int(problem.shares.argmax())
    alone = 8.0 / problem.shares[row] * math.sin(math.pi / (4 * tau + 2))
    low = math.log(alone / 8)
    high = math.log(alone * 8)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _swings(problem, math.exp(middle), tau, row):
            high = middle
        else:
            low = middle
    return math.exp((low + high) / 2)


def _swings(problem: Logistic, step: float, tau: int, row: int) -> bool:
    """Whether a row's gradient in the last quarter of a run still is large."""
    ids = problem.ids
    samples = len(ids)
    late = np.zeros(problem.rows)
    flying = deque[np.ndarray]()
    seen = []
    for _ in range(max(LEAST_UPDATES, DELAYS_A_RUN * (tau + 1))):
        error = _sigmoid(late[ids].sum(1)) - problem.labels
        sums = np.bincount(ids.ravel(), np.repeat(error, ids.shape[1]), problem.rows)
        gradient = sums / samples + RIDGE * problem.shares * late
        seen.append(abs(float(gradient[row])))
        flying.append(step * gradient)
        if len(flying) > tau:
            late -= flying.popleft()
    return max(seen[-len(seen) // 4 :]) > SWINGS * max(seen)


def exponents(log_step: np.ndarray, alphas: np.ndarray, taus: np.ndarray) -> tuple[float, float]:
    """Exponents (a, t) of step ~ alpha^-a tau^-t, by least squares over points [n]."""
    design = np.column_stack([np.ones_like(alphas), -np.log(alphas), -np.log(taus)])
    _, a, t = np.linalg.lstsq(design, log_step, rcond=None)[0]
    return float(a), float(t)
