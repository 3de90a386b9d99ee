"""The window rule: the one definition of the staleness bound tau.

Pure Python, shared by the runtime's gate and the simulator's. A lookup of step ``s`` may start only
when all pushes of all steps ``< s - tau`` are closed (applied, or lost and counted). ``tau = 0`` is
synchronous, ``None`` has no bound. In barrier modes the pushes of all ranks count, in async only
the rank's own (paper, section 3; the original bounds batches in flight instead, see `Permits`).
"""

from __future__ import annotations

_ENDLESS = 2**62


class Watermarks:
    """Per rank, how many leading steps have their push closed.

    >>> marks = Watermarks(ranks=2)
    >>> marks.close(0, 0), marks.may_start(0, 1, tau=0), marks.may_start(0, 1, tau=1)
    (None, False, True)
    """

    def __init__(self, ranks: int) -> None:
        self._closed = [0] * ranks
        self._early: list[set[int]] = [set() for _ in range(ranks)]
        self._steps: list[int | None] = [None] * ranks

    def close(self, rank: int, step: int) -> None:
        """The push of (rank, step) is applied or lost; pushes may close out of order."""
        if step < self._closed[rank] or step in self._early[rank]:
            raise ValueError(f"push of rank {rank}, step {step} is already closed")
        self._early[rank].add(step)
        while self._closed[rank] in self._early[rank]:
            self._early[rank].remove(self._closed[rank])
            self._closed[rank] += 1

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: once they are closed it holds nobody up."""
        self._steps[rank] = steps

    def closed_steps(self, rank: int | None = None) -> int:
        """Leading steps closed by ``rank``, or by all; endless for a rank that is through."""
        if rank is None:
            return min(self.closed_steps(r) for r in range(len(self._closed)))
        steps = self._steps[rank]
        return _ENDLESS if steps is not None and self._closed[rank] >= steps else self._closed[rank]

    def may_start(self, rank: int, step: int, tau: int | None, own_only: bool = False) -> bool:
        """Whether the lookup of (rank, step) lies inside the window."""
        if tau is None:
            return True
        return self.closed_steps(rank if own_only else None) >= step - tau
