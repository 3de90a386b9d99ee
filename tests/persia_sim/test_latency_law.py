"""Law 15: what a step takes when a lookup and a push take L each and compute C, nothing shared."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import step_time
from persia_sim.model.cluster import Cluster
from persia_sim.model.scenario import Discipline, Queues, Scenario
from persia_sim.model.stamps import Mark
from persia_sim.oracle.closed_form import answer
from persia_sim.words.staleness import staleness_in_steps
from persia_sim.words.vocabulary import Mode
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import hand_costs, hand_scenario, law


def instant_cluster(base: Cluster) -> Cluster:
    """Cards, bus and links cost nothing; a core of every host has speed 1."""
    roles = {}
    for name in ("nn", "embedding_workers", "servers"):
        part = getattr(base, name)
        host = replace(part.host, nic_bytes_per_s=inf, core_speed=1.0)
        roles[name] = replace(part, host=host)
    made = replace(base, **roles, link=replace(base.link, latency_s=0.0), loaders=8)
    return made.with_gpu(pcie_bytes_per_s=inf)


def bare(mode: Mode, latency_s: float, compute_s: float, ranks: int = 1, **knobs: int) -> Scenario:
    """Lookup and push each take so long at the servers, and nothing else takes any time.

    Tasks are as many as the window can hold: the original's 10 and 8 would bind at tau = 16.
    """
    free = law(0.0)
    costs = hand_costs(
        load=free, worker_forward=free, worker_pool=free, worker_scatter=free, copy_in=free,
        copy_out=free, server_lookup=law(latency_s), server_update=law(latency_s),
        gpu_fixed_s=compute_s,
    )  # fmt: skip
    sync = replace(costs.dense_sync, intra_bytes_per_s=inf, inter_bytes_per_s=inf,
                   intra_latency_s=0.0, inter_latency_s=0.0, overhead_s=0.0)  # fmt: skip
    base = hand_scenario(mode, ranks, costs=replace(costs, dense_sync=sync), steps=170)
    queues = Queues(dataset=40, lookup_tasks=40, forwarded=40, on_gpu=40, backward=40,
                    copied_back=40, push_tasks=40)  # fmt: skip
    return replace(base, cluster=instant_cluster(base.cluster), queues=queues, **knobs)


CASES = [(20.0, 4.0), (20.0, 30.0), (3.0, 100.0), (1000.0, 1.0)]


def step_s(scenario: Scenario) -> float:
    """The growth over the last 80 steps or so: whole windows, whose steps come in bursts."""
    stamps = simulate(scenario).stamps
    assert np.array_equal(stamps, instants(scenario))  # max-plus gives the exact figure
    lag = (scenario.window or 0) + 1
    rounds = 80 // lag * lag
    updated = stamps[Mark.UPDATED].max(0)
    return float(updated[-1] - updated[-1 - rounds]) / rounds


@pytest.mark.parametrize(("latency", "compute"), CASES)
@pytest.mark.parametrize("tau", [0, 1, 4, 16])
@pytest.mark.parametrize("mode", [Mode.RAW_HYBRID, Mode.HYBRID])
def test_a_window_of_tau_hides_all_but_one_in_tau_plus_one(
    mode: Mode, tau: int, latency: float, compute: float
) -> None:
    expected = max(compute, (2 * latency + compute) / (tau + 1))
    for ranks in (1, 3):
        scenario = bare(mode, latency, compute, ranks, tau=tau)
        assert step_s(scenario) == pytest.approx(expected, rel=1e-9)
        assert answer(scenario).step_s == pytest.approx(expected, rel=1e-9)
    assert step_time(simulate(scenario)).mean == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("latency", "compute"), CASES)
def test_sync_pays_both_latencies_in_every_step(latency: float, compute: float) -> None:
    for ranks in (1, 3):
        scenario = bare(Mode.SYNC, latency, compute, ranks)
        assert step_s(scenario) == pytest.approx(2 * latency + compute, rel=1e-9)
        assert answer(scenario).step_s == pytest.approx(2 * latency + compute, rel=1e-9)


@pytest.mark.parametrize(("latency", "compute"), CASES)
@pytest.mark.parametrize("ahead", [1, 4, 16])
def test_lookahead_that_reads_again_pays_as_much_as_sync(
    ahead: int, latency: float, compute: float
) -> None:
    scenario = bare(Mode.LOOKAHEAD, latency, compute, 3, ahead=ahead)
    assert step_s(scenario) == pytest.approx(2 * latency + compute, rel=1e-9)
    assert answer(scenario).step_s == pytest.approx(2 * latency + compute, rel=1e-9)


@pytest.mark.parametrize(("latency", "compute"), CASES)
@pytest.mark.parametrize("ahead", [1, 4, 16])
def test_lookahead_that_forwards_hides_as_much_as_a_window_of_ahead(
    ahead: int, latency: float, compute: float
) -> None:
    """And no row is late: the workers have applied all earlier steps before the batch trains."""
    expected = max(compute, (2 * latency + compute) / (ahead + 1))
    for ranks in (1, 3):
        scenario = bare(Mode.LOOKAHEAD, latency, compute, ranks, ahead=ahead)
        scenario = replace(scenario, lookahead="forwarded")
        assert step_s(scenario) == pytest.approx(expected, rel=1e-9)
        assert answer(scenario).step_s == pytest.approx(expected, rel=1e-9)
    trace = simulate(replace(scenario, steps=40), trace=True).trace
    assert trace is not None and staleness_in_steps(trace).missing_steps.max() == 0


def test_the_originals_tasks_bind_beyond_their_number() -> None:
    """Eight pushes at once: with tau = 16 a step takes L / 8, not (2 L + C) / 17."""
    scenario = replace(bare(Mode.HYBRID, 1000.0, 1.0, tau=16), queues=Queues())
    found = answer(scenario)
    assert (found.binds, found.step_s) == ("push tasks", 125.0)
    updated = simulate(scenario).stamps[Mark.UPDATED][0]
    assert float(updated[-1] - updated[-81]) / 80 == pytest.approx(125.0)


def test_cards_without_limit_carry_messages_in_no_time() -> None:
    """All disciplines agree where nothing can be shared."""
    base = bare(Mode.HYBRID, 20.0, 4.0, 2, tau=1)
    expected = simulate(base).stamps
    fifo = replace(base, discipline=Discipline.FIFO)
    assert np.array_equal(simulate(fifo).stamps, expected)
