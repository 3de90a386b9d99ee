"""What ten per cent more of a resource gives: a known number where it binds, nothing elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from persia_sim.insight.sensitivity import RESOURCES, choices, gains
from persia_sim.model.scenario import Noise, Queues, Scenario
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.hand_world import hand_costs, hand_scenario, law
from tests.persia_sim.sim_configurations import small_scenario


def sensitivity(scenario: Scenario, miss_rate: float = 0.0) -> dict[str, float]:
    return {name: gain.mean for name, gain in gains(scenario, miss_rate).items()}


def test_in_sync_every_resource_gives_its_own_share_of_the_step() -> None:
    """Two ranks, 113 s a step: what takes x of it saves x / 11 when 1.1 times as fast."""
    seconds = {
        "GPU": 12.0,
        "all-reduce": 9.0,
        "loaders": 0.0,  # batches are there in time
        "embedding workers' cores": 2 + 6 + 7,
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
        ("rank's copies", {"copy_out": law(5e4)}),
        ("embedding workers' cores", {"worker_scatter": law(5e5)}),
        ("embedding workers' cores", {"worker_forward": law(per_item_s=2e5)}),
        ("embedding workers' cores", {"worker_pool": law(per_byte_s=1e4)}),
        ("embedding workers' cores", {"worker_pool": law(5e5)}),
        ("servers' cores", {"server_lookup": law(5e5)}),
        ("servers' cores", {"server_update": law(5e5)}),
    ],
)
def test_a_stage_that_binds_gives_ten_per_cent_and_all_others_nothing(
    resource: str, costs: dict[str, Any]
) -> None:
    one_by_one = Queues(lookup_tasks=1, push_tasks=1, backward=1, copied_back=1)  # no bursts
    base = hand_scenario(Mode.RAW_HYBRID, steps=20, costs=hand_costs(**costs), queues=one_by_one)
    found = sensitivity(base)
    assert found.pop(resource) == pytest.approx(0.1, abs=2e-4)
    assert all(abs(gain) < 2e-4 for gain in found.values()), found


def test_a_card_that_binds_gives_ten_per_cent() -> None:
    """One role's NIC so slow that a step of sync is its messages and nothing else."""
    for role, name in (
        ("nn", "GPU hosts' NICs"), ("embedding_workers", "worker hosts' NICs"),
        ("servers", "server hosts' NICs"),
    ):  # fmt: skip
        base = hand_scenario(Mode.SYNC, steps=12)
        part = getattr(base.cluster, role)
        slow = replace(part, host=replace(part.host, nic_bytes_per_s=1e-3))
        found = sensitivity(replace(base, cluster=replace(base.cluster, **{role: slow})))
        assert found.pop(name) == pytest.approx(0.1, abs=2e-4), role
        assert all(abs(gain) < 2e-4 for gain in found.values()), (role, found)


def test_memory_dense_server_bus_and_latency_can_bind() -> None:
    busy = hand_scenario(Mode.RAW_HYBRID, steps=30, infinite_cpus=False)
    host = replace(busy.cluster.servers.host, memory_bytes_per_s=0.01)
    servers = replace(busy.cluster.servers, host=host)
    found = sensitivity(replace(busy, cluster=replace(busy.cluster, servers=servers)))
    assert found.pop("servers' memory") == pytest.approx(0.1, abs=2e-3)
    assert all(abs(gain) < 2e-3 for gain in found.values()), found

    slow = hand_costs(dense_server_bytes_per_s=904 / 2e4)
    found = sensitivity(hand_scenario(Mode.ASYNC, steps=20, costs=slow))
    assert found["dense server"] == pytest.approx(0.1, abs=1e-3) and found["GPU"] < 1e-3

    bus = hand_scenario(Mode.RAW_HYBRID, steps=20)
    found = sensitivity(replace(bus, cluster=bus.cluster.with_gpu(pcie_bytes_per_s=192 / 2e4)))
    assert found["rank's copies"] == pytest.approx(0.1, abs=1e-3) and found["GPU"] == 0

    far = hand_scenario(Mode.SYNC, steps=12)
    link = replace(far.cluster.link, latency_s=1e5)
    found = sensitivity(replace(far, cluster=replace(far.cluster, link=link)))
    assert found["latency"] == pytest.approx(0.1, abs=1e-3)


def test_each_constant_of_the_all_reduce_counts() -> None:
    """Overhead, hops and rate are three parts of its time: where one is all, it gives all."""
    for change in ({"overhead_s": 1e5}, {"inter_latency_s": 1e5}, {"inter_bytes_per_s": 0.01}):
        base = hand_scenario(Mode.RAW_HYBRID, ranks=2, steps=20)
        sync = replace(base.costs.dense_sync, **change)  # type: ignore[arg-type]
        found = sensitivity(replace(base, costs=replace(base.costs, dense_sync=sync)))
        assert found["all-reduce"] == pytest.approx(0.1, abs=1e-3), change
    one_host = replace(base.cluster, nn=replace(
        base.cluster.nn, hosts=1, processes_per_host=2
    ))  # fmt: skip
    sync = replace(base.costs.dense_sync, intra_bytes_per_s=0.01)
    slow = replace(base, cluster=one_host, costs=replace(base.costs, dense_sync=sync))
    assert sensitivity(slow)["all-reduce"] == pytest.approx(0.1, abs=1e-3)


def test_the_peak_rate_of_the_gpu_counts() -> None:
    base = hand_scenario(Mode.RAW_HYBRID, steps=20)
    slow = base.cluster.with_gpu(fp32_flops=5424 / 2e4)  # 2e4 s a step
    assert sensitivity(replace(base, cluster=slow))["GPU"] == pytest.approx(0.1, abs=1e-3)


def test_rows_that_miss_are_part_of_the_servers_work() -> None:
    """Every row misses and costs 1,000 s to create: then servers bind, and without misses not."""
    costs = hand_costs(server_create=law(per_item_s=1e5), gpu_fixed_s=500.0)
    base = hand_scenario(Mode.RAW_HYBRID, steps=20, costs=costs, queues=Queues(lookup_tasks=1))
    assert sensitivity(base, 1.0)["servers' cores"] == pytest.approx(0.1, abs=1e-3)
    assert sensitivity(base)["servers' cores"] == pytest.approx(0, abs=1e-6)


def test_a_faster_resource_that_nobody_waits_for_has_no_effect_beyond_its_interval() -> None:
    """Common random draws: noise of the rate is not noise of the difference."""
    noisy = small_scenario(Mode.SYNC, steps=80, noise=Noise(gpu_cv=0.3))
    found = gains(noisy, changes={name: RESOURCES[name] for name in ("loaders", "GPU")})
    assert abs(found["loaders"].mean) <= max(found["loaders"].half_width, 1e-9)
    assert found["GPU"].mean - found["GPU"].half_width > 0


def test_twice_the_window_helps_where_one_core_serves_a_batch() -> None:
    """A lookup of 1,000 s and a core to spare: more hosts give nothing, a wider window does."""
    costs = hand_costs(worker_pool=law(2000.0), load=law(0.0))
    base = hand_scenario(Mode.RAW_HYBRID, steps=40, costs=costs, tau=1)
    found = gains(base, changes=choices(base))
    assert found["worker hosts"].mean == pytest.approx(0, abs=1e-6)
    assert found["tau"].mean > 0.3
    assert {"tau", "worker hosts", "server hosts", "loaders", "batch"} == set(found)
