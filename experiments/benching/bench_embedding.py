"""The store's kernels on one core, against numpy, torch, a dictionary and the memory's own rate.

Rates are per second of the measuring thread's CPU time: on a free core that is wall time, and a
shared core does not count the time of others (their pressure on cache and memory still shows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Annotated, Any

import numpy as np

from experiments.benching import wide
from experiments.benching.windows import Bench, ForeignCores, interleave, summarize
from experiments.options import Count
from experiments.tables import drawn, table, write_csv
from persia_sim.base.schema import Within
from runtime.data.batch import Field, Layout
from runtime.embedding.config import Capacity, RowOptimizer, TableConfig

WINDOW_S = 0.15
"""Seconds of one measurement; the system counts CPU time in steps of 0.01 s."""
UNIFORM_IDS = 65_536
"""Distinct uniform ids of one lookup + Adagrad."""
ADAGRAD = RowOptimizer(kind="adagrad", lr=0.05)
GOALS = {
    "whole step": (106_496 / 6.5e-3 / 1e6, "6.5 ms a batch"),
    "evict lru": (2.0, "2 M ids/s (4 at 3 M rows)"),
}
"""M ids/s on one core at dim 16 and 10 M rows."""
LINE_FLOATS = 16
"""float32 in a cache line of 64 bytes."""
LINES = {
    "lookup+adagrad no limit": (4, 0.8),
    "lookup+adagrad lru": (6, 0.6),
}
"""Random lines that an id must fetch from memory (a group of the index, the record, a row of two
lines; for an LRU list two neighbours more), and the goal as a share of the rate of such lines."""


COLUMNS = {
    "median": "{median:.2f}",
    "min": "{low:.2f}",
    "max": "{high:.2f}",
    "quiet": "{quiet}/{windows}",
    "foreign cores": "{foreign_cores:.2f}",
}
Dim = Annotated[int, Within(1, 4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """M ids/s of each kernel on one core, candidates in turn."""

    rows: Annotated[int, Within(wide.FIELDS, 10**9)] = 10_000_000
    """Rows of each table."""
    dim: Dim = 16
    """Floats in a row."""
    batch: Count = 4096
    """Samples of a batch of workload `wide`, of 26 ids each."""
    rounds: Count = 15
    """Interleaved rounds."""
    most_foreign_cores: ForeignCores = 1.1
    """A window in which other processes used more cores than this counts as loaded; they have the
    other core to themselves."""


def run(options: Options) -> None:
    """Measure, print the table and the goals, write CSV and figure."""
    import torch

    from runtime.embedding.native.extension import native

    # Every kernel on one core, in turn with those it is compared with.
    native.set_threads(1)
    torch.set_num_threads(1)
    groups = {
        "one wide batch": _batch_kernels(options, *filled(options, batches=12)),
        "uniform ids": _uniform_kernels(options),
    }
    records, medians = _measured(options, groups, "workload", "{}: M ids/s")

    # Goals in rates, and in shares of what the memory can do at random.
    verdicts = ("MISSED", "met")
    for name, (goal, words) in GOALS.items():
        met = verdicts[medians[name] >= goal]
        print(f"goal: {name} >= {words}: {medians[name]:.1f} M ids/s: {met}")
    for name, (lines, share) in LINES.items():
        bound = medians["random line rate"] / lines
        reached = medians[name] / bound
        print(
            f"goal: {name} >= {share} of {bound:.1f} M ids/s ({lines} random lines an id):"
            f" {reached:.2f}: {verdicts[reached >= share]}"
        )

    # What the kernels chose on this machine.
    first_ns, second_ns = native.prefetch_probe_ns()
    tested = f"{first_ns:.1f} ns a row into l1, {second_ns:.1f} into l2"
    print(f"rows are fetched into {native.prefetch_level()} ({tested}; 0: PERSIA_PREFETCH says so)")
    if options.rows != 10_000_000 or options.dim != 16:
        print("(the goals are for 10 M rows and dim 16)")
    path = write_csv(options.out / "bench_embedding.csv", records)
    print(f"{path}  {drawn(path)}")


def _measured(
    options: Options, groups: Mapping[str, Mapping[str, Callable[[], float]]], key: str, header: str
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The lines of the CSV, each with its group as ``key``, and medians by candidate; prints a
    table of each group."""
    records: list[dict[str, Any]] = []
    medians: dict[str, float] = {}
    for group, candidates in groups.items():
        windows = interleave(candidates, options.rounds, options.most_foreign_cores, group)
        records += [{key: group, **asdict(w)} for w in windows]
        summaries = [summarize(windows, name) for name in candidates]
        medians |= {summary.name: summary.median for summary in summaries}
        print(table(summaries, {header.format(group): "{name}", **COLUMNS}) + "\n")
    return records, medians


def _rate(work: Callable[[], Any], count: int = 0, timed: bool = True) -> Callable[[], float]:
    """M ids/s of CPU time over a window that is long enough for the load to be measured.

    ``work`` does ``count`` ids; where it is ``timed`` it may return the CPU seconds that they took,
    else all of its time counts.
    """

    def measure() -> float:
        ids = 0
        used_s = 0.0
        ends = time.perf_counter() + WINDOW_S
        while time.perf_counter() < ends:
            began = time.thread_time()
            result = work()
            used_s += result if timed and result is not None else time.thread_time() - began
            ids += count
        return ids / used_s / 1e6

    return measure


def filled(options: Options, batches: int) -> tuple[wide.WideWorkload, Any, Any]:
    """The workload, a store of all its rows, and the pooling of its fields."""
    from runtime.embedding.native.plan import Pooling

    source = wide.wide_workload(options.batch, options.rows, batches=batches)
    config = TableConfig(dim=options.dim, optimizer=ADAGRAD)
    store = wide.full_store(source.layout, config, wide.wide_ids(options.rows))
    return source, store, Pooling(source.layout.fields, {"rows": options.dim})


def _dedup_and_find(ids: np.ndarray, table: dict[int, int]) -> None:
    """What a store in Python does: number the distinct ids, and look each one up."""
    seen: dict[int, int] = {}
    for one in ids.tolist():
        seen.setdefault(one, len(seen))
    for one in seen:
        table.get(one)


def _batch_kernels(
    options: Options, source: wide.WideWorkload, store: Any, pooling: Any
) -> dict[str, Callable[[], float]]:
    import torch

    from runtime.embedding.batch_rows import FieldVectors
    from runtime.embedding.native.extension import native
    from runtime.embedding.native.plan import Planner

    # Batches, plans and values once: a window times the work alone.
    batches = source.batches
    count = len(batches[0].ids)
    planner = Planner(source.layout.fields, store.tables.values(), 1)
    gradient = np.full((options.batch, wide.FIELDS * options.dim), 1e-3, np.float32)
    turn = cycle(range(len(batches)))
    plans = [store.begin(0, 0, b) for b in batches]
    for handle in plans:
        store.servers[0].read(handle)
    inverses = [h.plans["rows"].inverse.astype(np.int64) for h in plans]
    values = [h.values["rows"] for h in plans]
    per_id = gradient.reshape(-1, options.dim)
    table = {int(i): k for k, i in enumerate(plans[0].plans["rows"].ids)}
    lines = _random_lines(options.rows, count)
    line_turn = cycle(range(len(lines)))
    many = native.empty_float32(options.rows, LINE_FLOATS).reshape(-1)
    many.fill(0.0)
    firsts = np.empty(count, np.float32)

    # Ours as a whole, then each part beside what others offer for it.
    def whole_step() -> None:
        k = next(turn)
        handle = store.begin(0, k, batches[k])
        store.servers[0].read(handle)
        pooling.forward(batches[k], handle.plans, handle.values)
        rows = pooling.backward(batches[k], handle.plans, FieldVectors(gradient, {}, {}))
        store.servers[0].apply([(handle, rows)])

    def native_merge() -> None:
        k = next(turn)
        pooling.backward(batches[k], plans[k].plans, FieldVectors(gradient, {}, {}))

    def torch_merge() -> None:
        k = next(turn)
        total = torch.zeros(len(values[k]), options.dim)
        total.index_add_(0, torch.from_numpy(inverses[k]), torch.from_numpy(per_id))

    def numpy_merge() -> None:
        k = next(turn)
        np.add.at(np.zeros_like(values[k]), inverses[k], per_id)

    works: dict[str, Callable[[], object]] = {
        # "clip" needs no second pass over the numbers, as checking them would.
        "random line rate": lambda: many.take(lines[next(line_turn)], mode="clip", out=firsts),
        "whole step": whole_step,
        "dedup native": lambda: planner.plan(batches[next(turn)]),
        "dedup numpy": lambda: np.unique(batches[next(turn)].ids, return_inverse=True),
        "dedup torch": lambda: torch.unique(
            torch.from_numpy(batches[next(turn)].ids.view(np.int64)), return_inverse=True
        ),
        "dedup+find python dict": lambda: _dedup_and_find(batches[next(turn)].ids, table),
        "pool native": lambda: pooling.forward(
            batches[k := next(turn)], plans[k].plans, plans[k].values
        ),
        "pool numpy": lambda: values[k := next(turn)].take(inverses[k], axis=0),
        "pool torch": lambda: torch.from_numpy(values[k := next(turn)]).index_select(
            0, torch.from_numpy(inverses[k])
        ),
        "merge native": native_merge,
        "merge numpy": numpy_merge,
        "merge torch": torch_merge,
    }
    return {name: _rate(work, count, timed=False) for name, work in works.items()}


def _uniform_kernels(options: Options) -> dict[str, Callable[[], float]]:
    import torch

    # Tables without a limit and with eviction.
    layout = Layout(fields=(Field(name="a"),))
    all_ids = [wide.uniform_ids(np.arange(options.rows))]
    limits = {
        "no limit": Capacity(),
        "lru": Capacity(rows=options.rows),
    }
    draws = np.random.default_rng(3)
    fresh = [options.rows]
    ones = np.full((UNIFORM_IDS, options.dim), 1e-3, np.float32)

    # Known ids, or ids that no table has, so that each evicts one.
    def uniform(store: Any) -> float:
        numbers = np.unique(draws.integers(0, options.rows, UNIFORM_IDS + UNIFORM_IDS // 8))
        numbers = draws.permutation(numbers)[:UNIFORM_IDS]
        handle = wide.handle_of(store, wide.uniform_ids(numbers))
        began = time.thread_time()
        store.servers[0].read(handle)
        store.servers[0].apply([(handle, {"rows": ones[: len(numbers)]})])
        return (time.thread_time() - began) * UNIFORM_IDS / len(numbers)

    def evicting(store: Any) -> float:
        numbers = np.arange(fresh[0], fresh[0] + UNIFORM_IDS)
        fresh[0] += UNIFORM_IDS
        handle = wide.handle_of(store, wide.uniform_ids(numbers))
        began = time.thread_time()
        store.servers[0].read(handle)
        return time.thread_time() - began

    # The same on dense tables, as torch and numpy would have them.
    weights = torch.zeros(options.rows, options.dim)
    squares = torch.full((options.rows, options.dim), 0.01)
    gradient = torch.from_numpy(ones)

    def torch_dense() -> None:
        where = torch.from_numpy(draws.integers(0, options.rows, UNIFORM_IDS))
        grown = squares.index_select(0, where) + gradient * gradient
        squares.index_copy_(0, where, grown)
        weights.index_add_(0, where, -0.05 * gradient / (grown.sqrt() + 1e-10))

    def numpy_dense() -> None:
        where = draws.integers(0, options.rows, UNIFORM_IDS)
        table = weights.numpy()
        state = squares.numpy()
        grown = state[where] + ones * ones
        state[where] = grown
        table[where] -= 0.05 * ones / (np.sqrt(grown) + 1e-10)

    works: dict[str, Callable[[], float | None]] = {}
    for name, capacity in limits.items():
        config = TableConfig(dim=options.dim, optimizer=ADAGRAD, capacity=capacity)
        works[f"lookup+adagrad {name}"] = partial(uniform, wide.full_store(layout, config, all_ids))
        if capacity.limited:
            # A store of its own: the lookups above must find their rows.
            works[f"evict {name}"] = partial(evicting, wide.full_store(layout, config, all_ids))
    works["adagrad torch, dense table"] = torch_dense
    works["adagrad numpy, dense table"] = numpy_dense
    return {name: _rate(work, UNIFORM_IDS) for name, work in works.items()}


def _random_lines(lines: int, count: int) -> np.ndarray:
    """Places of the first floats of random lines, [calls, count]; the calls touch most lines once.

    The same lines in each call would come from the cache, faster than a table's lines can.
    """
    calls = -(-lines // count)
    return np.random.default_rng(0).integers(0, lines, (calls, count)) * LINE_FLOATS
