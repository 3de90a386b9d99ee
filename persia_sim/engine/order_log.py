"""The order of a simulated run: all shards as one, or one row of the trace for each server."""

from __future__ import annotations

from typing import Any

import numpy as np
import simpy

from persia_sim.words.trace import ALL, Event, Kind, Trace

Each = np.ndarray | None
"""Of every server, if it is asked for."""
Many = np.ndarray | int
"""Of every server, or the same of all."""


class OrderLog:
    """Where the processes of a run write what took effect; this one keeps nothing."""

    by_server = False
    """Whether the instant at which each single server read or wrote is asked for."""

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Something happened now that no server has a part in."""

    def rows(
        self, kind: Kind, rank: int, step: int, instants: Each, pushes: Many = 0, where: Each = None
    ) -> None:
        """Every server read or wrote its rows at its own instant, the last of them now; None where
        nobody asks for them (`by_server`).

        ``pushes`` is the number of batches whose gradients were applied, at each server or at all:
        versions grow by it. ``where``: the servers concerned, bool [servers]; None is all of them.
        """

    def finish(self, **meta: Any) -> Trace:
        """The trace so far. Raises ValueError where none is kept."""
        raise ValueError("the run kept no order: simulate with trace=True")


class OneShard(OrderLog):
    """All servers as one: rows count as read or written when the last server has done it."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._version = 0

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Append an event."""
        self._events.append(Event(int(kind), rank, step, ALL, version))

    def rows(
        self, kind: Kind, rank: int, step: int, instants: Each, pushes: Many = 0, where: Each = None
    ) -> None:
        """Append one event with the version before it. One shard has no parts: a push counts as
        applied where any server has applied it, and as lost when none has."""
        if where is not None and not (where.all() if kind is Kind.LOST_PUSH else where.any()):
            return
        self._events.append(Event(int(kind), rank, step, ALL, self._version))
        self._version += pushes if isinstance(pushes, int) else int(pushes.max())

    def finish(self, **meta: Any) -> Trace:
        """The events in the order in which they happened."""
        return Trace.of(self._events, **meta)


class EachShard(OrderLog):
    """One row for each server, in the order of the servers' own instants.

    Rows are logged when the last server is done, so an effect is always logged after its cause;
    sorting by instant with ties in the order of logging therefore keeps causes before effects.
    """

    by_server = True

    def __init__(self, env: simpy.Environment, shards: int) -> None:
        self._env = env
        self._shards = np.arange(shards)
        self._whole, self._none = np.array([ALL]), np.array([0])
        self._instants: list[np.ndarray] = []
        self._facts: list[tuple[int, int, int, int]] = []  # kind, rank, step, version
        self._concerned: list[np.ndarray] = []  # shards
        self._pushes: list[np.ndarray] = []  # at each of them

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """One row for all shards."""
        self._instants.append(np.array([self._env.now]))
        self._facts.append((int(kind), rank, step, version))
        self._concerned.append(self._whole)
        self._pushes.append(self._none)

    def rows(
        self, kind: Kind, rank: int, step: int, instants: Each, pushes: Many = 0, where: Each = None
    ) -> None:
        """A row for each shard concerned."""
        if instants is None:
            raise ValueError("the order of each server needs the instants of each")
        chosen = self._shards if where is None else self._shards[where]
        self._instants.append(instants[chosen])
        self._facts.append((int(kind), rank, step, ALL))
        self._concerned.append(chosen)
        self._pushes.append(np.broadcast_to(pushes, len(self._shards))[chosen])

    def finish(self, **meta: Any) -> Trace:
        """Sort, and count each shard's versions."""
        sizes = [len(instants) for instants in self._instants]
        if not sizes:
            return Trace.of([], **meta)
        facts = np.repeat(np.array(self._facts, np.int64), sizes, axis=0)
        shard, pushes = np.concatenate(self._concerned), np.concatenate(self._pushes)
        order = np.argsort(np.concatenate(self._instants), kind="stable")
        facts, shard, pushes = facts[order], shard[order], pushes[order]
        kind, rank, step, version = facts.T.copy()
        for k in self._shards:
            here = np.flatnonzero(shard == k)
            version[here] = np.cumsum(pushes[here]) - pushes[here]
        table = np.column_stack([kind, rank, step, shard, version])
        return Trace(table, meta | {"shards": len(self._shards)})
