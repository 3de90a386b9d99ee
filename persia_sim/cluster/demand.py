"""The service times and bytes of one rank's batch: the common starting point of every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from persia_sim.base.rules import require
from persia_sim.cluster.allreduce import Algorithm, Bucket, bucket_sizes
from persia_sim.cluster.costs import Law
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.validity import GPU, borrowed, extrapolated, strange
from persia_sim.cluster.workload import Workload

_FORWARD_SHARE = 1 / 3  # two of six operations a parameter


@dataclass(frozen=True, slots=True)
class Fetch:
    """One pass through worker and servers that brings rows: bytes on wires, seconds on cores."""

    worker_forward_s: float
    request_bytes: float
    server_s: np.ndarray
    """float64 [servers]: the request of each server, on one core."""
    join_s: float
    """Seconds by which the busiest server of a batch is later than that of the mean batch."""
    server_memory_bytes: float
    """Bytes of server memory moved for it, all servers together."""
    rows_bytes: float
    worker_pool_s: float
    activation_bytes: float
    copy_in_s: float

    @property
    def forward_memory_bytes(self) -> float:
        """Worker: ids are read and requests written."""
        return 2 * self.request_bytes

    @property
    def pool_memory_bytes(self) -> float:
        """Worker: rows are read and activations written."""
        return self.rows_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Forward:
    """Lookahead `forwarded`: gradients reach the workers that hold the rows, which apply them."""

    exchange_bytes: float
    """A batch's gradients of rows on lease elsewhere, from its worker to theirs."""
    worker_s: float
    """Apply them to the rows of a batch that are pending, and pool these."""
    memory_bytes: float
    """Bytes that pass the memory of the worker's host."""
    activation_bytes: float
    copy_in_s: float


@dataclass(frozen=True, slots=True)
class Push:
    """What a push of rows' gradients asks for, on its way from the rank to the servers."""

    copy_out_s: float
    gradient_bytes: float
    worker_scatter_s: float
    push_bytes: float
    server_update_s: np.ndarray
    """float64 [servers]"""
    update_join_s: float
    """Seconds as `Fetch.join_s`."""
    update_memory_bytes: float

    @property
    def scatter_memory_bytes(self) -> float:
        """Worker: gradients are read and pushes written."""
        return self.gradient_bytes + self.push_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What one rank's batch asks of every resource when nothing is shared."""

    load_s: float
    loader_bytes: float
    fetch: Fetch
    refresh: Fetch | None
    """Lookahead that reads again, and fresh tables: the second look at the rows with pending
    pushes."""
    forward: Forward | None
    """Lookahead `forwarded`: what takes its place."""
    forward_s: float
    backward_s: float
    buckets: tuple[Bucket, ...]
    sync_overhead_s: float
    push: Push
    """The push of a batch; where fresh tables have one of their own that of all others."""
    dense_copy_s: float
    """Async: one whole copy of the dense weights through one server."""
    averaging_s: float
    """async_averaging: one round of the background all-reduce."""
    dense_bytes: float
    """One copy of the dense weights or of their gradient."""
    server_shares: np.ndarray
    """float64 [servers], sum 1."""
    extrapolated: tuple[str, ...]
    """Names of measured laws used outside the range in which they were fitted."""
    borrowed: tuple[str, ...]
    """Constants that belong to other machines than the cluster's, in words."""
    strange: tuple[str, ...] = ()
    """Resources whose constants these are."""
    launching_s: float = 0.0
    """Seconds of `compute_s` that are the host's launching."""
    input_bytes: float = 0.0
    """Dense features and labels: from the loader to the rank's host, and copied to its GPU with the
    rows (`Fetch.copy_in_s` of the first look has them)."""
    fresh: Push | None = None
    """The push of fresh tables, copied from the GPU and sent before the other; None where no table
    is fresh, or none late."""

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """Every look of a batch at its rows."""
        return (self.fetch,) if self.refresh is None else (self.fetch, self.refresh)

    @property
    def pushes(self) -> tuple[Push, ...]:
        """Every push of a batch, in the order of sending."""
        return (self.push,) if self.fresh is None else (self.fresh, self.push)

    @property
    def dense_part_s(self) -> np.ndarray:
        """Async: each server's part of a copy of the dense weights, float64 [servers]."""
        parts: np.ndarray = self.dense_copy_s * self.server_shares
        return parts

    @property
    def compute_s(self) -> float:
        """Forward and backward of one rank's batch."""
        return self.forward_s + self.backward_s

    @property
    def all_reduce_s(self) -> float:
        """All buckets, one after the other."""
        return sum(bucket.seconds for bucket in self.buckets)


def demand(scenario: Scenario, miss_rate: float = 0.0) -> Demand:
    """Apply the cost laws to one rank's batch of the scenario."""
    require(0 <= miss_rate <= 1, "miss_rate", miss_rate, "must lie in [0, 1]")
    cluster = scenario.cluster
    work = scenario.workload
    costs = scenario.costs
    rank_speed = cluster.nn.host.core_speed
    inputs = work.input_bytes

    # One look at all rows; a second one at those that are to be exact and may have been written.
    fetch = _fetched(scenario, work, miss_rate)
    fresh, late = work.parted(scenario.fresh)
    if scenario.mode.prefetches_rows:
        fresh = work
    refresh = None
    forward = None
    if fresh is not None:
        share = fresh.pending_fraction(cluster.ranks * _steps_before(scenario))
        refresh = _part_of(_fetched(scenario, fresh, miss_rate), share, scenario, rank_speed)
        if scenario.lookahead == "forwarded":
            forward = _forward(refresh, share, scenario)
            refresh = None
            # A lease brings the state, too: one number a value, as Adagrad has.
            fetch = replace(fetch, rows_bytes=2 * fetch.rows_bytes)

    # Dense features are copied once, rows that are read or brought up to date again twice.
    copy_in_s = _copied_in_s(scenario, work, fetch.activation_bytes + inputs)
    fetch = replace(fetch, copy_in_s=copy_in_s)
    two = fresh is not None and late is not None and bool(scenario.fresh)
    launched_s = _launching_s(scenario)
    compute_s = _compute_s(scenario) + costs.gpu_fixed_s + launched_s
    buckets, averaging_s = _summed(scenario)
    loaded = work.batch_per_rank * work.columns, work.loader_bytes + inputs
    return Demand(
        load_s=costs.load(*loaded) / rank_speed,
        loader_bytes=work.loader_bytes,
        fetch=fetch,
        refresh=refresh,
        forward=forward,
        forward_s=compute_s * _FORWARD_SHARE,
        backward_s=compute_s * (1 - _FORWARD_SHARE),
        buckets=buckets,
        sync_overhead_s=_overhead_s(scenario) if buckets else 0.0,
        push=_pushed(scenario, late or work),
        fresh=_pushed(scenario, fresh) if two and fresh is not None else None,
        dense_copy_s=work.dense_bytes / costs.dense_server_bytes_per_s,
        averaging_s=averaging_s,
        dense_bytes=work.dense_bytes,
        server_shares=work.server_shares(cluster.servers.processes),
        extrapolated=extrapolated(scenario, [size for _, size in _messages(scenario)]),
        borrowed=borrowed(scenario),
        strange=tuple(strange(scenario)),
        launching_s=launched_s,
        input_bytes=inputs,
    )


def _copied_in_s(scenario: Scenario, rows: Workload, size_bytes: float) -> float:
    """A copy to the GPU of pooled rows."""
    costs = scenario.costs
    host = scenario.cluster.nn.host
    fixed_s = costs.copy_in(rows.sent_ids, size_bytes) / host.core_speed
    return fixed_s + size_bytes / costs.reach.bus(host.chip)


def _fetched(scenario: Scenario, rows: Workload, miss_rate: float) -> Fetch:
    """A look at all rows of a batch; a worker merges and sums every occurrence of an id."""
    costs = scenario.costs
    worker_speed = scenario.cluster.embedding_workers.host.core_speed
    server_s, join_s = _served(costs.server_lookup, scenario, rows, miss_rate)
    rpc_s = costs.worker_rpc.fixed_s * len(server_s)
    asked_s = costs.worker_forward(rows.ids_per_batch, rows.request_bytes) + rpc_s
    return Fetch(
        worker_forward_s=asked_s / worker_speed,
        request_bytes=rows.request_bytes,
        server_s=server_s,
        join_s=join_s,
        server_memory_bytes=2 * (4.0 * rows.sent_dim) * rows.sent_ids,
        rows_bytes=rows.rows_bytes,
        worker_pool_s=costs.worker_pool(rows.ids_per_batch, rows.rows_bytes) / worker_speed,
        activation_bytes=rows.activation_bytes,
        copy_in_s=_copied_in_s(scenario, rows, rows.activation_bytes),
    )


def _pushed(scenario: Scenario, rows: Workload) -> Push:
    """A push of all rows of a batch; a worker scatters to every occurrence of an id."""
    costs = scenario.costs
    host = scenario.cluster.nn.host
    activation = rows.activation_bytes
    copied_s = costs.copy_out(rows.sent_ids, activation) / host.core_speed
    update_s, update_join_s = _served(costs.server_update, scenario, rows)
    rpc_s = costs.worker_rpc.fixed_s * len(update_s)
    scatter_s = costs.worker_scatter(rows.ids_per_batch, rows.push_bytes) + rpc_s
    return Push(
        copy_out_s=copied_s + activation / costs.reach.bus(host.chip),
        gradient_bytes=activation,
        worker_scatter_s=scatter_s / scenario.cluster.embedding_workers.host.core_speed,
        push_bytes=rows.push_bytes,
        server_update_s=update_s,
        update_join_s=update_join_s,
        update_memory_bytes=4 * (4.0 * rows.sent_dim) * rows.sent_ids,
    )


def _steps_before(scenario: Scenario) -> int:
    """Steps of pushes that may come between a look at rows and their use."""
    ahead = scenario.steps_ahead
    return scenario.queues.lookups_in_flight if ahead is None else ahead


def _launching_s(scenario: Scenario) -> float:
    """What the host of a rank adds to a step of its GPU."""
    launching = scenario.costs.launching
    host = scenario.cluster.nn.host
    if launching is None or host.chip.is_host_core:
        return 0.0
    work = scenario.workload
    of_step = len(work.layer_params), scenario.cluster.ranks, work.precision
    return launching.seconds(*of_step) / host.core_speed


def _overhead_s(scenario: Scenario) -> float:
    """What an all-reduce takes beside its messages. It was fitted on the hosts of whole runs; where
    all ranks of others reach each other without a NIC, the all-reduce follows their links alone."""
    cluster = scenario.cluster
    costs = scenario.costs
    inside = cluster.ranks <= cluster.nn.near
    follows = inside and costs.machines and GPU in strange(scenario)
    return 0.0 if follows else costs.dense_sync.overhead_s


def _served(
    law: Law, scenario: Scenario, work: Workload, miss_rate: float = 0.0
) -> tuple[np.ndarray, float]:
    """Seconds of each server's request of a batch's rows, float64 [servers], and by how many the
    busiest server of a batch is later than that of the mean batch."""
    create = scenario.costs.server_create
    shares = work.server_shares(scenario.cluster.servers.processes)
    speed = scenario.cluster.servers.host.core_speed
    ids = work.sent_ids
    row = 4.0 * work.sent_dim
    created_s: np.ndarray | float = 0.0  # nothing is missing: not even the fixed part is paid
    if miss_rate:
        missing = ids * miss_rate * shares
        created_s = create.fixed_s + (create.per_item_s + create.per_byte_s * row) * missing
    whole_s = law.fixed_s + law.per_item_s * ids * shares + law.per_byte_s * ids * row * shares
    each_s = law.per_item_s + law.per_byte_s * row
    each_s += miss_rate * (create.per_item_s + create.per_byte_s * row)
    extra = work.busiest_extra(len(shares))
    return (whole_s + created_s) / speed, extra * each_s / speed


def _forward(refresh: Fetch, share: float, scenario: Scenario) -> Forward:
    """What keeps a share of a batch's rows up to date, in place of a second look at them."""
    work = scenario.workload
    update = scenario.costs.server_update
    workers = scenario.cluster.embedding_workers
    row = 4.0 * work.sent_dim
    each_s = update.per_item_s + update.per_byte_s * row
    applied_s = each_s * work.sent_ids * share / workers.host.core_speed
    return Forward(
        exchange_bytes=work.push_bytes * share if workers.hosts > 1 else 0.0,
        worker_s=refresh.worker_pool_s + applied_s,
        memory_bytes=refresh.pool_memory_bytes + 4 * row * work.sent_ids * share,
        activation_bytes=refresh.activation_bytes,
        copy_in_s=refresh.copy_in_s,
    )


def _compute_s(scenario: Scenario) -> float:
    """Multiplications of a batch at the GPU's rate, and its activations at its memory's."""
    work = scenario.workload
    costs = scenario.costs
    reach = scenario.costs.reach
    gpu = scenario.cluster.gpu
    precision = gpu.arithmetic(work.precision)
    rate = costs.efficiency(work.batch_per_rank, precision) * gpu.peak_flops(precision)
    moved = work.batch_per_rank * work.widths * work.precision.value_bytes
    moved_s = moved * reach.activation_passes / (gpu.hbm_bytes_per_s * reach.hbm)
    return work.batch_per_rank * work.flops_per_sample / rate + moved_s


def _messages(scenario: Scenario) -> list[tuple[float, float]]:
    """The gradient's buckets, (share of the backward pass, bytes); none where no step sums it."""
    work = scenario.workload
    mode = scenario.mode
    if scenario.cluster.ranks == 1 or not mode.has_barrier:
        return []
    if not mode.overlaps_dense_sync:
        return [(1.0, work.dense_gradient_bytes)]
    plan = bucket_sizes(work.layer_params, scenario.costs.dense_sync.bucket_bytes)
    return [(share, size * work.precision.value_bytes / 4) for share, size in plan]


def _summed(scenario: Scenario) -> tuple[tuple[Bucket, ...], float]:
    """A step's buckets, and seconds of a round of averaging."""
    # How ranks lie on hosts decides how fast they sum.
    cluster = scenario.cluster
    work = scenario.workload
    costs = scenario.costs
    nn = cluster.nn
    where = cluster.ranks, nn.near
    sync = costs.dense_sync.on([nn.host], costs.reach, cluster.link.latency_s)
    if sync.algorithm is Algorithm.HIERARCHICAL:  # all NICs of an NVLink domain carry its part
        together = nn.near / nn.processes_per_host
        sync = replace(sync, inter_bytes_per_s=together * (sync.inter_bytes_per_s or inf))

    # Bucket by bucket, as the backward pass gives them.
    buckets = tuple(
        Bucket(share, sync.seconds(size, *where)) for share, size in _messages(scenario)
    )

    # A round of averaging, which must be over before the next one begins.
    averaging_s = 0.0
    if cluster.ranks > 1:
        averaging_s = sync.seconds(work.dense_bytes, *where) + sync.overhead_s
    rounds = scenario.rounds
    require(
        not scenario.mode.averages_replicas or averaging_s < rounds.period_s,
        "averaging.period_s",
        rounds.period_s,
        f"a round takes {averaging_s:.3g} s, so the replicas would be locked for ever",
        "use a longer period",
    )
    return buckets, averaging_s


def _part_of(fetch: Fetch, share: float, scenario: Scenario, rank_speed: float) -> Fetch:
    """A fetch of a share of the rows: fixed parts stay, the rest shrinks. ``rank_speed``: of a core
    of the rank's host."""
    costs = scenario.costs
    cluster = scenario.cluster
    servers = len(fetch.server_s)

    def part(whole: float, fixed: float) -> float:
        return fixed + (whole - fixed) * share

    # Fixed parts, which do not shrink: a call at the worker, one at each server.
    worker_speed = cluster.embedding_workers.host.core_speed
    rpc_s = costs.worker_rpc.fixed_s * servers
    server_fixed = costs.server_lookup.fixed_s / cluster.servers.host.core_speed
    forward_s = (costs.worker_forward.fixed_s + rpc_s) / worker_speed

    # All else in proportion to the share.
    return replace(
        fetch,
        worker_forward_s=part(fetch.worker_forward_s, forward_s),
        request_bytes=fetch.request_bytes * share,
        server_s=server_fixed + (fetch.server_s - server_fixed) * share,
        join_s=fetch.join_s * share,
        server_memory_bytes=fetch.server_memory_bytes * share,
        rows_bytes=fetch.rows_bytes * share,
        activation_bytes=fetch.activation_bytes * share,
        worker_pool_s=part(fetch.worker_pool_s, costs.worker_pool.fixed_s / worker_speed),
        copy_in_s=part(fetch.copy_in_s, costs.copy_in.fixed_s / rank_speed),
    )


def loader_start_s(loader: int, scenario: Scenario, load_s: float) -> float:
    """When a loader begins: those with work start evenly over one batch time, in batch order."""
    used = min(scenario.cluster.loaders, scenario.cluster.ranks * scenario.steps)
    return load_s * (loader % used) / used
