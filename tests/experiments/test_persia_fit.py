"""One set of constants for all of Persia's clusters: found again, and what the points can test."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from experiments.published.persia import (
    RUN_NOISE,
    SHARED,
    SharedFit,
    divided_bar,
    divided_bars,
    fit_shared,
    moves,
    points,
    rate,
)
from persia_sim.presets.costs import EVERY, FITS
from persia_sim.words.vocabulary import Mode

FOUND = {name: fit.value for name, fit in FITS[EVERY].items()}
BATCHES = {name: FITS[name]["batch_per_rank"].integer for name in ("v100-paper", "gcp-100t")}


def test_the_presets_take_what_the_fit_finds():
    found = fit_shared(points(), BATCHES)
    known = {name: found.values[name] for name in found.identified}
    assert known == pytest.approx({name: FOUND[name] for name in known}, rel=0.02)
    for name in found.values.keys() - known.keys():  # no point narrows them
        assert abs(log(found.values[name] / FOUND[name])) < 0.1 * found.spread[name]
    assert set(found.values) - set(found.identified) == {"gpu_fixed_s", "load_s_per_column"}
    assert all(batch.bit_count() == 1 for batch in BATCHES.values())  # powers of two
    # Without a law of its own for the 100T run's workers its bar in sync is far off.
    alike = fit_shared(points(), BATCHES, held=["path_100t"])
    assert alike.cost > found.cost + 5 and alike.values["path_100t"] == 1.0


def test_the_points_are_all_of_persias_measurements():
    known = points()
    assert len(known) == 8 + 18 + 7
    halves = {round(p.samples_per_s) for p in known} & {27536, 28480}
    assert not halves  # those bars only halve others
    assert all(p.spread >= RUN_NOISE for p in known)


def test_constants_that_made_the_rates_are_found_again():
    known = [p for p in points() if p.cluster == "v100-2021-09"]
    truth = {name: shared.start for name, shared in SHARED.items()}
    truth |= {"gpu_share": 0.3, "sync_fixed_s": 8e-3}
    made = [replace(p, samples_per_s=rate(p, truth, BATCHES)[0], digitisation=1e-3) for p in known]
    found = fit_shared(made, BATCHES)
    assert np.abs(found.errors).max() < 0.03
    assert found.values["gpu_share"] == pytest.approx(0.3, rel=0.15)
    # No point of this cluster has a second host: its NICs' share is not identified.
    assert "nic_share" not in found.identified and "kwai_flops" not in found.identified
    assert found.values["nic_share"] == pytest.approx(SHARED["nic_share"].start, rel=1e-3)


def test_one_set_of_laws_serves_every_cluster_and_all_points_but_one():
    known = points()
    errors = [log(rate(p, FOUND, BATCHES)[0] / p.samples_per_s) for p in known]
    assert np.median(np.abs(errors)) < 0.03
    missed = {(p.workload, p.mode) for p, e in zip(known, errors, strict=True) if abs(e) > 0.25}
    assert missed == {("kwai-video", Mode.HYBRID)}  # its plotted bar at one GPU


def test_no_published_point_tests_the_servers_and_only_sync_tests_the_workers():
    known = points()
    fitted = SharedFit(FOUND, BATCHES, 0.0, {}, np.zeros(len(known)))
    gained = moves(known, fitted)
    assert gained["servers"] == []
    assert {p.mode for p in gained["embedding workers"]} == {Mode.SYNC}
    assert len(gained["GPUs"]) == len(known)


def test_a_bar_that_halves_another_exactly_was_hardly_measured():
    # Read within 0.3 %, an exact half is likelier by the ratio of the two densities at zero.
    sharp, wide = 0.003 * 2**0.5, 0.3
    expected = log((wide**2 + sharp**2) ** 0.5 / sharp)
    assert divided_bar(50.0, 100.0, 2, 0.003, 0.3) == pytest.approx(expected)
    bars = divided_bars()
    assert bars["taobao-ad hybrid: 1 GPU = 2 GPUs / 2"] > 3
    assert bars["avazu-ad hybrid: 1 GPU = 2 GPUs / 2"] > 3
    # Kwai's plot is read to 4,000 samples/s: its small bars cannot tell.
    assert all(abs(ratio) < 3 for name, ratio in bars.items() if name.startswith("kwai"))


def test_a_configuration_that_cannot_run_is_no_rate():
    point = next(p for p in points() if p.mode is Mode.ASYNC_AVERAGING and p.gpus == 64)
    assert rate(point, FOUND | {"nic_share": 0.001}, BATCHES) == (0.0, "refused")
