"""The stages of one rank's batches; which thread does them, and when, is the engine's matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from persia_sim.words.vocabulary import Mode, Stage
from runtime.embedding.store import Handle, RowGradients
from runtime.rank.learner import StageSpan
from runtime.rank.staging import Staged
from runtime.rank.team import Team


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


class RankStages:
    """What one rank does with a batch. Latency is the engine's: nothing here travels."""

    def __init__(self, rank: int, team: Team) -> None:
        parts = team.parts
        self._rank, self._team, self._rule = rank, team, team.rule
        self._mode, self._learner, self._store = parts.config.sync.mode, parts.learner, parts.store
        self._feed, self._spans, self._stop = parts.feed, parts.spans, parts.stop

    def finish(self, steps: int) -> None:
        """The rank has ``steps`` steps and no more."""
        for server in self._store.servers:
            server.finish(self._rank, steps)

    def fetch(self, step: int) -> Fetched | None:
        """load and lookup, when permit and window let it; None past the end of the data."""
        loaded = self._load(step)
        if loaded is None:
            return None
        handle = loaded.handle
        self._team.permits.take(self._rank, step)
        for server in self._store.servers:
            server.look_up(handle)
        with self._span("lookup", step)(Stage.LOOKUP):
            return loaded._replace(staged=self._learner.stage(handle))

    def prefetch(self, step: int) -> Fetched | None:
        """lookahead: load and a lookup without side effect, at any time before the step."""
        loaded = self._load(step)
        if loaded is not None:
            with self._span("lookup", step)(Stage.LOOKUP):
                for server in self._store.servers:
                    server.look_up_ahead(loaded.handle)
        return loaded

    def refresh(self, fetched: Fetched) -> Fetched:
        """lookahead: at the logical step, replace rows that were written since the prefetch."""
        handle = fetched.handle
        for server in self._store.servers:
            server.bring_up_to_date(handle)
        with self._span("lookup", handle.step)(Stage.LOOKUP):
            return fetched._replace(staged=self._learner.stage(handle))

    def train(self, fetched: Fetched) -> Computed:
        """forward, backward, and what the mode does with the dense gradients."""
        handle, rank = fetched.handle, self._rank
        span = self._span("dense", handle.step)
        if not self._mode.has_barrier:
            pulls = Stage.AVERAGE if self._mode is Mode.ASYNC_AVERAGING else Stage.DENSE_PULL
            with span(pulls):
                self._rule.begin_step(rank, handle.step)
        samples, staged = fetched.step_samples, fetched.staged
        found = self._learner.gradients(self._rule.model(rank), handle, staged, samples, span)
        if not found.finite:
            self._learner.refuse_or_skip(handle, found)
            self._team.skip_batch()
        dense = found.dense if found.finite else None
        loss = found.loss if found.finite else math.nan
        ends = Stage.DENSE_SYNC if self._mode.has_barrier else Stage.DENSE_PUSH
        with self._spans.span("dense", ends, rank, handle.step):
            self._rule.end_step(rank, handle.step, dense, loss, handle.batch.size)
        return Computed(handle, found.rows if found.finite else None)

    def push(self, computed: Computed) -> None:
        """Give every server the rows' gradients (merged: the last rank's bring them all in)."""
        with self._span("push", computed.handle.step)(Stage.PUSH):
            kept = self._lose_or_keep(computed)
            for server in self._store.servers:
                server.give(kept)

    def _lose_or_keep(self, computed: Computed) -> Computed:
        lose = self._team.lose_push
        if computed.rows is None or not lose(self._rank, computed.handle.step):
            return computed
        self._team.count_lost_push()
        return computed._replace(rows=None)

    def _load(self, step: int) -> Fetched | None:
        with self._span("load", step)(Stage.LOAD):
            work = self._feed.take(self._rank, step)
            if work is None:
                return None
            handle = self._store.begin(self._rank, step, work.batch)
        return Fetched(handle, work.step_samples, None)

    def _span(self, track: str, step: int) -> StageSpan:
        """Times a stage that works (does not wait), so that nobody takes it for a deadlock."""

        @contextmanager
        def span(stage: str) -> Iterator[None]:
            with self._stop.working(), self._spans.span(track, stage, self._rank, step):
                yield

        return span
