"""Late rows in theory: a problem with known constants; and of which sample an id is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.lateness.logistic import (
    RIDGE,
    Logistic,
    exponents,
    largest_stable_step,
    looked_at,
    made,
    train,
)
from experiments.lateness.logs import sample_of_each_id
from runtime.data.batch import Batch


@pytest.fixture(scope="module")
def problem() -> Logistic:
    return made((7, 3), 1.0, 60)


def drawn_weights(problem: Logistic, seeds: int, number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=problem.start(seeds).shape)


def one_gradient(problem: Logistic, sample: int, weights: np.ndarray, seed: int) -> np.ndarray:
    """Of one sample's loss, written out: rows, then dense weights."""
    rows, dense = np.split(weights[seed], [problem.rows])
    own, x = problem.ids[sample], problem.dense[sample]
    error = 1 / (1 + np.exp(-(rows[own].sum() + x @ dense))) - problem.labels[sample]
    found = np.zeros(problem.rows)
    for row in own:
        found[row] += error + RIDGE * rows[row]
    return np.concatenate([found, error * x + RIDGE * dense])


def test_gradient_and_variance_are_those_of_the_samples_one_by_one(problem):
    weights = drawn_weights(problem, 2, 0)
    whole, variance = problem.gradient(weights), problem.variance(weights)
    for seed in range(2):
        each = np.array([one_gradient(problem, n, weights, seed) for n in range(60)])
        mean = each.mean(axis=0)
        assert whole[seed] == pytest.approx(mean, abs=1e-12)
        assert variance[seed] == pytest.approx(np.square(each - mean).sum(1).mean())
        assert problem.square_norm(whole)[seed] == pytest.approx(mean @ mean)
    drawn = np.array([[3, 3, 5], [0, 1, 2]])
    part = problem.gradient(weights, drawn)
    for seed in range(2):
        mean = np.mean([one_gradient(problem, n, weights, seed) for n in drawn[seed]], axis=0)
        assert part[seed] == pytest.approx(mean)


def test_the_gradient_is_the_slope_of_the_loss(problem):
    at, along = drawn_weights(problem, 1, 1), drawn_weights(problem, 1, 2)
    told = (problem.gradient(at) * along).sum()
    ahead, behind = (problem.loss(at + h * along)[0] for h in (1e-5, -1e-5))
    assert told == pytest.approx((ahead - behind) / 2e-5, rel=1e-6)


def test_no_sample_has_a_steeper_gradient_than_its_smoothness(problem):
    one, two = drawn_weights(problem, 1, 3), drawn_weights(problem, 1, 4)
    for scale in (1e-3, 1.0):
        two = one + scale * two
        for n in range(60):
            apart = one_gradient(problem, n, one, 0) - one_gradient(problem, n, two, 0)
            rows, dense = np.split((one - two)[0], [problem.rows])
            moved = np.concatenate([rows[problem.ids[n]], dense])
            limit = problem.smoothness * np.linalg.norm(moved)
            assert np.linalg.norm(apart) <= limit * (1 + 1e-9)


def test_no_point_has_a_lower_loss_than_the_least(problem):
    least = problem.least_loss()
    told = problem.problem()
    assert told.gap == pytest.approx(np.log(2) - least)
    assert (problem.loss(drawn_weights(problem, 20, 5)) > least).all()
    assert (problem.loss(drawn_weights(problem, 20, 6) * 1e-3) > least).all()


@pytest.mark.parametrize("dense_late", [False, True])
@pytest.mark.parametrize("tau", [0, 1, 3])
def test_late_weights_are_those_of_so_many_updates_ago(problem, tau, dense_late):
    """The same, with every past weight kept, one sample at a time."""
    updates, batch, step = 12, 2, 0.4
    found = train(
        problem, seeds=2, updates=updates, batch=batch, step=step, tau=tau, dense_late=dense_late
    )
    for seed in range(2):
        draw = np.random.default_rng([seed, batch])
        past = [np.zeros(problem.rows + problem.dense.shape[1])]
        norms = []
        for t in range(updates):
            old, now = past[max(0, t - tau)], past[t]
            read = np.concatenate(
                [old[: problem.rows], (old if dense_late else now)[problem.rows :]]
            )
            norms.append(float(problem.square_norm(problem.gradient(now[None]))[0]))
            samples = draw.integers(0, 60, batch)
            each = [one_gradient(problem, n, read[None], 0) for n in samples]
            past.append(now - step * np.mean(each, axis=0))
        assert found.loss[seed] == pytest.approx(problem.loss(past[-1][None])[0])
        assert looked_at(updates).tolist() == list(range(updates))
        mean = (sum(norms) - (norms[0] + norms[-1]) / 2) / (updates - 1)
        assert found.square_norm[seed] == pytest.approx(mean)


def test_ids_are_of_their_samples_one_a_field_and_in_bags():
    labels, dense = np.zeros((2, 1)), np.zeros((2, 0))
    one = Batch(np.arange(6, dtype=np.uint64), None, dense, labels)
    assert sample_of_each_id(one).tolist() == [0, 0, 0, 1, 1, 1]
    bags = replace(one, offsets=np.array([0, 2, 2, 3, 6]))  # two fields; one bag is empty
    assert sample_of_each_id(bags).tolist() == [0, 0, 1, 1, 1, 1]


def test_the_largest_stable_step_is_near_that_of_a_row_alone():
    """(2 / h) sin(pi / (4 tau + 2)) with the curvature h = alpha / 4 of an undecided sample."""
    for tau in (0, 4):
        problem = made((40, 40), 0.0, 400, popular=0.5)
        alone = 16.0 * np.sin(np.pi / (4 * tau + 2))
        assert 0.7 < largest_stable_step(problem, tau) / alone < 2.0


def test_exponents_are_those_that_made_the_steps():
    alphas, taus = (grid.ravel() for grid in np.meshgrid([0.01, 0.1, 0.9], [4.0, 16.0, 64.0]))
    found = exponents(np.log(3.0 * alphas**-0.5 * taus**-1.25), alphas, taus)
    assert found == pytest.approx((0.5, 1.25))


def test_turning_one_share_leaves_all_others_rare():
    shares = made((40, 40), 0.0, 400, popular=0.5).shares
    assert shares[40] == 0.5 and np.delete(shares, 40).max() <= 0.03
