"""Every knob moves the result, and in the direction that its description says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.model.scenario import (
    Averaging,
    Discipline,
    Noise,
    Queues,
    Scenario,
    WorkerChoice,
)
from persia_sim.model.workload import Wire
from persia_sim.presets.costs import CATALOGUE
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.sim_configurations import small_cluster, small_scenario


def rate(scenario: Scenario) -> float:
    return throughput(simulate(scenario)).mean


def with_cost(scenario: Scenario, law: str, **numbers: float) -> Scenario:
    changed = replace(getattr(scenario.costs, law), **numbers)
    return replace(scenario, costs=replace(scenario.costs, **{law: changed}))


def with_role(scenario: Scenario, role: str, host: dict[str, float], **fields: Any) -> Scenario:
    part = getattr(scenario.cluster, role)
    part = replace(part, host=replace(part.host, **host), **fields)
    return replace(scenario, cluster=replace(scenario.cluster, **{role: part}))


SYNC = small_scenario(Mode.SYNC)
HYBRID = small_scenario(Mode.HYBRID, steps=30)
ASYNC = small_scenario(Mode.ASYNC, steps=30)


@pytest.mark.parametrize(
    ("law", "field", "value"),
    [
        ("load", "fixed_s", 0.2),
        ("load", "per_item_s", 1e-3),
        ("worker_forward", "per_item_s", 1e-6),
        ("worker_rpc", "fixed_s", 1e-3),
        ("worker_pool", "per_byte_s", 1e-7),
        ("worker_scatter", "per_byte_s", 1e-7),
        ("server_lookup", "per_item_s", 1e-5),
        ("server_lookup", "per_byte_s", 1e-7),
        ("server_update", "fixed_s", 1e-2),
        ("copy_in", "per_byte_s", 1e-7),
        ("copy_out", "fixed_s", 1e-2),
        ("dense_sync", "overhead_s", 1e-2),
        ("dense_sync", "intra_latency_s", 1e-2),
        ("dense_sync", "inter_latency_s", 1e-2),
    ],
)
def test_a_dearer_stage_slows_sync(law: str, field: str, value: float) -> None:
    assert rate(with_cost(SYNC, law, **{field: value})) < rate(SYNC) * 0.999


@pytest.mark.parametrize("rate_name", ["intra_bytes_per_s", "inter_bytes_per_s"])
def test_a_slower_all_reduce_slows_the_step(rate_name: str) -> None:
    sync = HYBRID.costs.dense_sync.on([HYBRID.cluster.nn.host], HYBRID.costs.reach)
    value = getattr(sync, rate_name) / 10
    assert rate(with_cost(HYBRID, "dense_sync", **{rate_name: value})) < rate(HYBRID) * 0.99


def test_smaller_buckets_overlap_more() -> None:
    large = replace(HYBRID, workload=replace(HYBRID.workload, batch_per_rank=4096))
    slow = with_cost(large, "dense_sync", inter_bytes_per_s=2e9)
    one = with_cost(slow, "dense_sync", bucket_bytes=1e12)
    assert rate(slow) > rate(one) * 1.01


def test_gpu_speed_efficiency_and_fixed_cost_count() -> None:
    slow = HYBRID.cluster.with_gpu(fp32_flops=HYBRID.cluster.gpu.fp32_flops / 4)
    assert rate(replace(HYBRID, cluster=slow)) < rate(HYBRID)
    for change in ({"gpu_efficiency": ((512, 0.05),)}, {"gpu_fixed_s": 0.02}):
        assert rate(replace(HYBRID, costs=replace(CATALOGUE, **change))) < rate(HYBRID)  # type: ignore[arg-type]
    points = ((16, 0.05), (256, 0.1), (512, 0.384))
    assert rate(replace(HYBRID, costs=replace(CATALOGUE, gpu_efficiency=points))) < rate(HYBRID)


def test_a_slow_bus_slows_the_copies() -> None:
    slow = SYNC.cluster.with_gpu(pcie_bytes_per_s=1e6)
    assert rate(replace(SYNC, cluster=slow)) < rate(SYNC) / 2


@pytest.mark.parametrize("role", ["nn", "embedding_workers", "servers"])
def test_slow_nics_and_cores_slow_sync(role: str) -> None:
    assert rate(with_role(SYNC, role, {"nic_bytes_per_s": 1e7})) < rate(SYNC) * 0.9
    assert rate(with_role(SYNC, role, {"core_speed": 0.01})) < rate(SYNC) * 0.9


def test_few_cores_queue_and_memory_bandwidth_binds() -> None:
    heavy = with_cost(ASYNC, "worker_pool", fixed_s=0.05)
    few = with_role(heavy, "embedding_workers", {}, cores_per_process=1)
    assert rate(few) < rate(heavy) * 0.9
    heavy = with_cost(ASYNC, "server_update", fixed_s=0.05)
    few = with_role(heavy, "servers", {}, cores_per_process=1)
    assert rate(few) < rate(heavy) * 0.9
    assert rate(with_role(ASYNC, "servers", {"memory_bytes_per_s": 1e7})) < rate(ASYNC) * 0.9


def test_more_workers_share_slow_nics() -> None:
    slow = with_role(ASYNC, "embedding_workers", {"nic_bytes_per_s": 1e7})
    more = replace(slow, cluster=slow.cluster.with_workers(12))
    assert rate(more) > rate(slow) * 1.5


def test_latency_headers_and_streams_count() -> None:
    for change in (
        {"latency_s": 0.01},
        {"header_efficiency": 0.01},
        {"stream_bytes_per_s": 1e6},
    ):
        cluster = replace(SYNC.cluster, link=replace(SYNC.cluster.link, **change))  # type: ignore[arg-type]
        assert rate(replace(SYNC, cluster=cluster)) < rate(SYNC) * 0.95


def test_too_few_loaders_starve_the_ranks() -> None:
    slow = with_cost(HYBRID, "load", fixed_s=0.05)
    one = replace(slow, cluster=replace(slow.cluster, loaders=1))
    many = replace(slow, cluster=replace(slow.cluster, loaders=40))
    assert rate(many) > rate(one) * 4


def test_window_permits_and_ahead_hide_latency() -> None:
    far = replace(HYBRID, cluster=replace(HYBRID.cluster, link=replace(
        HYBRID.cluster.link, latency_s=0.02
    )))  # fmt: skip
    rates = [rate(replace(far, tau=tau)) for tau in (0, 1, 4)]
    assert rates[0] < rates[1] * 0.9 < rates[2] * 0.81
    rates = [rate(replace(far, tau=None, permits=permits)) for permits in (1, 2, 5)]
    assert rates[0] < rates[1] * 0.9 < rates[2] * 0.81
    far = replace(far, mode=Mode.LOOKAHEAD, tau=None, merge_pushes=None)
    rates = [rate(replace(far, ahead=ahead)) for ahead in (1, 3)]
    assert rates[0] <= rates[1] * 1.01  # shared NICs: no strict order


def test_merged_pushes_wait_for_the_slowest_rank() -> None:
    noisy = replace(HYBRID, tau=1, noise=Noise(gpu_cv=0.3))
    alone, merged = (
        simulate(noisy, trace=True),
        simulate(replace(noisy, merge_pushes=True), trace=True),
    )
    assert alone.trace is not None and merged.trace is not None
    assert len(merged.trace) < len(alone.trace)


def test_noise_costs_the_barrier_its_largest_draw() -> None:
    noisy = rate(replace(HYBRID, noise=Noise(gpu_cv=0.3)))
    assert noisy < rate(HYBRID) * 0.97
    assert rate(replace(SYNC, noise=Noise(server_cv=2.0))) < rate(SYNC)


def test_dense_server_binds_async() -> None:
    slow = replace(ASYNC.costs, dense_server_bytes_per_s=1e8)
    assert rate(replace(ASYNC, costs=slow)) < rate(ASYNC) / 2


def test_frequent_or_locked_averaging_costs_throughput() -> None:
    base = small_scenario(Mode.ASYNC_AVERAGING, steps=60)
    base = replace(base, workload=replace(base.workload, batch_per_rank=4096))
    often = replace(base, averaging=Averaging(period_s=0.03))
    unlocked = replace(base, averaging=Averaging(period_s=0.03, stall_share=0.0))
    assert rate(often) < rate(unlocked) * 0.95


def test_loaders_in_step_collide_on_one_worker() -> None:
    slow = with_role(ASYNC, "embedding_workers", {"nic_bytes_per_s": 2e7})
    cluster = replace(slow.cluster, loaders=16).with_workers(4)
    spread = replace(slow, cluster=cluster, tau=0)
    assert rate(replace(spread, worker_choice=WorkerChoice.PER_LOADER)) < rate(spread) * 0.9
    assert rate(replace(spread, worker_choice=WorkerChoice.RANDOM)) < rate(spread) * 0.99


def test_disciplines_differ_where_a_card_binds() -> None:
    slow = with_role(ASYNC, "embedding_workers", {"nic_bytes_per_s": 2e7})
    rates = {d: rate(replace(slow, discipline=d)) for d in Discipline}
    assert rates[Discipline.UNSHARED] > rates[Discipline.FLUID] * 1.2
    assert rates[Discipline.UNSHARED] > rates[Discipline.FIFO] * 1.2


@pytest.mark.parametrize("queue", Queues.__slots__)
def test_every_queue_can_bind(queue: str) -> None:
    """Behind each queue stands a slow stage, so a queue of one holds fewer batches."""
    costs = replace(CATALOGUE, gpu_fixed_s=0.05)
    base = replace(ASYNC, costs=costs, tau=None, noise=Noise(gpu_cv=0.5), steps=40)
    if queue in ("backward", "copied_back", "push_tasks"):
        base = with_cost(replace(base, costs=CATALOGUE), "server_update", fixed_s=0.3)
    short = simulate(replace(base, queues=replace(Queues(), **{queue: 1})))
    long = simulate(base)
    assert short.stamps.tobytes() != long.stamps.tobytes()
    assert short.max_in_flight <= long.max_in_flight


@pytest.mark.parametrize(
    ("change", "message", "more"),
    [
        ({"deduplicate": False}, "rows_bytes", True),
        ({"row_value_bytes": 2}, "rows_bytes", False),
        ({"activation_value_bytes": 4}, "activation_bytes", True),
        ({"pooled": False}, "activation_bytes", True),
    ],
)
def test_wire_forms_change_the_bytes(change: dict[str, Any], message: str, more: bool) -> None:
    plain = replace(HYBRID.workload, zipf=0.5)
    changed = replace(plain, wire=Wire(**change))
    assert (getattr(changed, message) > getattr(plain, message)) == more


def test_bytes_of_a_batch_are_the_originals() -> None:
    work = replace(HYBRID.workload, batch_per_rank=100, zipf=0.0, wire=Wire(deduplicate=False))
    ids, dim = 26 * 100, 16
    assert work.request_bytes == 16 * ids
    assert work.rows_bytes == 4 * dim * ids
    assert work.activation_bytes == 2 * dim * 26 * 100
    assert work.push_bytes == 8 * ids + 4 * dim * ids


def test_skew_makes_batches_smaller_and_servers_uneven() -> None:
    flat, steep = (replace(HYBRID.workload, zipf=z) for z in (0.0, 1.2))
    assert steep.distinct_ids < flat.distinct_ids
    raw = replace(steep, wire=Wire(deduplicate=False))
    assert raw.server_shares(30).max() > 1.3 * steep.server_shares(30).max()
    assert flat.server_shares(30).sum() == pytest.approx(1)


def test_misses_cost_the_servers_time() -> None:
    from persia_sim.model.demand import demand

    assert (demand(HYBRID, 0.5).fetch.server_s > demand(HYBRID, 0.0).fetch.server_s).all()


def test_larger_batches_and_mlps_take_longer() -> None:
    for change in (
        {"batch_per_rank": 4096},
        {"mlp": (4096, 4096, 4096, 1)},
        {"dense_features": 20_000},
    ):
        work = replace(HYBRID.workload, **change)  # type: ignore[arg-type]
        assert (
            simulate(replace(HYBRID, workload=work)).makespan_s > simulate(HYBRID).makespan_s * 1.02
        )


def test_one_rank_pays_no_all_reduce() -> None:
    one = replace(HYBRID, cluster=small_cluster(1))
    slow = with_cost(one, "dense_sync", intra_bytes_per_s=1.0, overhead_s=1.0)
    assert rate(slow) == rate(one)
