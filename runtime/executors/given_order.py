"""The deterministic executor: carries out a given order of reads and writes, one event at a time.

The order is a constant lag, a recorded run, or a simulated one; the same order and seed give the
same bytes (law 6). Stages and rules of the dense weights are those of ranks that are threads: here
the order says what threads would wait for. Gradients are computed at the last moment at which the
order allows it: when they are first written anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import KNOWN_MODES, OF_FRESH, Dense, refuse_unless_carried
from persia_sim.base.window import constant_lag
from runtime.config import TrainConfig
from runtime.dense.averaging import AveragedReplicas
from runtime.dense.optimizer import sums_in_rank_order
from runtime.dense.rules import AsyncRule, BarrierRule, DenseRule, Loss, OnUpdate, StepGradients
from runtime.embedding.batch_rows import Handle, RowGradients
from runtime.embedding.server import EmbeddingServer
from runtime.embedding.sharded import ShardedStore
from runtime.executors.replayable import refuse_other_version
from runtime.rank.components import Components
from runtime.rank.feed import Feed
from runtime.rank.learner import Gradients
from runtime.rank.stages import Fetched, RankStages, Team

CARRIES = KNOWN_MODES
"""The modes whose events it can carry out."""
Actions = dict[int, Callable[[Event], None]]
"""By kind, what an event does."""


def constant_lag_order(config: TrainConfig, feed: Feed) -> Iterator[Event]:
    """The order of the executor `constant_lag` over the batches of this leg."""
    sync = config.sync
    return constant_lag(
        sync.mode,
        ranks=sync.ranks,
        has_batch=feed.has_batch,
        tau=0 if sync.window is None else sync.window,
        ahead=sync.ahead,
        merge_pushes=sync.merges,
        average_every=sync.average_every_steps if sync.mode.averages_replicas else None,
        first=feed.first,
        sync_steps=sync.sync_steps,
        fresh=bool(sync.fresh),
    )


def open_rule(components: Components, on_update: OnUpdate) -> DenseRule:
    """The rule of the mode, to be carried out as an order says."""
    rules: dict[Dense, Callable[..., DenseRule]] = {
        Dense.ALL_REDUCED: BarrierRule,
        Dense.OVERLAPPED: BarrierRule,
        Dense.ON_SERVERS: AsyncRule,
        Dense.AVERAGED: AveragedReplicas,
    }
    rule = rules[components.config.sync.mode.rules.dense]
    return rule(components.config, components.learner.model, components.recorder, on_update)


@dataclass(slots=True)
class _InFlight:
    """One (rank, step) between its first read and its last write."""

    fetched: Fetched
    handle: Handle
    unread_shards: set[int]
    unpushed_shards: set[int]
    unpushed_fresh: set[int]
    """Shards without the push of the fresh tables; none where no table is fresh."""
    not_refreshed: set[int]
    """Shards whose rows are not yet those of the step: of prefetches and of fresh tables."""
    gradients: Gradients | None = None
    rows: RowGradients | None = None
    """None before they are computed, and when they are not finite."""
    dense_done: bool = False
    applied: bool = False
    """At any shard."""

    def unpushed(self, kind: int) -> set[int]:
        """The shards that have no push of the tables that an event of this kind is of."""
        return self.unpushed_fresh if kind in OF_FRESH else self.unpushed_shards

    @property
    def is_pushed(self) -> bool:
        """Whether every push of it is applied or lost."""
        return not (self.unpushed_shards or self.unpushed_fresh)


class OrderedRun:
    """Executes an order over a learner and a store."""

    def __init__(self, components: Components) -> None:
        sync = components.config.sync
        who = "the executor of a given order"
        refuse_unless_carried(sync.mode, CARRIES, who, fresh=bool(sync.fresh))
        self._config = components.config
        self._feed = components.feed
        if not isinstance(components.store, ShardedStore):
            raise ValueError("an order is carried out on rows of this process; use --servers 0")
        self._worker = components.worker
        self._store = components.store
        self._meter = components.meter
        self._fused = components.fused
        self._has_fresh = bool(sync.fresh)
        # Fused, the batch of rank 0 is that of all ranks; what the others do is only written down.
        self._ranks = range(1 if components.fused else components.config.sync.ranks)
        self._team = Team(components, open_rule)
        self.rule = self._team.rule
        """The dense weights."""
        self._stages = [RankStages(rank, self._team) for rank in self._ranks]
        self._flying: dict[tuple[int, int], _InFlight] = {}
        self._took_effect: list[Event] = []
        components.recorder.listen(self._took_effect.append)
        self._actions = self._dense_actions(self.rule) | {
            Kind.LOOKUP: self._read,
            Kind.REFRESH: self._read,
            Kind.PUSH: self._push,
            Kind.LOST_PUSH: self._lose,
            Kind.FRESH_PUSH: self._push,
            Kind.FRESH_LOST_PUSH: self._lose,
        }

    def _dense_actions(self, rule: DenseRule) -> Actions:
        """The dense actions of the mode: events of another one are refused."""
        if isinstance(rule, BarrierRule):
            return {Kind.DENSE_UPDATE: partial(self._dense_update, rule)}
        result: Actions = {Kind.DENSE_PUSH: self._dense_push}
        if isinstance(rule, AveragedReplicas):
            result[Kind.AVERAGE_READ] = lambda e: rule.enter_round(e.rank, e.step, e.version)
            result[Kind.AVERAGE_WRITE] = lambda e: rule.leave_round(e.rank, e.step, e.version)
        else:
            result[Kind.DENSE_PULL] = lambda e: rule.begin_step(e.rank, e.step)
        return result

    def run(self, order: Iterable[Event] | None = None) -> None:
        """Execute every event; None: those of the constant lag, to the end of the feed's leg.

        Raises ValueError when an event does not fit the run.
        """
        # Without an order it is that of the constant lag.
        self._team.begin_leg()
        order = constant_lag_order(self._config, self._feed) if order is None else order
        simulated = isinstance(order, Trace) and order.is_simulated

        # Each event is carried out as it comes; one that this run cannot have is refused.
        for seq, event in enumerate(order):
            action = self._actions.get(event.kind)
            if not ALL <= event.shard < self._store.shards:
                last = int(order.events[:, 3].max()) if isinstance(order, Trace) else event.shard
                raise ValueError(
                    f"event {seq} of the order is not one of this run: it is of shard"
                    f" {event.shard}, and the run has {self._store.shards};"
                    f" give --shards {last + 1}"
                )
            if action is None:
                raise ValueError(f"event {seq} of the order is not one of this run: {event}")

            # A recorded order says which version each event found: another one is the first sign of
            # another run.
            self._took_effect.clear()
            action(event)
            if event.version != ALL and not simulated:
                refuse_other_version(seq, event, self._took_effect)

        # Nothing may be in flight at the end.
        if self._flying:
            rank, step = min(self._flying, key=lambda key: (key[1], key[0]))
            raise ValueError(
                f"the order ends with {len(self._flying)} batches not pushed,"
                f" first rank {rank}, step {step}; it is cut short"
            )
        self._team.end_leg()

    def _shards(self, event: Event) -> Iterable[int]:
        return range(self._store.shards) if event.shard == ALL else (event.shard,)

    def _batch(self, rank: int, step: int) -> _InFlight:
        flying = self._flying.get((rank, step))
        if flying is None:
            fetched = self._stages[rank].load(step)
            if fetched is None:
                raise ValueError(
                    f"the order has rank {rank}, step {step}, but the data ended before;"
                    " replay needs the data and the batch size of the recorded run"
                )
            every = range(self._store.shards)
            fresh = every if self._has_fresh else ()
            flying = self._flying[rank, step] = _InFlight(
                fetched, fetched.handle, set(every), set(every), set(fresh), set(fresh)
            )
        return flying

    def _read(self, event: Event) -> None:
        for shard in self._shards(event):
            server = self._store.servers[shard]
            if event.rank not in self._ranks:  # fused: it was read with rank 0's
                server.note(Kind(event.kind), event.rank, event.step)
                continue
            flying = self._batch(event.rank, event.step)
            if event.kind == Kind.REFRESH:
                server.refresh(flying.handle)
                flying.not_refreshed.discard(shard)
                continue
            server.read(flying.handle, create=not self._config.sync.mode.prefetches_rows)
            flying.unread_shards.discard(shard)

    def _compute(self, flying: _InFlight) -> Gradients:
        handle = flying.handle
        if flying.unread_shards:
            raise ValueError(
                f"the order trains rank {handle.rank}, step {handle.step} before"
                f" it reads shards {sorted(flying.unread_shards)}; it is not a whole order"
            )
        if flying.not_refreshed:
            raise ValueError(
                f"the order trains rank {handle.rank}, step {handle.step} before it brings the"
                f" fresh tables of shards {sorted(flying.not_refreshed)} up to date; it is not a"
                " whole order"
            )
        if flying.gradients is None:
            stages = self._stages[handle.rank]
            gradients = flying.gradients = stages.compute(stages.stage(flying.fetched))
            if gradients.finite:
                flying.rows = self._worker.scatter(handle, gradients.vectors)
        return flying.gradients

    def _push(self, event: Event) -> None:
        # A merged push is of all ranks; gradients that nobody has asked for yet are computed now.
        ranks = self._ranks if event.rank == ALL else (event.rank,)
        flying = [f for rank in ranks if (f := self._flying.get((rank, event.step))) is not None]
        for one in flying:
            self._compute(one)

        # At each server the gradients of the batches that are still open there make one update.
        for shard in self._shards(event):
            server = self._group(event, shard)
            here = [f for f in flying if shard in f.unpushed(event.kind)]
            for one in here:
                one.unpushed(event.kind).remove(shard)
                one.applied |= one.rows is not None
                if one.rows is None:
                    server.lose(one.handle)
            pushes = [(f.handle, f.rows) for f in here if f.rows is not None]
            of_ranks = self._config.sync.ranks if self._fused else len(pushes)
            server.apply(pushes, merged=event.rank == ALL, of_ranks=of_ranks)
        for one in flying:
            self._forget_if_done(one)

    def _lose(self, event: Event) -> None:
        flying = self._flying.get((event.rank, event.step))
        if flying is None:
            return
        gradients = self._compute(flying)
        unpushed = flying.unpushed(event.kind)
        lost = unpushed & set(self._shards(event))
        for shard in sorted(lost):
            self._group(event, shard).lose(flying.handle)
        unpushed -= lost
        if gradients.finite and flying.is_pushed and not flying.applied:
            self._meter.lose()
        self._forget_if_done(flying)

    def _group(self, event: Event, shard: int) -> EmbeddingServer:
        """Who holds the tables that the push is of."""
        server = self._store.servers[shard]
        if event.kind not in OF_FRESH:
            return server
        if server.fresh is None:
            raise ValueError(f"the order pushes fresh tables, and this run has none: {event}")
        return server.fresh

    def _dense_update(self, rule: BarrierRule, event: Event) -> None:
        # A rank without samples (of a short last step) has read nothing and starts here.
        flying = [self._batch(rank, event.step) for rank in self._ranks]
        computed = [self._compute(one) for one in flying]
        sums = sums_in_rank_order([g.dense for g in computed if g.finite])
        samples = sum(one.handle.batch.size for one in flying)
        rule.update(event.step, sums, [_loss(g) for g in computed], samples)
        for one, gradients in zip(flying, computed, strict=True):
            self._end_dense(one, gradients)

    def _dense_push(self, event: Event) -> None:
        flying = self._batch(event.rank, event.step)
        gradients = self._compute(flying)
        samples = flying.handle.batch.size
        dense = gradients.dense if gradients.finite else None
        self.rule.end_step(StepGradients(event.rank, event.step, dense, _loss(gradients), samples))
        self._end_dense(flying, gradients)

    def _end_dense(self, flying: _InFlight, gradients: Gradients) -> None:
        flying.dense_done = True
        # Else those of tau steps and all ranks wait here for the pushes of their rows.
        flying.gradients = replace(gradients, dense=[], vectors=None)
        self._forget_if_done(flying)

    def _forget_if_done(self, flying: _InFlight) -> None:
        if flying.dense_done and flying.is_pushed:
            del self._flying[flying.handle.rank, flying.handle.step]


def _loss(gradients: Gradients) -> Loss:
    """NaN of a rank that is left out."""
    return gradients.loss if gradients.finite else math.nan
