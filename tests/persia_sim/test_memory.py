"""Capacity arithmetic of the 100T run, and refusal of what does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persia_sim.model.memory import FORMATS, capacity, fill_s, resident_after
from persia_sim.model.popularity import expected_distinct, lru_miss_rate, zipf_bins
from persia_sim.presets.catalogue import workloads
from persia_sim.presets.clusters import gcp_100t

SYN5 = workloads()["criteo-syn5"]


def test_float16_values_of_100t_are_200_tb() -> None:
    assert SYN5.rows * SYN5.dim * 2 == pytest.approx(200e12)


def test_100t_fits_at_dim_128_in_float16_and_nothing_else_does() -> None:
    cluster = gcp_100t()
    assert capacity(cluster, SYN5, FORMATS["fp16-lean"]).fits
    for dim in (16, 32, 64):
        narrow = replace(SYN5, dim=dim, rows=1e14 / dim)
        assert not capacity(cluster, narrow, FORMATS["fp16-lean"]).fits
    for name in ("f32-adagrad", "f32-sgd"):
        held = capacity(cluster, SYN5, FORMATS[name])
        assert held.evicted_rows > 0 and held.miss_rate > 0
        with pytest.raises(ValueError, match=r"use at least \d+ servers"):
            held.refuse(cluster)


def test_the_remedy_in_the_refusal_is_enough() -> None:
    cluster = gcp_100t()
    held = capacity(cluster, SYN5, FORMATS["f32-sgd"])
    with pytest.raises(ValueError) as refusal:
        held.refuse(cluster)
    servers = int(str(refusal.value).split("at least ")[1].split(" servers")[0])
    hosts = -(-servers // 4)
    assert capacity(cluster.with_servers(hosts), SYN5, FORMATS["f32-sgd"]).fits


def test_filling_781_billion_rows_takes_hours() -> None:
    assert fill_s(SYN5, 1.91e6, SYN5.rows) / 3600 == pytest.approx(4.4, abs=0.1)


def test_distinct_ids_match_a_draw() -> None:
    rng = np.random.default_rng(0)
    probability, number = zipf_bins(1000.0, 1.05)
    assert (number == 1).all() and probability.sum() == pytest.approx(1)
    seen = [len(set(rng.choice(1000, 300, p=probability).tolist())) for _ in range(400)]
    error = np.std(seen) / 20
    assert expected_distinct(300, 1000.0, 1.05) == pytest.approx(np.mean(seen), abs=4 * error)


def test_lru_miss_rate_matches_a_simulated_cache() -> None:
    rng = np.random.default_rng(1)
    probability, _ = zipf_bins(1000.0, 0.9)
    cache: dict[int, None] = {}
    misses = []
    for number, key in enumerate(rng.choice(1000, 60_000, p=probability).tolist()):
        if number >= 10_000:
            misses.append(key not in cache)
        cache.pop(key, None)
        cache[key] = None
        if len(cache) > 200:
            del cache[next(iter(cache))]
    assert lru_miss_rate(200.0, 1000.0, 0.9) == pytest.approx(np.mean(misses), abs=0.01)
    assert lru_miss_rate(1000.0, 1000.0, 0.9) == 0


def test_rows_fill_with_samples_up_to_the_table() -> None:
    small = replace(SYN5, rows=26e4)
    few, many = resident_after(small, 1e3), resident_after(small, 1e9)
    assert few < many <= 26e4 and many == pytest.approx(26e4, rel=0.01)
