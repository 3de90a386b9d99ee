"""What a store must offer so that its rows can be written to a folder and read back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from runtime.embedding.config import TableConfig

TableSnapshot = dict[str, Any]
"""Of one table at one server, the next row to be evicted first: ids, words (write counts and
marks), stamps, rows (their bytes: values, then state), removed, sightings, latest_step."""


class SavableStore(Protocol):
    """Both engines in this process, and stores whose servers are elsewhere."""

    tables: dict[str, TableConfig]
    seed: int
    shards: int
    saving: threading.Lock
    """Held from the freezing to the settling."""
    last_saved: tuple[str, str] | None
    """The folder and the part of the last save that tracks changes."""

    def __len__(self) -> int: ...

    def consistent_cut(self) -> AbstractContextManager[None]:
        """Hold every shard at an instant at which no push is half applied."""

    def freeze_snapshots(self, *, only_changed: bool, track: bool) -> None:
        """Remember all rows (or the changed ones) as they are; inside `consistent_cut`."""

    def collect_snapshots(self) -> list[dict[str, TableSnapshot]]:
        """Per shard and table what was frozen; rows may be trained meanwhile."""

    def settle_snapshots(self, *, kept: bool) -> None:
        """Whether the last snapshots are safe; if not, what they held counts as changed still."""

    def restore(
        self, table: str, shards: Sequence[Mapping[str, Any]], *, keep_present: bool = False
    ) -> None:
        """Put rows of one table back, those of each shard."""
