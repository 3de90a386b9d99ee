"""What it costs that servers and ranks are processes: a call of a server, a sum over ranks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import start_processes

from persia_sim.base.trace import TraceRecorder
from runtime.config import SyncConfig, TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.native.plan import Pooling
from runtime.embedding.store import EmbeddingStore
from runtime.executors.open import rows_of
from runtime.process import enter_process, fork_server
from runtime.profiling.laws import Measurement, median_of
from runtime.rank.components import tables_of
from runtime.stop import Stop

REPEATS = 15
RANKS = 2
"""Processes whose gradients are summed."""
SUMMED_BYTES = tuple(4 * 2**exponent for exponent in (12, 15, 17, 19, 22))
"""Bytes of the vectors that they sum: a bias or two to an MLP of millions."""


def server_calls(
    config: TrainConfig,
    layout: Layout,
    batches: Sequence[Batch],
    on_measured: Callable[[], object] = lambda: None,
) -> list[Measurement]:
    """Seconds that one call of a server process takes beyond the same work in this process; items
    are distinct ids.

    A batch calls twice, for its rows and with their gradients: a call is the mean of both.
    """
    here = replace(config, sync=SyncConfig(), engine=replace(config.engine, executor="concurrent"))
    there = replace(here, engine=replace(here.engine, servers=1))
    measured = []
    for settings in (here, there):
        with closing(_opened(settings, layout)) as store:
            steps = count()
            measured.append([_both_calls(store, batch, steps, on_measured) for batch in batches])
    return [
        Measurement(inside.items, max(0.0, outside.seconds - inside.seconds) / 2)
        for inside, outside in zip(*measured, strict=True)
    ]


def _opened(config: TrainConfig, layout: Layout) -> EmbeddingStore:
    open_rows = rows_of(config)
    tables = list(tables_of(config, layout, {}).values())
    store = open_rows(config, layout, tables, TraceRecorder(keep=False), Stop()).store
    store.begin_leg([0])
    return store


def _both_calls(
    store: EmbeddingStore, batch: Batch, steps: Iterator[int], on_measured: Callable[[], object]
) -> Measurement:
    """Distinct ids of the batch, and the median seconds of its lookup and push."""
    # Gradients are made as a step makes them, and that is not timed.
    dims = {name: table.dim for name, table in store.tables.items()}
    pool = Pooling(store.layout.fields, dims)
    distinct = 0
    times = []

    # A lookup, and a push until the server has applied it.
    for step in islice(steps, REPEATS):
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
    on_measured()
    return Measurement(distinct, median_of(times))


def summed(on_measured: Callable[[], object] = lambda: None) -> list[Measurement]:
    """Seconds of an all-reduce over `RANKS` processes of this host; items are bytes of a rank."""
    answers = fork_server().SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = str(Path(folder, "store")), REPEATS, answers
        start_processes(_sum, given, nprocs=RANKS, start_method="forkserver")  # type: ignore[no-untyped-call]
    for _ in SUMMED_BYTES:
        on_measured()
    return [Measurement(*answers.get()) for _ in SUMMED_BYTES]


def _sum(rank: int, file: str, repeats: int, answers: Any) -> None:
    """A process: sum vectors of all sizes with the others; the first one tells."""
    import torch.distributed as dist

    enter_process()
    # Meet the other processes through a file: no port of this host is taken.
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may be any card's
    store = dist.FileStore(file, RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    # All begin together, so that one's delay is not another's sum.
    for size_bytes in SUMMED_BYTES:
        gradient = torch.zeros(size_bytes // 4)
        times = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(gradient)
            times.append(time.perf_counter() - began)
        if rank == 0:
            answers.put((size_bytes, median_of(times)))
    dist.barrier()
    dist.destroy_process_group()
