"""Closed forms: the step time of a run without queues, and bounds that hold with them.

Every constraint of a run says that an instant is not earlier than another one some steps before,
plus a delay. Without contention and noise the step time is then the largest mean delay round a
cycle of such constraints. Shared resources add bounds: demand of a step over capacity.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf

import numpy as np

from persia_sim.base.vocabulary import KNOWN_MODES, refuse_unless_carried
from persia_sim.bounds.transfers import (
    GPUS,
    SERVERS,
    WORKERS,
    Transfers,
    messages,
)
from persia_sim.cluster.allreduce import sync_delay
from persia_sim.cluster.demand import Demand, Fetch, demand
from persia_sim.cluster.scenario import DenseHome, Scenario


@dataclass(frozen=True, slots=True)
class Latencies:
    """Durations of the parts of a batch's life when it meets nobody."""

    load_s: float
    lookup_s: float
    served_s: float
    """The end of the lookup: from the window's opening, with the request at the servers."""
    copy_in_s: float
    refresh_s: float
    pull_s: float
    compute_s: float
    sync_s: float
    copy_out_s: float
    """All of it, that of fresh tables first."""
    push_s: float
    """Until the rows are updated at every server."""
    answer_s: float
    """Until the rank knows."""
    forward_s: float
    """Lookahead `forwarded`: until the gradients are at the workers; else 0."""
    exact_s: float
    """From the end of a step until the rows that are to be exact are updated at every server: all,
    or those of fresh tables."""

    @property
    def window_s(self) -> float:
        """Seconds from the start of a lookup until its push is applied."""
        return (
            self.lookup_s
            + self.copy_in_s
            + self.refresh_s
            + self.pull_s
            + self.compute_s
            + self.sync_s
            + self.copy_out_s
            + self.push_s
        )


CARRIES = KNOWN_MODES
"""The modes whose life of a batch is known here."""


def fetch_s(scenario: Scenario, transfers: Transfers, part: Fetch, waits: bool = False) -> float:
    """One pass through worker and servers, without the copy to the GPU; ``waits``: of a request
    that waits at the servers until it may be served."""
    latency = scenario.cluster.link.latency_s
    requested = 0.0 if waits else latency + part.worker_forward_s + latency
    if not waits:
        requested += transfers.fan_s(part.request_bytes)
    served = requested + (float(part.server_s.max()) + part.join_s)
    answered = served + latency + transfers.fan_s(part.rows_bytes)
    pooled = answered + part.worker_pool_s
    return pooled + latency + transfers.rank_s(part.activation_bytes)


def latencies(scenario: Scenario, need: Demand) -> Latencies:
    """Add up the life of a batch."""
    refuse_unless_carried(scenario.mode, CARRIES, "the closed form", fresh=bool(scenario.fresh))
    latency = scenario.cluster.link.latency_s
    transfers = Transfers(scenario, need)
    zero = np.zeros(1)

    # What the training loop does beside computing: all-reduce, refresh, dense pull.
    sync = 0.0
    if scenario.mode.has_barrier:
        sync = sync_delay(
            need.backward_s,
            zero,
            zero + need.backward_s,
            need.buckets,
            scenario.mode.overlaps_dense_sync,
            need.sync_overhead_s,
        )
    refresh = 0.0
    if need.forward is not None:
        refresh = need.forward.worker_s + latency + need.forward.copy_in_s
        refresh += transfers.rank_s(need.forward.activation_bytes)
    if need.refresh is not None:
        refresh = fetch_s(scenario, transfers, need.refresh) + need.refresh.copy_in_s
    pull = forward = 0.0
    if scenario.home is not None:
        pull = 2 * latency + transfers.dense_served_s() + transfers.dense_s()

    # The way of the gradients: rank, worker, servers; at each server the slowest counts.
    pushed = []
    for push in need.pushes:
        scattered = latency + transfers.rank_s(push.gradient_bytes)
        scattered = scattered + push.worker_scatter_s + latency
        if need.forward is not None:
            forward = scattered + transfers.worker_s(need.forward.exchange_bytes)
        update_s = float(push.server_update_s.max()) + push.update_join_s
        pushed.append(scattered + transfers.fan_s(push.push_bytes) + update_s)

    # The life of a batch, stage by stage.
    return Latencies(
        load_s=need.load_s + transfers.load_s() + transfers.input_s(),
        lookup_s=fetch_s(scenario, transfers, need.fetch),
        served_s=fetch_s(scenario, transfers, need.fetch, waits=True),
        copy_in_s=need.fetch.copy_in_s,
        refresh_s=refresh,
        pull_s=pull,
        compute_s=need.compute_s,
        sync_s=sync,
        copy_out_s=sum(push.copy_out_s for push in need.pushes),
        push_s=pushed[-1],
        answer_s=2 * latency,
        forward_s=forward,
        exact_s=need.pushes[0].copy_out_s + pushed[0],
    )


def cycles(scenario: Scenario, need: Demand) -> dict[str, float]:
    """Seconds a step that each cycle of constraints asks for; the largest is the step time."""
    life = latencies(scenario, need)
    queues = scenario.queues
    cluster = scenario.cluster
    train = life.refresh_s + life.pull_s + life.compute_s + life.sync_s
    averages = scenario.mode.averages_replicas and cluster.ranks > 1
    if averages:
        train = _with_rounds(train, scenario, need)

    # Cycles that every mode has: a stage's seconds over how many batches it holds.
    seconds = {
        "training loop": train,
        "copy to the GPU": life.copy_in_s,
        "copy from the GPU": life.copy_out_s,
        "lookups in flight": life.lookup_s / queues.lookups_in_flight,
        "push tasks": (life.push_s + life.answer_s) / queues.push_tasks,
        "loaders": life.load_s * cluster.ranks / cluster.loaders,
        "loaded batches": life.load_s / queues.dataset,
    }

    # A batch whose place on the GPU is reserved holds it from its lookup until it is trained.
    if queues.reserve:
        seconds["places on the GPU"] = (life.lookup_s + life.copy_in_s) / queues.on_gpu

    # Cycles of the mode: its window, its permits, its refresh. What waits at the servers is there
    # when the window opens; where rows are fresh it has set off behind the last push.
    if scenario.steps_ahead is not None:
        open_s = life.window_s
        if scenario.waits_at_servers:
            open_s += life.served_s - life.lookup_s
        if scenario.asks_in_turn:
            open_s = max(open_s, life.window_s - life.push_s)
        seconds["window"] = open_s / (scenario.steps_ahead + 1)
    if scenario.permits is not None:
        seconds["permits"] = (life.window_s + life.answer_s) / scenario.permits
    if scenario.brings_up_to_date:
        forwarded_s = life.copy_out_s + life.forward_s
        seconds["refresh"] = train + (life.exact_s if need.forward is None else forwarded_s)
    return seconds


def _with_rounds(step_s: float, scenario: Scenario, need: Demand) -> float:
    """Seconds a step with the rounds that begin before the last one, which stop every replica.

    Rounds begin at multiples of their period, so a run of a few steps may meet none.
    """
    rounds = scenario.rounds
    steps = scenario.steps
    begun = -1.0
    least_s = steps * step_s
    for _ in range(10_000):  # each turn finds the rounds of a longer run, and ever fewer
        count = max(0.0, (least_s - step_s) // rounds.period_s)
        if count == begun:
            break
        begun = count
        least_s = steps * step_s + need.averaging_s * count
    return least_s / steps


def shared(scenario: Scenario, need: Demand) -> dict[str, float]:
    """Seconds a step that each shared resource asks for, at full use and even spread."""
    cluster = scenario.cluster
    ranks = scenario.cluster.ranks
    nn = cluster.nn
    workers = cluster.embedding_workers
    servers = cluster.servers
    out: dict[str, float] = defaultdict(float)
    into: dict[str, float] = defaultdict(float)

    # Bytes that a batch sends out of and into each role's NICs.
    for sender, receiver, size in messages(scenario, need):
        out[sender] += size
        into[receiver] += size

    # Batches go to all hosts alike; of the servers the one with most of a batch decides.
    loads = np.bincount(servers.host_of, weights=need.server_shares)
    gpus: float = min(ranks, nn.processes_per_host)
    if not scenario.mode.has_barrier:  # where ranks wait for nobody a host that is not full is free
        gpus = ranks / nn.hosts
    worker_rate = workers.hosts * cluster.nic_rate(workers)
    seconds = {}
    for way, sent in ("in", into), ("out", out):
        seconds[f"GPU host NICs, {way}"] = gpus * sent[GPUS] / cluster.nic_rate(nn)
        seconds[f"worker NICs, {way}"] = ranks * sent[WORKERS] / worker_rate
        busiest = ranks * sent[SERVERS] * float(loads.max())
        seconds[f"server NICs, {way}"] = busiest / cluster.nic_rate(servers)
    return seconds if scenario.infinite_cpus else seconds | _work(scenario, need)


def _work(scenario: Scenario, need: Demand) -> dict[str, float]:
    """Seconds a step that cores and memory of workers and servers ask for."""
    cluster = scenario.cluster
    ranks = cluster.ranks
    home = scenario.home
    workers = cluster.embedding_workers
    servers = cluster.servers
    loads = np.bincount(servers.host_of, weights=need.server_shares)

    # Work at embedding workers and servers: core seconds, and bytes of memory.
    fetches = need.fetches
    forward = need.forward
    pushes = need.pushes
    work_s = sum(push.worker_scatter_s for push in pushes)
    work_s += sum(f.worker_forward_s + f.worker_pool_s for f in fetches)
    touched = sum(push.scatter_memory_bytes for push in pushes)
    touched += sum(f.forward_memory_bytes + f.pool_memory_bytes for f in fetches)
    if forward is not None:
        work_s = work_s + forward.worker_s
        touched = touched + forward.memory_bytes
    server_s = sum((push.server_update_s for push in pushes), np.zeros(len(need.server_shares)))
    server_s = server_s + sum(f.server_s for f in fetches)
    memory = sum(push.update_memory_bytes for push in pushes)
    memory += sum(f.server_memory_bytes for f in fetches)
    if home is DenseHome.SERVERS:
        server_s = server_s + 2 * need.dense_part_s
        memory += 4 * need.dense_bytes

    # What they have for it.
    cores = workers.processes * workers.cores_per_process
    seconds = {
        "worker cores": ranks * work_s / cores,
        "worker memory": ranks * touched / (workers.hosts * workers.host.memory_bytes_per_s),
        "server cores": ranks * float(server_s.max()) / servers.cores_per_process,
        "server memory": ranks * memory * float(loads.max()) / servers.host.memory_bytes_per_s,
    }

    # The dense weights' own server.
    if home is DenseHome.APART:
        seconds["dense server"] = 2 * ranks * need.dense_copy_s
    return seconds


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
    samples = scenario.batch / step if step else inf
    return Answer(step, samples, binds, seconds)
