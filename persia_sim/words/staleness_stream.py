"""Staleness while a run goes on, without its trace: memory for the batches in flight only.

The same figures as `staleness.summarize` gives from the whole table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from persia_sim.words.events import ALL, Event, Kind
from persia_sim.words.staleness import StalenessSummary, summarize
from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import Mode

SLACK_STEPS = 64
"""Steps that a batch is kept after the last rank has closed it. A rank with several lookups under
way may write them down out of turn, and a push of one not yet written down still counts."""


_TOTALS = (
    "any_push", "batches", "steps_missed", "most_missed", "oldest", "pushes", "pushes_missed"
)  # fmt: skip


MOST_EVENTS_AT_ONCE = 2_000_000
"""Of a longer trace the figures are counted event by event, in bounded memory."""


def summary_of(trace: Trace) -> StalenessSummary:
    """The figures of a finished trace, as `staleness.summarize` gives them, in bounded memory."""
    if len(trace) <= MOST_EVENTS_AT_ONCE:
        return summarize(trace)
    counter = StalenessCounter(Mode(trace.meta["mode"]), int(trace.meta["ranks"]))
    for event in trace:
        counter.note(event)
    return counter.summary()


class StalenessCounter:
    """Takes every event of a run in its order; `TraceRecorder.listen` brings them."""

    def __init__(self, mode: Mode, ranks: int) -> None:
        self._mode, self._ranks = mode, ranks
        self._reading = Kind.REFRESH if mode is Mode.LOOKAHEAD else Kind.LOOKUP
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
            self._any_push |= event.kind == Kind.PUSH
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

    def totals(self) -> dict[str, int | bool]:
        """What `go_on` takes, of a run with nothing in flight; plain JSON."""
        self._count_all()
        return {name: getattr(self, f"_{name}") for name in _TOTALS}

    def go_on(self, totals: Mapping[str, int | bool], first_steps: Sequence[int]) -> None:
        """Count on from what `totals` gave; ranks go on with these steps."""
        for name in _TOTALS:
            setattr(self, f"_{name}", totals[name])
        self._next, self._first = list(first_steps), min(first_steps)

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
        step, self._first = self._first, self._first + 1
        missing = self._missing.pop(step, {})
        for rank in self._read.pop(step, {}):
            missed = missing.get(rank, set())
            self._batches += 1
            self._steps_missed += len(missed)
            self._most_missed = max(self._most_missed, len(missed))
            self._oldest = max(self._oldest, step - min(missed, default=step))
