"""Where a process stands in a run whose ranks are not all in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from runtime.dense.rules import DenseRule, OnUpdate

if TYPE_CHECKING:
    from runtime.rank.feed import Feed
    from runtime.rank.parts import Parts


class Place(Protocol):
    """This process among those of the run; a run of one process needs none."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that live here."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, counts the updates of all, and writes everything down."""
        ...

    def open_rule(self, parts: Parts, on_update: OnUpdate) -> DenseRule:
        """The rule of the dense weights that the mode asks for; ``on_update`` matters where
        it leads."""
        ...

    def begin_leg(self, prepare: Callable[[], None]) -> None:
        """Return when all processes are ready and the leading one has prepared the servers."""
        ...

    def watch(self, feed: Feed, ends_now: Callable[[], bool]) -> None:
        """Until the leg is over: as soon as ``ends_now`` at any process, all end it at one cut."""
        ...

    def ended_by(self, why: str | None) -> str | None:
        """Why any process was asked to end the run; None: nobody was."""
        ...

    def end_leg(self, parts: Parts) -> None:
        """Return when all processes have ended the leg; what they have left out is counted where it
        leads."""
        ...
