"""Capacity arithmetic of the 100T run, and refusal of what does not fit."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from persia_sim.cli import Options, run
from persia_sim.model.memory import FORMATS, capacity, fill_s
from persia_sim.model.popularity import expected_distinct, zipf_bins
from persia_sim.presets.catalogue import gcp_100t, workloads
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.oracles import resident_after

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


def test_filling_781_billion_rows_takes_days_and_not_the_hours_of_new_ids_only() -> None:
    rate = 1.91e6
    all_new_s = SYN5.rows / (rate * SYN5.fields)
    filled_s = fill_s(SYN5, rate, 0.9 * SYN5.rows)
    assert all_new_s / 3600 < 5 and filled_s / 3600 > 10 * 5
    assert resident_after(SYN5, rate * filled_s) == pytest.approx(0.9 * SYN5.rows, rel=1e-6)
    assert fill_s(SYN5, rate, SYN5.rows) == inf


def test_distinct_ids_match_a_draw() -> None:
    rng = np.random.default_rng(0)
    probability, number = zipf_bins(1000.0, 1.05)
    assert (number == 1).all() and probability.sum() == pytest.approx(1)
    seen = [len(set(rng.choice(1000, 300, p=probability).tolist())) for _ in range(400)]
    error = np.std(seen) / 20
    assert expected_distinct(300, 1000.0, 1.05) == pytest.approx(np.mean(seen), abs=4 * error)


def test_rows_fill_with_samples_up_to_the_table() -> None:
    small = replace(SYN5, rows=26e4)
    few, many = resident_after(small, 1e3), resident_after(small, 1e9)
    assert few < many <= 26e4 and many == pytest.approx(26e4, rel=0.01)


def test_servers_that_were_empty_miss_more_and_hold_less() -> None:
    cluster, rows = gcp_100t(), FORMATS["fp16-lean"]
    full = capacity(cluster, SYN5, rows)
    assert full.filled_rows == full.resident_rows and full.miss_rate == 0
    young, older = (capacity(cluster, SYN5, rows, samples) for samples in (1e6, 1e9))
    assert young.filled_rows < older.filled_rows < full.filled_rows
    assert young.miss_rate > older.miss_rate > 0
    assert young.fits and young.evicted_rows == full.evicted_rows
    expected = resident_after(SYN5, 1e9)
    assert older.filled_rows == pytest.approx(expected, rel=1e-3)


def test_the_command_tells_the_misses_of_servers_that_fill_and_charges_them() -> None:
    common = {"ranks": 8, "steps": 8, "gpu_cv": 0.0, "mode": Mode.SYNC}
    full, young = run(Options(**common)), run(Options(**common, after_samples=1e6))
    assert "misses 0.00%" in full
    share = capacity(gcp_100t().resized(8), SYN5, FORMATS["fp16-lean"], 1e6).miss_rate
    assert f"misses {share:.2%}" in young

    def step_ms(said: str) -> float:
        return float(said.split("step ")[1].split(" ms")[0])

    assert step_ms(young) > step_ms(full)
