"""Measure what each stage costs on this machine, as the laws that the simulator reads.

A law is affine: seconds = fixed + per item * items. It is fitted on medians of repeated calls of
the very functions that training uses, and says its range and its residual spread.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import nnls
from torch.multiprocessing.spawn import start_processes

from persia_sim.base.trace import TraceRecorder
from persia_sim.base.vocabulary import Mode
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.data.open import open_source
from runtime.data.source import Source, rebatch
from runtime.dense.optimizer import make_optimizer
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import Pooling
from runtime.embedding.native.store import NativeStore, use_threads
from runtime.embedding.store import EmbeddingStore
from runtime.engines.open import rows_of
from runtime.process import enter_process
from runtime.rank.learner import Gradients, Learner
from runtime.rank.parts import assemble, tables_of
from runtime.rank.staging import Staged, StreamStaging, open_staging
from runtime.run.folder import environment
from runtime.stop import Stop

SCHEMA = 3
Precision = Literal["float32", "tf32", "bfloat16", "float16"]
BATCHES = (64, 192, 512, 1536, 4096)
REPEATS = 15
NO_COPIES = "none: the host's memory is the device's"
COPIES = "measured: through pinned memory, the bus and the launch in one"
_CHUNKS = 2
"""Chunks of the data source that are loaded for each batch size: it reads ahead in chunks, so
that only the mean batch of many costs what loading costs."""


def measurements(processes: bool = True, device: str = "cpu") -> int:
    """How many times `measure_profile` tells of one."""
    stages = 7 + 2 * processes + 2 * (device != "cpu")
    return stages * len(BATCHES) + len(SUMMED_BYTES) * processes


def measure_profile(
    dim: int,
    hidden: tuple[int, ...],
    data: str,
    on_measured: Callable[[], object] = lambda: None,
    *,
    processes: bool = True,
    device: str = "cpu",
    precision: Precision = "float32",
    threads: int = 1,
) -> dict[str, Any]:
    """The profile of this machine: every stage at every batch size of `BATCHES`.

    With ``processes`` also what a call of a server process costs, and a sum over ranks that are
    processes; on a GPU also the copies of a batch to it and of gradients back. Each stage has
    ``threads``, and the network computes in ``precision``. ``on_measured`` is called after each of
    the `measurements`. Raises ValueError for data whose training part is
    smaller than the largest batch, and for a device that is not here.
    """
    # Threads of each stage: with one, the simulator multiplies by cores itself.
    torch.set_num_threads(threads)
    use_threads(threads)
    config = TrainConfig(
        rows=TableConfig(dim=dim),
        model=ModelConfig(hidden=hidden),
        engine=EngineConfig(device=device, precision=precision, threads=threads),
    )
    source = open_source(data)
    largest = next(rebatch(source.chunks("train"), max(BATCHES)), None)
    if largest is None or largest.size < max(BATCHES):
        size = largest.size if largest else 0
        raise ValueError(
            f"data {data} has {size:,} training samples: must be at least {max(BATCHES):,}, the"
            " largest batch that is measured; name a larger data set"
        )

    # Every stage of a step at every batch size.
    learner = assemble(config, source).learner
    flops = 6 * sum(p.numel() for p in learner.model.parameters() if p.dim() == 2)
    batches = [largest.rows(0, size) for size in BATCHES]
    measured: dict[str, list[Measurement]] = {}
    rates = []
    for batch in batches:
        stages = _measure(config, learner, source, batch, on_measured)
        rates.append((batch.size, flops * batch.size / stages.pop("dense").seconds))
        for stage, measurement in stages.items():
            measured.setdefault(stage, []).append(measurement)

    # Laws from the points: a fixed time and one for each item or byte.
    copied = [stage for stage in measured if stage.startswith("copy")]
    laws = {s: (fit_bytes if s in copied else fit)(points) for s, points in measured.items()}
    more: dict[str, Any] = {}
    if processes:
        calls = server_calls(config, source.layout, batches, on_measured)
        laws["worker_rpc"] = fit_fixed(calls)
        points = summed(on_measured)
        more["all_reduce"] = {
            "ranks": RANKS,
            **fit_bytes(points),
            "fitted_bytes": [points[0].items, points[-1].items],
        }

    # Beside the laws, on what they were measured.
    where = environment()
    name = torch.cuda.get_device_name(device) if copied else "cpu"
    return {
        "schema": SCHEMA,
        "source": f"measured by runtime profile, {where['cpu']}, {_threads(threads)}",
        "dim": dim,
        "hidden": hidden,
        "precision": precision,
        "threads": threads,
        "laws": laws,
        "gpu": {"device": name, "fixed_s": 0.0, "flops_per_s": rates},
        "copies": COPIES if copied else NO_COPIES,
        **more,
        "provenance": {**where, "data": data, "repeats": REPEATS},
    }


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _loading_s(source: Source, size: int) -> float:
    """Mean seconds of a batch of so many samples."""
    chunk = next(source.chunks("train")).size
    batches = -(-_CHUNKS * chunk // size)
    endless = chain.from_iterable(source.chunks("train") for _ in repeat(None))
    stream = rebatch(endless, size)
    for _ in range(-(-chunk // size)):
        next(stream)
    began = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return (time.perf_counter() - began) / batches


def _measure(
    config: TrainConfig,
    learner: Learner,
    source: Source,
    batch: Batch,
    on_measured: Callable[[], object],
) -> dict[str, Measurement]:
    """Every stage on one batch, a step of the dense network among them; items of a copy are bytes.

    The mean of loading holds whole chunks of the source.
    """

    # The clock of every stage: the median of some repeats.
    def timed(
        work: Callable[..., object],
        prepare: Callable[[], tuple[Any, ...]] = tuple,
        clear: Callable[[Any], object] = lambda result: None,
    ) -> float:
        """Seconds of ``work`` alone, not of what it is given, nor of clearing up behind it."""
        times = []
        for _ in range(REPEATS):
            given = prepare()
            began = time.perf_counter()
            result = work(*given)
            times.append(time.perf_counter() - began)
            clear(result)
        on_measured()
        return _median(times)

    # The first read creates all rows: what it takes more than others is their creation.
    store = NativeStore(learner.layout, [config.rows], seed=0)
    server = store.servers[0]
    pool = Pooling(learner.layout.fields, dict.fromkeys(store.tables, config.rows.dim))
    handle = store.begin(0, 0, batch)
    plans = handle.plans
    values = handle.values
    began = time.perf_counter()
    server.read(handle)
    created_s = time.perf_counter() - began
    vectors = pool.forward(batch, plans, values)
    slopes = FieldVectors(np.ones_like(vectors.pooled), {}, {})
    rows = pool.backward(batch, plans, slopes)
    # A worker merges, sums and scatters every occurrence of an id; distinct ones go to a server.
    met = len(batch.ids)
    distinct = sum(len(plan.ids) for plan in plans.values())
    measured = {
        "load": Measurement(batch.size, _loading_s(source, batch.size)),
        "server_lookup": Measurement(distinct, timed(lambda: server.read(handle))),
        "server_update": Measurement(distinct, timed(lambda: server.apply([(handle, rows)]))),
        "worker_forward": Measurement(met, timed(lambda: store.begin(0, 0, batch))),
        "worker_pool": Measurement(met, timed(lambda: pool.forward(batch, plans, values))),
        "worker_scatter": Measurement(met, timed(lambda: pool.backward(batch, plans, slopes))),
    }
    on_measured()  # of the loading
    create_s = created_s - measured["server_lookup"].seconds
    measured["server_create"] = Measurement(distinct, max(0.0, create_s))

    # A whole dense step, and the copies around it where there is a GPU.
    dense_s = _dense_step_s(config, learner, batch, vectors, handle, timed)
    copies = _copies(learner, batch, vectors, timed)
    return measured | copies | {"dense": Measurement(batch.size, max(dense_s, 1e-9))}


def _dense_step_s(
    config: TrainConfig,
    learner: Learner,
    batch: Batch,
    vectors: FieldVectors,
    handle: Any,
    timed: Callable[..., float],
) -> float:
    """Seconds of forward, backward and optimiser on a batch that is at the device."""
    optimizer = make_optimizer(config, learner.model)

    # Before the clock starts, the batch is brought to the device.
    def arrived() -> tuple[Staged | None]:
        """The batch is at the device: its copy is no part of the step."""
        staged = learner.stage(batch, vectors)
        _settle(learner.device)
        return (staged,)

    # What is timed, a whole step of the dense network: forward, backward, update of its weights.
    def dense_step(staged: Staged | None) -> Gradients:
        """Gradients go back beside the optimiser, so nobody waits for their copy here."""
        gradients = learner.gradients(learner.model, handle, staged, batch.size)
        optimizer.step(gradients.dense)
        _settle_computing(learner.device)
        return gradients

    # Behind it, what the step holds is given back.
    def cleared(gradients: Gradients) -> None:
        float(gradients.loss)  # of a GPU: it is here when the rows' gradients are
        if gradients.vectors is not None:
            gradients.vectors.held.close()  # or each step would ask for pinned memory anew

    return timed(dense_step, arrived, cleared)


def _copies(
    learner: Learner, batch: Batch, vectors: FieldVectors, timed: Callable[..., float]
) -> dict[str, Measurement]:
    """A batch on its way to a GPU, and its rows' gradients on their way back; items are bytes.

    From pinned memory, into which training pools.
    """
    # Without a GPU nothing is copied.
    staging = open_staging(learner.device, learner.dtype)
    if not isinstance(staging, StreamStaging):
        return {}

    # Pinned memory is filled before the clock starts.
    def pooled() -> tuple[FieldVectors]:
        array = staging.allocate(vectors.pooled.shape, vectors.pooled.dtype)
        array[...] = vectors.pooled
        return (FieldVectors(array, {}, {}),)

    # Both ways end when the device has them, which a queued copy alone would not say.
    def copy_in(given: FieldVectors) -> Staged:
        staged = staging.send(batch, given)
        staging.arrive(staged)
        _settle(learner.device)
        return staged

    leaves = copy_in(*pooled()).embeddings
    leaves.pooled.grad = torch.ones_like(leaves.pooled)

    # The gradients' way back ends when the host may read them.
    def copy_out() -> None:
        with staging.receive(leaves):
            pass

    # Gradients go back as large as the vectors came.
    out_bytes = vectors.pooled.nbytes
    in_bytes = out_bytes + batch.dense.nbytes + batch.labels.nbytes
    return {
        "copy_in": Measurement(in_bytes, timed(copy_in, pooled)),
        "copy_out": Measurement(out_bytes, timed(copy_out)),
    }


def _settle(device: torch.device) -> None:
    """All that was asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _settle_computing(device: torch.device) -> None:
    """The network is done; copies of its gradients may be under way."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def fit(points: list[Measurement]) -> dict[str, Any]:
    """The affine law with non-negative terms that is nearest relative to each measurement."""
    seconds = np.array([p.seconds for p in points])
    items = np.array([p.items for p in points])
    scale = np.maximum(seconds, 1e-9)
    terms = np.column_stack([np.ones_like(items), items]) / scale[:, None]
    (fixed_s, per_item_s), _ = nnls(terms, seconds / scale)
    residuals = (fixed_s + per_item_s * items) / scale - 1
    return {
        "fixed_s": float(fixed_s),
        "per_item_s": float(per_item_s),
        "spread": float(np.std(residuals)),
        "fitted_items": [float(items.min()), float(items.max())],
    }


def fit_fixed(points: list[Measurement]) -> dict[str, Any]:
    """The median of all measurements: what a call costs holds no ids, and the spread says how far
    that is true."""
    seconds = [p.seconds for p in points]
    items = [p.items for p in points]
    fixed_s = statistics.median(seconds)
    spread = float(np.std(seconds)) / max(fixed_s, 1e-9)
    return {"fixed_s": fixed_s, "spread": spread, "fitted_items": [min(items), max(items)]}


def fit_bytes(points: list[Measurement]) -> dict[str, Any]:
    """Fit (see `fit`) where items are bytes: of a copy, or that each rank brings to a sum."""
    law = fit(points)
    return {"fixed_s": law["fixed_s"], "per_byte_s": law["per_item_s"], "spread": law["spread"]}


def _median(seconds: list[float]) -> float:
    """Without the first two, which warm up."""
    return statistics.median(seconds[min(2, len(seconds) - 1) :])


RANKS = 2
"""Processes whose gradients are summed."""
SUMMED_BYTES = tuple(4 * 2**exponent for exponent in (12, 15, 17, 19, 22))
"""Bytes of the vectors that they sum: a bias or two to an MLP of millions."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median seconds of one stage for one number of items."""

    items: float
    seconds: float


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
    sync = SyncConfig(mode=Mode.SYNC)
    here = replace(config, sync=sync, engine=replace(config.engine, executor="concurrent"))
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
    return Measurement(distinct, _median(times))


def summed(on_measured: Callable[[], object] = lambda: None) -> list[Measurement]:
    """Seconds of an all-reduce over `RANKS` processes of this host; items are bytes of a rank."""
    answers = multiprocessing.get_context("forkserver").SimpleQueue()
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
            answers.put((size_bytes, _median(times)))
    dist.barrier()
    dist.destroy_process_group()
