"""What a training step cannot be faster than on this machine, and how near each stage comes.

For each stage: the floating-point operations that it must do, the bytes that it must stream, and
the cache lines that it must fetch from random places. Each is divided by the rate of this machine,
which is measured beside the stages; the longest of the three binds. All stages share the cores, so
none hides another one: the bound of the step is the sum. Stages are timed in steps that go on, as
in a run: alone in a loop one finds in the caches what the network drives out of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, cycle, pairwise
from typing import Any

import numpy as np

from experiments.benching import wide
from experiments.benching.windows import Window, interleave, summarize
from experiments.tables import Column, table

LINE_BYTES = 64
DENSE = "network"
IDLE = "idle"
"""Of a step: what its cores had nothing to do, as if one after the other."""
STREAMED_FLOATS = 1 << 24
"""Floats of an array that no cache holds."""
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage must do for a batch."""

    stage: str
    flops: float = 0.0
    bytes: float = 0.0
    """Streamed: read or written once, one after the other."""
    lines: float = 0.0
    """Fetched from random places in memory."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What this machine does in a second, with so many threads."""

    flops: float
    """Operations per second of products of float32 matrices."""
    bytes: float
    lines: float

    def bound(self, work: Work) -> tuple[float, str]:
        """Seconds that the work takes at least, and what binds.

        >>> MachineRates(flops=9.0, bytes=1.0, lines=1.0).bound(Work("x", flops=18.0, bytes=1.0))
        (2.0, 'flops')
        """
        seconds = {name: getattr(work, name) / getattr(self, name) for name in _KINDS}
        binds = max(seconds, key=seconds.__getitem__)
        return seconds[binds], binds


_KINDS = ("flops", "bytes", "lines")


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes of a batch, and of what it trains."""

    samples: int
    ids: int
    distinct: float
    """Rows that it needs, the mean over the batches."""
    fields: int
    dim: int
    layers: tuple[tuple[int, int], ...]
    """Inputs and outputs of each layer of the network."""


def works(batch: BatchSizes) -> list[Work]:
    """What each stage of a step must do, in their order.

    A row's values and its optimiser state (Adagrad: one number beside each) lie side by side. The
    index is one line of 64 bytes for an id, its record (id, counters) another one.
    """
    row_bytes = 4.0 * batch.dim
    row_lines = -(-row_bytes // LINE_BYTES)
    vectors = 4.0 * batch.samples * batch.fields * batch.dim
    rows = batch.distinct * row_bytes
    weights = sum(inputs * outputs for inputs, outputs in batch.layers)
    biases = sum(outputs for _, outputs in batch.layers)
    return [
        # Ids are read, and which distinct one each is, and these are written.
        Work("merge", bytes=8.0 * batch.ids + 4.0 * batch.ids + 8.0 * batch.distinct),
        # Index, record and values of each row; ids, the copy, handles and counts beside it.
        Work("lookup", bytes=rows + 24.0 * batch.distinct, lines=(2 + row_lines) * batch.distinct),
        # Rows of the batch and numbers of its ids are read, vectors are written.
        Work("pool", bytes=rows + 4.0 * batch.ids + vectors),
        # Three products a layer; Adam reads weight, gradient, two moments and writes three of them.
        Work(DENSE, flops=6.0 * weights * batch.samples, bytes=28.0 * (weights + biases)),
        # Vectors' gradients and numbers of ids are read, sums of rows are written and read again.
        Work("scatter", bytes=vectors + 4.0 * batch.ids + 2 * rows),
        # Record, values and state of each row, and the gradient.
        Work(
            "update",
            bytes=rows + 24.0 * batch.distinct,
            lines=(1 + -(-2 * row_bytes // LINE_BYTES)) * batch.distinct,
        ),
    ]


def measured_rates(threads: int, rows: int, batch: BatchSizes) -> MachineRates:
    """The best of a few calls each: others on the machine only ever slow it down."""
    import torch

    torch.set_num_threads(threads)
    products = [(2048, 2048, 2048), *((batch.samples, i, o) for i, o in batch.layers if o > 1)]
    flops = max(_product_rate(*sizes) for sizes in products)
    array = torch.ones(STREAMED_FLOATS)
    other = torch.ones(STREAMED_FLOATS)
    size = 4.0 * STREAMED_FLOATS
    read = size / _best_s(array.sum)
    copied = 2 * size / _best_s(lambda: other.copy_(array))
    return MachineRates(flops, max(read, copied), _line_rate(threads, rows))


def _product_rate(samples: int, inputs: int, outputs: int) -> float:
    import torch

    left, right = torch.randn(samples, inputs), torch.randn(inputs, outputs)
    return 2.0 * samples * inputs * outputs / _best_s(lambda: left @ right)


def _line_rate(threads: int, rows: int) -> float:
    """Lines a second of as many threads, each at random places of an array like a table's."""
    from runtime.embedding.native.extension import native

    floats = LINE_BYTES // 4
    many = native.empty_float32(rows, floats).reshape(-1)
    many.fill(0.0)
    draws = np.random.default_rng(0)
    count = min(rows, 1 << 17)
    places = [draws.integers(0, rows, count) * floats for _ in range(threads * REPEATS)]
    firsts = [np.empty(count, np.float32) for _ in range(threads)]
    turn = cycle(range(REPEATS))

    # Threads without the interpreter lock, each at places of its own.
    def walk() -> None:
        now = next(turn)
        works = [
            threading.Thread(
                target=partial(many.take, places[now * threads + k], mode="clip", out=firsts[k])
            )
            for k in range(threads)
        ]
        for one in works:
            one.start()
        for one in works:
            one.join()

    return threads * count / _best_s(walk)


def _best_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


class StepsByStage:
    """Steps of a plain loop around our rows, of which each stage is timed where it happens."""

    def __init__(
        self,
        source: wide.WideWorkload,
        store: Any,
        dim: int,
        threads: int,
        loop: Callable[..., Callable[[], float]],
        skip: int,
    ) -> None:
        """``loop``: `wide.plain_loop` but for its rows; ``skip``: its first steps are not timed."""
        from runtime.embedding.native.plan import Pooling

        self._source = source
        self._store = store
        self._threads = threads
        self._skip = skip
        self._pooling = Pooling(source.layout.fields, {name: dim for name in store.tables})
        self._steps = count()
        self._began: list[tuple[float, float]] = []  # seconds on the clock, and of all cores
        self._spans: dict[str, list[float]] = {}
        self._measure = loop(self._look, step_rows=self._step_rows)
        self.windows: list[dict[str, float]] = []
        """Of each window the milliseconds of a step, by stage, and the cores' idle ones."""

    def window(self) -> float:
        """Milliseconds of a step of one window, with all that is between its stages."""
        from runtime.embedding.native.extension import native

        native.set_threads(self._threads)
        self._began.clear()
        self._spans = {stage: [] for stage in ("merge", "lookup", "pool", "scatter", "update")}
        self._measure()
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
        began_s, began_cpu_s = self._began[self._skip]
        steps = len(self._began) - self._skip
        step_ms = 1e3 * (ended_s - began_s) / steps
        took = {s: 1e3 * sum(spans[self._skip :]) / steps for s, spans in self._spans.items()}
        cores_ms = 1e3 * (ended_cpu_s - began_cpu_s) / steps / self._threads
        took |= {DENSE: step_ms - sum(took.values()), IDLE: max(0.0, step_ms - cores_ms)}
        self.windows.append(took)
        return step_ms

    def _timed(self, stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
        began_s = time.perf_counter()
        result = work(*arguments)
        self._spans[stage].append(time.perf_counter() - began_s)
        return result

    def _look(self, number: int) -> Any:
        """The pooled vectors of a batch, for the network."""
        import torch

        self._began.append((time.perf_counter(), time.process_time()))
        batch = self._source.batches[number]
        step = next(self._steps)
        self._handle = self._timed("merge", self._store.begin, 0, step, batch)
        self._timed("lookup", self._store.servers[0].read, self._handle)
        about = self._handle.batch, self._handle.plans
        vectors = self._timed("pool", self._pooling.forward, *about, self._handle.values)
        self._pooled = torch.from_numpy(vectors.pooled).requires_grad_()
        return self._pooled

    def _step_rows(self) -> None:
        """The update of the rows by the gradients that the network has left."""
        from runtime.embedding.batch_rows import FieldVectors

        gradients = FieldVectors(self._pooled.grad.numpy(), {}, {})
        about = self._handle.batch, self._handle.plans
        rows = self._timed("scatter", self._pooling.backward, *about, gradients)
        self._timed("update", self._store.servers[0].apply, [(self._handle, rows)])


def batch_of(source: wide.WideWorkload, store: Any, dim: int, hidden: Sequence[int]) -> BatchSizes:
    """The sizes of a workload's batches."""
    distinct = [len(store.begin(0, k, b).plans.ids) for k, b in enumerate(source.batches)]
    first = source.batches[0]
    widths = (wide.FIELDS * dim + wide.DENSE, *hidden, 1)
    return BatchSizes(
        samples=first.size,
        ids=len(first.ids),
        distinct=float(np.mean(distinct)),
        fields=wide.FIELDS,
        dim=dim,
        layers=tuple(pairwise(widths)),
    )


def rows_of_table(
    workload: str, batch: BatchSizes, rates: MachineRates, windows: Sequence[Window]
) -> list[dict[str, Any]]:
    """A record a stage and one of the whole step: its work, its bound, how near it comes."""
    records = []
    for work in works(batch):
        bound_s, binds = rates.bound(work)
        took = summarize(windows, work.stage)
        records.append(
            {
                "workload": workload,
                **asdict(work),
                "binds": binds,
                "bound_ms": 1e3 * bound_s,
                "measured_ms": took.median,
                "share": 1e3 * bound_s / took.median,
                "quiet": f"{took.quiet}/{took.windows}",
            }
        )

    # Stages come one after the other; what is idle lies within them.
    whole = {key: sum(r[key] for r in records) for key in (*_KINDS, "bound_ms", "measured_ms")}
    step = {"stage": "step", **whole, "share": whole["bound_ms"] / whole["measured_ms"]}
    idle = dict.fromkeys((*_KINDS, "bound_ms", "share"), 0.0)
    idle |= {"stage": IDLE, "measured_ms": summarize(windows, IDLE).median}
    for record in (step, idle):
        records.append({"workload": workload, "binds": "", "quiet": "", **record})
    return records


COLUMNS: dict[str, Column] = {
    "{} stage": "{stage}",
    "GFLOP": lambda r: f"{r['flops'] / 1e9:.1f}",
    "MB": lambda r: f"{r['bytes'] / 1e6:.1f}",
    "k lines": lambda r: f"{r['lines'] / 1e3:.0f}",
    "binds": "{binds}",
    "bound ms": "{bound_ms:.2f}",
    "measured ms": "{measured_ms:.2f}",
    "of the bound": "{share:.2f}",
    "quiet": "{quiet}",
}


def report(
    workload: str, rates: MachineRates, records: Sequence[dict[str, Any]], threads: int
) -> str:
    """The table, the machine's rates, and what the arithmetic leaves for the whole step."""
    columns = {header.format(f"{workload},"): show for header, show in COLUMNS.items()}
    by_stage = {r["stage"]: r for r in records}
    whole, dense = by_stage["step"], by_stage[DENSE]

    # What is left to gain: rows at their bounds, and the stages that are furthest from theirs.
    of_rows_ms = whole["bound_ms"] - dense["bound_ms"]
    most = dense["measured_ms"] / (dense["measured_ms"] + of_rows_ms)
    furthest = sorted(records[:-2], key=lambda r: r["bound_ms"] - r["measured_ms"])[:2]
    names = " and ".join(
        f"{r['stage']} ({r['measured_ms'] - r['bound_ms']:.2f} ms above)" for r in furthest
    )
    return "\n".join(
        [
            table(records, columns),
            f"{threads} threads here: {rates.flops / 1e9:,.0f} GFLOP/s,"
            f" {rates.bytes / 1e9:.1f} GB/s streamed, {rates.lines / 1e6:.0f} M random lines/s",
            "rows at their bounds beside the network as it is, one after the other:"
            f" {most:.3f} of dense-only at most",
            f"furthest from the bound: {names}",
        ]
    )


def measure(
    workload: str,
    source: wide.WideWorkload,
    store: Any,
    dim: int,
    hidden: Sequence[int],
    rows: int,
    threads: int,
    loop: Callable[..., Callable[[], float]],
    skip: int,
    rounds: int,
    most_foreign_cores: float,
) -> tuple[list[dict[str, Any]], str]:
    """Records of the CSV, and the text; ``loop`` and ``skip``: as `StepsByStage`."""
    batch = batch_of(source, store, dim, hidden)
    rates = measured_rates(threads, rows, batch)
    steps = StepsByStage(source, store, dim, threads, loop, skip)

    # A window has all stages; one that was measured again counts for its round.
    windows: list[Window] = []

    def keep(window: Window) -> None:
        took = steps.windows[-1]
        windows.extend(replace(window, name=stage, value=ms) for stage, ms in took.items())

    interleave(
        {"step": steps.window}, rounds, most_foreign_cores, workload, warm_up=True, on_window=keep
    )
    records = rows_of_table(workload, batch, rates, windows)
    rates_of = {f"{kind}_per_s": getattr(rates, kind) for kind in _KINDS}
    return [r | rates_of for r in records], report(workload, rates, records, threads)
