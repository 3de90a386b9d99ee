"""XDL and PaddlePaddle are runs of the simulator: their bars, their staleness, their resources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.published.descriptions import DATA, read_csv
from experiments.published.rivals import RIVALS, refitted, samples_per_s, scenario_of
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.model.cluster import Cluster
from persia_sim.model.scenario import Noise
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.words.vocabulary import Mode

ASYNC, SYNC, HETER = ("XDL", "async"), ("XDL", "sync"), ("PaddlePaddle", "heter")


def of(gpus: int) -> Cluster:
    return CLUSTERS["v100-2021-09"]().resized(gpus)


def test_bars_are_met_within_what_five_constants_can():
    assert sum(len(rival.fitted) for rival in RIVALS.values()) == 5
    errors = []
    for line in read_csv(DATA / "throughput_public.csv", "published"):
        if line["system"] != "Persia":
            rival = RIVALS[line["system"], line["mode"]]
            work = workloads()[line["dataset"]]
            rate = samples_per_s(rival, of(int(line["gpus"])), work, 16)
            errors.append(abs(rate / float(line["samples_per_s"]) - 1))
    assert len(errors) == 24
    assert np.median(errors) < 0.08 and max(errors) < 0.30


def test_xdl_sync_reads_no_late_rows_and_async_has_late_dense_weights():
    work = workloads()["taobao-ad"]
    sync = simulate(scenario_of(RIVALS[SYNC], of(4), work, 12), trace=True)
    assert sync.scenario.mode is Mode.SYNC
    assert sync.trace is not None
    assert staleness_in_steps(sync.trace).missing_steps.max() == 0
    late = simulate(scenario_of(RIVALS[ASYNC], of(4), work, 12), trace=True)
    assert late.scenario.mode is Mode.ASYNC
    assert late.trace is not None
    # Every rank waits for its own push alone, so others' pushes come in between.
    assert staleness_in_pushes(late.trace).missed_pushes.max() > 0


def test_a_rank_alone_takes_the_sum_of_its_fixed_cost_and_its_ids():
    rival = RIVALS[ASYNC]
    work = workloads()["avazu-ad"]
    slower = replace(rival, step_fixed_s=2 * rival.step_fixed_s)

    def step_s(chosen):
        alone = replace(scenario_of(chosen, of(1), work, 16), noise=Noise())
        return work.batch_per_rank / throughput(simulate(alone)).mean

    gained = step_s(slower) - step_s(rival)
    assert gained == pytest.approx(rival.step_fixed_s, rel=1e-6)


def test_servers_that_apply_one_push_at_a_time_bound_synchronous_training():
    work = workloads()["avazu-ad"]
    single = samples_per_s(RIVALS[SYNC], of(8), work, 12)
    parallel = samples_per_s(replace(RIVALS[SYNC], server_threads=48), of(8), work, 12)
    assert parallel > 1.1 * single


def test_constants_that_made_the_rates_are_found_again():
    work = workloads()["taobao-ad"]
    truth = replace(RIVALS[HETER], step_fixed_s=60e-3)
    measured = [(of(n), work, samples_per_s(truth, of(n), work, 16)) for n in (1, 2)]
    found, errors = refitted(RIVALS[HETER], measured)
    assert found.step_fixed_s == pytest.approx(60e-3, rel=0.02)
    assert np.abs(errors).max() < 0.02
