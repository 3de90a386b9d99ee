"""The stages of one (rank, step) as the concurrent executor runs them, safe for any thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from persia_sim.trace import ALL, Kind, TraceRecorder
from persia_sim.vocabulary import Mode, Stage
from runtime.config import TrainConfig
from runtime.embedding.store import EmbeddingStore, Handle, RowGradients
from runtime.training.allreduce import ThreadAllReduce
from runtime.training.dense import apply_gradients, make_optimizer, replica
from runtime.training.dense_server import DenseServer, ModelAverager
from runtime.training.feed import Feed
from runtime.training.gate import Gate, Stop
from runtime.training.learner import DenseGradients, Gradients, Learner
from runtime.training.merger import RankPush, StepMerger
from runtime.training.progress import Progress
from runtime.training.spans import SpanRecorder

LosePush = Callable[[int, int], bool]
"""Fault injection: whether the push of (rank, step) is lost on its way."""


class Fetched(NamedTuple):
    """Rows are here; the dense network may start."""

    handle: Handle
    step_samples: int


class Computed(NamedTuple):
    """Gradients are here; the rows may be written."""

    handle: Handle
    rows: RowGradients | None
    """None when they are not finite: the step is closed without them."""


class Stages:
    """What a rank does with a batch; which thread does it, and when, is the executor's matter."""

    def __init__(
        self,
        config: TrainConfig,
        learner: Learner,
        store: EmbeddingStore,
        feed: Feed,
        recorder: TraceRecorder,
        progress: Progress,
        spans: SpanRecorder,
        lose_push: LosePush,
        stop: Stop,
    ) -> None:
        self._config, self._learner, self._store = config, learner, store
        self._feed, self._recorder, self._progress = feed, recorder, progress
        self._spans, self._lose_push = spans, lose_push
        mode, ranks = config.mode, config.ranks
        self._gate = Gate(ranks, config.window, not mode.has_barrier, config.permits, stop)
        self._merger = StepMerger(ranks) if config.merges else None
        self._progress_lock = threading.Lock()
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
            self._allreduce = ThreadAllReduce(self._models, self._dense_update, stop)
            # Hooks see gradients before a loss scale is taken out of them, so a scale is exposed.
            if mode.overlaps_dense_sync and not alone and learner.loss_scale == 1.0:
                for rank, model in enumerate(self._models):
                    self._allreduce.overlap(rank, model)
        else:
            self._models = [replica(learner.model, shared=False) for _ in range(ranks)]
            server = ModelAverager if mode is Mode.ASYNC_AVERAGING else DenseServer
            self._dense_server = server(config, learner.model, self._models, recorder)

    def snapshot(self) -> nn.Module:
        """The model to evaluate; the mean of the replicas in async_averaging."""
        if not self._config.mode.has_barrier:
            self._dense_server.settle()
        return self._learner.model

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more."""
        self._gate.finish(rank, steps)

    def fetch(self, rank: int, step: int) -> Fetched | None:
        """load and lookup, when the window lets it; None past the end of the data."""
        with self._spans.span("load", Stage.LOAD, rank, step):
            work = self._feed.take(rank, step)
        if work is None:
            return None
        handle = self._store.begin(rank, step, work.batch)
        self._gate.enter(rank, step)
        with self._spans.span("lookup", Stage.LOOKUP, rank, step):
            self._travel()
            for shard in range(self._store.shards):
                self._store.read(handle, shard)
        return Fetched(handle, work.step_samples)

    def prefetch(self, rank: int, step: int) -> Fetched | None:
        """lookahead: load and a lookup without side effect, at any time before the step."""
        work = self._feed.take(rank, step)
        if work is None:
            return None
        handle = self._store.begin(rank, step, work.batch)
        with self._spans.span("lookup", Stage.LOOKUP, rank, step):
            self._travel()
            for shard in range(self._store.shards):
                self._store.read(handle, shard, create=False)
        return Fetched(handle, work.step_samples)

    def refresh(self, rank: int, fetched: Fetched) -> None:
        """lookahead: at the logical step, replace rows that were written since the prefetch."""
        handle = fetched.handle
        self._gate.enter(rank, handle.step)
        with self._spans.span("lookup", Stage.LOOKUP, rank, handle.step):
            for shard in range(self._store.shards):
                self._store.refresh(handle, shard)

    def train(self, rank: int, fetched: Fetched) -> Computed:
        """forward, backward, and what the mode does with the dense gradients."""
        handle, mode = fetched.handle, self._config.mode
        if not mode.has_barrier:
            self._dense_server.pull(rank, handle.step)
        with self._spans.span("dense", "forward_backward", rank, handle.step):
            found = self._learner.gradients(self._models[rank], handle, fetched.step_samples)
        if not found.finite:
            self._learner.refuse_or_skip(handle, found)
            with self._progress_lock:
                self._progress.skip()
        self._note(found, handle)
        dense = found.dense if found.finite else None
        with self._spans.span("dense", Stage.DENSE_SYNC, rank, handle.step):
            if mode.has_barrier:
                self._allreduce.join(rank, dense)
            else:
                self._dense_server.push(rank, handle.step, dense)
                self._tell_progress()
        return Computed(handle, found.rows if found.finite else None)

    def push(self, computed: Computed) -> None:
        """Apply the rows' gradients (merged: when the last rank's are here) and close the step."""
        handle = computed.handle
        with self._spans.span("push", Stage.PUSH, handle.rank, handle.step):
            self._travel()
            lost = computed.rows is not None and self._lose_push(handle.rank, handle.step)
            push: RankPush = (handle, None if lost else computed.rows)
            if lost:
                with self._progress_lock:
                    self._progress.lose()
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
        self._recorder.record(Kind.DENSE_UPDATE, ALL, self._updates, ALL, self._updates)
        if any(g is not None for g in sums):
            apply_gradients(self._learner.model, self._optimizer, sums)
        self._tell_progress()

    def _note(self, found: Gradients, handle: Handle) -> None:
        with self._progress_lock:
            if found.finite:
                self._step_losses.append(found.loss)
            self._step_samples += handle.batch.size

    def _tell_progress(self) -> None:
        """Evaluations run here: in barrier modes all ranks stand still; rows are held meanwhile."""
        with self._progress_lock, self._store.frozen():
            self._updates += 1
            loss = math.fsum(self._step_losses) if self._step_losses else math.nan
            samples = self._step_samples
            self._step_losses, self._step_samples = [], 0
            self._progress.update(self._updates, samples, loss, self.snapshot)

    def _travel(self) -> None:
        if self._config.latency_s:
            time.sleep(self._config.latency_s)
