"""What feeds a GPU: fetch and push with several threads, beside each other, and copies to a device.

By the wall clock, with the CPU time of a batch beside it: where that grows with the threads, they
do each other's work again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.benching import wide
from experiments.benching.windows import Window, interleave, ratio_of, summarize, verdict
from experiments.statistics import Ratio, paired_ratio
from experiments.tables import Column, table, write_csv

WINDOW_S = 0.15
SCATTER_GOAL = 0.55
"""Time of the scatter on two threads over that on one, set before the threads shared fields."""
CPU_GOAL = 1.15
"""CPU time of the scatter on any number of threads over that on one, set then, too."""
BESIDE_GOAL = 0.90
"""Work that fetch and push do beside each other over what they do alone, set then, too."""


class Feeding(Protocol):
    """What is read of the options."""

    threads: tuple[int, ...]
    device: str
    dim: int
    batch: int
    rounds: int
    most_foreign_cores: float
    out: Path


class Stages:
    """A batch's whole way to a GPU and back, as training does it, but for the network."""

    def __init__(self, source: wide.WideWorkload, store: Any, pooling: Any, dim: int) -> None:
        from runtime.embedding.batch_rows import FieldVectors

        self._store = store
        self._pooling = pooling
        self._turn: Iterator[Any] = cycle(enumerate(source.batches))
        samples = source.batches[0].size
        self.ids = len(source.batches[0].ids)
        gradient = np.full((samples, wide.FIELDS * dim), 1e-3, np.float32)
        self._gradient = FieldVectors(gradient, {}, {})
        self._batches = source.batches

    def merge(self) -> Any:
        """The distinct ids of the next batch, planned."""
        number, batch = next(self._turn)
        return self._store.begin(0, number, batch)

    def fetch(self) -> Any:
        """The next batch, from its ids to its vectors."""
        handle = self.merge()
        self._store.servers[0].read(handle)
        self._pooling.forward(handle.batch, handle.plans, handle.values)
        return handle

    def scatter(self, handle: Any) -> Any:
        """The gradients of a batch's rows."""
        return self._pooling.backward(handle.batch, handle.plans, self._gradient)

    def push(self, handle: Any) -> None:
        """The way back."""
        self._store.servers[0].apply([(handle, self.scatter(handle))])

    def beside_each_other(self) -> tuple[float, float]:
        """Fetches and pushes a second while both go on, each push of a batch that was fetched a few
        batches before, as in hybrid."""
        fetched = deque(self.fetch() for _ in range(4))
        counts = [0, 0]
        ends = time.perf_counter() + WINDOW_S

        def fetching() -> None:
            while time.perf_counter() < ends:
                fetched.append(self.fetch())
                counts[0] += 1

        def pushing() -> None:
            while time.perf_counter() < ends:
                if len(fetched) > 1:
                    fetched.popleft()  # the last one stays for a push that is faster
                self.push(fetched[0])
                counts[1] += 1

        # Both at once, each in a thread of its own.
        began = time.perf_counter()
        both = [threading.Thread(target=work) for work in (fetching, pushing)]
        for one in both:
            one.start()
        for one in both:
            one.join()
        took_s = time.perf_counter() - began
        return counts[0] / took_s, counts[1] / took_s


def measure(options: Feeding, source: wide.WideWorkload, store: Any, pooling: Any) -> None:
    """Print M ids/s, CPU time, goals and the GB/s of copies; write the CSV."""
    # Each stage with each number of threads in turn.
    bench = _Bench(Stages(source, store, pooling, options.dim))
    candidates = bench.candidates(options.threads)
    windows = interleave(
        candidates,
        options.rounds,
        options.most_foreign_cores,
        "feed",
        warm_up=True,
        on_window=bench.note,
    )
    columns: dict[str, Column] = {
        "M ids/s": "{name}",
        "median": "{median:.2f}",
        "min": "{low:.2f}",
        "max": "{high:.2f}",
        "CPU ms a batch": lambda s: f"{bench.cpu_ms(s.name):.2f}",
        "quiet": "{quiet}/{windows}",
        "foreign cores": "{foreign_cores:.2f}",
    }
    print(table([summarize(windows, name) for name in candidates], columns) + "\n")
    records = [
        {"unit": "M ids/s", **asdict(w), "cpu_ms": 1e3 * cpu_s}
        for w, cpu_s in zip(windows, bench.cpu_s, strict=True)
    ]

    # Goals: how the scatter scales, and what fetch and push lose to each other.
    print("\n".join(_goals(options.threads, windows, bench)) + "\n")

    # Copies between host and device.
    floats = options.batch * wide.FIELDS * options.dim
    copied = interleave(
        copies(options.device, floats), options.rounds, options.most_foreign_cores, "copies"
    )
    names = dict.fromkeys(w.name for w in copied)
    columns = {"GB/s": "{name}"} | {
        key: show for key, show in columns.items() if key not in ("M ids/s", "CPU ms a batch")
    }
    print(table([summarize(copied, name) for name in names], columns) + "\n")
    records += [{"unit": "GB/s", **asdict(w), "cpu_ms": ""} for w in copied]
    print(f"{write_csv(options.out / 'bench_feed.csv', records)}")


class _Bench:
    """Rates of the stages; beside each window the CPU time of a batch, and where fetch and push ran
    beside each other the rates of both."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.ids = stages.ids
        self._last_cpu_s = 0.0
        self._last_beside = (0.0, 0.0)
        self.cpu_s: list[float] = []
        self._names: list[str] = []
        self.beside: dict[tuple[int, str], tuple[float, float]] = {}

    def candidates(self, threads: Sequence[int]) -> dict[str, Callable[[], float]]:
        """By name, what measures one window."""
        stages = self._stages
        rates: dict[str, Callable[[], float]] = {
            "merge": partial(self._rate, lambda _: stages.merge()),
            "fetch": partial(self._rate, lambda _: stages.fetch()),
            "scatter": partial(self._rate, stages.scatter, stages.fetch),
            "push": partial(self._rate, stages.push, stages.fetch),
            "both": self._both,
        }
        return {
            f"{name}, {count} threads": partial(_with_threads, count, rate)
            for name, rate in rates.items()
            for count in threads
        }

    def note(self, window: Window) -> None:
        """Keep what was measured beside the window's rate."""
        self.cpu_s.append(self._last_cpu_s)
        self._names.append(window.name)
        if window.name.startswith("both"):
            self.beside[window.round, window.name] = self._last_beside

    def cpu_ms(self, name: str) -> float:
        """The median CPU time of a batch."""
        cpu_s = [s for s, of in zip(self.cpu_s, self._names, strict=True) if of == name]
        return 1e3 * float(np.median(cpu_s))

    def _rate(
        self, work: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None
    ) -> float:
        """M ids/s of the work alone, over a window; what it is given is made between."""
        work(prepare())  # threads start, memory is mapped
        took_s = cpu_s = 0.0
        calls = 0
        ends = time.perf_counter() + WINDOW_S
        while not calls or time.perf_counter() < ends:
            prepared = prepare()
            began = time.perf_counter(), time.process_time()
            work(prepared)
            took_s += time.perf_counter() - began[0]
            cpu_s += time.process_time() - began[1]
            calls += 1
        self._last_cpu_s = cpu_s / calls
        return calls * self._stages.ids / took_s / 1e6

    def _both(self) -> float:
        began = time.process_time()
        fetches, pushes = self._last_beside = self._stages.beside_each_other()
        self._last_cpu_s = (time.process_time() - began) / WINDOW_S / max(fetches + pushes, 1e-9)
        return (fetches + pushes) * self._stages.ids / 1e6


def _with_threads(count: int, rate: Callable[[], float]) -> float:
    from runtime.embedding.native.extension import native

    native.set_threads(count)
    try:
        return rate()
    finally:
        native.set_threads(1)


def _goals(threads: Sequence[int], windows: Sequence[Window], bench: _Bench) -> list[str]:
    """A line for each goal that these numbers of threads have."""
    lines = []
    cores = len(os.sched_getaffinity(0))
    one = "scatter, 1 threads"

    # The scatter: two threads by the clock, any number by what they use together.
    for count in threads if 1 in threads else ():
        name = f"scatter, {count} threads"
        if count == 1:
            continue
        if count == 2:
            faster = ratio_of(windows, name, one)
            time_share = inverse(faster)
            word = verdict(faster, 1 / SCATTER_GOAL)
            lines.append(
                f"goal: {name} take <= {SCATTER_GOAL} x the time of one: {time_share},"
                f" {faster.pairs} pairs: {word}"
            )
        more = bench.cpu_ms(name) / bench.cpu_ms(one)
        word = "met" if more <= CPU_GOAL else "MISSED"
        lines.append(f"goal: {name} take <= {CPU_GOAL} x the CPU time of one: {more:.2f}: {word}")

    # Fetch and push, each with so many.
    for count in threads:
        share = work_beside(count, cores, windows, bench.beside, bench.ids)
        lines.append(
            f"goal: fetch and push beside each other, {count} threads each on {cores} cores, do >="
            f" {BESIDE_GOAL} of the work that they do alone: {share}, {share.pairs} pairs:"
            f" {verdict(share, BESIDE_GOAL)}"
        )
    return lines


def inverse(ratio: Ratio) -> Ratio:
    """The ratio of times from that of rates; the interval of one pair has no end.

    >>> inverse(Ratio(mean=2.0, low=0.0, high=4.0, pairs=1, clean=True))
    Ratio(mean=0.5, low=0.25, high=inf, pairs=1, clean=True)
    """
    high = 1 / ratio.low if ratio.low else math.inf
    return Ratio(1 / ratio.mean, 1 / ratio.high, high, ratio.pairs, ratio.clean)


def work_beside(
    threads: int,
    cores: int,
    windows: Sequence[Window],
    beside: dict[tuple[int, str], tuple[float, float]],
    ids: int,
) -> Ratio:
    """Work that fetch and push do beside each other over what they do alone, with so many threads
    each.

    Alone one of them uses ``threads`` of the cores; beside each other they can do the work of both,
    or of as many as the cores carry.
    """
    by_key = {(w.round, w.name): w for w in windows}
    rounds = sorted({w.round for w in windows})
    names = [f"{name}, {threads} threads" for name in ("fetch", "push", "both")]
    at_once = min(2.0, max(1.0, cores / threads))
    done, able, quiet = [], [], []
    for number in rounds:
        fetch, push, both = (by_key[number, name] for name in names)
        fetches, pushes = beside[number, names[2]]
        done.append((fetches / fetch.value + pushes / push.value) * ids / 1e6)
        able.append(at_once)
        quiet.append(fetch.quiet and push.quiet and both.quiet)
    clean = sum(quiet) >= 3
    used = [k for k, is_quiet in enumerate(quiet) if is_quiet or not clean]
    return paired_ratio([done[k] for k in used], [able[k] for k in used], clean)


def copies(device: str, floats: int) -> dict[str, Callable[[], float]]:
    """Copies of one batch's vectors between host and device; pinned where there is a GPU."""
    import torch

    from runtime.rank.learner import open_device

    # Both ends once: only copies are timed.
    there = torch.zeros(floats, device=open_device(device))
    kinds = {"pageable": torch.zeros(floats)}
    if there.is_cuda:
        kinds["pinned"] = torch.zeros(floats, pin_memory=True)

    # A queued copy is over when the device says so.
    def copy(target: Any, origin: Any) -> None:
        target.copy_(origin, non_blocking=True)
        if there.is_cuda:
            torch.cuda.synchronize(there.device)

    # Each direction from each kind of memory.
    works: dict[str, Callable[[], object]] = {}
    for kind, here in kinds.items():
        works[f"{kind} to device"] = partial(copy, there, here)
        works[f"device to {kind}"] = partial(copy, here, there)
    if there.is_cuda:
        works["pageable to pinned"] = partial(copy, kinds["pinned"], kinds["pageable"])
    return {name: partial(_by_wall, work, floats * 4 / 1e3) for name, work in works.items()}


def _by_wall(work: Callable[[], object], amount: float) -> float:
    """Millions of ``amount`` a second, over a window."""
    work()  # threads start, memory is mapped
    began = time.perf_counter()
    calls = 0
    while not calls or time.perf_counter() < began + WINDOW_S:
        work()
        calls += 1
    return calls * amount / (time.perf_counter() - began) / 1e6
