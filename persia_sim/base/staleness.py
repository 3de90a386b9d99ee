"""Staleness of a trace: in steps, and in pushes, with the identity that checks both.

The statistics read only the table, so a simulated run and a recorded one are measured alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from persia_sim.base.trace import ALL, Kind, Trace
from persia_sim.base.vocabulary import Event, Mode

_NONE = np.zeros(0, np.int64)
_KIND, _RANK, _STEP, _SHARD = range(1, 5)  # columns of Trace.of_kind


@dataclass(frozen=True, slots=True)
class StepStaleness:
    """Per lookup of a batch, what its rows missed when they were read."""

    rank: np.ndarray
    """int64 [n]"""
    step: np.ndarray
    """int64 [n]"""
    missing_steps: np.ndarray
    """int64 [n]: earlier steps with a push not applied at a shard when that shard was read."""
    oldest_missing_steps: np.ndarray
    """int64 [n]: how many steps back the oldest of them lies; 0 when none is missing."""


def staleness_in_steps(trace: Trace) -> StepStaleness:
    """Count, for each (rank, step), the earlier steps whose pushes its lookup missed.

    In async the steps are the rank's own, as the window's are. The bound of the window is
    ``oldest_missing_steps <= tau`` (design law 5). In lookahead the reading that counts is the
    refresh, in which pending rows are replaced.
    """
    mode = Mode(trace.meta["mode"])
    ranks = int(trace.meta["ranks"])
    reading = Kind.REFRESH if mode.prefetches_rows else Kind.LOOKUP
    reads = trace.of_kind(reading)
    pushes = trace.of_kind(Kind.PUSH)
    pushes = np.vstack([pushes, trace.of_kind(Kind.LOST_PUSH)])
    closed_at = _closing_instants(pushes, ranks, mode.has_barrier)

    # Per lookup: which earlier steps had not closed when its shard was read.
    missing: dict[tuple[int, int], list[np.ndarray]] = {}
    frontier: dict[tuple[int, int], int] = {}
    in_order = {key: sorted(instants.tolist()) for key, instants in closed_at.items()}
    # Reads of a step with no closing between them miss the same: what the last one found.
    last: dict[tuple[int, int], tuple[int, int, np.ndarray]] = {}
    for seq, _, rank, step, shard, _ in reads.tolist():
        owner = ALL if mode.has_barrier else rank
        key = (owner, shard) if (owner, shard) in closed_at else (owner, ALL)
        closed = bisect_left(in_order.get(key, []), seq)
        at, of_step, late = last.get((owner, shard), (-1, -1, _NONE))
        if (at, of_step) != (closed, step):
            instants = closed_at.get(key, _NONE)
            first = frontier.get((owner, shard), 0)
            while first < len(instants) and instants[first] < seq:
                first += 1
            frontier[owner, shard] = first
            late = first + np.flatnonzero(instants[first:step] > seq)
            last[owner, shard] = closed, step, late
        missing.setdefault((rank, step), []).append(late)

    # A line for each lookup: the union over its shards.
    rows = []
    for rank, step in sorted(missing, key=lambda key: (key[1], key[0])):
        late = _union(missing[rank, step])
        rows.append((rank, step, len(late), step - int(late[0]) if len(late) else 0))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return StepStaleness(*table.T)


def _union(parts: list[np.ndarray]) -> np.ndarray:
    """A step that any shard missed is missing once."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _closing_instants(
    pushes: np.ndarray, ranks: int, all_ranks: bool
) -> dict[tuple[int, int], np.ndarray]:
    """For each (owner, shard): the ``seq`` at which the pushes of step 0, 1, ... were closed."""
    instants: dict[tuple[int, int], np.ndarray] = {}
    if not len(pushes):
        return instants
    steps = int(pushes[:, _STEP].max()) + 1
    shards = {int(s) for s in np.unique(pushes[:, _SHARD])}
    owners = [ALL] if all_ranks else list(range(ranks))
    for shard in shards:
        here = pushes[(pushes[:, _SHARD] == shard) | (pushes[:, _SHARD] == ALL)]
        for owner in owners:
            counted = here if all_ranks else here[here[:, _RANK] == owner]
            last = np.full(steps, -1, np.int64)
            np.maximum.at(last, counted[:, _STEP], counted[:, 0])
            instants[owner, shard] = last
    return instants


@dataclass(frozen=True, slots=True)
class PushStaleness:
    """Per (rank, step, shard), how many pushes of others came between lookup and own push."""

    shard: np.ndarray
    """int64 [n]"""
    missed_pushes: np.ndarray
    """int64 [n]: version at the own push minus version at the lookup."""
    in_flight: np.ndarray
    """int64 [n]: other batches in flight at the instant of the push (an independent gauge)."""
    step: np.ndarray
    """int64 [n]"""


def staleness_in_pushes(trace: Trace) -> PushStaleness:
    """Read the versions that the stores recorded, and count batches in flight beside them.

    Needs a trace with versions and with one row per shard, as an execution writes it. Pushes merged
    into one apply take effect at the same instant and do not count as each other's. A batch whose
    push is lost at a shard never has a push instant there, so it is in neither of its figures.
    """
    lost = {(e.rank, e.step, e.shard) for e in trace if e.kind == Kind.LOST_PUSH}
    mode = Mode(trace.meta["mode"])
    reading = Kind.REFRESH if mode.prefetches_rows else Kind.LOOKUP

    # Batches between lookup and push, per shard, with the version that they read.
    open_reads: dict[int, dict[tuple[int, int], int]] = {}
    rows: list[tuple[int, int, int, int]] = []

    # A push closes its batch, or all batches of its step when merged.
    for event in trace:
        flying = open_reads.setdefault(event.shard, {})
        if event.kind == reading:
            batch = (event.rank, event.step)
            if (*batch, event.shard) not in lost and (*batch, ALL) not in lost:
                flying[batch] = event.version
        elif event.kind == Kind.PUSH:
            if event.rank == ALL:
                group = [key for key in flying if key[1] == event.step]
            else:
                group = [(event.rank, event.step)]
            versions = [flying.pop(key) for key in group if key in flying]
            for version in versions:
                rows.append((event.shard, event.version - version, len(flying), event.step))
    return PushStaleness(*np.array(rows, np.int64).reshape(-1, 4).T)


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """The figures that a results table shows; None where nobody knows them."""

    mean_steps: float | None
    max_steps: int | None
    oldest_steps: int | None
    mean_pushes: float | None
    """None, too, when the trace carries no versions (an order that was never executed)."""


SLACK_STEPS = 64
"""Steps that a batch is kept after the last rank has closed it. A rank with several lookups under
way may write them down out of turn, and a push of one not yet written down still counts."""


_TOTALS = (
    "any_push",
    "batches",
    "steps_missed",
    "most_missed",
    "oldest",
    "pushes",
    "pushes_missed",
)


def summary_of(trace: Trace) -> StalenessSummary:
    """The figures of a finished trace, over all lookups of its run, in bounded memory."""
    counter = StalenessCounter(Mode(trace.meta["mode"]), int(trace.meta["ranks"]))
    for event in trace:
        counter.note(event)
    return counter.summary()


class StalenessCounter:
    """The figures while a run goes on, in memory for the batches in flight only: takes every event
    in its order; `TraceRecorder.listen` brings them."""

    def __init__(self, mode: Mode, ranks: int) -> None:
        self._mode = mode
        self._ranks = ranks
        self._reading = Kind.REFRESH if mode.prefetches_rows else Kind.LOOKUP
        # By step, then rank: the shards read, and the earlier steps that were missing there.
        self._read: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._missing: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        # Per rank and step: the version of each shard that is read and not pushed.
        self._open: list[dict[int, dict[int, int]]] = [defaultdict(dict) for _ in range(ranks)]
        self._next = [0] * ranks  # per rank: one more than the last step read
        self._first = 0  # the first step not yet counted
        self._any_push = False
        self._batches = self._steps_missed = self._most_missed = self._oldest = 0
        self._pushes = self._pushes_missed = 0

    def note(self, event: Event) -> None:
        """One event took effect."""
        if event.kind == self._reading:
            self._note_read(event)
        elif event.kind in (Kind.PUSH, Kind.LOST_PUSH):
            self._any_push |= event.kind == Kind.PUSH and event.version >= 0
            self._note_missing(event)
            for rank in range(self._ranks) if event.rank == ALL else (event.rank,):
                self._close(rank, event)
            self._settle()

    def summary(self) -> StalenessSummary:
        """The figures of all batches so far."""
        self._count_all()
        if not self._batches:
            return StalenessSummary(0.0, 0, 0, None)
        return StalenessSummary(
            self._steps_missed / self._batches,
            self._most_missed,
            self._oldest,
            (self._pushes_missed / max(self._pushes, 1)) if self._any_push else None,
        )

    def state_dict(self) -> dict[str, int | bool]:
        """What `load_state_dict` takes, of a run with nothing in flight; plain JSON."""
        self._count_all()
        return {name: getattr(self, f"_{name}") for name in _TOTALS}

    def load_state_dict(self, totals: Mapping[str, int | bool], first_steps: Sequence[int]) -> None:
        """Count on from what `state_dict` gave; ranks go on with these steps."""
        for name in _TOTALS:
            setattr(self, f"_{name}", totals[name])
        self._next = list(first_steps)
        self._first = min(first_steps)

    def _count_all(self) -> None:
        """Nothing is in flight; slower ranks may still come to steps that others have had."""
        while self._first < max(self._next):
            self._count_first()
        self._first = min(self._next)

    def _note_read(self, event: Event) -> None:
        self._read[event.step][event.rank].add(event.shard)
        self._open[event.rank][event.step][event.shard] = event.version
        self._next[event.rank] = max(self._next[event.rank], event.step + 1)

    def _note_missing(self, event: Event) -> None:
        """Whoever has read this shard for a later step has missed this push."""
        shared = self._mode.has_barrier
        for step in range(event.step + 1, max(self._next) if shared else self._next[event.rank]):
            for rank, shards in self._read.get(step, {}).items():
                if event.shard in shards and (shared or rank == event.rank):
                    self._missing[step][rank].add(event.step)

    def _close(self, rank: int, event: Event) -> None:
        shards = self._open[rank].get(event.step)
        version = shards.pop(event.shard, None) if shards is not None else None
        if not shards:
            self._open[rank].pop(event.step, None)
        if version is not None and event.kind == Kind.PUSH:
            self._pushes += 1
            self._pushes_missed += event.version - version

    def _settle(self) -> None:
        """Count the batches that no push to come can have been missed by."""
        closed = min(
            min(steps) if steps else following
            for steps, following in zip(self._open, self._next, strict=True)
        )
        while self._first < closed - SLACK_STEPS:
            self._count_first()

    def _count_first(self) -> None:
        step = self._first
        self._first = self._first + 1
        missing = self._missing.pop(step, {})
        for rank in self._read.pop(step, {}):
            missed = missing.get(rank, set())
            self._batches += 1
            self._steps_missed += len(missed)
            self._most_missed = max(self._most_missed, len(missed))
            self._oldest = max(self._oldest, step - min(missed, default=step))
