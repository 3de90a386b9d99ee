"""The doors between what trains and what only several processes and hosts need.

Whoever trains knows the rows of a run as an `EmbeddingStore` and its data as a `Source`. Where
other processes take part, this one is a `RankProcess` among them, and a `Launcher` has started it.
What stands behind the doors may be left out: then a run trains in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runtime.data.source import Source
from runtime.embedding.store import EmbeddingStore

if TYPE_CHECKING:
    from persia_sim.base.trace import TraceRecorder
    from runtime.config import TrainConfig
    from runtime.data.batch import Layout
    from runtime.dense.rules import DenseRule, OnUpdate
    from runtime.embedding.config import TableConfig
    from runtime.embedding.worker import EmbeddingWorker
    from runtime.rank.components import Components
    from runtime.rank.feed import Feed
    from runtime.stop import Stop

__all__ = ["EmbeddingStore", "JoinedRank", "Launcher", "RankProcess", "Source"]


class RankProcess(Protocol):
    """This process among those of the run."""

    alone: bool
    """Whether the rows end with this process; else ranks that are processes part by themselves."""
    leads: bool
    """Whether this process evaluates, counts the updates of all, and writes everything down."""
    ranks: Sequence[int]
    """Ranks that live here."""

    def open_rule(self, components: Components, on_update: OnUpdate) -> DenseRule:
        """The rule of the dense weights that the mode asks for; ``on_update`` matters where
        it leads."""
        ...

    def begin_leg(self, prepare: Callable[[], None]) -> None:
        """Return when all processes are ready and the leading one has prepared the servers."""
        ...

    def open_leg(self, feed: Feed, end: int | None, ends_now: Callable[[], bool]) -> None:
        """Batches of a leg up to ``end``, or less: as soon as ``ends_now`` at any process, all end
        it at one cut."""
        ...

    def ended_by(self, why: str | None) -> str | None:
        """Why any process was asked to end the run; None: nobody was."""
        ...

    def end_leg(self, components: Components) -> None:
        """Return when all processes have ended the leg; what they have left out is counted where it
        leads."""
        ...


class JoinedRank(RankProcess, Protocol):
    """A process that is one rank of a run and has found the others."""

    device: str
    """Of its dense network."""
    attempt: int
    """Which start of all ranks this is, from 1."""

    def open_rows(
        self,
        config: TrainConfig,
        layout: Layout,
        tables: list[TableConfig],
        recorder: TraceRecorder,
        stop: Stop,
    ) -> EmbeddingWorker:
        """Connect to the servers of the rows, which the leading rank starts."""
        ...

    def shared(self, what: str, address: Any, config: TrainConfig) -> Any:
        """The address of what the leading rank has started for all."""
        ...

    def has_not_started(self, what: str) -> None:
        """Tell the others, at the leading rank, that it could not start what all use."""
        ...

    def told(self, what: str, word: str) -> str:
        """The leading rank's word; each rank gives its own, and waits for all."""
        ...


class Launcher(Protocol):
    """Who has started this process as one of several, and as which of them."""

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        ...

    @property
    def started_s(self) -> float:
        """When it was started itself, in seconds since 1970, the same for all ranks."""
        ...

    @property
    def is_of_torchrun(self) -> bool:
        """Whether this process may become another one, unnoticed."""
        ...

    def applied_to(self, config: TrainConfig, source: str, *, anew: bool = False) -> TrainConfig:
        """The config with what the launcher decides; ``source`` says where its ranks stand."""
        ...

    def refuse_other(self, config: TrainConfig, folder: Path | None) -> None:
        """Raise ValueError for what ranks that are processes cannot do."""
        ...
