"""One training run from its config to its figures: the whole story in one readable function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from persia_sim.words.chrome import Span
from persia_sim.words.orders import constant_lag
from persia_sim.words.staleness import StalenessSummary, summarize
from persia_sim.words.staleness_stream import StalenessCounter
from persia_sim.words.trace import Event, Trace
from persia_sim.words.vocabulary import DEFAULT_TAU, Mode
from runtime.config import TrainConfig
from runtime.data.open import open_source
from runtime.data.source import Source
from runtime.embedding.config import TableConfig
from runtime.embedding.verbs import EmbeddingStore
from runtime.engines.parts import assemble_for
from runtime.engines.threads import ConcurrentRun
from runtime.order.executor import OrderedRun
from runtime.order.merge import whole_trace
from runtime.order.replayable import (
    refuse_cut_short,
    refuse_other_run,
    trace_meta,
    unseeded_draws,
)
from runtime.rank.feed import Feed
from runtime.rank.fused import FUSED
from runtime.run.evaluate import Evaluation, HeldOut, evaluate


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
    """Empty when the run was not to keep it."""
    staleness: StalenessSummary
    store: EmbeddingStore
    model: nn.Module
    spans: list[Span]
    """How long each stage took; only of the concurrent executor, and only when asked for."""
    warnings: list[str]
    """Why the figures may mean nothing, from the first evaluation and the last."""
    losses: list[float]
    """Mean loss of each dense update, in their order; of a long run, of each
    ``figures["updates_per_loss"]`` updates."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Samples, updates, samples/s, rows, bytes, and all that was skipped, lost or replaced."""


def train(
    config: TrainConfig,
    source: Source | None = None,
    *,
    tables: Mapping[str, TableConfig] | None = None,
    on_samples: Callable[[int], None] | None = None,
    on_snapshot: Callable[[CurvePoint], None] | None = None,
) -> Outcome:
    """Train as ``config`` says and evaluate on the test part.

    ``source`` replaces the data that the config names, ``tables`` the config of single tables;
    ``on_samples`` is told of every dense update's samples, ``on_snapshot`` of every evaluation on
    the way.
    """
    torch.set_num_threads(config.engine.threads)
    if source is None:
        data = config.data
        source = open_source(data.name, data.dir, data.rows, data.skip_bad_rows, keep=data.keep)
    parts = assemble_for(config, source, tables)
    held_out = HeldOut(source, config.evaluation.test_rows)
    curve: list[CurvePoint] = []

    def snapshot(updates: int, samples: int, model: nn.Module) -> None:
        found = evaluate(parts.learner, model, parts.worker, held_out)
        curve.append(CurvePoint(updates, samples, found))
        if on_snapshot:
            on_snapshot(curve[-1])

    counter = StalenessCounter(config.sync.mode, config.sync.ranks)
    if not parts.recorder.keeps:
        parts.recorder.listen(counter.note)
    meta = trace_meta(config, source, parts.store.tables)
    if parts.fused:
        meta[FUSED] = True
    recorded = _recorded_order(config, meta)
    began = time.perf_counter()
    meter = parts.meter
    meter.start(every=config.evaluate_every_updates, evaluate=snapshot, on_samples=on_samples)
    run: OrderedRun | ConcurrentRun
    if config.engine.executor == "concurrent":
        run = ConcurrentRun(parts)
        run.run()
    else:
        run = OrderedRun(parts)
        run.run(recorded if recorded is not None else lag_order(config, parts.feed))
    wall_s = time.perf_counter() - began
    if not meter.samples:
        raise ValueError(
            f"data set {config.data.name} gave no training sample; is its split right?"
        )
    if recorded is not None:
        refuse_cut_short(recorded, meter.updates)
        meta["tau"] = recorded.meta.get("tau")
    model = run.snapshot()
    final = evaluate(parts.learner, model, parts.worker, held_out)
    early = [w for w in curve[0].evaluation.warnings if w not in final.warnings] if curve else []
    warnings = [f"after {curve[0].updates} updates: {w}" for w in early] + final.warnings
    if parts.learner.drew_unseeded:
        meta["not_replayable"] = unseeded_draws(config.model.name)
        warnings.append(f"this run cannot be repeated: {meta['not_replayable']}")
    facts = meta | {"updates": meter.updates}
    trace = whole_trace(parts.recorder, parts.store.recorded(), facts)
    return Outcome(
        final=final,
        curve=curve,
        trace=trace,
        staleness=summarize(trace) if parts.recorder.keeps else counter.summary(),
        store=parts.store,
        model=model,
        spans=parts.spans.spans,
        warnings=list(dict.fromkeys(warnings)),
        losses=meter.losses,
        figures={
            "samples": meter.samples,
            "updates": meter.updates,
            "wall_s": wall_s,
            "updates_per_loss": meter.updates_per_loss,
            "samples_per_s": meter.samples_per_s(),
            "rows": len(parts.store),
            "resident_bytes": parts.store.resident_bytes,
            "rows_replaced": parts.store.rows_replaced,
            "batches_skipped": meter.batches_skipped,
            "pushes_lost": meter.pushes_lost,
            "loss_scale": parts.learner.scale.value,
            "ranks_fused": parts.fused,
        },
    )


def lag_order(config: TrainConfig, feed: Feed) -> Iterator[Event]:
    """The constant lag of the config over the batches of the feed."""
    sync = config.sync
    tau = 0 if sync.window is None else sync.window
    return constant_lag(
        sync.mode,
        ranks=sync.ranks,
        has_batch=feed.has_batch,
        tau=tau,
        ahead=sync.ahead,
        merge_pushes=sync.merges,
        average_every=sync.average_every_steps if sync.mode is Mode.ASYNC_AVERAGING else None,
    )


def _recorded_order(config: TrainConfig, meta: dict[str, Any]) -> Trace | None:
    if config.engine.executor != "replay" or config.engine.trace is None:
        return None
    trace = Trace.load(config.engine.trace)
    refuse_other_run(trace, meta, str(config.engine.trace))
    if config.sync.tau != DEFAULT_TAU and trace.meta.get("tau") != config.sync.window:
        raise ValueError(
            f"trace {config.engine.trace} was made with tau {trace.meta.get('tau')},"
            f" not {config.sync.tau};"
            " a replay takes tau from its trace: leave the option out"
        )
    return trace
