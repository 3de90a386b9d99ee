"""The order of a simulated run: all shards as one, or one row of the trace for each server."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import simpy

from persia_sim.words.trace import ALL, Event, Kind, Trace


class OrderLog(Protocol):
    """Where the processes of a run write what took effect."""

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Something happened now that no server has a part in."""
        ...

    def rows(self, kind: Kind, rank: int, step: int, instants: np.ndarray, pushes: int = 0) -> None:
        """Every server read or wrote its rows at its own instant, the last of them now.

        ``pushes`` is the number of batches whose gradients were applied: versions grow by it.
        """
        ...

    def finish(self, **meta: Any) -> Trace:
        """The trace so far."""
        ...


class NoOrder:
    """Keeps nothing."""

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Nothing to do."""

    def rows(self, kind: Kind, rank: int, step: int, instants: np.ndarray, pushes: int = 0) -> None:
        """Nothing to do."""

    def finish(self, **meta: Any) -> Trace:
        """There is none."""
        raise ValueError("the run kept no order: simulate with trace=True")


class OneShard(NoOrder):
    """All servers as one: rows count as read or written when the last server has done it."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._version = 0

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Append an event."""
        self._events.append(Event(int(kind), rank, step, ALL, version))

    def rows(self, kind: Kind, rank: int, step: int, instants: np.ndarray, pushes: int = 0) -> None:
        """Append one event with the version before it."""
        self._events.append(Event(int(kind), rank, step, ALL, self._version))
        self._version += pushes

    def finish(self, **meta: Any) -> Trace:
        """The events in the order in which they happened."""
        return Trace.of(self._events, **meta)


class EachShard(NoOrder):
    """One row for each server, in the order of the servers' own instants.

    Rows are logged when the last server is done, so an effect is always logged after its cause;
    sorting by instant with ties in the order of logging therefore keeps causes before effects.
    """

    def __init__(self, env: simpy.Environment, shards: int) -> None:
        self._env = env
        self._shards = np.arange(shards)
        self._whole = np.array([ALL])
        self._instants: list[np.ndarray] = []
        self._facts: list[tuple[int, int, int, int, int]] = []  # kind, rank, step, version, pushes

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """One row for all shards."""
        self._instants.append(np.array([self._env.now]))
        self._facts.append((int(kind), rank, step, version, 0))

    def rows(self, kind: Kind, rank: int, step: int, instants: np.ndarray, pushes: int = 0) -> None:
        """A row for each shard."""
        self._instants.append(instants)
        self._facts.append((int(kind), rank, step, ALL, pushes))

    def finish(self, **meta: Any) -> Trace:
        """Sort, and count each shard's versions."""
        sizes = [len(instants) for instants in self._instants]
        if not sizes:
            return Trace.of([], **meta)
        facts = np.repeat(np.array(self._facts, np.int64), sizes, axis=0)
        # A run on one server has rows of length one, too: tell dense events by their kind.
        of_rows = {int(k) for k in (Kind.LOOKUP, Kind.REFRESH, Kind.PUSH, Kind.LOST_PUSH)}
        shard = np.concatenate(
            [self._shards if fact[0] in of_rows else self._whole for fact in self._facts]
        )
        order = np.argsort(np.concatenate(self._instants), kind="stable")
        facts, shard = facts[order], shard[order]
        kind, rank, step, version, pushes = facts.T.copy()
        for k in self._shards:
            here = np.flatnonzero(shard == k)
            version[here] = np.cumsum(pushes[here]) - pushes[here]
        table = np.column_stack([kind, rank, step, shard, version])
        return Trace(table, meta | {"shards": len(self._shards)})
