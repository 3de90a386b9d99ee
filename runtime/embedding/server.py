"""The embedding server: one object that owns rows, lock, version, window and merge.

It holds a lookup until its own window allows it, holds the pushes of a step until all ranks' are
here when merging, applies them in rank order, and writes down its linearisation points while it
holds the lock. There is no gate in the middle: engines differ only in how requests reach it.

What a lookup waits for is `Watermarks.may_start` (`persia_sim.base.window`); what the rules are in
this run, `server_rules`. Its rows, their initial values and optimisers are C++ tables
(`native/store`, `native/kernels`). Who asks it for a batch merges duplicate ids and pools rows to
vectors: `worker`. Lookahead prefetches with `look_up_ahead` and replaces what was written since
with `bring_up_to_date`.

Tables named fresh are a second server behind the first, `EmbeddingServer.fresh`: the same rows and
lock, with window marks, pushes and counters of its own, under the rules of lookahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from persia_sim.base.trace import ALL, Kind, TraceRecorder
from persia_sim.base.vocabulary import ENDLESS, OF_FRESH
from persia_sim.base.window import Watermarks
from runtime.embedding.batch_rows import (
    STALENESS_BINS,
    Handle,
    RankPush,
    RowGradients,
    ShardRows,
    WholePush,
)
from runtime.embedding.push_gate import PushGate
from runtime.embedding.server_rules import ServerRules
from runtime.stop import Stop, Turns

READ, REFRESH, UPDATE = "read", "refresh", "update"
"""Spans of work on rows, on the track `rows`, beside the words of `Stage`."""
_COUNTED = ("version", "updates", "rows_replaced", "lost")
_OF_FRESH = {ours: kind for kind, ours in OF_FRESH.items()}


Span = Callable[[str, str, int, int], AbstractContextManager[None]]
"""Times its body as work on a track, of a stage, a rank and a step."""


class EmbeddingServer:
    """One shard. ``version`` counts pushes applied, ``lost`` those that never will be, ``updates``
    optimiser updates."""

    def __init__(
        self,
        shard: int,
        rows: ShardRows,
        rules: ServerRules,
        recorder: TraceRecorder,
        gate: PushGate,
        stop: Stop,
        lock: Turns | None = None,
        *,
        is_of_fresh: bool = False,
    ) -> None:
        """``lock``: where requests wait in another way than `Turns`; ``is_of_fresh``: it serves the
        fresh tables of another one."""
        self.shard = shard
        self.rows = rows
        self._own = rows
        self._is_of_fresh = is_of_fresh
        self.fresh: EmbeddingServer | None = None
        """The group of the fresh tables, where there are any; this one serves the others then."""
        self.version = self.updates = self.rows_replaced = self.lost = 0
        self.row_staleness = np.zeros(STALENESS_BINS, np.int64)
        self._counted_before: Mapping[str, int] = {}  # by the rows that went before these
        self.on_closed: Callable[[int, int], None] = lambda rank, step: None
        """Told, under the lock, of each (rank, step) whose push is applied or lost here; where
        tables are fresh both its pushes are."""
        self.span: Span = lambda *work: nullcontext()
        """Around work on rows; the update of a step's merged pushes is that of rank 0."""
        self._recorder = recorder
        self._gate = gate
        self.lock = lock or Turns()
        self.begin_run(rules, stop)

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        self._rules = rules
        self._stop = stop
        self._part_tables(rules)
        self.begin_leg([0] * rules.ranks)
        stop.on_stop(self.lock.wake)

    def _part_tables(self, rules: ServerRules) -> None:
        """Open the group of the fresh tables, or close it where no table is fresh any more."""
        if self._is_of_fresh:
            return
        if rules.fresh and self.fresh is None:
            self.fresh = EmbeddingServer(
                self.shard,
                self.rows,
                rules.of_fresh_tables(),
                self._recorder,
                self._gate.of_fresh_tables,
                self._stop,
                self.lock,
                is_of_fresh=True,
            )
            self.fresh.on_closed = self._note_closed
            self.fresh.span = lambda *work: self.span(*work)
        elif not rules.fresh:
            self.fresh = None
        self._own = self.rows if self.fresh is None else self.rows.of_tables(rules.fresh, False)
        if self.fresh is not None:
            self.fresh._own = self.rows.of_tables(rules.fresh, True)
            self.fresh.begin_run(rules.of_fresh_tables(), self._stop)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks begin, or go on, with these steps; every push before them is closed."""
        with self.lock:
            self._marks = Watermarks(self._rules.ranks, first_steps)
            self._served = list(first_steps)  # per rank: lookups with side effects so far
            self._waiting: dict[int, dict[int, RankPush]] = {}
            self._lost_steps: set[int] = set()  # merged ones, of which some ranks cannot know
            if self.fresh is not None:
                self.fresh.begin_leg(first_steps)

    def counters(self) -> dict[str, Any]:
        """What it has counted, as plain JSON; ``fresh`` of the fresh tables."""
        status = self.status()
        names = (*_COUNTED, "row_staleness", "counters", *(["fresh"] if self.fresh else []))
        return {name: status[name] for name in names}

    def status(self) -> dict[str, Any]:
        """What it has counted, and what its rows are."""
        with self.lock:
            status = self.rows.status() | self._counts()
            for name, count in self._counted_before.items():
                status["counters"][name] += count
            return status | ({"fresh": self.fresh._counts()} if self.fresh else {})

    def _counts(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _COUNTED}
        return own | {"row_staleness": self.row_staleness.tolist()}

    def export(self, table: str) -> dict[str, np.ndarray]:
        """Ids, values and state of all rows of a table, in any order."""
        with self.lock:
            ids, values, state = self.rows.export(table)
        return {"ids": ids, "values": values, "state": state}

    def resume_run(self, rules: ServerRules, counters: Mapping[str, Any]) -> None:
        """Count on from what `counters` gave, under these rules, on the rows as they are."""
        with self.lock:
            self._rules = rules
            self._part_tables(rules)
            self._count_on(counters)
            self._counted_before = counters["counters"]
            if self.fresh is not None and "fresh" in counters:
                self.fresh._count_on(counters["fresh"])

    def _count_on(self, counters: Mapping[str, Any]) -> None:
        for name in _COUNTED:
            setattr(self, name, counters[name])
        self.row_staleness = np.array(counters["row_staleness"], np.int64)

    # What an engine calls: these wait.

    def look_up(self, handle: Handle) -> None:
        """Read the batch's rows, creating absent ones, when window and order allow it."""
        with self.lock:
            self._wait_for_turn(handle)
            self.read(handle)
            self._serve(handle)

    def look_up_ahead(self, handle: Handle) -> None:
        """A prefetch of lookahead: read at any time, without side effect."""
        self.read(handle, create=False)

    def lease(self, handle: Handle, ahead: int) -> dict[str, dict[str, Any]]:
        """lookahead `forwarded`: the batch's rows with their state, once all pushes of steps
        < step - ahead are applied; without side effect."""
        with self.lock:
            self._wait_for_window(handle, ahead)
            return self.rows.lease(handle)

    def bring_up_to_date(self, handle: Handle) -> None:
        """Replace prefetched rows that were written since, when all earlier pushes are applied: of
        the fresh tables, where there are any."""
        if self.fresh is not None:
            return self.fresh.bring_up_to_date(handle)
        with self.lock:
            self._wait_for_turn(handle)
            self.refresh(handle)
            self._serve(handle)

    def give(self, push: RankPush) -> None:
        """Take a rank's push; when merging, the last one of a step applies them all. Where tables
        are fresh it is of the others, and goes to ``fresh`` first.

        Closes the (rank, step) of every push that is applied or lost.
        """
        handle, _ = push
        if handle.step in self._lost_steps:
            self._finish_step([(handle, None)])
            return
        if not self._rules.merges:
            self._finish_step([push])
            return
        with self.lock:
            step = self._waiting.setdefault(handle.step, {})
            step[handle.rank] = push
            if len(step) < self._rules.ranks:
                return
            del self._waiting[handle.step]
        self._finish_step([step[rank] for rank in range(self._rules.ranks)])

    def has_closed(self, rank: int, step: int) -> bool:
        """Whether the push of (rank, step) is applied or lost here, also that of fresh tables."""
        with self.lock:
            of_fresh = self.fresh is None or self.fresh.has_closed(rank, step)
            return of_fresh and self._marks.has_closed(rank, step)

    def closed(self) -> list[list[int]]:
        """Which steps of each rank are closed; behind them those of fresh tables."""
        with self.lock:
            closed = [self._marks.closed(rank) for rank in range(self._rules.ranks)]
            return closed + (self.fresh.closed() if self.fresh is not None else [])

    def rejoin(self, rank: int, begun: int, still_open: Collection[int]) -> int:
        """After a restart from older rows, or of a rank's embedding worker: what is known of the
        rank's first ``begun`` steps.

        Those that are not ``still_open`` were closed at the server before this one and are not in
        the rows here, or were held by the worker: where they are open here they are lost, and
        counted. In merged modes a step that is lost for one rank is lost as a whole, also for ranks
        that had not heard it. Returns how many were lost, with those of fresh tables.
        """
        with self.lock:
            # Steps that were begun and are known neither here nor to the rank are lost: close and
            # count them.
            first = self._marks.closed_steps(rank)
            closed = self._marks.closed(rank)[1:]
            lost = [s for s in range(first, begun) if s not in still_open and s not in closed]
            for step in lost:
                self._record(Kind.LOST_PUSH, rank, step)
                self._marks.close(rank, step)
            self.lost += len(lost)
            if lost:  # what is pushed was looked up
                self._served[rank] = max(self._served[rank], lost[-1] + 1)

            # A merged step is applied whole or not at all, so the other ranks' pushes of it are
            # lost, too.
            if self._rules.merges:
                self._lost_steps.update(lost)
            waits = [self._waiting.pop(step) for step in lost if step in self._waiting]
            self.lock.notify_all()

        # Pushes that wait for the rest of such a step are closed without it.
        for pushes in waits:
            others = [handle for handle, _ in pushes.values() if handle.rank != rank]
            self._finish_step([(handle, None) for handle in others])
        if self.fresh is None:
            return len(lost)
        return len(lost) + self.fresh.rejoin(rank, begun, still_open)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        with self.lock:
            self._marks.finish(rank, steps)
            self._served[rank] = ENDLESS
            if self.fresh is not None:
                self.fresh.finish(rank, steps)
            self.lock.notify_all()

    def reopen(self, handle: Handle, *, is_up_to_date: bool) -> None:
        """After a restart: read a batch that the server before this one has read, and where it was
        brought up to date there, do that, too. Nobody waits for it."""
        with self.lock:
            self.read(handle)
            self._serve(handle)
            if is_up_to_date and self.fresh is not None:
                self.fresh.refresh(handle)
                self.fresh._serve(handle)

    # What happens in one instant, under the lock; the executor of a given order calls these.

    def read(self, handle: Handle, *, create: bool = True) -> None:
        """Read the batch's rows of this shard into the handle; those of fresh tables without side
        effect, to be brought up to date."""
        with self.lock:
            self._record(Kind.LOOKUP, handle.rank, handle.step)
            handle.version[self.shard] = self.version
            batch_step = self._rules.batch_step(handle.rank, handle.step)
            with self.span("rows", READ, handle.rank, handle.step):
                self._own.read(handle, create, batch_step)
                if self.fresh is not None:
                    self.fresh._own.read(handle, False, batch_step)

    def refresh(self, handle: Handle) -> None:
        """Bring prefetched rows up to date: re-read those written since, create absent ones."""
        if self.fresh is not None:
            return self.fresh.refresh(handle)
        with self.lock:
            self._record(Kind.REFRESH, handle.rank, handle.step)
            if not self._is_of_fresh:
                handle.version[self.shard] = self.version
            batch_step = self._rules.batch_step(handle.rank, handle.step)
            with self.span("rows", REFRESH, handle.rank, handle.step):
                self.rows_replaced += self._own.refresh(handle, batch_step)

    def note(self, kind: Kind, rank: int, step: int) -> None:
        """Write down what a read of another rank has served at this instant."""
        if kind is Kind.REFRESH and self.fresh is not None:
            return self.fresh.note(kind, rank, step)
        with self.lock:
            self._record(kind, rank, step)

    def apply(
        self, pushes: Sequence[WholePush], *, merged: bool = False, of_ranks: int | None = None
    ) -> None:
        """Apply gradients in the given order, one optimiser update per row.

        ``merged``: these are the pushes of all ranks of a step, in rank order (law 6).
        ``of_ranks``: so many ranks' pushes are in them, when that is not one each (law 14).
        """
        if not pushes:
            return
        first = pushes[0][0]
        with self._gate.pushing([handle for handle, _ in pushes], self.shard), self.lock:
            # The linearisation point of the push: recorded and applied under one lock.
            self._record(Kind.PUSH, ALL if merged else first.rank, first.step)

            # What is done about late gradients, if anything: a smaller rate, or a correction.
            strength = self._rules.delay_compensation
            rate = 1.0
            if self._rules.lr_by_staleness:
                now = self.version
                rate = self._rules.rate([now - h.version.get(self.shard, now) for h, _ in pushes])
            if strength:
                pushes = compensated(self._own, pushes, self.shard, strength)

            # One optimiser update of every row that is touched.
            self.version += len(pushes) if of_ranks is None else of_ranks
            self.updates += 1
            with self.span("rows", UPDATE, 0, first.step):
                self.row_staleness += self._own.update(pushes, self.updates, rate)

    def lose(self, handle: Handle) -> None:
        """Record that the handle's push will never be applied here."""
        with self.lock:
            self._record(Kind.LOST_PUSH, handle.rank, handle.step)
            self.lost += 1
        self._gate.leave([handle], self.shard)

    def peek(self, handle: Handle) -> None:
        """The rows as they are now, for evaluation: creates and records nothing."""
        with self.lock:
            handle.version[self.shard] = self.version
            self.rows.read(handle, False, 0)

    def _record(self, kind: Kind, rank: int, step: int) -> None:
        kind = _OF_FRESH.get(kind, kind) if self._is_of_fresh else kind
        self._recorder.record(kind, rank, step, self.shard, self.version)

    def _wait_for_turn(self, handle: Handle) -> None:
        window = self._rules.window(handle.step)
        self._wait_for_window(handle, window)
        if self._rules.in_rank_order and window == 0:
            before = self._served[: handle.rank]
            self.lock.wait_until(
                lambda: all(steps > handle.step for steps in self._served[: handle.rank]),
                self._stop,
                lambda: (
                    f"rank {handle.rank}, step {handle.step} waits for the lookups of the ranks"
                    f" before it at server {self.shard}; served: {before}"
                ),
            )

    def _wait_for_window(self, handle: Handle, tau: int | None) -> None:
        rules = self._rules
        rank = handle.rank
        step = handle.step

        def who() -> str:
            closed = [self._marks.closed_steps(r) for r in range(rules.ranks)]
            return (
                f"the lookup of rank {rank}, step {step} waits at server {self.shard} with"
                f" tau={tau} for pushes; steps closed per rank: {closed}"
            )

        self.lock.wait_until(
            lambda: self._marks.may_start(rank, step, tau, rules.per_rank_window), self._stop, who
        )

    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first ``steps`` steps is applied or lost here."""
        with self.lock:
            self.lock.wait_until(
                lambda: self._marks.closed_steps() >= steps,
                self._stop,
                lambda: f"a snapshot waits at server {self.shard} for the pushes of step {steps}",
            )

    def _serve(self, handle: Handle) -> None:
        if self._rules.in_rank_order:
            self._served[handle.rank] = handle.step + 1
            self.lock.notify_all()

    def _finish_step(self, pushes: Sequence[RankPush]) -> None:
        for handle, rows in pushes:
            if rows is None:
                self.lose(handle)
        whole = [(handle, rows) for handle, rows in pushes if rows is not None]
        self.apply(whole, merged=self._rules.merges)
        with self.lock:
            for handle, _ in pushes:
                self._marks.close(handle.rank, handle.step)
                self._note_closed(handle.rank, handle.step)
            self.lock.notify_all()

    def _note_closed(self, rank: int, step: int) -> None:
        """A push of (rank, step) is closed, of fresh tables or of late ones; perhaps both are."""
        if self.has_closed(rank, step):
            self.on_closed(rank, step)


def compensated(
    rows: ShardRows, pushes: Sequence[WholePush], shard: int, strength: float
) -> list[WholePush]:
    """These pushes with their gradients compensated for rows that have moved since they were read;
    call under the shard's lock. Rows that nobody has written since keep theirs, to the bit.

    A gradient g was computed on the row w_read and is applied to the row w_now. To first order the
    gradient at w_now is g + H (w_now - w_read), and lambda g^2 stands for the diagonal of the
    Hessian H (source: Zheng et al. 2017, DC-ASGD, arXiv 1609.08326; Monolith's DcOptimizer does it
    for rows): g + lambda * g * g * (w_now - w_read).

    Of a merged step it is the merged gradient G that is compensated, since G is what the update is
    made of: then the result depends neither on how many ranks shared the step (law 3) nor on
    whether they were computed as one batch (law 14). Ranks may have read the row at different
    instants, so each one's part is moved by its own delay: g_r + lambda * G * g_r * (w_now -
    w_read_r), whose sum is the formula above where all have read the same.

    Gradients are of a mean over B samples, so lambda about B stands for 1 of single samples.
    """
    moved = [_moved(rows, handle) for handle, _ in pushes]
    result: list[dict[str, np.ndarray]] = [dict(gradients) for _, gradients in pushes]
    for name in pushes[0][0].plans:
        plans = [handle.plans[name] for handle, _ in pushes]
        parts = [plan.part(shard) for plan in plans]
        read = [gradients[name][part] for (_, gradients), part in zip(pushes, parts, strict=True)]
        ids = [plan.ids[part] for plan, part in zip(plans, parts, strict=True)]
        merged = read if len(read) == 1 else _merged(ids, read)
        for number, part in enumerate(parts):
            delay = moved[number][name][part]
            more = strength * merged[number] * read[number] * delay
            new = pushes[number][1][name].copy()
            new[part] = np.where(delay != 0, read[number] + more, read[number])
            result[number][name] = new
    return [(handle, new) for (handle, _), new in zip(pushes, result, strict=True)]


def _moved(rows: ShardRows, handle: Handle) -> RowGradients:
    """Per table, by how much the rows of this shard have moved since they were read."""
    arrays = {name: getattr(handle, name) for name in ("values", "slots", "writes")}
    copies = {name: one and one.of(one.flat.copy()) for name, one in arrays.items()}
    now = replace(handle, **copies)
    rows.read(now, False, 0)
    return {name: now.values[name] - values for name, values in handle.values.items()}


def _merged(ids: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each push, the sums over all pushes of the gradients of its rows."""
    distinct, where = np.unique(np.concatenate(ids), return_inverse=True)
    total = np.zeros((len(distinct), gradients[0].shape[1]), gradients[0].dtype)
    places = np.split(where, np.cumsum([len(one) for one in ids])[:-1])
    for place, gradient in zip(places, gradients, strict=True):
        total[place] += gradient  # the ids of one batch are distinct
    return [total[place] for place in places]
