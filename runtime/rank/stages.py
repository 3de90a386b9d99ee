"""The stages of one rank's batches, and what ranks share meanwhile; which thread does a stage, and
when, is the executor's matter."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from persia_sim.base.vocabulary import Stage
from runtime.dense.rules import DenseRule, Loss, OnUpdate, StepGradients
from runtime.embedding.batch_rows import Handle, RankPush, VectorGradients
from runtime.embedding.store import Lease
from runtime.embedding.worker import LeasedRows
from runtime.rank.components import Components
from runtime.rank.learner import Gradients, StageSpan
from runtime.rank.staging import Staged
from runtime.stop import Stop, Turns


class Fetched(NamedTuple):
    """Rows are here; the dense network may start."""

    handle: Handle
    step_samples: int
    staged: Staged | None
    """None before the rows are final, and for a batch without samples."""


class Computed(NamedTuple):
    """Gradients are here; the rows may be written."""

    handle: Handle
    vectors: VectorGradients | None
    """None of a batch without samples, and of one that is left out."""
    is_counted: bool
    """Whether the rows are written; if not, the step is closed without them."""


class RankStages:
    """What one rank does with a batch. Latency is the executor's: nothing here travels.

    `load`, `stage` and `compute` are those of every executor; the others wait as threads do.
    """

    def __init__(self, rank: int, team: Team) -> None:
        components = team.components
        self._rank = rank
        self._team = team
        self._rule = team.rule
        self._mode = components.config.sync.mode
        self._has_barrier = self._mode.has_barrier
        self._learner = components.learner
        self._worker = components.worker
        self._store = components.store
        self._meter = components.meter
        self._feed = components.feed
        self._spans = components.spans
        self._stop = components.stop
        self.answers_later = components.store.answers_later
        """Whether what is asked for travels."""

    def load(self, step: int) -> Fetched | None:
        """The batch's turn at the embedding worker; no row is read. None past the end."""
        with self._stop.working(), self._spans.span("load", Stage.LOAD, self._rank, step):
            work = self._feed.take(self._rank, step)
            if work is None:
                return None
            handle = self._store.begin(self._rank, step, work.batch)
            return Fetched(handle, work.step_samples, None)

    def stage(self, fetched: Fetched) -> Fetched:
        """Pool the rows, which are final now, and start them on their way to the device."""
        handle = fetched.handle
        span = self._spans.span("lookup", Stage.LOOKUP, self._rank, handle.step)
        with self._stop.working(), span:
            vectors = self._worker.pool(handle, self._learner.allocate)
            return fetched._replace(staged=self._learner.stage(handle.batch, vectors))

    def compute(self, fetched: Fetched, span: StageSpan = nullcontext) -> Gradients:
        """forward and backward on the weights that the rule gives this rank."""
        model = self._rule.model(self._rank)
        samples = fetched.step_samples
        result = self._learner.gradients(model, fetched.handle, fetched.staged, samples, span)
        if not result.finite:
            self._meter.skip()
        return result

    def finish(self, steps: int) -> None:
        """The rank has ``steps`` steps and no more."""
        self._store.finish(self._rank, steps)

    def ask(self, step: int) -> Fetched | None:
        """load, and send off the lookup as soon as a permit lets it; None past the end."""
        loaded = self.load(step)
        if loaded is not None:
            if self._team.permits is not None:
                self._team.permits.take(self._rank, step)
            self._store.ask(loaded.handle)
        return loaded

    def look_up(self, loaded: Fetched) -> Fetched:
        """The answer to `ask`, when the window let it."""
        self._store.look_up(loaded.handle)
        return self.stage(loaded)

    def look_up_late(self, loaded: Fetched) -> Fetched:
        """The same where tables are fresh: their rows are still to be brought up to date."""
        self._store.look_up(loaded.handle)
        return loaded

    def fetch(self, step: int) -> Fetched | None:
        """load and lookup in one; None past the end of the data."""
        loaded = self.ask(step)
        return None if loaded is None else self.look_up(loaded)

    def ask_ahead(self, step: int) -> Fetched | None:
        """lookahead: load, and send off a lookup without side effect, any time before the step."""
        loaded = self.load(step)
        if loaded is not None:
            self._store.ask_ahead(loaded.handle)
        return loaded

    def prefetch(self, loaded: Fetched) -> Fetched:
        """lookahead: the answer to `ask_ahead`."""
        step = loaded.handle.step
        with self._stop.working(), self._spans.span("lookup", Stage.LOOKUP, self._rank, step):
            self._store.look_up_ahead(loaded.handle)
        return loaded

    def refresh(self, fetched: Fetched) -> Fetched:
        """lookahead, fresh tables: at the logical step, replace rows that were written since the
        prefetch."""
        self._store.bring_up_to_date(fetched.handle)
        return self.stage(fetched)

    def forward_backward(self, fetched: Fetched) -> Computed:
        """forward, backward, and what the mode does with the dense gradients."""
        handle = fetched.handle
        rank = self._rank
        span = partial(self._spans.span, "dense", rank=rank, step=handle.step)

        # async: pull the dense weights, or enter a round of averaging, before the forward pass.
        if not self._has_barrier:
            pulls = Stage.AVERAGE if self._mode.averages_replicas else Stage.DENSE_PULL
            with (
                self._stop.working(),
                span(pulls),
                self._spans.exchange(rank, self._meter.pauses_s),
            ):
                self._rule.begin_step(rank, handle.step)

        # Forward and backward; what is not finite is left out of the update.
        with self._stop.working():
            gradients = self.compute(fetched, span)
        dense = gradients.dense if gradients.finite else None
        loss = gradients.loss if gradients.finite else math.nan

        # Hand the dense gradients in; in modes with a barrier this waits for the ranks' common
        # update.
        ends = Stage.DENSE_SYNC if self._has_barrier else Stage.DENSE_PUSH
        with span(ends), self._spans.exchange(rank, self._meter.pauses_s):
            self._rule.end_step(StepGradients(rank, handle.step, dense, loss, handle.batch.size))
        return Computed(handle, gradients.vectors if gradients.finite else None, gradients.finite)

    def push(self, computed: Computed) -> None:
        """Give every server the rows' gradients (merged: the last rank's bring them all in)."""
        step = computed.handle.step
        with self._stop.working(), self._spans.span("push", Stage.PUSH, self._rank, step):
            if self._arrives(computed):
                self._worker.give_back(computed.handle, computed.vectors)
            else:
                self._worker.give_up(computed.handle, computed.vectors)

    def _arrives(self, computed: Computed) -> bool:
        """Whether the rows are to be written: not left out, and not lost on the way."""
        if not computed.is_counted:
            return False
        lose_push = self._team.lose_push
        if lose_push is None or not lose_push(self._rank, computed.handle.step):
            return True
        self._meter.lose()
        return False


class Prefetched(NamedTuple):
    """A batch whose rows are on their way to the worker."""

    fetched: Fetched
    at_servers: Handle
    lease: Lease


class ForwardedStages(RankStages):
    """Lookahead against the worker's copies of rows, which are always up to date."""

    def __init__(self, rank: int, team: Team, copies: LeasedRows, ahead: int) -> None:
        super().__init__(rank, team)
        self._copies = copies
        self._ahead = ahead

    def ask_lease(self, step: int) -> Fetched | None:
        """load, and send off a lookup of rows with their state, ``ahead`` steps late at most."""
        loaded = self.load(step)
        if loaded is not None:
            self._store.ask_lease(loaded.handle, self._ahead)
        return loaded

    def prefetch_lease(self, loaded: Fetched) -> Prefetched:
        """The answer to `ask_lease`."""
        handle = loaded.handle
        lease = self._store.lease(handle, self._ahead)
        copy = self._copies.begin(handle.rank, handle.step, handle.batch, handle.plans)
        return Prefetched(loaded._replace(handle=copy), handle, lease)

    def train_on_lease(self, prefetched: Prefetched) -> RankPush:
        """The prefetch has arrived: train on its rows as all earlier steps left them, and apply the
        gradients to the copies, with those of the other ranks. The servers are still to be told."""
        fetched = prefetched.fetched
        self._copies.take_in(fetched.handle, prefetched.lease)
        self._copies.bring_up_to_date(fetched.handle)
        computed = self.forward_backward(self.stage(fetched))
        handle, vectors, _ = computed
        rows = self._worker.scatter(handle, vectors) if self._arrives(computed) else None
        self._copies.give((handle, rows))
        return prefetched.at_servers, rows

    def write_back(self, push: RankPush) -> None:
        """Give the servers the same lookup and the same push, in the same order."""
        handle, _ = push
        with self._stop.working(), self._spans.span("push", Stage.PUSH, self._rank, handle.step):
            self._store.write_back(push)


# What the ranks of a process share.

LosePush = Callable[[int, int], bool]
"""Injects faults: whether the push of (rank, step) is lost on its way."""
OpenRule = Callable[[Components, OnUpdate], DenseRule]
"""Opens the rule of the dense weights that the mode asks for, for who carries it out."""


class Team:
    """Shared by the ranks of one process."""

    def __init__(
        self, components: Components, open_rule: OpenRule, lose_push: LosePush | None = None
    ) -> None:
        config = components.config
        self.components = components
        self.lose_push = lose_push
        self._store = components.store
        self._meter = components.meter
        self.ranks = components.process.ranks
        """Ranks of this process."""
        self._telling = threading.Lock()
        self._updates = 0
        self.rule = open_rule(components, self._note_update)

        # Without a bound on batches in flight there are no permits to wait for, or to give back.
        sync = config.sync
        self.permits: Permits | None = None
        if sync.permits is not None:
            self.permits = Permits(
                sync.ranks, sync.permits, components.store.shards, components.stop
            )
            components.store.on_closed(self.permits.give_back)
        self.copies = self._open_copies()

    def begin_leg(self) -> list[int]:
        """Make ready for the feed's next leg; per rank the step with which it begins.

        Nothing is on lease any more: the servers have all that the copies had.
        """
        components = self.components
        self._updates = components.meter.updates
        first = components.feed.first_steps()
        components.store.note_leg(first)
        components.process.begin_leg(lambda: components.store.begin_leg(first))
        self.copies = self._open_copies()
        if self.copies is not None:
            self.copies.begin_leg_behind(first, components.store.server_counters())
        return first

    def end_leg(self) -> None:
        """Return when nothing of any rank is in flight."""
        self.components.store.drain()
        self.components.meter.settle()
        self.rule.end_leg()
        self.components.process.end_leg(self.components)

    def _open_copies(self) -> LeasedRows | None:
        config = self.components.config
        components = self.components
        if config.sync.lookahead != "forwarded":
            return None
        return LeasedRows(
            components.store,
            config.sync.ranks,
            config.sync.ahead,
            components.recorder,
            components.stop,
        )

    def _note_update(self, loss: Loss, samples: int) -> None:
        """A snapshot may be evaluated here: rows are held, and the dense weights stand still."""
        meter = self._meter
        store = self._store
        with self._telling, self.components.stop.working():
            self._updates += 1
            if not meter.evaluates_at(self._updates, samples):
                return meter.update(self._updates, samples, loss, self.rule.snapshot)
            with meter.pause():
                if self.copies is not None:  # what the copies know already is on its way
                    store.wait_until_closed(self._updates - 1)
                with store.frozen():
                    meter.update(self._updates, samples, loss, self.rule.snapshot)


class Permits:
    """The original's other bound: batches of a rank between the start of its lookup and the moment
    at which every server has closed its push."""

    def __init__(self, ranks: int, permits: int, shards: int, stop: Stop) -> None:
        self._permits = permits
        self._shards = shards
        self._stop = stop
        self._in_flight = [0] * ranks
        self._closings: Counter[tuple[int, int]] = Counter()
        self._changed = Turns()
        stop.on_stop(self._changed.wake)

    def take(self, rank: int, step: int) -> None:
        """Wait for one of the rank's permits."""
        with self._changed:
            self._changed.wait_until(
                lambda: self._in_flight[rank] < self._permits,
                self._stop,
                lambda: f"rank {rank}, step {step} waits for one of {self._permits} permits",
            )
            self._in_flight[rank] += 1

    def give_back(self, rank: int, step: int) -> None:
        """A server has closed the push of (rank, step); with the last one the permit is free."""
        with self._changed:
            self._closings[rank, step] += 1
            if self._closings[rank, step] == self._shards:
                del self._closings[rank, step]
                self._in_flight[rank] -= 1
                self._changed.notify_all()
