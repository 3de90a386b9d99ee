"""The sharding plan: which GPU holds which table or which part of it, and what each must do.

Whole tables are dealt to the least loaded GPU, the costliest first; where one would overflow, to
the least loaded that has room. Where the strategy allows it,
tables that cost more than a GPU's fair share are split by columns, small ones are replicated, and
the most frequent rows of large ones, too.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil, inf
from typing import Annotated, NamedTuple

import numpy as np

from persia_sim.base.popularity import hottest, zipf_bins
from persia_sim.base.rules import AMOUNT, COUNT, Usual, require, require_within
from persia_sim.base.schema import hold_choices, require_possible
from persia_sim.cluster.tables import Storage, Table
from persia_sim.sharded.ranker import Ranker

_SENT = 12.0
"""What sending a number costs, in numbers read: links are slower than memory, rows are read and
updated."""

Piece = tuple[float, float, float, float, float, float]
"""A part of a table: cost, ids, elements, sent, bytes, vectors."""
MOST_PARTS = 5_000_000
"""The most parts of tables that are dealt one by one."""


class Strategy(StrEnum):
    """How tables are split."""

    TABLE = "table"
    """Whole tables on one GPU each."""
    ROW = "row"
    """Every table's rows over all GPUs: each gives partial sums of every sample."""
    COLUMN = "column"
    """Every table's columns over all GPUs: each looks up every id of the global batch."""
    PLANNED = "planned"
    """Whole tables; those above a GPU's fair share are split by columns, as planners do, and where
    that is more parts than they have columns by rows, too."""
    SLOT = "slot"
    """Every feature's rows on one GPU, dealt in turn; each GPU has room for those of the fullest.
    A table whose rows are single numbers, as of a wide part, lies in rows over all GPUs."""
    DATA_PARALLEL = "data_parallel"
    """A copy of every table on every GPU; gradients are summed, or gathered where sparse."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one GPU does for one global batch, per sample of the global batch."""

    ids: np.ndarray
    """float64 [gpus]: ids looked up."""
    elements: np.ndarray
    """float64 [gpus]: numbers read from rows."""
    sent: np.ndarray
    """float64 [gpus]: pooled numbers that go to the sample's own GPU."""
    bytes: np.ndarray
    """float64 [gpus]: memory of rows and state in HBM."""
    vectors: np.ndarray
    """float64 [gpus]: pooled vectors, or partial sums or columns of them, that it makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan: where each table's rows are."""

    gpus: int
    sharded: Load
    """Rows that exist once."""
    local_ids: float
    """Ids of one sample looked up in replicas, on the sample's own GPU."""
    local_elements: float
    """Numbers read for them."""
    replicated_values: float
    """Numbers that every GPU keeps a copy of."""
    replicated_bytes: float
    """Bytes of these copies with their optimiser state."""
    partial_sums: bool
    """Row-wise: what is sent is a partial sum from every GPU (a reduce-scatter)."""

    @property
    def bytes(self) -> float:
        """Memory of rows and state on the fullest GPU."""
        return float(self.sharded.bytes.max()) + self.replicated_bytes

    @property
    def imbalance(self) -> float:
        """Largest over mean of the numbers read; 1 is perfect."""
        mean = float(self.sharded.elements.mean())
        return float(self.sharded.elements.max()) / mean if mean else 1.0


def hot_share(table: Table, rows: float) -> float:
    """Share of a table's lookups that its most frequent ``rows`` take."""
    if rows >= table.rows:
        return 1.0
    probability, _ = zipf_bins(float(table.rows), table.zipf)
    room = hottest(rows, float(table.rows), table.zipf)
    return float((probability * room).sum())


class _Copied(NamedTuple):
    """Rows that every GPU has: small tables, and the hot rows of others."""

    ids: float
    """Ids of a sample that meet them."""
    elements: float
    """Numbers of these ids' rows."""
    values: float
    """Numbers of all copied rows."""


def _copied(
    ranker: Ranker, gpus: int, strategy: Strategy, replicate_rows: float, hot_rows: float
) -> tuple[_Copied, list[tuple[Table, float]]]:
    """What is copied; and each table of which something is dealt, with the share of its ids."""
    ids = 0.0
    elements = 0.0
    values = 0.0
    dealt: list[tuple[Table, float]] = []
    for table in ranker.tables:
        # The share of the table's ids that meets a copy.
        all_local = strategy is Strategy.DATA_PARALLEL or table.rows <= replicate_rows
        share = 1.0 if all_local or gpus == 1 else hot_share(table, hot_rows) if hot_rows else 0.0
        if gpus > 1 and share:
            ids += share * table.count * table.ids
            elements += share * table.count * table.ids * table.dim
            copies = table.rows if all_local else min(hot_rows, table.rows)
            values += copies * table.dim * table.count

        # One GPU copies nothing: it is dealt everything.
        if gpus == 1:
            share = 0.0
        if share < 1.0:
            dealt.append((table, 1.0 - share))
    return _Copied(ids, elements, values), dealt


@lru_cache(maxsize=4096)
def make_plan(
    ranker: Ranker,
    gpus: int,
    strategy: Strategy,
    *,
    replicate_rows: float = 0.0,
    hot_rows: float = 0.0,
    id_elements: float = 0.0,
    room_bytes: float = inf,
) -> Plan:
    """Place the tables.

    Tables of at most ``replicate_rows`` rows are copied to every GPU, as are the ``hot_rows`` most
    frequent rows of the others; ``id_elements`` is what an id costs beside its row, in numbers, and
    ``room_bytes`` what a GPU has for rows and their state: a plan may need more (`Plan.bytes`).
    """
    require(gpus >= 1, "gpus", gpus, "must be >= 1")

    # Copies on every GPU; the rest is dealt.
    copied, dealt = _copied(ranker, gpus, strategy, replicate_rows, hot_rows)

    # What a part costs the GPU that gets it, and how many parts there may be.
    def cost_of(ids: float, elements: float, sent: float) -> float:
        return elements + id_elements * ids + _SENT * sent

    ways_most = 1 if strategy is Strategy.TABLE else gpus
    parts = ways_most * sum(table.count for table, _ in dealt)
    rule = f"{strategy} cuts each table into as many, and no more than {MOST_PARTS:,} are dealt"
    require(parts <= MOST_PARTS, "tables x gpus", f"{parts:,}", rule, "use fewer of either")
    total = sum(t.count * s * cost_of(t.ids, t.ids * t.dim, t.pooled) for t, s in dealt)

    # Bytes of a table, as far as they lie on the GPU.
    state = 4.0 * ranker.update.values_per_value
    held = {Storage.HBM: 1.0, Storage.UVM: 0.0}

    def size_of(table: Table) -> float:
        return state * table.rows * table.dim * held.get(table.storage, table.cached_share)

    total_bytes = sum(table.count * size_of(table) for table, _ in dealt)

    # The rest is cut into pieces, by cost, or by cost and memory.
    def cut(by_memory: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for table, share in dealt:
            ids = share * table.ids
            elements = share * table.ids * table.dim
            sent = share * table.pooled
            size = size_of(table)
            fair = cost_of(0.0, elements, sent) * gpus / total if total else 0.0
            if by_memory:
                fair = max(fair, size * gpus / total_bytes)
            rows = gpus if strategy is Strategy.ROW else 1
            columns = gpus if strategy is Strategy.COLUMN else 1
            if strategy is Strategy.PLANNED:
                ways = min(gpus, max(1, ceil(2.0 * fair - 1.0)))
                rows = ceil(ways / max(1.0, table.dim))  # no part is less than a column
                columns = ways // rows
            # Columns: every part sees all ids. Rows: every part sees its share of the ids.
            ways = rows * columns
            part = ids / rows, elements / ways, sent / columns
            piece = cost_of(*part), *part, size / ways, float(len(table.ids_per_sample))
            pieces += [piece] * (ways * table.count)
        return pieces

    if strategy is Strategy.SLOT:
        sharded = _in_slots([(table, share, size_of(table)) for table, share in dealt], gpus)
    else:
        by_memory = (False, True) if strategy is Strategy.PLANNED and total_bytes else (False,)
        sharded = _deal([cut(each) for each in by_memory], gpus, room_bytes - state * copied.values)

    # Each piece goes to a GPU.
    return Plan(
        gpus=gpus,
        sharded=sharded,
        local_ids=copied.ids,
        local_elements=copied.elements,
        replicated_values=copied.values,
        replicated_bytes=state * copied.values,
        partial_sums=strategy is Strategy.ROW and gpus > 1,
    )


def _in_slots(dealt: list[tuple[Table, float, float]], gpus: int) -> Load:
    """Features in turn, through all tables; of each the share that is dealt, and its bytes."""
    totals = np.zeros((5, gpus))
    dealt_before = 0
    for table, share, size in dealt:
        ids = share * np.tile(table.ids_per_sample, table.count)
        one = np.ones(len(ids))
        part = size / len(table.ids_per_sample)
        work = np.array([ids, ids * table.dim, share * table.dim * one, part * one, one])
        if table.dim == 1:  # by rows: each GPU has a part of every feature's, and sums all
            totals += work.sum(axis=1)[:, None] / [[gpus], [gpus], [1.0], [gpus], [1.0]]
            continue
        turns = (dealt_before + np.arange(len(ids))) % gpus
        totals += [np.bincount(turns, each, gpus) for each in work]
        dealt_before += len(ids)
    totals[3] = totals[3].max()
    return Load(*totals)


def _deal(ways: list[list[Piece]], gpus: int, room_bytes: float) -> Load:
    """The costliest piece first, each to the GPU with the least so far. Where one overflows, the
    best balanced of those that do not: with finer pieces, and each to a GPU that has room."""
    by_cost = _dealt(sorted(ways[0], reverse=True), gpus, inf)
    needed = float(by_cost.bytes.sum())
    if float(by_cost.bytes.max()) <= room_bytes or needed > gpus * room_bytes:
        return by_cost
    loads = []
    for pieces in ways:
        costliest_first = sorted(pieces, reverse=True)
        largest_first = sorted(pieces, key=lambda piece: (piece[4], piece), reverse=True)
        loads += [_dealt(order, gpus, room_bytes) for order in (costliest_first, largest_first)]
    fitting = [load for load in loads if float(load.bytes.max()) <= room_bytes]
    return min(fitting, key=lambda load: float(load.elements.max()), default=by_cost)


def _dealt(pieces: list[Piece], gpus: int, room_bytes: float) -> Load:
    share, more = divmod(len(pieces), gpus)
    if pieces and pieces[0] == pieces[-1]:  # sorted, so all are alike: in turn
        return Load(*np.outer(pieces[0][1:], share + (np.arange(gpus) < more)))

    # Each piece to the GPU with the least cost that has room.
    totals = np.zeros((5, gpus))
    heap = [(0.0, g) for g in range(gpus)]
    for cost, *work in pieces:
        full = []
        while heap and totals[3, heap[0][1]] + work[3] > room_bytes:
            full.append(heapq.heappop(heap))
        if heap:
            load, gpu = heapq.heappop(heap)
        else:  # nobody has room: the emptiest overflows least
            load, gpu = full.pop(int(np.argmin([totals[3, g] for _, g in full])))
        totals[:, gpu] += work
        for entry in (*full, (load + cost, gpu)):
            heapq.heappush(heap, entry)
    return Load(*totals)


class Keys(StrEnum):
    """How ids reach the GPUs that have their rows."""

    EXCHANGED = "exchanged"
    """Every GPU gets its own samples', and they are exchanged."""
    DEALT = "dealt"
    """The host gives every GPU those of its own rows, with an offset for each vector."""
    TO_ALL = "to_all"
    """A machine's GPUs get the whole batch's, and an offset for each vector, from one of them."""


class Pipeline(StrEnum):
    """What of one batch may run beside another."""

    BASE = "base"
    """Nothing: keys are exchanged and waited for, then everything else."""
    SPARSE_DIST = "sparse_dist"
    """The next batch is copied and its keys exchanged behind this one."""
    PREFETCH = "prefetch"
    """Like sparse_dist; rows that a cache misses are fetched behind this batch, too."""
    SEMI_SYNC = "semi_sync"
    """Like sparse_dist; the next lookup and its exchange run before this batch's update: rows are
    read one step late."""


class HostTime(StrEnum):
    """What becomes of the time in which the host launches a step's kernels."""

    HIDDEN = "hidden"
    """The host is ahead of the GPU (replayed graphs): a step takes the longer of both."""
    PARTLY = "partly"
    """Where both take about as long neither is hidden whole: the root of the sum of squares."""
    EXPOSED = "exposed"
    """Once a step each waits for the other: a step takes the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """The steps that constants were read from: what is like them is predicted best."""

    machine: str
    """Name of the machine."""
    gpus: int = 1
    """Ranks that shared each step, >= 1."""
    batch_per_gpu: float
    """Samples of a step on one GPU, > 0."""
    dense_macs: float
    """Multiplications of one sample's forward pass, > 0."""
    ids: float
    """Ids of a sample, > 0."""
    spread: float
    """Standard deviation of the logarithm of a step, with what the laws miss of it, >= 0."""

    def __post_init__(self) -> None:
        some = (1e-9, AMOUNT[1])
        require_within(self, " traced", batch_per_gpu=some, dense_macs=some, ids=some)
        require_within(self, " traced", gpus=COUNT, spread=(0, 10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """One training system: what it pays a step beside bytes and multiplications."""

    name: str
    """The preset's name."""
    versions: str = ""
    """Releases that it stands for, from and to."""
    unmeasured: str = ""
    """Where a title is all that is known of it: the system whose constants it has, in the middle of
    those that the title may mean."""
    guess_ln: float = 0.0
    """Standard deviation of the logarithm of a step among those, in [0, 10]."""
    launch_s: Annotated[float, Usual.LATENCY]
    """Launching one kernel on a core of speed 1, >= 0."""
    replay_s: Annotated[float, Usual.LATENCY] = 0.0
    """What a small kernel of a replayed graph takes on a V100 at least, >= 0."""
    layers_replayed: bool = False
    """The dense network's kernels are replayed as graphs, and those of tables launched; where
    `host_time` is hidden, all are replayed."""
    layer_kernels: float = 8.0
    """Kernels of a layer of the dense network: forward, backward and update, in [0, 1e6]. torch's
    profiler counts 49 for an MLP of six."""
    table_kernels: float = 8.0
    """Kernels of a table; where lookups are fused, of a width of tables, in [0, 1e6]."""
    fused_tables: bool = True
    """Tables of one width are looked up by one kernel."""
    host_s: Annotated[float, Usual.LATENCY] = 0.0
    """What the host does once a step beside launching, on a core of speed 1 (as all `host_` times),
    >= 0."""
    host_multi_s: Annotated[float, Usual.LATENCY] = 0.0
    """Seconds more where there is more than one GPU: collectives and their synchronisation, >=
    0."""
    host_exchange_s: Annotated[float, Usual.LATENCY] = 0.0
    """Seconds more where GPUs exchange keys and rows and that costs more than summing gradients,
    >= 0."""
    casts: bool = False
    """Mixed precision casts weights and activations: half as many kernels more in a layer."""
    tables_by_one_thread: bool = False
    """One thread launches the tables' kernels of a machine's GPUs, one after the other, and waits
    for each one's sort of ids; else, and for the dense network, every GPU has its own."""
    host_time: HostTime = HostTime.EXPOSED
    """What becomes of the host's time inside a machine."""
    host_time_across: HostTime | None = None
    """The host's time where collectives cross nodes; None: as inside one."""
    tuned: float = 1.0
    """What its matrix products reach over what they usually do, in (0, 2]."""
    unfused_passes: float = 0.0
    """How often activations in float32 cross the GPU's memory more than where the kernels of
    elementwise layers are fused, in [0, 1e6]."""
    id_s: Annotated[float, Usual.ITEM]
    """What an id costs a GPU beside its row (hash, sort, scattered access), in a lookup and again
    in an update, >= 0. Measured alike on GPUs of very different memory."""
    planned_id_bytes: float = 256.0
    """Cost of an id as its planner takes it when tables are dealt, as bytes of HBM, >= 0."""
    sgd_sorts: bool = True
    """Plain SGD, too, sorts ids to sum the gradients of a row first; else it adds each where the
    row lies, and an id costs nothing more there."""
    sparse_gradients: bool = False
    """Gradients of copied tables are lines of ids and rows that all GPUs send to all; else they are
    as large as the tables, and summed."""
    keys: Keys = Keys.EXCHANGED
    """How ids reach the GPUs that have their rows."""
    exposed: float = 1.0
    """Share of the exchange of pooled rows that nothing hides, in [0, 1]."""
    strategy: Strategy = Strategy.PLANNED
    """How tables are split."""
    replicate_rows: float = 0.0
    """Tables with at most so many rows are copied to every GPU, >= 0."""
    hot_rows: float = 0.0
    """Most frequent rows of a larger table that are copied, too, >= 0."""
    pipeline: Pipeline = Pipeline.SPARSE_DIST
    """What runs beside another batch."""
    traced: Traced | None = None
    """The steps of one's own program behind its constants; None: steps of others."""
    source: str
    """Where these constants come from, and which were fitted."""

    def __post_init__(self) -> None:
        hold_choices(self)
        require_possible(self)
        rows = (0, AMOUNT[1])
        require_within(self, planned_id_bytes=(0, 1e9), exposed=(0, 1), replicate_rows=rows)
        many = (0, 1e6)
        require_within(
            self,
            hot_rows=rows,
            unfused_passes=many,
            layer_kernels=many,
            table_kernels=many,
            tuned=(1e-9, 2),
            guess_ln=(0, 10),
        )
