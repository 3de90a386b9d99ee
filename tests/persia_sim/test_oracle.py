"""The simulation against max-plus, against a law of latencies, and what it must conserve."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.staleness import staleness_in_pushes
from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.demand import demand
from persia_sim.cluster.scenario import Averaging, Discipline, Noise, Queues, Scenario
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.simulate import Run, simulate
from persia_sim.report.measure import step_time
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import hand_costs, hand_scenario, law
from tests.persia_sim.sim_configurations import small_scenario, uncontended


@given(uncontended())
def test_simpy_equals_max_plus_bit_for_bit_without_contention(scenario):
    simulated, oracle = simulate(scenario).stamps, instants(scenario)
    for mark in Mark:
        assert np.array_equal(simulated[mark], oracle[mark]), mark.name


@pytest.mark.long
@given(uncontended())
def test_closed_form_is_the_growth_rate_of_the_recursion(scenario):
    scenario = replace(scenario, noise=Noise(), steps=240)
    returned = instants(scenario)[Mark.RETURNED].max(0)
    # Over a multiple of every period (steps to 5, tasks to 4) the growth is the cycle mean.
    growth = (returned[239] - returned[119]) / 120
    assert growth == pytest.approx(answer(scenario).step_s, rel=1e-9)


def test_an_answer_without_rows_still_has_its_latency():
    scenario = small_scenario(discipline=Discipline.UNSHARED, infinite_cpus=True)
    need = demand(scenario)
    empty = replace(need, fetch=replace(need.fetch, rows_bytes=0.0))
    run = simulate(scenario, need=empty)
    assert np.array_equal(run.stamps, instants(scenario, empty))
    answered = run.legs[Leg.ANSWERED] - run.stamps[Mark.READ]
    assert answered == pytest.approx(scenario.cluster.link.latency_s)


def instant_cluster(base: Cluster) -> Cluster:
    """Cards, bus and links cost nothing; a core of every host has speed 1."""
    roles = {}
    for name in ("nn", "embedding_workers", "servers"):
        part = getattr(base, name)
        host = replace(part.host, nic_bytes_per_s=inf, core_speed=1.0)
        roles[name] = replace(part, host=host)
    made = replace(base, **roles, link=replace(base.link, latency_s=0.0), loaders=8)
    return made.with_gpu(pcie_bytes_per_s=inf)


def bare(mode: Mode, latency_s: float, compute_s: float, ranks: int = 1, **knobs: Any) -> Scenario:
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
    queues = Queues(dataset=40, lookups_in_flight=40, forwarded=40, on_gpu=40, backward=40,
                    copied_back=40, push_tasks=40)  # fmt: skip
    return replace(base, cluster=instant_cluster(base.cluster), queues=queues, **knobs)


HIDING = [  # mode, its options, and the steps behind which it hides what travels
    *((mode, {"tau": n}, n) for mode in (Mode.RAW_HYBRID, Mode.HYBRID) for n in (0, 1, 4, 16)),
    (Mode.SYNC, {}, 0),
    *((Mode.LOOKAHEAD, {"ahead": n}, 0) for n in (1, 4, 16)),  # it reads again what was written
    *((Mode.LOOKAHEAD, {"ahead": n, "lookahead": "forwarded"}, n) for n in (1, 4, 16)),
]


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("latency", "compute", "ranks"),
    [(20.0, 4.0, 3), (20.0, 30.0, 1), (3.0, 100.0, 3), (1000.0, 1.0, 1)],
)
@pytest.mark.parametrize(("mode", "options", "window"), HIDING)
@pytest.mark.law15
def test_a_window_hides_all_but_one_in_its_steps_and_one(
    mode, options, window, latency, compute, ranks
):
    expected = max(compute, (2 * latency + compute) / (window + 1))
    scenario = bare(mode, latency, compute, ranks, **options)
    steps = 40 + 8 * (scenario.tau or scenario.ahead or 0)
    scenario = replace(scenario, steps=steps)
    run = simulate(scenario)
    assert np.array_equal(run.stamps, instants(scenario))  # max-plus gives the exact figure
    lag = (scenario.steps_ahead or 0) + 1
    rounds = steps // 2 // lag * lag  # whole windows, whose steps come in bursts
    updated = run.stamps[Mark.UPDATED].max(0)
    assert (updated[-1] - updated[-1 - rounds]) / rounds == pytest.approx(expected, rel=1e-9)
    assert answer(scenario).step_s == pytest.approx(expected, rel=1e-9)
    assert step_time(run).mean == pytest.approx(expected, rel=0.1)


def test_the_originals_tasks_bind_beyond_their_number():
    """Eight pushes at once: with tau = 16 a step takes L / 8, not (2 L + C) / 17."""
    scenario = replace(bare(Mode.HYBRID, 1000.0, 1.0, tau=16), queues=Queues())
    found = answer(scenario)
    assert (found.binds, found.step_s) == ("push tasks", 125.0)
    updated = simulate(scenario).stamps[Mark.UPDATED][0]
    assert float(updated[-1] - updated[-81]) / 80 == pytest.approx(125.0)


def test_cards_without_limit_carry_messages_in_no_time():
    """All disciplines agree where nothing can be shared."""
    base = bare(Mode.HYBRID, 20.0, 4.0, 2, tau=1)
    expected = simulate(base).stamps
    fifo = replace(base, discipline=Discipline.FIFO)
    assert np.array_equal(simulate(fifo).stamps, expected)


LATE = [Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC]


def carried(run: Run, role: str, way: str) -> float:
    return sum(
        size
        for name, size in run.link_bytes.items()
        if name.startswith(role) and name.endswith(way)
    )


@given(
    mode=st.sampled_from([m for m in Mode if not m.prefetches_rows]),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 6),
    workers=st.integers(1, 3),
    discipline=st.sampled_from(list(Discipline)),
    cpus=st.booleans(),
)
@pytest.mark.law9
def test_every_byte_of_every_batch_crosses_its_cards_once(
    mode, ranks, steps, workers, discipline, cpus
):
    """268 from the loader and 96 past the worker, 48 and 120 to the servers, 96 back, 192 to the
    rank and 192 back."""
    rounds = Averaging(period_s=100.0) if mode.averages_replicas else None
    base = hand_scenario(
        mode, ranks, steps=steps, discipline=discipline, infinite_cpus=cpus, averaging=rounds
    )
    run = simulate(replace(base, cluster=base.cluster.with_workers(workers)))
    batches = ranks * steps
    assert carried(run, "GPU host", "in") == (192 + 96) * batches
    assert carried(run, "GPU host", "out") == 192 * batches
    assert carried(run, "worker host", "out") == (48 + 120 + 192) * batches
    assert carried(run, "worker host", "in") == (268 + 96 + 192) * batches
    assert carried(run, "server host", "in") == (48 + 120) * batches
    assert carried(run, "server host", "out") == 96 * batches


def test_lookahead_carries_its_second_look_too():
    run = simulate(hand_scenario(Mode.LOOKAHEAD, 2, steps=4, ahead=2))
    assert carried(run, "server host", "out") == 2 * 96 * 8
    assert carried(run, "server host", "in") == (2 * 48 + 120) * 8
    assert carried(run, "GPU host", "in") == (2 * 192 + 96) * 8


@pytest.mark.parametrize(("compute", "ranks"), [(4.0, 3), (200.0, 1)])
@pytest.mark.parametrize(
    ("mode", "options", "window"),
    [each for each in HIDING if not each[0].prefetches_rows],
)
@pytest.mark.law15
def test_of_six_messages_four_are_waited_for_where_lookups_wait_at_the_servers(
    mode, options, window, compute, ranks
):
    """A push takes two, beside which the next request takes two of a lookup's four."""
    base = bare(mode, 0.0, compute, ranks, **options)
    link = replace(base.cluster.link, latency_s=5.0)
    scenario = replace(
        base,
        cluster=replace(base.cluster, link=link),
        queues=replace(base.queues, at_servers=True),
        steps=40 + 8 * (base.tau or base.ahead or 0),
    )
    run = simulate(scenario)
    assert np.array_equal(run.stamps, instants(scenario))
    expected = max(compute, (4 * 5.0 + compute) / (window + 1))
    assert answer(scenario).step_s == pytest.approx(expected)
    updated = run.stamps[Mark.UPDATED].max(0)
    rounds = (scenario.steps // 2) // (window + 1) * (window + 1)
    steady = (updated[-1] - updated[-1 - rounds]) / rounds
    assert steady == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20)
@given(st.sampled_from(LATE), st.integers(0, 4), st.integers(0, 3), st.booleans())
@pytest.mark.law5
def test_no_lookup_starts_before_its_window_opens(mode, tau, seed, merged):
    """The sentence of the contract: all pushes of all steps < s - tau are applied (in async the
    rank's own). And where it binds, some lookup starts at the very instant."""
    merge = {"merge_pushes": merged} if mode.may_merge else {}
    noise = Noise(gpu_cv=0.3, server_cv=0.5)
    run = simulate(small_scenario(mode, tau=tau, steps=12, seed=seed, noise=noise, **merge))
    start, applied = run.stamps[Mark.LOOKUP], run.stamps[Mark.APPLIED]
    at_the_instant = 0
    for r in range(4):
        for s in range(tau + 1, 12):
            before = applied[:, : s - tau] if mode.has_barrier else applied[r, : s - tau]
            assert start[r, s] >= before.max()
            at_the_instant += start[r, s] == before.max()
    assert at_the_instant > 0 or tau > 1 or mode.has_dense_server


@pytest.mark.parametrize("mode", LATE)
def test_missed_pushes_are_others_in_flight_on_average(mode):
    """Law 7: versions from the trace on the left; on the right the batches of others that had read
    and were not applied when a push was, counted from the instants."""
    noise = Noise(gpu_cv=0.4, server_cv=1.0)
    merge = {"merge_pushes": False} if mode.may_merge else {}
    run = simulate(small_scenario(mode, tau=3, steps=40, noise=noise, **merge), trace=True)
    assert run.trace is not None
    read, applied = run.stamps[Mark.READ].ravel(), run.stamps[Mark.APPLIED].ravel()
    assert len(np.unique(np.concatenate([read, applied]))) == 2 * len(read)  # no two at once
    gauge = np.array([((read < at) & (applied > at)).sum() for at in applied])
    missed = staleness_in_pushes(run.trace).missed_pushes
    assert missed.sum() == gauge.sum() > 0
    in_between = [((applied > a) & (applied < b)).sum() for a, b in zip(read, applied, strict=True)]
    assert sorted(missed.tolist()) == sorted(in_between)
