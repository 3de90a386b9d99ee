"""One training run from its config to its figures: the whole story in one readable function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from persia_sim.chrome import Interval
from persia_sim.orders import constant_lag
from persia_sim.staleness import StalenessSummary, summarize
from persia_sim.trace import Event, Trace, TraceRecorder
from runtime.config import TrainConfig
from runtime.data.open import open_source
from runtime.data.source import Source
from runtime.embedding.open import open_store
from runtime.embedding.store import EmbeddingStore
from runtime.training.concurrent import ConcurrentRun
from runtime.training.evaluate import Evaluation, evaluate, test_batches
from runtime.training.feed import Feed, training_stream
from runtime.training.learner import Learner
from runtime.training.ordered import OrderedRun
from runtime.training.progress import Meter
from runtime.training.spans import SpanRecorder

OnSamples = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A snapshot on the way: rows as applied, dense weights after ``updates``, nothing drained."""

    updates: int
    samples: int
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a run leaves behind."""

    final: Evaluation
    """After all pushes were applied."""
    curve: list[CurvePoint]
    trace: Trace
    staleness: StalenessSummary
    store: EmbeddingStore
    model: nn.Module
    intervals: list[Interval]
    """How long each stage took; only of the concurrent executor, and only when asked for."""
    warnings: list[str]
    """Why the figures may mean nothing, from the first evaluation and the last."""
    losses: list[float]
    """Mean loss of each dense update, in the order of updates."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Samples, updates, samples/s, rows, bytes, and all that was skipped, lost or replaced."""


def train(
    config: TrainConfig, source: Source | None = None, on_samples: OnSamples | None = None
) -> Outcome:
    """Train as ``config`` says and evaluate on the test part.

    ``source`` replaces the data that the config names; ``on_samples`` is told of every dense
    update's samples.
    """
    torch.set_num_threads(config.threads)
    if source is None:
        data = config.data
        source = open_source(data.name, data_dir=data.dir, skip_bad_rows=data.skip_bad_rows)
    learner = Learner(config, source.layout)
    recorder = TraceRecorder()
    store = open_store(
        source.layout,
        [config.rows],
        engine=config.engine,
        shards=config.shards,
        seed=config.seed,
        recorder=recorder,
    )
    curve: list[CurvePoint] = []
    held_out = list(test_batches(source, config.test_rows))

    def snapshot(updates: int, samples: int, model: nn.Module) -> None:
        curve.append(CurvePoint(updates, samples, evaluate(learner, model, store, held_out)))

    meter = Meter(
        evaluate_every=config.evaluate_every_steps, evaluate=snapshot, on_samples=on_samples
    )
    feed = Feed(
        training_stream(config, source), config.ranks, config.mode.has_barrier, stop=lambda: False
    )
    meta = _trace_meta(config, source)
    spans = SpanRecorder(enabled=config.timeline)
    began = time.perf_counter()
    meter.start()
    run: OrderedRun | ConcurrentRun
    if config.executor == "concurrent":
        run = ConcurrentRun(config, learner, store, feed, recorder, meter, spans=spans)
        run.run()
    else:
        run = OrderedRun(config, learner, store, feed, recorder, meter)
        run.run(_order(config, feed, meta))
    wall_s = time.perf_counter() - began
    if not meter.samples:
        raise ValueError(
            f"data set {config.data.name} gave no training sample; is its split right?"
        )
    model = run.snapshot()
    final = evaluate(learner, model, store, held_out)
    trace = recorder.finish(**meta)
    figures = {
        "samples": meter.samples,
        "updates": meter.updates,
        "wall_s": wall_s,
        "samples_per_s": meter.samples_per_s(),
        "rows": len(store),
        "resident_bytes": store.resident_bytes,
        "rows_replaced": store.rows_replaced,
        "batches_skipped": meter.batches_skipped,
        "pushes_lost": meter.pushes_lost,
        "loss_scale": learner.loss_scale,
    }
    first = curve[0].evaluation.warnings if curve else []
    warnings = list(dict.fromkeys([*first, *final.warnings]))
    return Outcome(
        final,
        curve,
        trace,
        summarize(trace),
        store,
        model,
        spans.intervals,
        warnings,
        meter.losses,
        figures,
    )


def _order(config: TrainConfig, feed: Feed, meta: dict[str, Any]) -> Iterator[Event]:
    if config.executor == "replay" and config.trace is not None:
        trace = Trace.load(config.trace)
        refuse_other_run(trace, meta, str(config.trace))
        meta["tau"] = trace.meta.get("tau")
        return iter(trace)
    every = config.average_every_steps or 32
    return constant_lag(
        config.mode,
        ranks=config.ranks,
        has_batch=feed.has_batch,
        tau=config.lag,
        ahead=config.prefetched_steps,
        merge_pushes=config.merges,
        average_every=every if config.mode == "async_averaging" else None,
    )


def _trace_meta(config: TrainConfig, source: Source) -> dict[str, Any]:
    """What a replay must match to give the same bytes."""
    return {
        "mode": str(config.mode),
        "ranks": config.ranks,
        "tau": config.window,
        "seed": config.seed,
        "batch": config.batch_per_push,
        "batch_per_rank": config.batch_per_push // (config.ranks if config.mode.has_barrier else 1),
        "shards": config.shards,
        "passes": config.data.passes,
        "shuffle": config.data.shuffle,
        "rows_read": config.data.rows,
        "model": f"{config.model}",
        "rows": f"{config.rows}",
        "row_gradients": config.row_gradients,
        "precision": config.precision,
        "device": config.device,
        "threads": config.threads,
        "torch": torch.__version__,
        "data": source.provenance().name,
    }


def refuse_other_run(trace: Trace, meta: dict[str, Any], name: str) -> None:
    """Raise ValueError when the trace cannot be executed with these settings.

    A recorded trace must agree in everything that decides a byte. A simulated one knows neither
    seed nor data: its mode, its ranks and the samples of one rank's batch must agree.
    """
    if trace.meta.get("order") == "simulated":
        meta = {"mode": meta["mode"], "ranks": meta["ranks"], "batch": meta["batch_per_rank"]}
    differences = [
        f"{key}: trace {trace.meta[key]!r}, this run {value!r}"
        for key, value in meta.items()
        if key in trace.meta and key != "tau" and trace.meta[key] != value
    ]
    if differences:
        raise ValueError(f"trace {name} is of another run; " + "; ".join(differences))
