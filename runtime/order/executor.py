"""The deterministic executor: carries out a given order of reads and writes, one event at a time.

The order is a constant lag, a recorded run, or a simulated one; the same order and seed give the
same bytes (law 6). Gradients are computed at the last moment at which the order allows it: when
they are first written anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from persia_sim.words.trace import ALL, Event, Kind, Trace
from persia_sim.words.vocabulary import Mode
from runtime.dense.averaging import AveragingRound, mean_model
from runtime.dense.functional import FunctionalOptimizer
from runtime.dense.late import LateGradients
from runtime.dense.optimizer import (
    DenseGradients,
    apply_gradients,
    copy_weights,
    make_optimizer,
    replica,
    sum_in_rank_order,
)
from runtime.dense.state import (
    DenseState,
    capture,
    load_optimizers,
    load_replicas,
    pending_of,
)
from runtime.embedding.sharded import ShardedStore
from runtime.embedding.store import Handle, RowGradients
from runtime.order.replayable import refuse_other_version
from runtime.rank.learner import Gradients
from runtime.rank.parts import Parts


@dataclass(slots=True)
class _InFlight:
    """One (rank, step) between its first read and its last write."""

    handle: Handle
    step_samples: int
    unread_shards: set[int]
    unpushed_shards: set[int]
    gradients: Gradients | None = None
    rows: RowGradients | None = None
    """None before they are computed, and when they are not finite."""
    dense_done: bool = False


class OrderedRun:
    """Executes an order over a learner and a store."""

    def __init__(self, parts: Parts) -> None:
        config, learner = parts.config, parts.learner
        self._config, self._learner = config, learner
        if not isinstance(parts.store, ShardedStore):
            raise ValueError("an order is carried out on rows of this process; use --servers 0")
        self._worker, self._store = parts.worker, parts.store
        self._feed, self._recorder, self._meter = parts.feed, parts.recorder, parts.meter
        self._fused = parts.fused
        # Fused, the batch of rank 0 is that of all ranks; what the others do is only written down.
        self._ranks = range(1 if parts.fused else config.sync.ranks)
        self._flying: dict[tuple[int, int], _InFlight] = {}
        self._optimizer = make_optimizer(config.model, learner.model)
        self._late = LateGradients(config.sync.dense_lag, self._apply_dense)
        self._dense_version = 0
        self._rounds: dict[int, AveragingRound] = {}
        self._rounds_begun = 0
        self._took_effect: list[Event] = []
        self._recorder.listen(self._took_effect.append)
        self._replicas: list[nn.Module] = []
        self._replica_optimizers: list[FunctionalOptimizer] = []
        if not config.sync.mode.has_barrier:
            ranks = range(config.sync.ranks)
            self._replicas = [replica(learner.model, shared=False) for _ in ranks]
        if config.sync.mode is Mode.ASYNC_AVERAGING:
            self._replica_optimizers = [make_optimizer(config.model, m) for m in self._replicas]

    def run(self, order: Iterable[Event]) -> None:
        """Execute every event. Raises ValueError when an event does not fit the run."""
        actions: dict[int, Callable[[Event], None]] = {
            Kind.LOOKUP: self._lookup,
            Kind.REFRESH: self._refresh,
            Kind.PUSH: self._push,
            Kind.LOST_PUSH: self._lose,
            Kind.DENSE_UPDATE: self._dense_update,
            Kind.DENSE_PULL: self._dense_pull,
            Kind.DENSE_PUSH: self._dense_push,
            Kind.AVERAGE_READ: self._average_read,
            Kind.AVERAGE_WRITE: self._average_write,
        }
        simulated = isinstance(order, Trace) and order.is_simulated
        took_effect = self._took_effect
        for seq, event in enumerate(order):
            action = actions.get(event.kind)
            if not ALL <= event.shard < self._store.shards:
                needed = event.shard + 1
                if isinstance(order, Trace):
                    needed = int(order.events[:, 3].max()) + 1
                raise ValueError(
                    f"event {seq} of the order is not one of this run: it is of shard"
                    f" {event.shard}, and the run has {self._store.shards}; give --shards {needed}"
                )
            if action is None:
                raise ValueError(f"event {seq} of the order is not one of this run: {event}")
            took_effect.clear()
            action(event)
            if event.version != ALL and not simulated:
                refuse_other_version(seq, event, took_effect)
        if self._flying:
            rank, step = min(self._flying, key=lambda key: (key[1], key[0]))
            raise ValueError(
                f"the order ends with {len(self._flying)} batches not pushed,"
                f" first rank {rank}, step {step}; it is cut short"
            )

    def drain(self) -> None:
        """The run is over: apply what a dense lag holds back."""
        self._late.drain()

    def dense_state(self) -> DenseState:
        """A copy of the dense weights and their optimisers, between two legs."""
        counters = {"version": self._dense_version, "rounds": self._rounds_begun}
        optimizers = self._replica_optimizers or [self._optimizer]
        replicas = self._replicas if self._replica_optimizers else []
        pending = self._late.pending()
        return capture(self.snapshot(), optimizers, replicas=replicas, pending=pending, **counters)

    def go_on(self, state: DenseState) -> None:
        """Take up what `dense_state` gave; the weights are in the learner's model already."""
        if self._replica_optimizers:
            load_replicas(self._replicas, state)
        load_optimizers(self._replica_optimizers or [self._optimizer], state)
        self._late.go_on(pending_of(state, self._learner.model))
        self._dense_version, self._rounds_begun = state["version"], state["rounds"]

    def snapshot(self) -> nn.Module:
        """The model to evaluate now; the mean of the replicas in async_averaging."""
        if self._replica_optimizers:
            return mean_model(self._learner.model, self._replicas)
        return self._learner.model

    def _shards(self, event: Event) -> Iterable[int]:
        return range(self._store.shards) if event.shard == ALL else (event.shard,)

    def _batch(self, event: Event) -> _InFlight:
        key = event.rank, event.step
        if key not in self._flying:
            work = self._feed.take(*key)
            if work is None:
                raise ValueError(
                    f"the order has rank {key[0]}, step {key[1]}, but the data ended before;"
                    " replay needs the data and the batch size of the recorded run"
                )
            handle = self._worker.begin(*key, work.batch)
            every = range(self._store.shards)
            self._flying[key] = _InFlight(handle, work.step_samples, set(every), set(every))
        return self._flying[key]

    def _lookup(self, event: Event) -> None:
        if event.rank not in self._ranks:
            self._note(event)
            return
        flying = self._batch(event)
        for shard in self._shards(event):
            creates = self._config.sync.mode is not Mode.LOOKAHEAD
            self._store.read(flying.handle, shard, create=creates)
        flying.unread_shards -= set(self._shards(event))

    def _note(self, event: Event) -> None:
        """What a fused rank reads was read with rank 0's."""
        for shard in self._shards(event):
            self._store.note(Kind(event.kind), event.rank, event.step, shard)

    def _refresh(self, event: Event) -> None:
        if event.rank not in self._ranks:
            self._note(event)
            return
        flying = self._batch(event)
        for shard in self._shards(event):
            self._store.refresh(flying.handle, shard)

    def _compute(self, flying: _InFlight, model: nn.Module) -> Gradients:
        if flying.unread_shards:
            raise ValueError(
                f"the order trains rank {flying.handle.rank}, step {flying.handle.step} before"
                f" it reads shards {sorted(flying.unread_shards)}; it is not a whole order"
            )
        if flying.gradients is None:
            handle = flying.handle
            staged = self._learner.stage(handle.batch, self._worker.pool(handle))
            found = self._learner.gradients(model, handle, staged, flying.step_samples)
            if found.finite:
                flying.rows = self._worker.scatter(handle, found.vectors)
            else:
                self._meter.skip()
            flying.gradients = found
        return flying.gradients

    def _push(self, event: Event) -> None:
        ranks = self._ranks if event.rank == ALL else (event.rank,)
        group = [self._flying.get((rank, event.step)) for rank in ranks]
        flying = [f for f in group if f is not None]
        for one in flying:
            self._compute(one, self._model_of(one.handle.rank))
        for shard in self._shards(event):
            here = [f for f in flying if shard in f.unpushed_shards]
            for one in here:
                one.unpushed_shards.remove(shard)
                if one.rows is None:
                    self._store.lose(one.handle, [shard])
            pushes = [(f.handle, f.rows) for f in here if f.rows is not None]
            of_ranks = self._config.sync.ranks if self._fused else len(pushes)
            self._store.push(shard, pushes, merged=event.rank == ALL, of_ranks=of_ranks)
        for one in flying:
            self._forget_if_done(one)

    def _lose(self, event: Event) -> None:
        flying = self._flying.get((event.rank, event.step))
        if flying is None:
            return
        found = self._compute(flying, self._model_of(event.rank))
        if found.finite and len(flying.unpushed_shards) == self._store.shards:
            self._meter.lose()
        lost = flying.unpushed_shards & set(self._shards(event))
        self._store.lose(flying.handle, sorted(lost))
        flying.unpushed_shards -= lost
        self._forget_if_done(flying)

    def _forget_if_done(self, flying: _InFlight) -> None:
        if flying.dense_done and not flying.unpushed_shards:
            del self._flying[flying.handle.rank, flying.handle.step]

    def _model_of(self, rank: int) -> nn.Module:
        return self._replicas[rank] if self._replicas else self._learner.model

    def _dense_update(self, event: Event) -> None:
        self._recorder.record(Kind.DENSE_UPDATE, ALL, event.step, ALL, self._dense_version)
        # A rank without samples (of a short last step) has read nothing and starts here.
        flying = [self._batch(event._replace(rank=r)) for r in self._ranks]
        found = [self._compute(f, self._learner.model) for f in flying]
        good = [g for g in found if g.finite]
        total = [sum_in_rank_order(gs) for gs in zip(*(g.dense for g in good), strict=True)]
        self._late.take(total if good else None)
        self._dense_version += 1
        self._finish_dense(flying, math.fsum(g.loss for g in good) if good else math.nan)

    def _apply_dense(self, gradients: DenseGradients) -> None:
        apply_gradients(self._optimizer, gradients)

    def _dense_pull(self, event: Event) -> None:
        self._recorder.record(Kind.DENSE_PULL, event.rank, event.step, ALL, self._dense_version)
        copy_weights(self._learner.model, self._replicas[event.rank])

    def _dense_push(self, event: Event) -> None:
        self._recorder.record(Kind.DENSE_PUSH, event.rank, event.step, ALL, self._dense_version)
        flying = self._batch(event)
        own = self._replicas[event.rank]
        found = self._compute(flying, own)
        if found.finite and self._replica_optimizers:
            apply_gradients(self._replica_optimizers[event.rank], found.dense)
        elif found.finite:
            apply_gradients(self._optimizer, found.dense)
        self._dense_version += 1
        self._finish_dense([flying], found.loss if found.finite else math.nan)

    def _finish_dense(self, flying: list[_InFlight], loss: float) -> None:
        for one in flying:
            one.dense_done = True
            self._forget_if_done(one)
        samples = sum(f.handle.batch.size for f in flying)
        self._meter.update(self._dense_version, samples, loss, self.snapshot)

    def _average_read(self, event: Event) -> None:
        self._record_round(Kind.AVERAGE_READ, event)
        self._rounds_begun = max(self._rounds_begun, event.version + 1)
        round_ = self._rounds.setdefault(event.version, AveragingRound(self._config.sync.ranks))
        round_.read(event.rank, self._replicas[event.rank])

    def _record_round(self, kind: Kind, event: Event) -> None:
        self._recorder.record(kind, event.rank, event.step, ALL, event.version)

    def _average_write(self, event: Event) -> None:
        self._record_round(Kind.AVERAGE_WRITE, event)
        round_ = self._rounds[event.version]
        round_.write(event.rank, self._replicas[event.rank])
        if round_.is_over:
            del self._rounds[event.version]
