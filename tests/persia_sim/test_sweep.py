"""Sweeps and sensitivity: points, precision, columns, fronts and gains, each computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.scenario import Noise, Queues, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets import point as points
from persia_sim.presets.costs import CATALOGUE
from persia_sim.report import measure
from persia_sim.report.measure import bound_of, steady_steps, throughput, until_narrow
from persia_sim.report.sensitivity import RESOURCES, choices, gains
from persia_sim.report.sweep import (
    Point,
    evaluate,
    pareto,
    scenario_of,
    updates_missed,
)
from tests.persia_sim.hand_world import hand_costs, hand_scenario, law
from tests.persia_sim.sim_configurations import small_scenario

SMALL = Point(ranks=4, workers=4, servers=2, batch_per_rank=512)


@pytest.mark.long
def test_a_run_whose_queues_still_fill_goes_on_however_narrow_its_interval(monkeypatch):
    """A window of 25 steps before NICs that are asked for more than they give: in 100 steps more
    begin than are served, and the rate stands further above the bound than is allowed. Its interval
    holds the bound; and if it did not, the run would go on."""
    allowed = 0.02
    point = replace(SMALL, workload="criteo-syn1", ranks=8, workers=16, servers=1, tau=24, gpu_cv=0)
    costs = replace(CATALOGUE, launching=None)  # the GPU keeps pace with the NICs' queues
    scenario = replace(points.scenario_of(point), costs=costs)
    short, bound = throughput(simulate(scenario)), answer(scenario)
    assert bound.binds.startswith("server NICs")
    assert short.mean > (1 + 2 * allowed) * bound.samples_per_s
    assert short.mean - short.half_width < bound.samples_per_s
    monkeypatch.setattr(measure, "throughput", lambda run: replace(throughput(run), half_width=0.0))
    found = throughput(until_narrow(scenario, allowed, 1600))
    assert found.mean <= (1 + allowed) * bound.samples_per_s


def bound_at(point: Point) -> float:
    """Samples per second by the closed form, of a long run."""
    return answer(scenario_of(point, 1536)).samples_per_s


ROW = st.fixed_dictionaries({
    "samples_per_s": st.integers(1, 4).map(float),
    "staleness_steps_mean": st.integers(0, 3).map(float),
    "staleness_pushes_mean": st.integers(0, 3).map(float),
    "usd_per_million_samples": st.integers(1, 3).map(float),
    "dense_late": st.booleans(),
})  # fmt: skip


@given(st.lists(ROW, max_size=8))
def test_the_front_is_what_no_other_point_beats(rows):
    """By brute force: at least as good in all four, and better in one."""

    def missed(row: dict[str, float]) -> float:
        return row["staleness_pushes_mean"] if row["dense_late"] else row["staleness_steps_mean"]

    def beats(a: dict[str, float], b: dict[str, float]) -> bool:
        good = (
            a["samples_per_s"] - b["samples_per_s"],
            missed(b) - missed(a),
            b["usd_per_million_samples"] - a["usd_per_million_samples"],
            int(b["dense_late"]) - int(a["dense_late"]),
        )
        return min(good) >= 0 and max(good) > 0

    assert pareto(rows) == [not any(beats(other, own) for other in rows) for own in rows]


def swept_row(samples_per_s: float, usd: float | None, pushes: float) -> dict[str, object]:
    """Of async; a window of 4 own steps is full."""
    return {
        "samples_per_s": samples_per_s, "usd_per_million_samples": usd, "dense_late": True,
        "staleness_steps_mean": 4.0, "staleness_pushes_mean": pushes,
    }  # fmt: skip


def test_fewer_ranks_stay_on_the_front_for_the_updates_that_they_do_not_miss():
    """Five of its own steps among 16 ranks are 79 updates, among 8 they are 39."""
    assert pareto([swept_row(10.0, 1.0, 79.0), swept_row(9.0, 1.0, 39.0)]) == [True, True]


def test_what_an_interval_can_hide_is_a_tie_and_no_front():
    """A window of 16 gains 0.01 % over one of 4, and a rate differs in its last bit."""
    late, more, last = (swept_row(*row) for row in (
        (177_243.0, 1.0, 39.0), (177_259.0, 0.9999, 135.0), (177_243.0000001, 1.0, 39.0)
    ))  # fmt: skip
    assert pareto([late, more, last]) == [True, False, True]
    cheaper = swept_row(177_000.0, 0.9, 39.0)
    assert pareto([late, more, last, cheaper]) == [False, False, False, True]
    steps = [swept_row(rate, 1.0, 0.0) for rate in (100.0, 99.5, 99.0, 98.5, 98.0)]
    assert pareto(steps) == [True, True, True, False, False], "no chain of ties"


def test_prices_that_are_not_known_are_no_dollars_and_not_in_the_front(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "gcp-100t"\n[servers.host]\nusd_per_hour = 0.0\n')
    point = replace(SMALL, cluster=str(path))
    row = evaluate(point, 0.1)
    assert row["usd_per_million_samples"] is None and row["samples_per_s"] > 0
    slower_and_cheaper = swept_row(9.0, 1.0, 79.0)
    assert pareto([swept_row(10.0, 2.0, 79.0), slower_and_cheaper]) == [True, True]
    assert pareto([swept_row(10.0, None, 79.0), slower_and_cheaper]) == [True, False]


def test_a_point_becomes_the_cluster_that_it_names():
    """The preset has 240 loaders for 64 ranks, so 3.75 for each."""
    scenario = scenario_of(replace(SMALL, gpu_cv=0.25, seed=9), steps=7)
    cluster = scenario.cluster
    assert (cluster.ranks, cluster.embedding_workers.hosts, cluster.servers.hosts) == (4, 4, 2)
    assert cluster.loaders == 15 and scenario_of(replace(SMALL, ranks=1), 7).cluster.loaders == 4
    assert (scenario.workload.name, scenario.workload.batch_per_rank) == ("criteo-syn5", 512)
    assert (scenario.mode, scenario.tau, scenario.steps, scenario.seed) == (Mode.HYBRID, 4, 7, 9)
    assert scenario.noise.gpu_cv == 0.25
    assert scenario_of(replace(SMALL, mode=Mode.SYNC), 7).tau is None


def turns(point: Point) -> Iterator[tuple[Run, float]]:
    """Each turn and its relative half width, as the contract of `evaluate` says."""
    steps = 64 if point.mode.has_barrier else 96
    while True:
        run = simulate(scenario_of(point, steps), trace=True)
        rate = throughput(run)
        yield run, rate.half_width / rate.mean
        steps *= 2


@pytest.mark.first_case
@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ASYNC])
def test_columns_of_a_simulated_point(mode):
    point = replace(SMALL, mode=mode, gpu_cv=0.2)
    point = replace(point, merge_pushes=False if mode.may_merge else None)
    row = evaluate(point, half_width=0.02)
    run, width = next((r, w) for r, w in turns(point) if r.scenario.steps == row["steps"])
    assert width <= 0.02
    assert row["relative_half_width_95"] == pytest.approx(width)
    read, applied = run.stamps[Mark.READ], run.stamps[Mark.APPLIED]
    closed = applied.max(0) if mode.has_barrier else None
    late = [
        int(((closed if closed is not None else applied[r])[:s] > read[r, s]).sum())
        for r in range(4)
        for s in steady_steps(run)
    ]
    assert row["staleness_steps_mean"] == pytest.approx(np.mean(late))
    if not run.scenario.merges:
        full = read[:, -1].min()
        kept = [s for s in steady_steps(run) if applied[:, s].max() <= full]
        batches = [(read[r, s], applied[r, s]) for r in range(4) for s in kept]
        least = np.mean([((applied > a) & (applied < b)).sum() for a, b in batches])
        most = np.mean([((applied >= a) & (applied <= b)).sum() - 1 for a, b in batches])
        assert least <= row["staleness_pushes_mean"] <= most  # some instants are equal
        if mode.has_dense_server:  # each push is a dense update
            assert least <= updates_missed(row) <= most
        else:
            assert updates_missed(row) == pytest.approx(np.mean(late))
    assert row["dense_late"] == mode.has_dense_server
    # Half a host of 8 GPUs is rented whole: list prices a month of 730 hours.
    dollars = (1 * 21888 + 4 * 1007 + 2 * 45251) / 730
    assert row["usd_per_hour"] == pytest.approx(dollars)
    per_million = dollars / (row["samples_per_s"] * 3600 / 1e6)
    assert row["usd_per_million_samples"] == pytest.approx(per_million)
    assert (row["mode"], row["discipline"], row["ranks"]) == (str(mode), "fluid", 4)
    assert (row["batch_per_rank"], row["batch"]) == (512, 2048)
    # The bound that `persia-sim` prints: of the compute times that these steps have drawn.
    bound = bound_of(run)
    assert row["bound_samples_per_s"] == pytest.approx(bound.samples_per_s)
    assert row["binds"] == bound.binds
    assert bound.samples_per_s < 0.95 * bound_at(point) or mode.has_dense_server
    assert set(asdict(point)) <= set(row)


def test_steps_that_would_be_too_few_are_not_tried():
    """A width falls with the root of the steps: half of it takes four times as many."""
    tried = []

    @contextmanager
    def watch(scenario):
        tried.append(scenario.steps)
        yield lambda: None

    first = scenario_of(replace(SMALL, ranks=2, gpu_cv=0.5), 64)
    width = throughput(simulate(first)).relative
    for factor, steps in ((2.1, [64, 256]), (1.1, [64, 128])):
        tried.clear()
        until_narrow(first, width / factor, 256, watch=watch)
        assert tried[:2] == steps


def sensitivity(scenario: Scenario, miss_rate: float = 0.0) -> dict[str, float]:
    return {name: gain.mean for name, gain in gains(scenario, miss_rate).items()}


def test_in_sync_every_resource_gives_its_own_share_of_the_step():
    """Two ranks, 113 s a step: what takes x of it saves x / 11 when 1.1 times as fast."""
    seconds = {
        "GPU": 12.0,
        "all-reduce": 9.0,
        "loaders": 0.0,  # batches are there in time
        "embedding workers' cores": 2 + 6 + 7,
        "embedding workers' memory": 0.0,  # without a limit
        "servers' cores": 3 + 11,
        "servers' memory": 0.0,  # without a limit
        "dense server": 0.0,  # only async has one
        "rank's copies": (2 + 3) + (6 + 3),  # the thread's own work and the bus
        "GPU hosts' NICs": 0.0,  # 24 bytes a second, and the worker's 16 bind
        "worker hosts' NICs": 12 + 12,  # activations and gradients
        "server hosts' NICs": 4 + 8 + 10,  # requests, rows, pushes
        "latency": 4 * 0.5 + 2 * 0.5,
    }
    assert sum(seconds.values()) == 113
    expected = {name: 113 / (113 - x / 11) - 1 for name, x in seconds.items()}
    found = sensitivity(hand_scenario(Mode.SYNC, ranks=2, steps=12))
    assert set(found) == set(RESOURCES) == set(expected)
    assert found == pytest.approx(expected, abs=1e-9)
    # The same 6 and 7 s as a price of 24 occurrences and of 120 bytes.
    priced = hand_costs(worker_pool=law(per_item_s=0.5), worker_scatter=law(per_byte_s=14 / 120))
    again = sensitivity(hand_scenario(Mode.SYNC, ranks=2, steps=12, costs=priced))
    assert again == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("resource", "costs"),
    [
        ("GPU", {"gpu_fixed_s": 2e4}),
        ("loaders", {"load": law(5e4)}),
        ("rank's copies", {"copy_in": law(5e4)}),
        ("embedding workers' cores", {"worker_scatter": law(5e5)}),
        ("embedding workers' cores", {"worker_pool": law(per_byte_s=1e4)}),
        ("servers' cores", {"server_lookup": law(5e5)}),
        ("servers' cores", {"server_update": law(5e5)}),
    ],
)
def test_a_stage_that_binds_gives_ten_per_cent_and_all_others_nothing(resource, costs):
    one_by_one = Queues(lookups_in_flight=1, push_tasks=1, backward=1, copied_back=1)  # no bursts
    base = hand_scenario(Mode.RAW_HYBRID, steps=20, costs=hand_costs(**costs), queues=one_by_one)
    found = sensitivity(base)
    assert found.pop(resource) == pytest.approx(0.1, abs=2e-4)
    assert all(abs(gain) < 2e-4 for gain in found.values()), found


def test_memory_and_a_dense_server_can_bind():
    busy = hand_scenario(Mode.RAW_HYBRID, steps=30, infinite_cpus=False)
    host = replace(busy.cluster.servers.host, memory_bytes_per_s=0.01)
    servers = replace(busy.cluster.servers, host=host)
    found = sensitivity(replace(busy, cluster=replace(busy.cluster, servers=servers)))
    assert found.pop("servers' memory") == pytest.approx(0.1, abs=2e-3)
    assert all(abs(gain) < 2e-3 for gain in found.values()), found
    slow = hand_costs(dense_server_bytes_per_s=904 / 2e4)
    found = sensitivity(hand_scenario(Mode.ASYNC, steps=20, costs=slow))
    assert found["dense server"] == pytest.approx(0.1, abs=1e-3) and found["GPU"] < 1e-3


def test_rows_that_miss_are_part_of_the_servers_work():
    """Every row misses and costs 1,000 s to create: then servers bind, and without misses not."""
    costs = hand_costs(server_create=law(per_item_s=1e5), gpu_fixed_s=500.0)
    base = hand_scenario(Mode.RAW_HYBRID, steps=20, costs=costs, queues=Queues(lookups_in_flight=1))
    assert sensitivity(base, 1.0)["servers' cores"] == pytest.approx(0.1, abs=1e-3)
    assert sensitivity(base)["servers' cores"] == pytest.approx(0, abs=1e-6)


def test_a_faster_resource_that_nobody_waits_for_has_no_effect_beyond_its_interval():
    """Common random draws: noise of the rate is not noise of the difference."""
    noisy = small_scenario(Mode.SYNC, steps=80, noise=Noise(gpu_cv=0.3))
    found = gains(noisy, changes={name: RESOURCES[name] for name in ("loaders", "GPU")})
    assert abs(found["loaders"].mean) <= max(found["loaders"].half_width, 1e-9)
    assert found["GPU"].mean - found["GPU"].half_width > 0


def test_twice_the_window_helps_where_one_core_serves_a_batch():
    """A lookup of 1,000 s and a core to spare: more hosts give nothing, a wider window does."""
    costs = hand_costs(worker_pool=law(2000.0), load=law(0.0))
    base = hand_scenario(Mode.RAW_HYBRID, steps=40, costs=costs, tau=1)
    told = []
    found = gains(base, changes=choices(base), watch=lambda runs: told.extend(runs) or runs)
    assert told == list(found), "each run is counted on the bar"
    assert found["worker hosts"].mean == pytest.approx(0, abs=1e-6)
    assert found["tau"].mean > 0.3
    assert {"tau", "worker hosts", "server hosts", "loaders", "batch"} == set(found)
