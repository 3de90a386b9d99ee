"""A shard: what a server asks of the rows of one partition, and what a push to them consists of.

The engines (`reference`, `native`) implement it, the server calls it; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from runtime.embedding.store import Handle, RowGradients

RankPush = tuple[Handle, RowGradients | None]
"""A rank's handle and its rows' gradients; None when they are lost or not finite."""

WholePush = tuple[Handle, RowGradients]
"""A push with gradients."""

STALENESS_BINS = 64
"""Row staleness is counted up to this many missed updates; more go into the last bin."""


class ShardRows(Protocol):
    """The rows of all tables that one server owns; called under the server's lock."""

    def read(self, handle: Handle, create: bool, batch_step: int) -> None:
        """Copy the batch's rows into the handle; ``create=False`` has no side effect."""
        ...

    def refresh(self, handle: Handle, batch_step: int) -> int:
        """Replace rows written since the handle read them, create absent ones; how many."""
        ...

    def lease(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """Per table, the batch's rows with their state; absent ones are left out."""
        ...

    def update(
        self, pushes: Sequence[WholePush], update: int, step: int, rate: float = 1.0
    ) -> np.ndarray:
        """One optimiser update on each row, gradients summed in the given order.

        ``update`` counts the server's updates from 1 (Adam's bias correction), ``step`` the global
        steps from 1 (schedules); ``rate`` multiplies the learning rate. Returns int64
        [STALENESS_BINS]: rows by updates they had missed.
        """
        ...
