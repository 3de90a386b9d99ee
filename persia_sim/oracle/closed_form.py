"""Closed forms: the step time of a run without queues, and bounds that hold with them.

Every constraint of a run says that an instant is not earlier than another one some steps before,
plus a delay. Without contention and noise the step time is then the largest mean delay round a
cycle of such constraints. Shared resources add bounds: demand of a step over capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from persia_sim.model.allreduce import sync_delay
from persia_sim.model.demand import Demand, Fetch, demand
from persia_sim.model.placement import placement
from persia_sim.model.scenario import DenseHome, Scenario
from persia_sim.oracle.transfers import Transfers
from persia_sim.oracle.uplinks import rack_pairs, uplink_bytes
from persia_sim.words.vocabulary import Mode


@dataclass(frozen=True, slots=True)
class Latencies:
    """Durations of the parts of a batch's life when it meets nobody."""

    load_s: float
    lookup_s: float
    copy_in_s: float
    refresh_s: float
    pull_s: float
    compute_s: float
    sync_s: float
    copy_out_s: float
    push_s: float
    """Until the rows are updated at every server."""
    answer_s: float
    """Until the rank knows."""
    forward_s: float
    """Lookahead `forwarded`: until the gradients are at the workers; else 0."""

    @property
    def window_s(self) -> float:
        """From the start of a lookup until its push is applied."""
        return (
            self.lookup_s + self.copy_in_s + self.refresh_s + self.pull_s + self.compute_s
            + self.sync_s + self.copy_out_s + self.push_s
        )  # fmt: skip


def fetch_s(scenario: Scenario, transfers: Transfers, part: Fetch) -> float:
    """One pass through worker and servers, without the copy to the GPU."""
    latency = scenario.cluster.link.latency_s
    asked = latency + part.worker_forward_s + latency
    answered = max(
        asked
        + transfers.fan_s(part.request_bytes, group)
        + (float(part.server_s[group.processes].max()) + part.join_s)
        + latency
        + transfers.fan_s(part.rows_bytes, group)
        for group in transfers.groups
    )
    return answered + part.worker_pool_s + latency + transfers.rank_s(part.activation_bytes)


def latencies(
    scenario: Scenario, need: Demand, rank_rack: int = 0, worker_rack: int = 0
) -> Latencies:
    """Add up the life of a batch whose rank and whose embedding worker are in these racks."""
    latency = scenario.cluster.link.latency_s
    transfers = Transfers(scenario, need, rank_rack, worker_rack)
    zero = np.zeros(1)
    sync = 0.0
    if scenario.mode.has_barrier:
        sync = sync_delay(
            need.backward_s, zero, zero + need.backward_s, need.buckets,
            scenario.mode.overlaps_dense_sync, need.sync_overhead_s,
        )  # fmt: skip
    refresh = 0.0
    if need.forward is not None:
        refresh = need.forward.worker_s + latency + need.forward.copy_in_s
        refresh += transfers.rank_s(need.forward.activation_bytes)
    if need.refresh is not None:
        refresh = fetch_s(scenario, transfers, need.refresh) + need.refresh.copy_in_s
    forward = 0.0
    if need.forward is not None:
        forward = latency + transfers.rank_s(need.gradient_bytes) + need.worker_scatter_s + latency
        forward += transfers.worker_s(need.forward.exchange_bytes)
    pull = 0.0
    if scenario.home is not None:
        pull = 2 * latency + transfers.dense_served_s() + transfers.dense_s()
    scattered = latency + transfers.rank_s(need.gradient_bytes) + need.worker_scatter_s + latency
    push = max(
        scattered
        + transfers.fan_s(need.push_bytes, group)
        + (float(need.server_update_s[group.processes].max()) + need.update_join_s)
        for group in transfers.groups
    )
    return Latencies(
        load_s=need.load_s + transfers.load_s() + transfers.input_s(),
        lookup_s=fetch_s(scenario, transfers, need.fetch),
        copy_in_s=need.fetch.copy_in_s,
        refresh_s=refresh,
        pull_s=pull,
        compute_s=need.compute_s,
        sync_s=sync,
        copy_out_s=need.copy_out_s,
        push_s=push,
        answer_s=2 * latency,
        forward_s=forward,
    )


def cycles(scenario: Scenario, need: Demand) -> dict[str, float]:
    """Seconds a step that each cycle of constraints asks for; the largest is the step time.

    With racks a bound: of each rank by the worker that is best placed for it. Where ranks share a
    step the slowest counts, where they do not their rates add up.
    """
    ranks, found = [], []
    for (rank_rack, worker_racks), count in rack_pairs(scenario).items():
        ways = [_cycles(scenario, need, rank_rack, rack) for rack in worker_racks]
        found.append({name: min(way[name] for way in ways) for name in ways[0]})
        ranks.append(count)
    if len(found) == 1:
        return found[0]
    if scenario.mode.has_barrier:
        return {name: max(each[name] for each in found) for name in found[0]}
    return {
        name: sum(ranks)
        / sum(n / each[name] if each[name] else inf for n, each in zip(ranks, found, strict=True))
        for name in found[0]
    }


def _cycles(scenario: Scenario, need: Demand, rank_rack: int, worker_rack: int) -> dict[str, float]:
    life = latencies(scenario, need, rank_rack, worker_rack)
    queues, cluster = scenario.queues, scenario.cluster
    train = life.refresh_s + life.pull_s + life.compute_s + life.sync_s
    if scenario.mode is Mode.ASYNC_AVERAGING and cluster.ranks > 1:
        train = _with_rounds(train, scenario, need)
    found = {
        "training loop": train,
        "copy to the GPU": life.copy_in_s,
        "copy from the GPU": life.copy_out_s,
        "lookup tasks": life.lookup_s / queues.lookup_tasks,
        "push tasks": (life.push_s + life.answer_s) / queues.push_tasks,
        "loaders": life.load_s * cluster.ranks / cluster.loaders,
        "loaded batches": life.load_s / queues.dataset,
    }
    if scenario.window is not None:
        found["window"] = life.window_s / (scenario.window + 1)
    if scenario.permits is not None:
        found["permits"] = (life.window_s + life.answer_s) / scenario.permits
    if scenario.mode is Mode.LOOKAHEAD:
        there_s = life.push_s if need.forward is None else life.forward_s
        found["refresh"] = train + life.copy_out_s + there_s
    return found


def _with_rounds(step_s: float, scenario: Scenario, need: Demand) -> float:
    """Seconds a step with the rounds that begin before the last one, which stop every replica.

    Rounds begin at multiples of their period, so a run of a few steps may meet none.
    """
    rounds, steps = scenario.rounds, scenario.steps
    every_s = max(rounds.period_s, need.averaging_s)
    stall_s = rounds.stall_share * need.averaging_s
    begun, least_s = -1.0, steps * step_s
    for _ in range(10_000):  # each turn finds the rounds of a longer run, and ever fewer
        found = max(0.0, (least_s - step_s) // every_s)
        if found == begun:
            break
        begun, least_s = found, steps * step_s + stall_s * found
    return least_s / steps


def shared(scenario: Scenario, need: Demand) -> dict[str, float]:
    """Seconds a step that each shared resource asks for, at full use and even spread."""
    cluster = scenario.cluster
    ranks = cluster.ranks
    rank_rate, worker_rate, server_rate = cluster.nic_payload_bytes_per_s
    shares = need.server_shares
    per_host = np.bincount(
        np.arange(len(shares)) // cluster.servers.processes_per_host, weights=shares
    )
    busiest = float(per_host.max())
    fetches = [need.fetch] + ([need.refresh] if need.refresh is not None else [])
    request = sum(f.request_bytes for f in fetches)
    rows = sum(f.rows_bytes for f in fetches)
    activation = sum(f.activation_bytes for f in fetches)
    exchanged, forward_s, forward_memory = 0.0, 0.0, 0.0
    if need.forward is not None:
        activation += need.forward.activation_bytes
        exchanged, forward_s = need.forward.exchange_bytes, need.forward.worker_s
        forward_memory = need.forward.memory_bytes
    workers = cluster.embedding_workers
    worker_hosts = workers.hosts * worker_rate
    on_host = min(ranks, cluster.nn.processes_per_host)
    found = {
        "GPU host NICs, in": on_host * (activation + need.input_bytes) / rank_rate,
        "GPU host NICs, out": on_host * need.gradient_bytes / rank_rate,
        "worker NICs, out": ranks
        * (request + need.push_bytes + activation + exchanged)
        / worker_hosts,
        "worker NICs, in": ranks
        * (need.loader_bytes + rows + need.gradient_bytes + exchanged)
        / worker_hosts,
        "server NICs, in": ranks * (request + need.push_bytes) * busiest / server_rate,
        "server NICs, out": ranks * rows * busiest / server_rate,
    }
    if scenario.dense_on_nics:
        dense = sum(bucket.nic_bytes for bucket in need.buckets)
        found["GPU host NICs, in"] += dense / rank_rate
        found["GPU host NICs, out"] += dense / rank_rate
    home = scenario.home
    if home in (DenseHome.SERVERS, DenseHome.ONE):
        found["GPU host NICs, in"] += on_host * need.dense_bytes / rank_rate
        found["GPU host NICs, out"] += on_host * need.dense_bytes / rank_rate
        if home is DenseHome.SERVERS:
            found["server NICs, in"] += ranks * need.dense_bytes * busiest / server_rate
            found["server NICs, out"] += ranks * need.dense_bytes * busiest / server_rate
        else:
            found["dense server's NIC"] = ranks * need.dense_bytes / server_rate
    uplinks = placement(cluster).uplinks
    if uplinks:
        carried = uplink_bytes(scenario, need)
        found |= {
            f"uplinks, {way}": max(
                carried[f"uplink {rack} {way}"] / scenario.steps / rate
                for rack, rate in enumerate(uplinks)
            )
            for way in ("out", "in")
        }
    if scenario.infinite_cpus:
        return found
    work_s = need.worker_scatter_s + sum(f.worker_forward_s + f.worker_pool_s for f in fetches)
    server_s = need.server_update_s + sum(f.server_s for f in fetches)
    memory = need.update_memory_bytes + sum(f.server_memory_bytes for f in fetches)
    if home is DenseHome.SERVERS:
        server_s = server_s + 2 * need.dense_part_s
        memory += 4 * need.dense_bytes
    work_s += forward_s
    touched = need.scatter_memory_bytes + forward_memory
    touched += sum(f.forward_memory_bytes + f.pool_memory_bytes for f in fetches)
    worker_memory = workers.hosts * workers.host.memory_bytes_per_s
    found |= {
        "worker cores": ranks * work_s / (workers.processes * workers.cores_per_process),
        "worker memory": ranks * touched / worker_memory,
        "server cores": ranks * float(np.max(server_s)) / cluster.servers.cores_per_process,
        "server memory": ranks * memory * busiest / cluster.servers.host.memory_bytes_per_s,
    }
    if home in (DenseHome.ONE, DenseHome.APART):
        found["dense server"] = 2 * ranks * need.dense_copy_s
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """The instant first answer."""

    step_s: float
    samples_per_s: float
    binds: str
    seconds: dict[str, float]
    """Step time that each constraint alone would allow."""


def answer(scenario: Scenario, need: Demand | None = None, drawn: Demand | None = None) -> Answer:
    """Upper bound on throughput; exact when nothing is shared or random.

    ``drawn``: the demand with the times that some steps of a run have drawn, to bound those steps.
    """
    need = need or demand(scenario)
    seconds = cycles(scenario, drawn or need)
    if scenario.discipline != "unshared":
        seconds |= shared(scenario, need)
    binds = max(seconds, key=lambda name: seconds[name])
    step = seconds[binds]
    samples = scenario.batch / step
    return Answer(step, samples, binds, seconds)
