"""The stages of one (rank, step) as the concurrent executor runs them, safe for any thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from torch import nn

from persia_sim.words.trace import ALL, Kind
from persia_sim.words.vocabulary import Mode, Stage
from runtime.dense.optimizer import DenseGradients, apply_gradients, make_optimizer, replica
from runtime.dense.server import DenseServer, ModelAverager
from runtime.dense.threads import ThreadAllReduce
from runtime.embedding.store import Handle, RowGradients
from runtime.rank.gate import Gate
from runtime.rank.learner import StageSpan
from runtime.rank.merger import RankPush, StepMerger
from runtime.rank.parts import Parts
from runtime.rank.staging import Staged

LosePush = Callable[[int, int], bool]
"""Fault injection: whether the push of (rank, step) is lost on its way."""


class Fetched(NamedTuple):
    """Rows are here; the dense network may start."""

    handle: Handle
    step_samples: int
    staged: Staged | None
    """None before the rows are final, and for a batch without samples."""


class Computed(NamedTuple):
    """Gradients are here; the rows may be written."""

    handle: Handle
    rows: RowGradients | None
    """None when they are not finite: the step is closed without them."""


class Stages:
    """What a rank does with a batch; which thread does it, and when, is the executor's matter."""

    def __init__(self, parts: Parts, lose_push: LosePush) -> None:
        config, learner = parts.config, parts.learner
        self._config, self._learner, self._store = config, learner, parts.store
        self._feed, self._recorder, self._meter = parts.feed, parts.recorder, parts.meter
        self._spans, self._stop, self._lose_push = parts.spans, parts.stop, lose_push
        mode, ranks = config.mode, config.ranks
        self._gate = Gate(ranks, config.window, not mode.has_barrier, config.permits, parts.stop)
        self._merger = StepMerger(ranks) if config.merges else None
        self._meter_lock = threading.Lock()
        self._step_losses: list[float] = []
        self._step_samples = 0
        self._updates = 0
        if mode.has_barrier:
            alone = ranks == 1
            self._models: list[nn.Module] = [
                learner.model if alone else replica(learner.model, shared=True)
                for _ in range(ranks)
            ]
            self._optimizer = make_optimizer(config.model, learner.model)
            self._allreduce = ThreadAllReduce(self._models, self._dense_update, parts.stop)
            # Hooks see gradients before a loss scale is taken out of them, so a scale is exposed.
            if mode.overlaps_dense_sync and not alone and learner.scale.value == 1.0:
                for rank, model in enumerate(self._models):
                    self._allreduce.overlap(rank, model)
        else:
            self._models = [replica(learner.model, shared=False) for _ in range(ranks)]
            server = ModelAverager if mode is Mode.ASYNC_AVERAGING else DenseServer
            self._dense_server = server(config, learner.model, self._models, parts.recorder)

    def snapshot(self) -> nn.Module:
        """The model to evaluate: that of the barrier, or a copy at one version."""
        if self._config.mode.has_barrier:
            return self._learner.model
        return self._dense_server.snapshot()

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more."""
        self._gate.finish(rank, steps)

    def fetch(self, rank: int, step: int) -> Fetched | None:
        """load and lookup, when the window lets it; None past the end of the data."""
        return self._load_and_read(rank, step, prefetch=False)

    def prefetch(self, rank: int, step: int) -> Fetched | None:
        """lookahead: load and a lookup without side effect, at any time before the step."""
        return self._load_and_read(rank, step, prefetch=True)

    def _load_and_read(self, rank: int, step: int, prefetch: bool) -> Fetched | None:
        with self._span("load", rank, step)(Stage.LOAD):
            work = self._feed.take(rank, step)
            if work is None:
                return None
            handle = self._store.begin(rank, step, work.batch)
        if not prefetch:
            self._gate.enter(rank, step)
        with self._span("lookup", rank, step)(Stage.LOOKUP):
            self._travel()
            for shard in range(self._store.shards):
                self._store.read(handle, shard, create=not prefetch)
            staged = None if prefetch else self._learner.stage(handle)
        return Fetched(handle, work.step_samples, staged)

    def refresh(self, rank: int, fetched: Fetched) -> Fetched:
        """lookahead: at the logical step, replace rows that were written since the prefetch."""
        handle = fetched.handle
        self._gate.enter(rank, handle.step)
        with self._span("lookup", rank, handle.step)(Stage.LOOKUP):
            for shard in range(self._store.shards):
                self._store.refresh(handle, shard)
            return fetched._replace(staged=self._learner.stage(handle))

    def train(self, rank: int, fetched: Fetched) -> Computed:
        """forward, backward, and what the mode does with the dense gradients."""
        handle, mode = fetched.handle, self._config.mode
        span = self._span("dense", rank, handle.step)
        if not mode.has_barrier:
            with span(Stage.AVERAGE if mode is Mode.ASYNC_AVERAGING else Stage.DENSE_PULL):
                self._dense_server.pull(rank, handle.step)
        model = self._models[rank]
        samples, staged = fetched.step_samples, fetched.staged
        found = self._learner.gradients(model, handle, staged, samples, span)
        if not found.finite:
            self._learner.refuse_or_skip(handle, found)
            with self._meter_lock:
                self._meter.skip()
        dense = found.dense if found.finite else None
        loss = found.loss if found.finite else math.nan
        if mode.has_barrier:
            with self._meter_lock:
                self._step_losses.append(loss)
                self._step_samples += handle.batch.size
            with self._spans.span("dense", Stage.DENSE_SYNC, rank, handle.step):
                self._allreduce.join(rank, dense)
        else:
            with span(Stage.DENSE_PUSH):
                self._dense_server.push(rank, handle.step, dense)
            self._tell(loss, handle.batch.size)
        return Computed(handle, found.rows if found.finite else None)

    def push(self, computed: Computed) -> None:
        """Apply the rows' gradients (merged: when the last rank's are here) and close the step."""
        handle = computed.handle
        with self._span("push", handle.rank, handle.step)(Stage.PUSH):
            self._travel()
            lost = computed.rows is not None and self._lose_push(handle.rank, handle.step)
            if lost:
                with self._meter_lock:
                    self._meter.lose()
            push: RankPush = (handle, None if lost else computed.rows)
            pushes = self._merger.add(push) if self._merger else [push]
            if pushes is None:
                return
            whole = [(h, rows) for h, rows in pushes if rows is not None]
            for h, rows in pushes:
                if rows is None:
                    self._store.lose(h)
            for shard in range(self._store.shards):
                self._store.push(shard, whole, merged=self._merger is not None)
        for h, _ in pushes:
            self._gate.close(h.rank, h.step)

    def _dense_update(self, sums: DenseGradients) -> None:
        """Runs while all ranks stand at the barrier."""
        self._recorder.record(Kind.DENSE_UPDATE, ALL, self._updates, ALL, self._updates)
        if any(g is not None for g in sums):
            apply_gradients(self._learner.model, self._optimizer, sums)
        losses = [loss for loss in self._step_losses if not math.isnan(loss)]
        samples = self._step_samples
        self._step_losses, self._step_samples = [], 0
        self._tell(math.fsum(losses) if losses else math.nan, samples)

    def _tell(self, loss: float, samples: int) -> None:
        """A snapshot may be evaluated here: rows are held, and the dense weights are a copy."""
        with self._meter_lock, self._stop.working():
            self._updates += 1
            held = self._meter.evaluates_at(self._updates)
            with self._store.frozen() if held else nullcontext():
                self._meter.update(self._updates, samples, loss, self.snapshot)

    def _travel(self) -> None:
        if self._config.latency_s:
            time.sleep(self._config.latency_s)

    def _span(self, track: str, rank: int, step: int) -> StageSpan:
        """Times a stage that works (does not wait), so that nobody takes it for a deadlock."""

        @contextmanager
        def span(stage: str) -> Iterator[None]:
            with self._stop.working(), self._spans.span(track, stage, rank, step):
                yield

        return span
