"""What the ranks of a run share: the rule of the dense weights, the meter, and who may start."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from runtime.dense.rules import DenseRule, OnUpdate
from runtime.rank.parts import Parts
from runtime.stop import Stop, wait_for

if TYPE_CHECKING:
    from runtime.embedding.lease import LeasedRows

LosePush = Callable[[int, int], bool]
"""Fault injection: whether the push of (rank, step) is lost on its way."""


OpenRule = Callable[[Parts, OnUpdate], DenseRule]
"""Opens the rule of the dense weights that the mode asks for, for who carries it out."""


def lose_nothing(rank: int, step: int) -> bool:
    """No push is lost."""
    return False


class Team:
    """Shared by the ranks of one process."""

    def __init__(
        self, parts: Parts, open_rule: OpenRule, lose_push: LosePush = lose_nothing
    ) -> None:
        config = parts.config
        self.parts, self.lose_push = parts, lose_push
        process = parts.process
        self.ranks: Sequence[int] = range(config.sync.ranks) if process is None else process.ranks
        """Those of this process."""
        self._telling = threading.Lock()
        self._updates = 0
        self.rule = open_rule(parts, self._note_update)
        sync, shards = config.sync, parts.store.shards
        self.permits = Permits(sync.ranks, sync.permits, shards, parts.stop)
        parts.store.on_closed(self.permits.give_back)
        self.copies = self._open_copies()

    def begin_leg(self) -> list[int]:
        """Make ready for the feed's next leg; per rank the step with which it begins.

        Nothing is on lease any more: the servers have all that the copies had.
        """
        parts = self.parts
        self._updates = parts.meter.updates
        first = parts.feed.first_steps()
        if parts.process is None:
            parts.store.begin_leg(first)
        else:
            parts.process.begin_leg(lambda: parts.store.begin_leg(first))
        self.copies = self._open_copies()
        if self.copies is not None:
            self.copies.begin_leg(first, parts.store.counters_of_servers())
        return first

    def end_leg(self) -> None:
        """Return when nothing of any rank is in flight."""
        self.parts.store.drain()
        self.rule.end_leg()
        if self.parts.process is not None:
            self.parts.process.end_leg(self.parts)

    def _open_copies(self) -> LeasedRows | None:
        config, parts = self.parts.config, self.parts
        if config.sync.lookahead != "forwarded":
            return None
        from runtime.embedding.lease import LeasedRows  # loads the compiled kernels

        return LeasedRows(
            parts.store, config.sync.ranks, config.sync.ahead, parts.recorder, parts.stop
        )

    def _note_update(self, loss: float, samples: int) -> None:
        """A snapshot may be evaluated here: rows are held, and the dense weights stand still."""
        meter, store = self.parts.meter, self.parts.store
        with self._telling, self.parts.stop.working():
            self._updates += 1
            held = meter.evaluates_at(self._updates)
            if held and self.copies is not None:  # what the copies know already is on its way
                store.wait_until_closed(self._updates - 1)
            with store.frozen() if held else nullcontext():
                meter.update(self._updates, samples, loss, self.rule.snapshot)


class Permits:
    """The original's other bound: batches of a rank between the start of its lookup and the moment
    at which every server has closed its push."""

    def __init__(self, ranks: int, permits: int | None, servers: int, stop: Stop) -> None:
        self._permits, self._servers, self._stop = permits, servers, stop
        self._in_flight = [0] * ranks
        self._closings: Counter[tuple[int, int]] = Counter()
        self._changed = threading.Condition()
        stop.on_stop(self._wake)

    def take(self, rank: int, step: int) -> None:
        """Wait for one of the rank's permits; there is no end of them without a bound."""
        if self._permits is None:
            return
        with self._changed:
            wait_for(
                self._changed,
                lambda: self._in_flight[rank] < (self._permits or 0),
                self._stop,
                lambda: f"rank {rank}, step {step} waits for one of {self._permits} permits",
            )
            self._in_flight[rank] += 1

    def give_back(self, rank: int, step: int) -> None:
        """A server has closed the push of (rank, step); with the last one the permit is free."""
        if self._permits is None:
            return
        with self._changed:
            self._closings[rank, step] += 1
            if self._closings[rank, step] == self._servers:
                del self._closings[rank, step]
                self._in_flight[rank] -= 1
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
