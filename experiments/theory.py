"""The convergence bound of SGD whose rows are read late: sync, hybrid and async by one formula.

The paper's theorem is recalled, not verified: none of the texts at hand has it. As recalled, it is
a rate of the order

    sigma / sqrt(T) + 1 / T + tau * alpha / T

with constants left out. Here is a bound of our own with every constant, and it is not that rate:
through the largest step that the proof allows (`allowed_step`), lateness costs L D tau
sqrt(2 alpha) / T in the first term, and alpha tau stands in the last one only. Measured, the
largest stable step falls as 1 / (alpha tau), as recalled (`experiments convergence-bound`), so that
the proof is too strict by about 1 / sqrt(alpha).

Step t draws a batch independent of the past, computes g_t = grad F(late_t; batch), where late_t is
w_t but for the rows, which miss at most the last tau updates, and sets w_{t+1} = w_t - gamma g_t.
It assumes

1. every sample's loss has an L-Lipschitz gradient: ``Problem.smoothness``;
2. a sample's gradient varies by E ||grad F - grad f||^2 <= sigma^2 around its mean, at every point
   that the run meets: ``Problem.variance``; a batch of B independent samples by sigma^2 / B;
3. f(w_0) - min f <= D: ``Problem.gap``;
4. no row is read by more than a share ``alpha`` of the *samples*;
5. which updates a lookup misses does not depend on its batch (a constant lag does not).

With d_t = w_t - late_t, (4) gives ||grad f(w_t) - grad f(late_t)||^2 <= L^2 alpha ||d_t||^2, since
a sample's gradient sees d_t on its own rows only; and d_t is the sum of at most tau steps, so
E ||d_t||^2 <= 2 gamma^2 (tau sigma^2 / B + tau sum ||grad f(late_j)||^2). The descent lemma, summed
over T updates, has the gradients at late points with the factor
1 - gamma L - 2 alpha (gamma L tau)^2. Where that is >= 0,

    1/T sum E ||grad f(w_t)||^2 <= 2 D / (gamma T) + gamma L sigma^2 / B
                                   + 2 gamma^2 L^2 alpha tau sigma^2 / B.

Who takes a whole batch for the "sample" of the theorem must put `of_batch` of it for alpha; the
proof above needs the sample's own, because a batch's gradient is a mean over its samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from persia_sim.base.rules import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is known of a loss before it is trained."""

    smoothness: float
    """L: Lipschitz constant of the gradient of every sample's loss, > 0."""
    variance: float
    """sigma^2: largest variance of one sample's gradient on the way, >= 0."""
    gap: float
    """D: loss at the start minus the least loss, > 0."""

    def __post_init__(self) -> None:
        require(0 < self.smoothness < math.inf, "smoothness", self.smoothness, "must be > 0")
        require(0 <= self.variance < math.inf, "variance", self.variance, "must be >= 0")
        require(0 < self.gap < math.inf, "gap", self.gap, "must be > 0")

    @property
    def untrained(self) -> float:
        """2 L D: what the squared norm of the gradient is at most before any training.

        Smoothness alone gives it: a step of 1 / L lowers the loss by ||grad f||^2 / (2 L), and it
        cannot fall by more than D.
        """
        return 2.0 * self.smoothness * self.gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """On the mean over the run's updates of E ||grad f(w_t)||^2, by its three reasons."""

    problem: Problem
    step: float
    """gamma, the constant learning rate that it holds for."""
    start: float
    """2 D / (gamma T): the way from w_0."""
    noise: float
    """gamma L sigma^2 / B: of the samples."""
    late: float
    """2 gamma^2 L^2 alpha tau sigma^2 / B: of the rows that were read late."""

    @property
    def total(self) -> float:
        """The bound."""
        return self.start + self.noise + self.late

    @property
    def vacuous(self) -> bool:
        """Whether it is no better than 2 L D, which holds for weights that were never trained.

        With the largest step that is allowed and little noise, so it is for
        T <= (1 + sqrt(1 + 8 alpha tau^2)) / 2, about tau sqrt(2 alpha) updates.
        """
        return self.total >= self.problem.untrained


def allowed_step(smoothness: float, tau: float, alpha: float) -> float:
    """The largest gamma for which the bound is proved: gamma L + 2 alpha (gamma L tau)^2 = 1.

    1 / L for tau = 0, and about 1 / (L tau sqrt(2 alpha)) where tau^2 alpha is large.

    >>> allowed_step(2.0, 0, 1.0)
    0.5
    >>> round(allowed_step(1.0, 100, 1.0) * 100 * 2**0.5, 2)
    1.0
    """
    require(0 < smoothness < math.inf, "smoothness", smoothness, "must be > 0")
    _check(tau, alpha)
    return 2.0 / (smoothness * (1.0 + math.sqrt(1.0 + 8.0 * alpha * tau * tau)))


def tuned_step(problem: Problem, updates: int, batch: int, tau: float, alpha: float) -> float:
    """The allowed gamma with the least bound.

    Without lateness that is sqrt(2 D B / (L sigma^2 T)), or 1 / L where this is smaller.
    """
    most = allowed_step(problem.smoothness, tau, alpha)
    way = 2.0 * problem.gap / updates
    noise = problem.smoothness * problem.variance / batch
    if noise == 0.0:
        return most
    late = 2.0 * problem.smoothness * alpha * tau * noise
    gamma = math.sqrt(way / noise)
    for _ in range(200):  # Newton from the right on 2 late g^3 + noise g^2 - way, convex in g
        value = (2.0 * late * gamma + noise) * gamma * gamma - way
        nearer = gamma - value / ((6.0 * late * gamma + 2.0 * noise) * gamma)
        if not 0.0 < nearer < gamma:
            break
        gamma = nearer
    return min(most, gamma)


def hybrid(
    problem: Problem,
    *,
    updates: int,
    batch: int,
    tau: float,
    alpha: float,
    step: float | None = None,
) -> Bound:
    """The bound of hybrid: rows miss at most ``tau`` updates, dense weights none.

    ``batch``: samples of one update over all K ranks, so that its noise falls with K. ``step``:
    else the best one. ValueError for a step that is larger than `allowed_step`.
    """
    require(updates >= 1, "updates", updates, "must be >= 1")
    require(batch >= 1, "batch", batch, "must be >= 1")
    most = allowed_step(problem.smoothness, tau, alpha)
    gamma = tuned_step(problem, updates, batch, tau, alpha) if step is None else step
    require(0 < gamma <= most * (1 + 1e-12), "step", gamma, f"must be > 0 and at most {most:g}")
    noise = gamma * problem.smoothness * problem.variance / batch
    return Bound(
        problem=problem,
        step=gamma,
        start=2.0 * problem.gap / (gamma * updates),
        noise=noise,
        late=2.0 * gamma * problem.smoothness * alpha * tau * noise,
    )


def sync(problem: Problem, *, updates: int, batch: int, step: float | None = None) -> Bound:
    """The bound of sync, which is that of plain SGD: 2 sqrt(2 L D sigma^2 / (B T)) for large T."""
    return hybrid(problem, updates=updates, batch=batch, tau=0, alpha=1.0, step=step)


def asynchronous(
    problem: Problem, *, updates: int, batch: int, delay: float, step: float | None = None
) -> Bound:
    """The bound of async: all weights miss at most ``delay`` updates (`updates_missed`).

    Every sample reads the dense weights, so alpha is 1. ``batch``: samples of one update.
    """
    return hybrid(problem, updates=updates, batch=batch, tau=delay, alpha=1.0, step=step)


def _check(tau: float, alpha: float) -> None:
    require(0 <= tau < math.inf, "tau", tau, "must be >= 0 and finite: nothing else is bounded")
    require(0 < alpha <= 1, "alpha", alpha, "must be > 0 and at most 1")
