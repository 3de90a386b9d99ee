"""A shard: which ids it owns, what a server asks of its rows, and what a push to them consists of.

Who holds rows implements `ShardRows`, the server calls it; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from runtime.data.ids import mix64
from runtime.embedding.store import Handle, RowGradients

RankPush = tuple[Handle, RowGradients | None]
"""A rank's handle and its rows' gradients; None when they are lost or not finite."""

WholePush = tuple[Handle, RowGradients]
"""A push with gradients."""

STALENESS_BINS = 64
"""Row staleness is counted up to this many missed updates; more go into the last bin."""


def shard_of(ids: np.ndarray, shards: int) -> np.ndarray:
    """The shard that owns each id: int64 in [0, shards).

    A hash of it, whatever its field, so hot fields spread over all shards (paper, section 4.2.3).
    """
    return ((mix64(ids) >> np.uint64(32)) % np.uint64(shards)).astype(np.int64)


class ShardRows(Protocol):
    """The rows of all tables that one server owns; called under the server's lock."""

    def read(self, handle: Handle, create: bool, batch_step: int) -> None:
        """Copy the batch's rows into the handle; ``create=False`` has no side effect."""
        ...

    def refresh(self, handle: Handle, batch_step: int) -> int:
        """Replace rows written since the handle read them, create absent ones; how many."""
        ...

    def status(self) -> dict[str, Any]:
        """How many ``rows`` there are, in how many ``resident_bytes``, and ``counters``: rows
        created, evicted, expired, not admitted, and gradients that found none."""
        ...

    def export(self, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, values and state of all rows of a table, in any order."""
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
