"""Measure what each stage costs on this machine, as the laws that the simulator reads.

A law is affine: seconds = fixed + per item * items. Stages are timed in short runs of sync with one
rank, at several batch sizes (`stage_times`): with one thread by its CPU clock, which other work on
the machine does not lengthen, else by the wall clock. What a GPU does is no thread's work: a step
of the network there, and the copies around it, are called by themselves and waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any, Literal, NamedTuple

import torch

from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import Source, rebatch
from runtime.dense.optimizer import make_optimizer
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import Pooling
from runtime.embedding.native.store import NativeStore, use_threads
from runtime.embedding.server import READ
from runtime.profiling.laws import (
    LawPoint,
    Measurement,
    fit,
    fit_bytes,
    fit_fixed,
    fit_reads,
    median_of,
)
from runtime.profiling.process_costs import RANKS, REPEATS, SUMMED_BYTES, server_calls, summed
from runtime.profiling.stage_times import Drawn, count_ids, measured_stages, timed_run
from runtime.rank.components import assemble
from runtime.rank.learner import Gradients, Learner
from runtime.rank.staging import Staged, StreamStaging, open_staging
from runtime.run.folder import environment

SCHEMA = 3
Precision = Literal["float32", "tf32", "bfloat16"]
BATCHES = (64, 192, 512, 1536, 4096)
LEAST_STEPS, MOST_STEPS = 18, 240
RUN_SAMPLES = 36_864
"""A run has so many samples, but not fewer or more steps than these; its first third is left
out."""
NO_COPIES = "none: the host's memory is the device's"
COPIES = "measured: through pinned memory, the bus and the launch in one"
_CHUNKS = 2
"""Chunks of the data source that are loaded for each batch size: it reads ahead in chunks, so
that only the mean batch of many costs what loading costs."""


def measurements(processes: bool = True, device: str = "cpu") -> int:
    """How many times `measure_profile` tells of one."""
    each = 2 + 2 * processes + 3 * (device != "cpu")
    return each * len(BATCHES) + len(SUMMED_BYTES) * processes


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

    # Laws from the points of all sizes: a fixed time and one for each item or byte.
    batches = [largest.rows(0, size) for size in BATCHES]
    learner = assemble(config, source).learner
    points, reads = _points(learner, source, batches, on_measured)
    flops = 6 * sum(p.numel() for p in learner.model.parameters() if p.dim() == 2)
    rates = [(int(p.items), flops * p.items / p.seconds) for p in points.pop("dense")]
    copied = [stage for stage in points if stage.startswith("copy")]
    laws = {s: (fit_bytes if s in copied else fit)(of) for s, of in points.items()}
    laws |= fit_reads(reads)
    more: dict[str, Any] = {}
    if processes:
        calls = server_calls(config, source.layout, batches, on_measured)
        laws["worker_rpc"] = fit_fixed(calls)
        sums = summed(on_measured)
        more["all_reduce"] = {
            "ranks": RANKS,
            **fit_bytes(sums),
            "fitted_bytes": [sums[0].items, sums[-1].items],
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


def _points(
    learner: Learner,
    source: Source,
    batches: Sequence[Batch],
    on_measured: Callable[[], object],
) -> tuple[dict[str, list[Measurement]], list[LawPoint]]:
    """By stage, and of reading rows, a measurement for each batch: in a run of batches of its size,
    and of a GPU what that does by itself."""
    points: dict[str, list[Measurement]] = {}
    reads: list[LawPoint] = []
    for batch in batches:
        found = _in_a_run(learner.config, source, batch.size)
        on_measured()
        load_s = _loading_s(source, batch.size)
        on_measured()
        apart = _on_a_device(learner, batch, on_measured)
        stages = found.stages | {"load": Measurement(batch.size, load_s)} | apart
        reads += found.reads
        for stage, measurement in stages.items():
            points.setdefault(stage, []).append(measurement)
    return points, reads


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


class _Run(NamedTuple):
    """What the stages of one batch took in a run."""

    stages: dict[str, Measurement]
    reads: list[LawPoint]
    """Reading the rows of a batch while many are new, and while few are."""


def _in_a_run(config: TrainConfig, source: Source, batch: int) -> _Run:
    """The stages of a batch of so many samples in a run of sync with one rank.

    Samples are drawn before it; what drawing costs is the law of loading.
    """
    # Train so many steps, every span timed.
    steps = max(LEAST_STEPS, min(MOST_STEPS, RUN_SAMPLES // batch))
    drawn = Drawn(source, steps * batch)
    config = replace(
        config,
        sync=SyncConfig(),
        engine=replace(config.engine, executor="concurrent", timeline=True),
        batch=batch,
        steps=steps,
    )
    components = assemble(config, drawn)
    with closing(components):
        spans = timed_run(components)
    first = steps // 3
    by_cpu = config.engine.threads == 1
    times = measured_stages(spans, first, prefetches=False)
    took = times.cpu if by_cpu else times.wall

    # A worker merges, sums and scatters every occurrence of an id; distinct ones go to a server.
    counts = count_ids(islice(rebatch(drawn.chunks("train"), batch), steps))
    met = float(counts.occurrences[first:].mean())
    distinct = float(counts.distinct[first:].mean())
    dense_s = sum(took[stage] for stage in ("forward", "backward", "check", "update"))
    stages = {
        "server_update": Measurement(distinct, took["push"]),
        "worker_forward": Measurement(met, took["load"]),
        "worker_pool": Measurement(met, took["pool"]),
        "worker_scatter": Measurement(met, took["scatter"]),
        "dense": Measurement(batch, max(dense_s, 1e-9)),
    }

    # Rows are made by their first reading: most in the first third, fewer behind it.
    reads = []
    of_rows = [span for span in spans if span.stage == READ]
    for part in (range(first), range(first, steps)):
        seconds = [s.cpu_s if by_cpu else s.wall_s for s in of_rows if s.step in part]
        at = {
            "one": 1.0,
            "distinct": float(counts.distinct[part].mean()),
            "created": float(counts.created[part].mean()),
        }
        reads.append(LawPoint(at, sum(seconds) / len(part)))
    return _Run(stages, reads)


def _on_a_device(
    learner: Learner, batch: Batch, on_measured: Callable[[], object]
) -> dict[str, Measurement]:
    """A step of the network and copies where these are a GPU's; nothing without one.

    Items of a copy are bytes.
    """
    staging = open_staging(learner.device, learner.dtype)
    if not isinstance(staging, StreamStaging):
        return {}

    # The clock: the median of some repeats, without what is prepared before and cleared behind.
    def timed(
        work: Callable[..., object],
        prepare: Callable[[], tuple[Any, ...]] = tuple,
        clear: Callable[[Any], object] = lambda result: None,
    ) -> float:
        times = []
        for _ in range(REPEATS):
            given = prepare()
            began = time.perf_counter()
            result = work(*given)
            times.append(time.perf_counter() - began)
            clear(result)
        on_measured()
        return median_of(times)

    # The vectors of the batch, as a step has them.
    rows = learner.config.rows
    store = NativeStore(learner.layout, [rows], seed=0)
    pool = Pooling(learner.layout.fields, dict.fromkeys(store.tables, rows.dim))
    handle = store.begin(0, 0, batch)
    store.servers[0].read(handle)
    vectors = pool.forward(batch, handle.plans, handle.values)
    dense_s = _dense_step_s(learner, batch, vectors, handle, timed)
    copies = _copies(staging, learner, batch, vectors, timed)
    return copies | {"dense": Measurement(batch.size, max(dense_s, 1e-9))}


def _dense_step_s(
    learner: Learner,
    batch: Batch,
    vectors: FieldVectors,
    handle: Any,
    timed: Callable[..., float],
) -> float:
    """Seconds of forward, backward and optimiser on a batch that is at the device."""
    optimizer = make_optimizer(learner.config, learner.model)

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
    staging: StreamStaging,
    learner: Learner,
    batch: Batch,
    vectors: FieldVectors,
    timed: Callable[..., float],
) -> dict[str, Measurement]:
    """A batch on its way to a GPU, and its rows' gradients on their way back; items are bytes.

    From pinned memory, into which training pools.
    """

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
