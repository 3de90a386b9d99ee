"""Checkpoints over long times: formulas in numbers, and failures drawn again by hand."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from persia_sim.model.incidents import (
    Recovery,
    Target,
    best_interval_s,
    cpr_illustration,
    overhead,
    random_crashes,
    young_interval_s,
)
from tests.persia_sim.oracles import simulated_overhead

FULL = Recovery(mtbf_s=1000.0, checkpoint_s=20.0, back_s=50.0)
PARTIAL = Recovery(mtbf_s=1000.0, checkpoint_s=20.0, back_s=50.0, partial=True)


def test_youngs_interval_is_the_root_of_twice_cost_times_mean() -> None:
    assert young_interval_s(20.0, 1000.0) == 200.0


def test_overhead_by_dalys_formula_and_by_partial_recovery() -> None:
    # exp(50/1000) x 1000 x (exp(220/1000) - 1) seconds of wall time for 200 useful ones
    assert overhead(FULL, 200.0) == pytest.approx(exp(0.05) * 1000 * (exp(0.22) - 1) / 200 - 1)
    # 220 seconds for 200, and 50 more for every 1,000
    assert overhead(PARTIAL, 200.0) == pytest.approx(1.1 * 1.05 - 1)
    with pytest.raises(ValueError, match=r"interval_s is 0\.0: must be > 0"):
        overhead(FULL, 0.0)


def test_best_interval_is_what_scipy_finds() -> None:
    found = minimize_scalar(lambda t: overhead(FULL, t), bounds=(1.0, 5000.0), method="bounded")
    assert best_interval_s(FULL) == pytest.approx(found.x, rel=1e-3)
    assert best_interval_s(PARTIAL) == pytest.approx(50 * 1000.0)  # the longest that is tried


def failures(seed: int) -> np.random.Generator:
    """The stream that the module's contract names: key (seed, purpose 5 and entity), counter 0."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, 5 << 32], np.uint64)))


def test_full_recovery_repeats_a_segment_until_it_passes_whole() -> None:
    for seed in range(5):
        draws, wall, wasted = failures(seed), 0.0, 0.0
        for _ in range(30):  # 6,000 useful seconds in segments of 200
            while (failure := draws.exponential(1000.0)) < 220.0:
                wall, wasted = wall + failure, wasted + failure
                while (again := draws.exponential(1000.0)) < 50.0:
                    wall += again
                wall += 50.0
            wall += 220.0
        found, share = simulated_overhead(FULL, 200.0, 6000.0, seed)
        assert found == pytest.approx(wall / 6000 - 1) and share == pytest.approx(wasted / wall)


def test_partial_recovery_repeats_nothing() -> None:
    for seed in range(5):
        draws, wall = failures(seed), 0.0
        for _ in range(30):
            left = 220.0
            while (failure := draws.exponential(1000.0)) < left:
                left -= failure
                wall += failure + 50.0
            wall += left
        found, share = simulated_overhead(PARTIAL, 200.0, 6000.0, seed)
        assert found == pytest.approx(wall / 6000 - 1) and share == 0.0


def test_a_run_shorter_than_an_interval_has_one_segment() -> None:
    rare = Recovery(mtbf_s=1e12, checkpoint_s=20.0, back_s=50.0)
    assert simulated_overhead(rare, 200.0, 1.0, 0) == pytest.approx((0.1, 0.0))


def test_crashes_come_at_exponential_distances_to_random_ranks() -> None:
    draws = np.random.Generator(np.random.Philox(key=np.array([3, (5 << 32) + 1], np.uint64)))
    now, expected = 0.0, []
    while (now := now + draws.exponential(100.0)) < 2000.0:
        expected.append((now, int(draws.integers(4))))
    found = random_crashes(100.0, 2000.0, 4, 7.0, 3)
    assert [(c.at_s, c.index) for c in found] == expected and len(found) > 5
    assert {c.target for c in found} == {Target.RANK}
    assert all(c.back_s == c.at_s + 7.0 and c.detect_s == 0.0 for c in found)
    many = random_crashes(1.0, 40_000.0, 4, 0.0, 1)
    assert len(many) == pytest.approx(40_000, abs=4 * sqrt(40_000))
    assert np.bincount([c.index for c in many]) / len(many) == pytest.approx([0.25] * 4, abs=0.01)


def test_the_illustration_uses_the_inputs_that_it_states() -> None:
    """A crash every 28 h, 300 s a checkpoint, 120 s to be back; partial: every 20 h."""
    full = Recovery(mtbf_s=100_800.0, checkpoint_s=300.0, back_s=120.0)
    best = minimize_scalar(lambda t: overhead(full, t), bounds=(60, 1e5), method="bounded").fun
    found = cpr_illustration()
    assert found["full"] == pytest.approx(best, rel=1e-6)
    assert found["partial"] == pytest.approx(72_300 / 72_000 * (1 + 120 / 100_800) - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtbf_s": 0.0}, r"mtbf_s is 0\.0: must be > 0"),
        ({"checkpoint_s": 0.0}, r"checkpoint_s is 0\.0: must be > 0"),
        ({"back_s": -1.0}, r"back_s is -1\.0: must be >= 0"),
    ],
)
def test_a_wrong_recovery_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recovery(**({"mtbf_s": 1.0, "checkpoint_s": 1.0, "back_s": 0.0} | change))  # type: ignore[arg-type]
    assert Recovery(mtbf_s=1.0, checkpoint_s=1.0, back_s=0.0).back_s == 0
