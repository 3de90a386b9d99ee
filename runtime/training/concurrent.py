"""The concurrent executor: every rank a set of threads around the same stage functions.

In sync and lookahead a rank is one thread that does all stages in turn. In the other modes it is
three: one fetches (load, lookup), one trains (forward, backward, dense), one pushes, with bounded
queues between them; that is where staleness comes from, and the gate bounds it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from persia_sim.trace import ALL, Kind, TraceRecorder
from persia_sim.vocabulary import Mode, Stage
from runtime.config import TrainConfig
from runtime.embedding.store import EmbeddingStore, Handle, RowGradients
from runtime.training.allreduce import ThreadAllReduce
from runtime.training.dense import apply_gradients, make_optimizer, replica
from runtime.training.dense_server import DenseServer, ModelAverager
from runtime.training.feed import Feed
from runtime.training.gate import Gate, RunStopped, Stop
from runtime.training.learner import DenseGradients, Gradients, Learner
from runtime.training.merger import RankPush, StepMerger
from runtime.training.progress import Progress
from runtime.training.spans import SpanRecorder

T = TypeVar("T")
LosePush = Callable[[int, int], bool]
"""Fault injection: whether the push of (rank, step) is lost on its way."""


class _Fetched(NamedTuple):
    handle: Handle
    step_samples: int


class _Computed(NamedTuple):
    handle: Handle
    rows: RowGradients | None


class ConcurrentRun:
    """Trains with all ranks at once and measures what that does."""

    def __init__(
        self,
        config: TrainConfig,
        learner: Learner,
        store: EmbeddingStore,
        feed: Feed,
        recorder: TraceRecorder,
        progress: Progress,
        *,
        spans: SpanRecorder | None = None,
        lose_push: LosePush = lambda rank, step: False,
    ) -> None:
        self._config, self._learner, self._store = config, learner, store
        self._feed, self._recorder, self._progress = feed, recorder, progress
        self._spans = spans or SpanRecorder(enabled=False)
        self._lose_push = lose_push
        self._stop = Stop()
        mode, ranks = config.mode, config.ranks
        self._gate = Gate(ranks, config.window, not mode.has_barrier, config.permits, self._stop)
        self._merger = StepMerger(ranks) if config.merges else None
        self._progress_lock = threading.Lock()
        self._step_loss = 0.0
        self._step_samples = 0
        self._updates = 0
        if mode.has_barrier:
            alone = ranks == 1
            self._models: list[nn.Module] = [
                learner.model if alone else replica(learner.model, shared=True)
                for _ in range(ranks)
            ]
            self._optimizer = make_optimizer(config.model, learner.model)
            self._allreduce = ThreadAllReduce(self._models, self._dense_update, self._stop)
            if mode.overlaps_dense_sync and not alone and learner.loss_scale == 1.0:
                for rank, model in enumerate(self._models):
                    self._allreduce.overlap(rank, model)
        else:
            self._models = [replica(learner.model, shared=False) for _ in range(ranks)]
            server = ModelAverager if mode is Mode.ASYNC_AVERAGING else DenseServer
            self._dense_server = server(config, learner.model, self._models, recorder)

    def run(self) -> None:
        """Train to the end of the data. Raises what the first failing thread raised."""
        threads = [t for rank in range(self._config.ranks) for t in self._threads_of(rank)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)  # short, so that Ctrl-C is heard
        except BaseException as error:
            self._stop.set(error)
            raise
        finally:
            # Every wait of a thread looks at the stop, so this ends within one stage.
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._stop.error is not None:
            raise self._stop.error

    def snapshot(self) -> nn.Module:
        """The model to evaluate; the mean of the replicas in async_averaging."""
        if not self._config.mode.has_barrier:
            self._dense_server.settle()
        return self._learner.model

    def _threads_of(self, rank: int) -> list[threading.Thread]:
        if not self._config.mode.reads_late_rows:
            work = self._run_lookahead if self._config.mode is Mode.LOOKAHEAD else self._run_in_turn
            bodies = {"rank": lambda: work(rank)}
        else:
            size = self._config.queue_batches
            fetched: queue.Queue[_Fetched | None] = queue.Queue(size)
            computed: queue.Queue[_Computed | None] = queue.Queue(size)
            bodies = {
                "fetch": lambda: self._run_fetch(rank, fetched),
                "train": lambda: self._run_train(rank, fetched, computed),
                "push": lambda: self._run_push(rank, computed),
            }
        return [
            threading.Thread(target=self._guard, args=(body,), name=f"{name}-{rank}")
            for name, body in bodies.items()
        ]

    def _guard(self, body: Callable[[], None]) -> None:
        torch.set_num_threads(self._config.threads)  # OpenMP keeps this per thread
        try:
            body()
        except RunStopped:
            pass
        except BaseException as error:  # told by run(), after all threads have gone home
            self._stop.set(error)

    # The four kinds of thread.

    def _run_in_turn(self, rank: int) -> None:
        step = 0
        while (fetched := self._fetch(rank, step)) is not None:
            self._push(self._train(rank, fetched))
            step += 1
        self._gate.finish(rank, step)

    def _run_lookahead(self, rank: int) -> None:
        ready: queue.SimpleQueue[_Fetched] = queue.SimpleQueue()
        step = 0
        ended = False
        while True:
            while not ended and ready.qsize() <= self._config.prefetched_steps:
                fetched = self._prefetch(rank, step + ready.qsize())
                ended = fetched is None
                if fetched is not None:
                    ready.put(fetched)
            if ready.empty():
                break
            fetched = ready.get()
            self._gate.enter(rank, step)
            with self._spans.span("lookup", Stage.LOOKUP, rank, step):
                for shard in range(self._store.shards):
                    self._store.refresh(fetched.handle, shard)
            self._push(self._train(rank, fetched))
            step += 1
        self._gate.finish(rank, step)

    def _run_fetch(self, rank: int, out: queue.Queue[_Fetched | None]) -> None:
        step = 0
        while (fetched := self._fetch(rank, step)) is not None:
            self._put(out, fetched)
            step += 1
        self._gate.finish(rank, step)
        self._put(out, None)

    def _run_train(
        self, rank: int, source: queue.Queue[_Fetched | None], out: queue.Queue[_Computed | None]
    ) -> None:
        while (fetched := self._get(source)) is not None:
            self._put(out, self._train(rank, fetched))
        self._put(out, None)

    def _run_push(self, rank: int, source: queue.Queue[_Computed | None]) -> None:
        while (computed := self._get(source)) is not None:
            self._push(computed)

    # The stages.

    def _fetch(self, rank: int, step: int) -> _Fetched | None:
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
        return _Fetched(handle, work.step_samples)

    def _prefetch(self, rank: int, step: int) -> _Fetched | None:
        work = self._feed.take(rank, step)
        if work is None:
            return None
        handle = self._store.begin(rank, step, work.batch)
        with self._spans.span("lookup", Stage.LOOKUP, rank, step):
            self._travel()
            for shard in range(self._store.shards):
                self._store.read(handle, shard, create=False)
        return _Fetched(handle, work.step_samples)

    def _train(self, rank: int, fetched: _Fetched) -> _Computed:
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
        return _Computed(handle, found.rows if found.finite else None)

    def _push(self, computed: _Computed) -> None:
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
            self._step_loss += found.loss if found.finite else 0.0
            self._step_samples += handle.batch.size

    def _tell_progress(self) -> None:
        """Evaluations run here: in barrier modes all ranks stand still; rows are held meanwhile."""
        with self._progress_lock, self._store.frozen():
            self._updates += 1
            loss, samples = self._step_loss, self._step_samples
            self._step_loss, self._step_samples = 0.0, 0
            self._progress.update(self._updates, samples, loss, self.snapshot)

    def _travel(self) -> None:
        if self._config.latency_s:
            time.sleep(self._config.latency_s)

    def _put(self, target: queue.Queue[T], item: T) -> None:
        while True:
            self._stop.check()
            try:
                return target.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _get(self, source: queue.Queue[T]) -> T:
        while True:
            self._stop.check()
            try:
                return source.get(timeout=0.1)
            except queue.Empty:
                continue
