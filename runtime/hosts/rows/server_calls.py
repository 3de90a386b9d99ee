"""The rare calls to an embedding server: figures, tables, traces, evaluation, checkpoints.

What every batch asks (lookups, pushes) has messages of its own: `wire/messages.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.hosts.wire.calls import Payload


class ServerCalls(ABC):
    """The calls that travel over a control connection, one after the other."""

    # A run, and its legs.

    @abstractmethod
    def begin_run(self, rules: Mapping[str, Any]) -> None:
        """A run starts at step 0 on the rows as they are."""

    @abstractmethod
    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps; nothing is in flight."""

    @abstractmethod
    def resume_run(self, rules: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Count on under these rules."""

    @abstractmethod
    def rejoin(self, rank: int, begun: int, open: Sequence[int]) -> Payload:
        """A rank tells a server that was restarted, or an embedding worker that was, which of its
        ``begun`` steps are open; how many pushes are ``lost``."""

    # What it has counted and holds.

    @abstractmethod
    def status(self) -> Payload:
        """Figures of this server, also of what has travelled."""

    @abstractmethod
    def counters(self) -> Payload:
        """What `resume_run` takes."""

    @abstractmethod
    def export(self, table: str) -> dict[str, np.ndarray]:
        """The ids, values and state of a table."""

    @abstractmethod
    def trace(self, after: int, most: int) -> Payload:
        """The ``events`` of its rows behind the first ones, so many at most."""

    @abstractmethod
    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first steps is applied or lost."""

    @abstractmethod
    def closed(self) -> Payload:
        """Per rank, the steps whose pushes are ``closed``."""

    # Held for an evaluation or a checkpoint.

    @abstractmethod
    def freeze(self) -> None:
        """Hold the server for this client."""

    @abstractmethod
    def thaw(self) -> None:
        """Let it go on."""

    @abstractmethod
    def freeze_rows(self) -> None:
        """Remember all rows as they are."""

    @abstractmethod
    def drop_rows(self) -> None:
        """Forget what was remembered, and not collected."""

    # Files.

    @abstractmethod
    def see_folder(self, mark: str) -> Payload:
        """Whether a file that rank 0 has made is seen here."""

    @abstractmethod
    def write_rows(self, folder: str, save: str) -> Payload:
        """Write the remembered rows into the run's folder, and nowhere else."""

    @abstractmethod
    def load_rows(self, folder: str, values_only: bool = False) -> Payload:
        """Read rows of a checkpoint."""

    @abstractmethod
    def load_vectors(self, table: str, file: str, digest: str) -> Payload:
        """Begin with rows of a file."""

    @abstractmethod
    def restore(
        self,
        rules: Mapping[str, Any],
        first_steps: Sequence[int],
        counters: dict[str, Any],
        folder: str | None,
    ) -> None:
        """This server was started again: take what a checkpoint has of it, and admit ranks."""
