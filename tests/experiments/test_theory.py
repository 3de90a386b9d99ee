"""The convergence bound: its laws, and delayed SGD that must stay below it."""

from __future__ import annotations

import math
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.theory import (
    Problem,
    allowed_step,
    asynchronous,
    hybrid,
    sync,
    tuned_step,
)
from persia_sim.base.popularity import of_batch
from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import updates_missed
from tests.persia_sim.oracles import constant_lag_trace

NUMBER = st.floats(1e-3, 1e3)
PROBLEM = st.builds(Problem, smoothness=NUMBER, variance=st.just(0.0) | NUMBER, gap=NUMBER)
UPDATES = st.integers(1, 10**7)
BATCH = st.integers(1, 10**4)
TAU = st.integers(0, 10**4)
ALPHA = st.floats(1e-9, 1.0)


@given(NUMBER, TAU, ALPHA)
def test_the_allowed_step_is_where_late_gradients_lose_their_weight(smoothness, tau, alpha):
    x = smoothness * allowed_step(smoothness, tau, alpha)
    assert x + 2 * alpha * (x * tau) ** 2 == pytest.approx(1.0)


@given(PROBLEM, UPDATES, BATCH, TAU, ALPHA)
def test_no_allowed_step_gives_a_lower_bound_than_the_tuned_one(
    problem, updates, batch, tau, alpha
):
    def total(step: float) -> float:
        return hybrid(problem, updates=updates, batch=batch, tau=tau, alpha=alpha, step=step).total

    best = tuned_step(problem, updates, batch, tau, alpha)
    most = allowed_step(problem.smoothness, tau, alpha)
    for other in (0.5 * best, 0.99 * best, 1.01 * best, 2 * best, most):
        if other <= most:
            assert total(best) <= total(other) * (1 + 1e-9)


@given(PROBLEM, UPDATES, BATCH, ALPHA)
def test_hybrid_without_lateness_is_sync_whatever_alpha(problem, updates, batch, alpha):
    late = hybrid(problem, updates=updates, batch=batch, tau=0, alpha=alpha)
    assert late == sync(problem, updates=updates, batch=batch)
    assert late.late == 0.0


@given(PROBLEM, UPDATES, BATCH, st.integers(1, 64), st.integers(0, 64))
def test_hybrid_whose_every_row_is_in_every_sample_is_async(problem, updates, batch, ranks, tau):
    delay = updates_missed(Mode.ASYNC, tau, ranks=ranks).rows
    late = asynchronous(problem, updates=updates, batch=batch, delay=delay)
    assert late == hybrid(problem, updates=updates, batch=batch, tau=delay, alpha=1.0)


@given(PROBLEM, UPDATES, BATCH, TAU, ALPHA, st.integers(1, 100), st.floats(1.0, 100.0))
def test_the_bound_rises_with_tau_and_alpha_and_falls_with_updates_and_batch(
    problem, updates, batch, tau, alpha, more, times
):
    given_ = {"updates": updates, "batch": batch, "tau": tau, "alpha": alpha}
    here = hybrid(problem, **given_).total * (1 + 1e-9)
    assert hybrid(problem, **{**given_, "tau": tau + more}).total * (1 + 1e-9) >= here / (1 + 1e-9)
    higher = {**given_, "alpha": min(1.0, alpha * times)}
    assert hybrid(problem, **higher).total * (1 + 1e-9) >= here / (1 + 1e-9)
    assert hybrid(problem, **{**given_, "updates": updates + more}).total <= here
    assert hybrid(problem, **{**given_, "batch": batch + more}).total <= here


@given(NUMBER, NUMBER, NUMBER, BATCH, st.integers(0, 100), ALPHA)
def test_lateness_is_forgotten_as_the_run_grows(smoothness, variance, gap, batch, tau, alpha):
    """The rate of SGD is 2 sqrt(2 L D sigma^2 / (B T)), whatever the lateness."""
    problem = Problem(smoothness=smoothness, variance=variance, gap=gap)
    updates = 10**26  # the step is then small beside 1 / (L alpha tau) in every drawn problem
    rate = 2 * math.sqrt(2 * smoothness * gap * variance / (batch * updates))
    found = hybrid(problem, updates=updates, batch=batch, tau=tau, alpha=alpha)
    assert found.total == pytest.approx(rate, rel=1e-3)


def test_a_bound_by_hand():
    """L 2, sigma^2 3, D 0.5, B 2, alpha 1/4, tau 4, gamma 1/8: 8 / T, 3/8, 3/16."""
    problem = Problem(smoothness=2.0, variance=3.0, gap=0.5)
    found = hybrid(problem, updates=100, batch=2, tau=4, alpha=0.25, step=0.125)
    assert (found.start, found.noise, found.late) == (0.08, 0.375, 0.1875)
    assert found.total == pytest.approx(0.6425) and problem.untrained == 2.0 and not found.vacuous


@given(TAU, ALPHA)
def test_a_bound_is_vacuous_up_to_about_tau_root_two_alpha_updates(tau, alpha):
    problem = Problem(smoothness=1.0, variance=0.0, gap=1.0)
    last = (1 + math.sqrt(1 + 8 * alpha * tau**2)) / 2
    for updates, says in ((math.floor(last), True), (math.floor(last) + 1, False)):
        if abs(updates - last) > 1e-6 * last:
            found = hybrid(problem, updates=max(1, updates), batch=1, tau=tau, alpha=alpha)
            assert found.vacuous is (says or updates < 1)


@pytest.mark.parametrize(("ranks", "tau"), [(1, 0), (1, 3), (3, 0), (3, 2), (8, 1)])
@pytest.mark.law16
def test_what_async_misses_is_counted_in_an_order_of_its_events(ranks, tau):
    trace = constant_lag_trace(Mode.ASYNC, ranks=ranks, steps=20 * ranks, tau=tau)
    in_flight = Counter()
    most = Counter()
    for event in trace:
        opened = {Kind.LOOKUP: "rows", Kind.DENSE_PULL: "dense"}.get(event.kind)
        if opened:
            most[opened] = max(most[opened], in_flight[opened])
            in_flight[opened] += 1
        closed = {Kind.PUSH: "rows", Kind.DENSE_PUSH: "dense"}.get(event.kind)
        in_flight[closed] -= bool(closed)
    assert updates_missed(Mode.ASYNC, tau, ranks=ranks) == (most["rows"], most["dense"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Problem(smoothness=0, variance=1, gap=1), "smoothness"),
        (lambda: Problem(smoothness=1, variance=-1, gap=1), "variance"),
        (lambda: Problem(smoothness=1, variance=1, gap=math.inf), "gap"),
        (lambda: allowed_step(1, -1, 0.5), "tau"),
        (lambda: allowed_step(1, 1, 0), "alpha"),
        (lambda: allowed_step(1, 1, 1.5), "alpha"),
        (lambda: sync(Problem(smoothness=1, variance=1, gap=1), updates=0, batch=1), "updates"),
        (lambda: sync(Problem(smoothness=1, variance=1, gap=1), updates=1, batch=0), "batch"),
        (
            lambda: sync(Problem(smoothness=1, variance=1, gap=1), updates=1, batch=1, step=2),
            "step",
        ),
    ],
)
def test_what_no_theorem_covers_is_refused_by_name(make, said):
    with pytest.raises(ValueError, match=f"^{said} "):
        make()


# Delayed SGD against the bound, on a quadratic whose constants are known.


class Blocks:
    """f(w) = sum_i p_i L/2 ||w_i||^2: a sample reads block i alone, with noise in its gradient."""

    def __init__(self, shares: list[float], smoothness: float, noise: float) -> None:
        self.shares, self.smoothness = np.array(shares), smoothness
        self.noise = noise  # variance of one block's gradient at one point

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.smoothness * self.shares[:, None] * w

    def variance(self, w: np.ndarray) -> np.ndarray:
        """E ||g||^2 - ||grad f||^2 per seed."""
        size = np.square(self.smoothness * w).sum(-1)
        return (self.shares * (size + self.noise)).sum(-1) - np.square(self.gradient(w)).sum((1, 2))


def train(
    blocks: Blocks, tau: int, step: float, updates: int, seeds: int, dim: int = 2
) -> tuple[np.ndarray, float]:
    """Per seed the mean squared norm of the gradient, and the largest variance on the way."""
    draw = np.random.default_rng(0)
    count = len(blocks.shares)
    w = np.full((seeds, count, dim), 1.0)
    late, flying, own = w.copy(), deque(), np.arange(seeds)
    squares, variance = np.zeros(seeds), 0.0
    for _ in range(updates):
        squares += np.square(blocks.gradient(w)).sum((1, 2))
        variance = max(variance, float(blocks.variance(late).mean()))
        block = draw.choice(count, size=seeds, p=blocks.shares)
        found = np.zeros_like(w)
        noise = draw.normal(0.0, math.sqrt(blocks.noise / dim), (seeds, dim))
        found[own, block] = blocks.smoothness * late[own, block] + noise
        w = w - step * found
        flying.append(found)
        if len(flying) > tau:
            late = late - step * flying.popleft()
    return squares / updates, variance


@pytest.mark.parametrize("tau", [0, 1, 8, 32])
@pytest.mark.parametrize("shares", [[1.0], [0.7, 0.2, 0.1], [0.05] * 20])
def test_delayed_sgd_on_a_quadratic_stays_below_the_bound(shares, tau):
    blocks, updates, seeds = Blocks(shares, 2.0, 0.5), 400, 100
    gap = 0.5 * 2.0 * 2.0  # of w = 1 in two dimensions: sum p_i L/2 ||w_i||^2
    step = allowed_step(2.0, tau, max(shares))
    found, variance = train(blocks, tau, step, updates, seeds)
    problem = Problem(smoothness=2.0, variance=variance, gap=gap)
    bound = hybrid(problem, updates=updates, batch=1, tau=tau, alpha=max(shares), step=step)
    error = found.std(ddof=1) / math.sqrt(seeds)
    assert found.mean() - 4 * error < bound.total
    if shares == [1.0] and tau == 0:
        assert found.mean() > 0.95 * bound.total, "the largest step of plain SGD: nothing to spare"


def test_three_times_the_allowed_step_diverges_where_every_row_is_always_read():
    """The oldest gradient alone: stable up to gamma L = 2 sin(pi / (4 tau + 2)), about 1.57 / tau,
    where the proof allows 0.71 / tau."""
    blocks = Blocks([1.0], 1.0, 0.0)
    for times, diverges in ((1.0, False), (3.0, True)):
        squares, _ = train(blocks, 16, times * allowed_step(1.0, 16, 1.0), 2000, 1)
        assert bool(squares[0] > 1.0) is diverges


# Alpha.


def test_alpha_of_a_batch_is_the_share_of_batches_that_hold_the_row():
    draw = np.random.default_rng(0)
    shares = np.array([0.5, 0.1, 0.01])
    held = (draw.random((20_000, 16, 3)) < shares).any(axis=1).mean(axis=0)
    assert of_batch(shares, 16) == pytest.approx(held, abs=0.01)
    assert of_batch(1.0, 5) == pytest.approx(1.0)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20), st.integers(1, 5000))
def test_larger_batches_and_shares_are_met_more_often(shares, draws):
    found = of_batch(np.sort(shares), draws)
    assert (np.diff(found) >= 0).all() and (found >= np.sort(shares) - 1e-12).all()
    assert (of_batch(np.sort(shares), draws + 1) >= found).all()
