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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from persia_sim.words.trace import TraceRecorder
from persia_sim.words.vocabulary import Mode
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.data.open import open_source
from runtime.data.source import Source, rebatch
from runtime.dense.optimizer import make_optimizer
from runtime.embedding.config import TableConfig
from runtime.embedding.open import open_pooling, open_store
from runtime.embedding.store import FieldVectors
from runtime.embedding.verbs import EmbeddingStore
from runtime.rank.learner import Learner
from runtime.rank.parts import assemble, rows_here, tables_of
from runtime.rank.staging import Staged, StreamStaging, open_staging
from runtime.run.folder import environment, write_json
from runtime.stop import Stop

SCHEMA = 3
BATCHES = (64, 192, 512, 1536, 4096)
REPEATS = 15
NO_COPIES = "none: the host's memory is the device's"
COPIES = "measured: through pinned memory, the bus and the launch in one"
_CHUNKS = 2
"""Of the data source that are loaded for each batch size: it reads ahead in chunks, so that only
the mean batch of many costs what loading costs."""


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
) -> dict[str, Any]:
    """The profile of this machine: every stage at every batch size of `BATCHES`.

    With ``processes`` also what a call of a server process costs, and a sum over ranks that are
    processes; on a GPU also the copies of a batch to it and of gradients back. ``on_measured`` is
    called after each of the `measurements`. Raises ValueError for data whose training part is
    smaller than the largest batch, and for a device that is not here.
    """
    found, dense, weights = measure_stages(dim, hidden, data, on_measured, device=device)
    copies = {stage: found.pop(stage) for stage in ("copy_in", "copy_out") if stage in found}
    laws = {stage: fit(points) for stage, points in found.items()}
    laws |= {stage: fit_bytes(points) for stage, points in copies.items()}
    more: dict[str, Any] = {}
    if processes:
        source = open_source(data)
        largest = next(rebatch(source.chunks("train"), max(BATCHES)))
        config = TrainConfig(rows=TableConfig(dim=dim), model=ModelConfig(hidden=hidden))
        batches = [largest.rows(0, size) for size in BATCHES]
        calls = server_calls(config, source.layout, batches, REPEATS, on_measured)
        laws["worker_rpc"] = fit_fixed(calls)
        law = fit_bytes(points := summed(REPEATS, on_measured))
        law["fitted_bytes"] = [points[0].items, points[-1].items]
        more["all_reduce"] = {"ranks": RANKS, **law}
    rates = [(size, 6 * weights * size / dense_s) for size, dense_s in dense]
    where = environment()
    return {
        "schema": SCHEMA,
        "source": f"measured by runtime profile, {where['cpu']}, one thread",
        "dim": dim,
        "hidden": hidden,
        "laws": laws,
        "gpu": {"device": _name_of(device), "fixed_s": 0.0, "flops_per_s": rates},
        "copies": COPIES if copies else NO_COPIES,
        **more,
        "provenance": {**where, "data": data, "repeats": REPEATS},
    }


def _name_of(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def measure_stages(
    dim: int,
    hidden: tuple[int, ...],
    data: str,
    on_measured: Callable[[], object] = lambda: None,
    *,
    device: str = "cpu",
) -> tuple[dict[str, list[Measurement]], list[tuple[int, float]], int]:
    """Each stage's measurements; (batch, seconds) of dense steps; weights of the dense network.

    The means of loading hold whole chunks of the source. Items of a copy are bytes.
    ``on_measured`` and errors are those of `measure_profile`.
    """
    torch.set_num_threads(1)

    def timed(work: Callable[[], object]) -> float:
        seconds = _median_s(work)
        on_measured()
        return seconds

    engine = EngineConfig(device=device)
    config = TrainConfig(rows=TableConfig(dim=dim), model=ModelConfig(hidden=hidden), engine=engine)
    source = open_source(data)
    largest = next(rebatch(source.chunks("train"), max(BATCHES)), None)
    if largest is None or largest.size < max(BATCHES):
        size = largest.size if largest else 0
        raise ValueError(
            f"data {data} has {size:,} training samples: must be at least {max(BATCHES):,}, the"
            " largest batch that is measured; name a larger data set"
        )
    learner = assemble(config, source).learner
    found: dict[str, list[Measurement]] = {}
    dense = []
    for size in BATCHES:
        found.setdefault("load", []).append(Measurement(size, _loading_s(source, size)))
        on_measured()
        stages, dense_s = _measure(config, learner, largest.rows(0, size), timed)
        for stage, measurement in stages.items():
            found.setdefault(stage, []).append(measurement)
        dense.append((size, dense_s))
    weights = sum(p.numel() for p in learner.model.parameters() if p.dim() == 2)
    return found, dense, weights


def _loading_s(source: Source, size: int) -> float:
    """Mean seconds of a batch of so many samples."""
    chunk = next(source.chunks("train")).size
    count = -(-_CHUNKS * chunk // size)
    stream = rebatch(_endless(source), size)
    for _ in range(-(-chunk // size)):
        next(stream)
    began = time.perf_counter()
    for _ in range(count):
        next(stream)
    return (time.perf_counter() - began) / count


def _endless(source: Source) -> Iterator[Batch]:
    while True:
        yield from source.chunks("train")


def _measure(
    config: TrainConfig, learner: Learner, batch: Batch, timed: Callable[..., float]
) -> tuple[dict[str, Measurement], float]:
    """Every stage on one batch, and the seconds of a dense step."""
    store = open_store(learner.layout, [config.rows], seed=0)
    pool = open_pooling(learner.layout.fields, dict.fromkeys(store.tables, config.rows.dim))
    handle = store.begin(0, 0, batch)
    plans, values = handle.plans, handle.values
    began = time.perf_counter()
    store.read(handle, 0)
    created_s = time.perf_counter() - began
    vectors = pool.forward(batch, plans, values)
    slopes = FieldVectors(np.ones_like(vectors.pooled), {}, {})
    rows = pool.backward(batch, plans, slopes)
    seconds = {
        "server_lookup": timed(lambda: store.read(handle, 0)),
        "server_update": timed(lambda: store.push(0, [(handle, rows)])),
        "worker_forward": timed(lambda: store.begin(0, 0, batch)),
        "worker_pool": timed(lambda: pool.forward(batch, plans, values)),
        "worker_scatter": timed(lambda: pool.backward(batch, plans, slopes)),
    }
    seconds["server_create"] = max(0.0, created_s - seconds["server_lookup"])
    distinct = sum(len(plan.ids) for plan in plans.values())
    optimizer = make_optimizer(config, learner.model)

    def dense_step() -> None:
        staged = learner.stage(batch, vectors)
        gradients = learner.gradients(learner.model, handle, staged, batch.size)
        optimizer.step(gradients.dense)
        float(gradients.loss)  # of a GPU: it is here when the gradients are
        _settle(learner.device)

    copies = _copies(learner, batch, vectors, timed)
    dense_s = timed(dense_step) - sum(copy.seconds for copy in copies.values())
    # A worker merges, sums and scatters every occurrence of an id; distinct ones go to a server.
    items = {"worker": len(batch.ids), "server": distinct}
    laws = {s: Measurement(items[s.split("_")[0]], t) for s, t in seconds.items()}
    return laws | copies, max(dense_s, 1e-9)


def _copies(
    learner: Learner, batch: Batch, vectors: FieldVectors, timed: Callable[..., float]
) -> dict[str, Measurement]:
    """A batch on its way to a GPU, and its rows' gradients on their way back; items are bytes."""
    staging = open_staging(learner.device, learner.dtype)
    if not isinstance(staging, StreamStaging):
        return {}

    def copy_in() -> Staged:
        staged = staging.send(batch, vectors)
        staging.arrive(staged)
        _settle(learner.device)
        return staged

    leaves = copy_in().embeddings
    leaves.pooled.grad = torch.ones_like(leaves.pooled)

    def copy_out() -> None:
        with staging.receive(leaves):
            pass

    out_bytes = vectors.pooled.nbytes
    in_bytes = out_bytes + batch.dense.nbytes + batch.labels.nbytes
    return {
        "copy_in": Measurement(in_bytes, timed(copy_in)),
        "copy_out": Measurement(out_bytes, timed(copy_out)),
    }


def _settle(device: torch.device) -> None:
    """All that was asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    seconds, items = [p.seconds for p in points], [p.items for p in points]
    fixed_s = statistics.median(seconds)
    spread = float(np.std(seconds)) / max(fixed_s, 1e-9)
    return {"fixed_s": fixed_s, "spread": spread, "fitted_items": [min(items), max(items)]}


def fit_bytes(points: list[Measurement]) -> dict[str, Any]:
    """As `fit`, where items are bytes: of a copy, or that each rank brings to a sum."""
    law = fit(points)
    return {n: law[o] for n, o in (("fixed_s", "fixed_s"), ("per_byte_s", "per_item_s"),
                                   ("spread", "spread"))}  # fmt: skip


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write the file that `persia-sim --profile` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile)


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


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
