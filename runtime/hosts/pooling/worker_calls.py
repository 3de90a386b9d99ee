"""The calls of a rank, or of its process, to an embedding worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.hosts.wire.calls import Payload


class WorkerCalls(ABC):
    """The calls that travel; those of a rank go over the connection of its stage."""

    @abstractmethod
    def look_up(
        self,
        rank: int,
        step: int,
        ids: np.ndarray,
        samples: int,
        ahead: bool,
        offsets: np.ndarray | None = None,
    ) -> Payload:
        """The vectors of a batch; of a prefetch (``ahead``), and of fresh tables, when it is
        brought up to date."""

    @abstractmethod
    def bring_up_to_date(self, rank: int, step: int) -> Payload:
        """The vectors of a batch that was prefetched, or those of fresh tables alone."""

    @abstractmethod
    def push(self, rank: int, step: int, lost: bool, factor: float, **vectors: Any) -> None:
        """The gradients of a batch's vectors; ``lost``: the step is closed without them."""

    @abstractmethod
    def finish(self, rank: int, steps: int) -> None:
        """The rank has so many steps and no more."""

    @abstractmethod
    def begin_run(self) -> None:
        """A run starts; who leads has told the servers."""

    @abstractmethod
    def note_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps."""

    @abstractmethod
    def rejoin(self, rank: int, begun: int, finished: int | None) -> Payload:
        """A rank tells a worker that was restarted how many of its steps had begun."""
