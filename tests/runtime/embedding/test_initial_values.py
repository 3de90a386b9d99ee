"""Initial values are a function of (seed, table, id), and distributed as they say."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.embedding.config import Capacity

MOMENTS = {
    "uniform": (0.0, 0.2**2 / 3),
    "normal": (0.0, 0.2**2),
    "constant": (0.2, 0.0),
}


@pytest.mark.parametrize("kind", sorted(MOMENTS))
def test_mean_and_variance_are_those_of_the_distribution(one_table, kind):
    table = one_table(dim=8, initial=kind, initial_scale=0.2)
    values = table.values(np.arange(25_000)).astype(np.float64)
    mean, variance = MOMENTS[kind]
    assert values.mean() == pytest.approx(mean, abs=5 * (variance / values.size) ** 0.5 + 1e-6)
    assert values.var() == pytest.approx(variance, rel=0.03, abs=1e-9)
    if variance:
        assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.03


@pytest.mark.parametrize("kind", sorted(MOMENTS))
@pytest.mark.law10
def test_eviction_sharding_and_restart_give_the_same_values(one_table, kind):
    config = {"dim": 4, "initial": kind, "seed": 9}
    ids = np.arange(30)
    fresh = one_table(**config).values(ids)
    created = one_table(shards=3, **config).look_up(ids)
    found = created.values["rows"][created.plans["rows"].inverse]
    np.testing.assert_array_equal(found, fresh)
    small = one_table(capacity=Capacity(rows=2), **config)
    for _ in range(2):
        small.push(small.look_up(ids))
    again = small.look_up(ids)
    np.testing.assert_array_equal(again.values["rows"], fresh)
    assert kind == "constant" or (one_table(**config | {"seed": 10}).values(ids) != fresh).any()
