"""Row pushes of one step, kept until all ranks' are there: a row then takes one optimiser step."""

from __future__ import annotations

import threading

from runtime.embedding.store import Handle, RowGradients

RankPush = tuple[Handle, RowGradients | None]
"""A rank's handle and its rows' gradients; None when they are lost or not finite."""


class StepMerger:
    """Collects one push per rank and step; whoever brings the last one gets them all."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[int, dict[int, RankPush]] = {}
        self._lock = threading.Lock()

    def add(self, push: RankPush) -> list[RankPush] | None:
        """All pushes of the step in rank order, if this was the last; else None.

        The window bounds how many steps can wait here.
        """
        handle = push[0]
        with self._lock:
            step = self._waiting.setdefault(handle.step, {})
            step[handle.rank] = push
            if len(step) < self._ranks:
                return None
            del self._waiting[handle.step]
        return [step[rank] for rank in range(self._ranks)]
