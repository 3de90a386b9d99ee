"""What it costs that rows and ranks are processes: a call of a server, a sum over two ranks."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.words.trace import TraceRecorder
from persia_sim.words.vocabulary import Mode
from runtime.config import SyncConfig, TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.embedding.open import open_pooling
from runtime.embedding.store import FieldVectors
from runtime.embedding.verbs import EmbeddingStore
from runtime.rank.parts import rows_here, tables_of
from runtime.stop import Stop

RANKS = 2
"""Processes whose gradients are summed."""
SUMMED_BYTES = tuple(4 * 2**exponent for exponent in (12, 15, 17, 19, 22))
"""Of the vectors that they sum: a bias or two to an MLP of millions."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median seconds of one stage for one number of items."""

    items: float
    seconds: float


def server_calls(
    config: TrainConfig,
    layout: Layout,
    batches: Sequence[Batch],
    repeats: int,
    on_measured: Callable[[], object] = lambda: None,
) -> list[Measurement]:
    """Seconds that one call of a server process takes beyond the same work in this process; items
    are distinct ids.

    A batch calls twice, for its rows and with their gradients: a call is the mean of both.
    """
    sync = SyncConfig(mode=Mode.SYNC)
    here = replace(config, sync=sync, engine=replace(config.engine, executor="concurrent"))
    there = replace(here, engine=replace(here.engine, servers=1))
    found: list[list[tuple[int, float]]] = []
    for settings in (here, there):
        with _opened(settings, layout) as store:
            first = 0
            found.append([])
            for batch in batches:
                found[-1].append(_both_calls(store, batch, first, repeats))
                first += repeats
                on_measured()
    inside, outside = found
    return [
        Measurement(ids, max(0.0, there_s - here_s) / 2)
        for (ids, here_s), (_, there_s) in zip(inside, outside, strict=True)
    ]


@contextmanager
def _opened(config: TrainConfig, layout: Layout) -> Iterator[EmbeddingStore]:
    open_rows = rows_here
    if config.engine.servers:
        from runtime.engines.processes.open import rows_in_servers  # loads the compiled kernels

        open_rows = rows_in_servers
    tables = list(tables_of(config, layout, {}).values())
    store = open_rows(config, layout, tables, TraceRecorder(keep=False), Stop())
    try:
        store.begin_leg([0])
        yield store
    finally:
        store.close()


def _both_calls(store: EmbeddingStore, batch: Batch, first: int, repeats: int) -> tuple[int, float]:
    """Distinct ids of the batch, and the median seconds of its lookup and push."""
    dims = {name: table.dim for name, table in store.tables.items()}
    pool = open_pooling(store.layout.fields, dims)
    distinct, times = 0, []
    for step in range(first, first + repeats):
        handle = store.begin(0, step, batch)
        distinct = sum(len(plan.ids) for plan in handle.plans.values())
        began = time.perf_counter()
        store.look_up(handle)
        looked_up = time.perf_counter() - began
        vectors = pool.forward(batch, handle.plans, handle.values)
        slopes = FieldVectors(np.ones_like(vectors.pooled), {}, {})
        rows = pool.backward(batch, handle.plans, slopes)
        began = time.perf_counter()
        store.give((handle, rows))
        store.drain()
        times.append(looked_up + time.perf_counter() - began)
    return distinct, statistics.median(times[min(2, repeats - 1) :])


def summed(repeats: int, on_measured: Callable[[], object] = lambda: None) -> list[Measurement]:
    """Seconds of an all-reduce over `RANKS` processes of this host; items are bytes of a rank."""
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = spawning.SimpleQueue()
        ranks = [
            spawning.Process(
                target=_sum, args=(rank, str(Path(folder, "store")), repeats, answers), daemon=True
            )
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = [_answer(answers, ranks, on_measured) for _ in SUMMED_BYTES]
        for process in ranks:
            process.join()
    return found


def _answer(answers: Any, ranks: Sequence[Any], on_measured: Callable[[], object]) -> Measurement:
    while answers.empty():
        ended = [rank.exitcode for rank in ranks if rank.exitcode]
        if ended:
            raise RuntimeError(f"a process of the all-reduce ended with code {ended[0]}")
        time.sleep(0.02)
    on_measured()
    size_bytes, seconds = answers.get()
    return Measurement(size_bytes, seconds)


def _sum(rank: int, file: str, repeats: int, answers: Any) -> None:
    """A process: sum vectors of all sizes with the others; the first one tells."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may be any card's
    store = dist.FileStore(file, RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for size_bytes in SUMMED_BYTES:
        gradient, times = torch.zeros(size_bytes // 4), []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(gradient)
            times.append(time.perf_counter() - began)
        if rank == 0:
            answers.put((size_bytes, statistics.median(times[min(2, repeats - 1) :])))
    dist.barrier()
    dist.destroy_process_group()
