"""Seconds of every stage of one GPU-sharded step, from bytes and multiplications.

The slowest GPU counts: an exchange ends when the last one has sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np

from persia_sim.base.popularity import lru_miss_rate
from persia_sim.base.rules import require
from persia_sim.base.schema import hold_choices
from persia_sim.cluster.allreduce import allreduce_s, exchange_s, gather_s
from persia_sim.cluster.costs import CASTS
from persia_sim.cluster.machine import Precision, Reach, System
from persia_sim.cluster.tables import RowUpdate, Storage
from persia_sim.sharded.plan import (
    HostTime,
    Keys,
    Pipeline,
    Plan,
    Software,
    Strategy,
    make_plan,
)
from persia_sim.sharded.ranker import Ranker

_USUAL_HBM = 900e9
_MEMORY = 0.5
"""A V100's memory, and the power of another's bandwidth over it by which the chain of replayed
kernels shortens: some of them wait for bytes, others for latencies."""
_ID_BYTES = 8
_DENSE_STATE_BYTES = 16
"""Bytes of a weight of the dense network: float32 weight, gradient and Adam's two moments."""
WORKSPACE_BYTES = 2e9
"""CUDA's context, buffers of collectives and libraries, what the allocator cannot use. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One question: a model on a system with some software."""

    ranker: Ranker
    system: System
    software: Software
    reach: Reach
    batch: int
    """Samples of a step over all GPUs, >= 1."""
    precision: Precision = Precision.FP16
    """The arithmetic of the dense network."""
    reads_files: bool = True
    """Batches come from files; else they are on the GPUs before."""
    wire_bytes: int | None = None
    """Bytes of a pooled number that travels; None: as activations."""

    def __post_init__(self) -> None:
        hold_choices(self)
        require(self.batch >= 1, "batch", self.batch, "must be >= 1")
        ok = self.wire_bytes in (None, 2, 4)
        require(ok, "wire_bytes", self.wire_bytes, "must be 2 or 4")

    @property
    def per_gpu(self) -> float:
        """Samples of a step on one GPU."""
        return self.batch / self.system.gpus

    @property
    def in_machine(self) -> int:
        """GPUs of a machine, as far as it has any."""
        return min(self.system.host.gpus, self.system.gpus)

    @property
    def arithmetic(self) -> Precision:
        """What its GPUs multiply in."""
        return self.system.host.chip.arithmetic(self.precision)

    @property
    def gemm_share(self) -> float:
        """Share of the GPU's peak that its multiplications reach, at most 1, however well they are
        tuned."""
        return min(1.0, self.reach.gemm(self.arithmetic) * self.software.tuned)

    @property
    def host_time(self) -> HostTime:
        """What becomes of the host's launching."""
        soft = self.software
        across = self.system.nodes > 1 and soft.host_time_across
        rule = across or soft.host_time
        waits = soft.pipeline is Pipeline.BASE and rule is HostTime.PARTLY
        return HostTime.EXPOSED if waits else rule

    @property
    def gathers(self) -> bool:
        """Gradients of rows that every GPU has a copy of are gathered from all, not summed."""
        return self.software.sparse_gradients and self.ranker.update is not RowUpdate.DENSE_ADAM

    @property
    def plan(self) -> Plan:
        """Where the tables are."""
        soft = self.software
        return make_plan(
            self.ranker,
            self.system.gpus,
            soft.strategy,
            replicate_rows=soft.replicate_rows,
            hot_rows=soft.hot_rows,
            id_elements=soft.planned_id_bytes / 4.0,
            room_bytes=self.system.host.chip.hbm_bytes - self.beside_rows_bytes,
        )

    @property
    def host_rows_bytes(self) -> float:
        """Memory of the fullest machine for rows; its GPUs have as many as all others."""
        return self.ranker.host_bytes * self.in_machine / self.system.gpus

    @property
    def beside_rows_bytes(self) -> float:
        """Memory of a GPU that holds no rows: the dense network with gradient and Adam's state,
        activations (a gradient takes the place of what it was made from), pooled rows that are
        exchanged and their gradients, and a workspace."""
        value = self.precision.value_bytes
        copy = value if self.precision is Precision.FP16 else 0  # beside the float32 weights
        dense = (_DENSE_STATE_BYTES + copy) * self.ranker.dense_params
        activations = self.per_gpu * self.ranker.widths * value
        exchanged = 2.0 * self.per_gpu * self.ranker.pooled * (self.wire_bytes or value)
        exchanged *= self.system.gpus > 1
        return dense + activations + exchanged + WORKSPACE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """One batch on the busiest GPU; each in seconds."""

    input_s: float
    """Copy of the batch to the GPU and exchange of its keys."""
    keys_s: float = 0.0
    """Seconds of it for the exchange of the keys, all to all."""
    miss_s: float
    """Rows that are read over the bus to the host."""
    lookup_s: float
    exchange_s: float
    """Pooled rows to the samples' own GPUs; their gradients take as long back."""
    forward_s: float
    backward_s: float
    update_s: float
    allreduce_s: float
    """Gradients of the dense network and of copied rows: summed, or gathered from all."""
    copied_s: float = 0.0
    """Seconds of it for copied rows: the backward pass makes them last, and the update waits."""
    gpu_s: float
    """Chain of small kernels, whatever the batch."""
    host_s: float
    """Launching all of it."""

    @property
    def dense_s(self) -> float:
        """Forward and backward of the dense network."""
        return self.forward_s + self.backward_s


def stages(job: Job) -> Stages:
    """Apply the laws to one batch."""
    ranker = job.ranker
    system = job.system
    soft = job.software
    reach = job.reach
    b = job.per_gpu
    gpu = system.host.chip
    plan = job.plan
    gpus = system.gpus
    value = job.precision.value_bytes
    wire = job.wire_bytes or value
    hbm = gpu.hbm_bytes_per_s * reach.hbm
    away = (gpus - 1) / gpus

    # Rows of the busiest GPU: reading them, sending what they pool to, and updating them. One that
    # reads less than others may send more, and then it sends while they still read.
    ids = plan.sharded.ids * job.batch + plan.local_ids * b
    row_bytes = 4.0 * (plan.sharded.elements * job.batch + plan.local_elements * b)
    pooled_bytes = wire * (plan.sharded.sent * job.batch + plan.local_elements * b)
    read_s = (row_bytes + pooled_bytes) / hbm + soft.id_s * ids
    sent, who = np.unique(plan.sharded.sent * job.batch * wire, return_inverse=True)
    if plan.partial_sums:
        sent_s = np.array([gather_s(system, reach, each / gpus) for each in sent.tolist()])[who]
    else:
        sent_s = np.array([exchange_s(system, reach, each * away) for each in sent.tolist()])[who]
    updated_s = updates_s(job)
    busiest = int(np.argmax(read_s + 2.0 * soft.exposed * sent_s + updated_s))

    # The batch reaches the GPUs: over the bus, then keys to where their rows are.
    arrival, keys_s = arrival_s(job)

    # The dense network: multiplications, and activations that cross the GPU's memory.
    moved = value * reach.activation_passes + 4.0 * soft.unfused_passes
    moved *= b * ranker.widths / hbm
    flops = 6.0 * ranker.dense_macs * b
    dense = flops / (gpu.peak_flops(job.arithmetic) * job.gemm_share) + moved

    # Gradients of what every GPU has: summed, or gathered from all.
    summed_s = allreduce_s(system, reach, value * ranker.dense_params)
    if job.gathers and plan.local_ids:
        lines = _ID_BYTES * plan.local_ids + value * plan.local_elements
        copied_s = gather_s(system, reach, b * lines)
    else:  # in one message
        more = value * (ranker.dense_params + plan.replicated_values)
        copied_s = allreduce_s(system, reach, more) - summed_s
    return Stages(
        input_s=arrival * job.reads_files + keys_s,
        keys_s=keys_s,
        miss_s=misses_s(job),
        lookup_s=float(read_s[busiest]),
        exchange_s=float(sent_s[busiest]),
        update_s=float(updated_s[busiest]),
        forward_s=dense / 3.0,
        backward_s=dense * 2.0 / 3.0,
        allreduce_s=summed_s + copied_s,
        copied_s=copied_s,
        gpu_s=chain_s(job),
        host_s=host_s(job),
    )


def arrival_s(job: Job) -> tuple[float, float]:
    """Seconds of a batch on its way to the GPUs, over the bus; and of its keys between them."""
    ranker = job.ranker
    system = job.system
    soft = job.software
    reach = job.reach
    plan = job.plan
    gpus = system.gpus
    local = job.in_machine
    b = job.per_gpu
    dense = 4.0 * b * ranker.dense_features
    keys = b * ranker.ids * _ID_BYTES
    over_bus = reach.copies(system.host, local)

    # Those of the GPU's own rows, and an offset of each vector: nothing is left to exchange.
    shard = plan.sharded
    if soft.keys is Keys.DEALT:
        mine = job.batch * float((shard.ids + shard.vectors).max()) + b * plan.local_ids
        return (dense + _ID_BYTES * mine) / over_bus, 0.0

    # All of them from one GPU, to which they came alone: each of the others takes all.
    if soft.keys is Keys.TO_ALL:
        whole = job.batch * (ranker.ids + ranker.features) * _ID_BYTES
        alone = whole / reach.copies(system.host, 1)
        return dense / over_bus + alone, whole * (local - 1) / reach.from_one(system.host, local)

    # Of rows that every GPU has none travel; those of a table in columns, to each of them.
    arrival = (dense + keys) / over_bus
    keys -= b * plan.local_ids * _ID_BYTES
    if soft.strategy is Strategy.COLUMN:  # every GPU needs all ids
        return arrival, gather_s(system, reach, keys)
    return arrival, exchange_s(system, reach, keys * (gpus - 1) / gpus)


def kernels(job: Job, tables: bool = True) -> float:
    """Kernels that a GPU runs in a step: of the dense network, and of its ``tables``."""
    ranker = job.ranker
    soft = job.software
    casts = soft.casts and job.precision is Precision.FP16
    layers = ranker.layers * soft.layer_kernels * (CASTS if casts else 1.0)
    lookups = ranker.table_widths if soft.fused_tables else ranker.table_count
    return layers + lookups * soft.table_kernels * tables


def replayed(job: Job, tables: bool = True) -> float:
    """How many of them belong to graphs; the others are launched one by one."""
    if job.software.host_time is HostTime.HIDDEN:
        return kernels(job, tables)
    return kernels(job, tables=False) * job.software.layers_replayed


def chain_s(job: Job, tables: bool = True) -> float:
    """Seconds in which the GPU replays a step's graphs, however small the batch; 0 without one."""
    memory = _USUAL_HBM / job.system.host.chip.hbm_bytes_per_s
    return float(replayed(job, tables) * job.software.replay_s * memory**_MEMORY)


def host_s(job: Job, tables: bool = True) -> float:
    """Seconds of the host for a step: launching the kernels of the dense network and of its
    ``tables``, and what it does once."""
    soft = job.software
    launched = kernels(job, tables) - replayed(job, tables)
    if soft.tables_by_one_thread and launched:  # for each of the machine's other GPUs, too
        of_tables = kernels(job, tables) - kernels(job, tables=False)
        launched += of_tables * (job.in_machine - 1)
    launched_s = soft.launch_s * launched
    once_s = soft.host_s + _collectives_s(job, tables)
    return (once_s + launched_s) / job.system.host.core_speed


def collectives_s(job: Job) -> float:
    """Seconds of `host_s` for collectives: the host waits for the sizes of keys before it can ask
    for the keys, and calls what sums gradients. 0 on one GPU."""
    return _collectives_s(job, True) / job.system.host.core_speed


def _collectives_s(job: Job, tables: bool) -> float:
    soft = job.software
    if job.system.gpus == 1:
        return 0.0
    exchanges = tables and soft.strategy is not Strategy.DATA_PARALLEL
    return soft.host_multi_s + soft.host_exchange_s * exchanges


def updates_s(job: Job) -> np.ndarray:
    """Seconds of the rows' update on each GPU, float64 [gpus].

    A sparse gradient is a line for each id: sorted, read, its row with state read and written. A
    dense one is as large as its table: zeroed, each id's line added, then read while every value is
    read and written with its state. Sparse gradients of copies come from all GPUs to each. Where
    one thread launches for all GPUs of a machine, these sort one after the other.
    """
    soft = job.software
    plan = job.plan
    update = job.ranker.update
    hbm = job.system.host.chip.hbm_bytes_per_s * job.reach.hbm
    wire = job.wire_bytes or job.precision.value_bytes
    state = update.values_per_value
    id_s = soft.id_s * (soft.sgd_sorts or update is not RowUpdate.SGD)
    dense_shards = update is RowUpdate.DENSE_ADAM
    dense_copies = not job.gathers
    samples = job.per_gpu if dense_copies else job.batch

    # Ids that are sorted before a GPU's rows can be updated: its own, or all of its machine.
    sorted_ids = plan.sharded.ids
    if soft.tables_by_one_thread:
        first = np.arange(0, len(sorted_ids), job.in_machine)
        of_machines = np.add.reduceat(sorted_ids, first)
        sorted_ids = of_machines.repeat(job.in_machine)[: len(sorted_ids)]

    # Seconds of a line of a gradient.
    def line_s(elements: Any, sent: Any, ids: Any, dense: bool) -> Any:
        return (8.0 * (1 if dense else state) * elements + wire * sent) / hbm + id_s * ids

    # Rows of this GPU's shard, rows of which every GPU has a copy, and tables that a dense gradient
    # streams through.
    shard = plan.sharded
    copied = plan.local_elements
    seconds = job.batch * line_s(shard.elements, shard.sent, sorted_ids, dense_shards)
    seconds += samples * line_s(copied, copied, plan.local_ids, dense_copies)
    streamed = shard.bytes * dense_shards + plan.replicated_bytes * dense_copies
    total: np.ndarray = seconds + 2.0 * (1.0 + 1.0 / state) * streamed / hbm
    return total


def fits(job: Job) -> bool:
    """Whether the fullest GPU has room for its rows with their state and all that is beside, and
    the fullest machine for those in its memory."""
    needed = job.plan.bytes + job.beside_rows_bytes
    host = job.system.host
    return needed <= host.chip.hbm_bytes and job.host_rows_bytes <= host.ram_bytes


def misses_s(job: Job) -> float:
    """Rows that a step brings over the bus to the host, and takes back; evenly over the GPUs. Dense
    Adam writes every row of a table, which it streams with its moments."""
    crossing = 0.0
    streams = job.ranker.update is RowUpdate.DENSE_ADAM
    for table in job.ranker.tables:
        if table.storage is Storage.HBM:
            continue

        # A dense update streams the whole table over the bus.
        if streams:
            whole = table.count * table.rows * table.dim
            crossing += 2.0 * 4.0 * job.ranker.update.values_per_value * whole / job.reach.host

        # Single rows, or those that a cache misses.
        if table.storage is Storage.UVM:
            rows = job.batch * table.ids
            share = job.reach.uvm
        else:
            distinct = table.distinct(job.batch)
            miss = lru_miss_rate(table.cached_share * table.rows, table.rows, table.zipf)
            rows = min(distinct, job.batch * table.ids * miss)
            share = job.reach.host
        state = 0.5 if streams else job.ranker.update.values_per_value  # read, and not written
        crossing += table.count * rows * 4.0 * table.dim * state * 2.0 / share
    return crossing / job.system.gpus / job.system.host.chip.pcie_bytes_per_s


_READY = 0.5
"""Half of the gradients can be summed after half of the backward pass."""
_BATCHES = 6
"""A schedule repeats from the second or third batch on."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stage of one batch on one stream."""

    stream: str
    stage: str
    batch: int
    start_s: float
    end_s: float


def schedule(parts: Stages, soft: Software, batches: int = _BATCHES) -> list[StageSpan]:
    """Every stage of so many batches, stream by stream in the order of working."""
    spans: list[StageSpan] = []
    free = {"copy": 0.0, "gpu": 0.0, "link": 0.0}
    exchange = soft.exposed * parts.exchange_s
    ahead = soft.pipeline is not Pipeline.BASE
    semi = soft.pipeline is Pipeline.SEMI_SYNC
    prefetch = soft.pipeline is Pipeline.PREFETCH

    # A stage runs when its stream is free and what it needs is there.
    def run(stream: str, stage: str, batch: int, seconds: float, after: float) -> float:
        if seconds <= 0:  # not there: it waits for nobody
            return after
        start = max(free[stream], after)
        free[stream] = start + seconds
        spans.append(StageSpan(stream, stage, batch, start, free[stream]))
        return free[stream]

    def arrive(batch: int, after: float) -> float:
        arrived = run("copy", "input", batch, parts.input_s, after)
        return run("copy", "misses", batch, parts.miss_s, arrived) if prefetch else arrived

    def fetch(batch: int, arrived: float, updated: float) -> float:
        ready = max(arrived, updated)
        if not prefetch:
            ready = run("copy", "misses", batch, parts.miss_s, ready)
        looked = run("gpu", "lookup", batch, parts.lookup_s, ready)
        return run("link", "exchange", batch, exchange, looked)

    # Before the first step: the first rows, and the batches that arrive early.
    early = 2 if semi else 1  # batches that arrive before their turn
    rows = fetch(0, arrive(0, 0.0), 0.0)  # when the pooled rows of the batch at hand are there
    arrivals = {k: arrive(k, 0.0) for k in range(1, early)}
    updated = 0.0  # when the rows have the update of the batch before it

    # Each step, in the order in which the host launches it.
    for k in range(batches):
        if semi:  # the next rows are read before the update of this batch
            following = fetch(k + 1, arrivals[k + 1], free["gpu"])
        if ahead:
            arrivals[k + early] = arrive(k + early, max(free["gpu"], rows))
        forward = run("gpu", "forward", k, parts.forward_s + parts.gpu_s, rows)
        backward = run("gpu", "backward", k, parts.backward_s, forward)
        dense_s = parts.allreduce_s - parts.copied_s
        dense_s -= min(dense_s, parts.backward_s) * _READY  # the backward pass hides it
        returned = run("link", "exchange back", k, exchange, backward)
        returned = run("link", "copied gradients", k, parts.copied_s, returned)
        summed = run("link", "all-reduce", k, dense_s, backward)
        updated = max(run("gpu", "update", k, parts.update_s, returned), summed)
        if not ahead:
            arrivals[k + 1] = arrive(k + 1, updated)
        rows = following if semi else fetch(k + 1, arrivals[k + 1], updated)
    return spans


def device_step_s(parts: Stages, soft: Software) -> float:
    """Time from one batch to the next on the GPU, in the steady state."""
    spans = schedule(parts, soft)
    starts = {s.batch: s.start_s for s in spans if s.stage == "forward"}
    return (starts[_BATCHES - 1] - starts[_BATCHES - 3]) / 2.0


def step_s(job: Job) -> float:
    """Seconds of a step of the job."""
    return step_of(stages(job), job)


def step_of(parts: Stages, job: Job) -> float:
    """Seconds of a step of the job with these stages."""
    return launched_s(device_step_s(parts, job.software), parts.host_s, job.host_time)


def launched_s(device_s: float, host_s: float, host_time: HostTime) -> float:
    """Seconds of GPU work that the host launches meanwhile: the one law of launching, of a whole
    step and of a dense network alone.

    >>> [launched_s(4.0, 3.0, each) for each in HostTime]
    [4.0, 5.0, 7.0]
    """
    if host_time is HostTime.HIDDEN:
        return max(device_s, host_s)
    return hypot(device_s, host_s) if host_time is HostTime.PARTLY else device_s + host_s
