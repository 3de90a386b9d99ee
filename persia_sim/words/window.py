"""The window rule: the one definition of the staleness bound tau.

Pure Python, shared by the runtime's gate and the simulator's. A lookup of step ``s`` may start only
when all pushes of all steps ``< s - tau`` are closed (applied, or lost and counted). ``tau = 0`` is
synchronous, ``None`` has no bound. In barrier modes the pushes of all ranks count, in async only
the rank's own (paper, section 3; the original bounds batches in flight instead, see `Permits`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

from persia_sim.words.vocabulary import Mode

_ENDLESS = 2**62


def steps_to_close(step: int, tau: int) -> int:
    """How many leading steps must be closed before a lookup of ``step`` may start."""
    return max(0, step - tau)


class UpdatesMissed(NamedTuple):
    """Dense updates whose gradients a batch does not see, from the moment that the lag is full.

    The measure in which modes are compared: tau counts common steps in hybrid, but a rank's own
    steps in async.
    """

    rows: int | None
    """Those of rows; None without a bound."""
    dense: int | None
    """Those of dense weights; None where replicas are averaged and no update is missed whole."""


def updates_missed(mode: Mode, tau: int | None, *, ranks: int, dense_lag: int = 0) -> UpdatesMissed:
    """What a batch misses under the constant lag, where ranks take their turns.

    >>> updates_missed(Mode.HYBRID, 4, ranks=8), updates_missed(Mode.ASYNC, 4, ranks=8)
    (UpdatesMissed(rows=4, dense=0), UpdatesMissed(rows=39, dense=7))

    In async the window holds back pushes of rows only: dense weights are pulled just before a batch
    is computed on, and miss what the other ranks push until its own push (law 16).
    """
    if mode.has_barrier:
        return UpdatesMissed(tau if mode.reads_late_rows else 0, dense_lag)
    rows = None if tau is None else (tau + 1) * ranks - 1
    return UpdatesMissed(rows, None if mode is Mode.ASYNC_AVERAGING else ranks - 1)


class Watermarks:
    """Per rank and for all of them, how many leading steps have their push closed.

    >>> marks = Watermarks(ranks=2)
    >>> marks.close(0, 0), marks.may_start(0, 1, tau=0), marks.may_start(0, 1, tau=1)
    (None, False, True)

    A run that goes on starts with all steps before ``first`` (one a rank) closed.
    """

    def __init__(self, ranks: int, first: Sequence[int] | None = None) -> None:
        self._closed = list(first) if first else [0] * ranks
        self._early: list[set[int]] = [set() for _ in range(ranks)]
        self._steps: list[int | None] = [None] * ranks
        self._through: set[int] = set()  # ranks that hold nobody up any more
        self._ends: list[int] = []  # their steps, sorted
        self._by_all = least = min(self._closed)
        # Open steps: how many ranks have closed them.
        self._passed = {
            step: sum(closed > step for closed in self._closed)
            for step in range(least, max(self._closed))
        }

    def close(self, rank: int, step: int) -> None:
        """The push of (rank, step) is applied or lost; pushes may close out of order."""
        early = self._early[rank]
        if self.has_closed(rank, step):
            raise ValueError(f"push of rank {rank}, step {step} is already closed")
        early.add(step)
        while (now := self._closed[rank]) in early:
            early.remove(now)
            self._passed[now] = self._passed.get(now, 0) + 1
            self._closed[rank] = now + 1
        self._move(rank)

    def has_closed(self, rank: int, step: int) -> bool:
        """Whether the push of (rank, step) is applied or lost."""
        return step < self._closed[rank] or step in self._early[rank]

    def closed(self, rank: int) -> list[int]:
        """The number of leading steps closed by the rank, then those closed out of order."""
        return [self._closed[rank], *sorted(self._early[rank])]

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: once they are closed it holds nobody up."""
        self._steps[rank] = steps
        self._move(rank)

    def _move(self, rank: int) -> None:
        """Count the leading steps that every rank has closed, or does not have."""
        ranks = len(self._closed)
        if rank not in self._through and self.closed_steps(rank) == _ENDLESS:
            self._through.add(rank)
            insort(self._ends, self._closed[rank])
        if len(self._ends) == ranks:
            self._by_all = _ENDLESS
        while self._by_all < _ENDLESS:
            without = bisect_right(self._ends, self._by_all) if self._ends else 0
            if self._passed.get(self._by_all, 0) + without < ranks:
                return
            self._passed.pop(self._by_all, None)
            self._by_all += 1

    def closed_steps(self, rank: int | None = None) -> int:
        """Leading steps closed by ``rank``, or by all; endless for a rank that is through."""
        if rank is None:
            return self._by_all
        steps = self._steps[rank]
        return _ENDLESS if steps is not None and self._closed[rank] >= steps else self._closed[rank]

    def may_start(self, rank: int, step: int, tau: int | None, own_only: bool = False) -> bool:
        """Whether the lookup of (rank, step) lies inside the window."""
        if tau is None:
            return True
        return self.closed_steps(rank if own_only else None) >= steps_to_close(step, tau)
