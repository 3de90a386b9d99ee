"""Random factors: mean, spread, and which draw belongs to whom."""

from __future__ import annotations

import numpy as np
import pytest

from persia_sim.model.incidents import Purpose, lognormal_factors, stream


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.5])
def test_factors_have_mean_one_and_the_asked_variation(cv: float) -> None:
    drawn = lognormal_factors(np.random.default_rng(1), cv, 2_000_000)
    assert drawn.mean() == pytest.approx(1, abs=4 * cv / np.sqrt(2e6))
    assert drawn.std() == pytest.approx(cv, rel=0.02)
    # The logarithm is normal: its spread is sqrt(log(1 + cv^2)), its mean minus half the square.
    sigma = np.sqrt(np.log(1 + cv**2))
    assert np.log(drawn).std() == pytest.approx(sigma, rel=0.01)
    assert np.median(drawn) == pytest.approx(np.exp(-(sigma**2) / 2), rel=0.01)


def test_no_variation_is_exactly_one() -> None:
    assert lognormal_factors(np.random.default_rng(1), 0.0, 5).tolist() == [1.0] * 5


def test_a_draw_belongs_to_seed_purpose_entity_and_step() -> None:
    def first(*place: int) -> float:
        seed, purpose, entity, step = place
        return float(stream(seed, Purpose(purpose), entity, step).random())

    places = [(0, 1, 0, 0), (1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 6, 3, 2)]
    drawn = [first(*place) for place in places]
    assert len(set(drawn)) == len(places) and drawn == [first(*place) for place in places]
    # Philox keyed by (seed, purpose and entity), its counter starting at the step's own block.
    for (seed, purpose, entity, step), value in zip(places, drawn, strict=True):
        key = np.array([seed, purpose * 2**32 + entity], np.uint64)
        bits = np.random.Philox(key=key, counter=[0, 0, 0, step])
        assert np.random.Generator(bits).random() == value


def test_another_entity_or_a_longer_run_sees_the_same_factors() -> None:
    short = lognormal_factors(stream(3, Purpose.GPU, 2), 0.3, 10)
    long = lognormal_factors(stream(3, Purpose.GPU, 2), 0.3, 50)
    assert np.array_equal(long[:10], short)
