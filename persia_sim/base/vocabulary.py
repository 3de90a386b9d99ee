"""The words that runtime, replay and simulator share (paper, section 3): modes, stages, and
the rows of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

DEFAULT_TAU = 4
"""Steps of the window where a command is not told them and the mode has a window."""
DEFAULT_AHEAD = 4
"""Steps that lookahead fetches ahead."""
DEFAULT_LOOKUPS_IN_FLIGHT = 10
"""Lookups of a rank that are on their way at once (source: the original)."""
DEFAULT_AVERAGE_EVERY_S = 0.5
"""Seconds between two averagings of async_averaging (source: the original)."""


class Stage(StrEnum):
    """What a rank does with one batch, in this order; async adds the last three."""

    LOAD = "load"
    LOOKUP = "lookup"
    COPY_IN = "copy_in"
    REFRESH = "refresh"
    FORWARD = "forward"
    BACKWARD = "backward"
    DENSE_SYNC = "dense_sync"
    COPY_OUT = "copy_out"
    PUSH = "push"
    DENSE_PULL = "dense_pull"
    DENSE_PUSH = "dense_push"
    AVERAGE = "average"


_UNBOUNDED = {"none", "unbounded"}


def with_unbounded(words: Sequence[str]) -> list[str]:
    """Words of a command line in which no bound tau is written as the parsers know it.

    >>> with_unbounded(["--tau", "none", "--steps", "9"]), with_unbounded(["--tau=unbounded"])
    (['--tau', 'None', '--steps', '9'], ['--tau=None'])
    """
    rewritten = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "--tau" and value.lower() in _UNBOUNDED:
            word = "--tau=None"
        elif before == "--tau" and word.lower() in _UNBOUNDED:
            word = "None"
        rewritten.append(word)
        before = word
    return rewritten


class Mode(StrEnum):
    """How the embedding layer and the dense network are kept up to date (paper, figure 3)."""

    SYNC = "sync"
    """Every stage after the one before: a step reads all pushes of the steps before it."""
    LOOKAHEAD = "lookahead"
    """Rows are fetched ahead and brought up to date before they are used: the bytes of sync."""
    RAW_HYBRID = "raw_hybrid"
    """Rows may be tau steps late; dense weights are all-reduced after the backward pass."""
    HYBRID = "hybrid"
    """Rows as in raw_hybrid, with the all-reduce inside the backward pass."""
    ASYNC = "async"
    """Rows and dense weights may be late: each rank pulls, pushes, and waits for nobody."""
    ASYNC_AVERAGING = "async_averaging"
    """Rows as in async, with a replica of the dense weights a rank, averaged every period."""

    @property
    def has_barrier(self) -> bool:
        """All ranks share one dense update a step, so the dense weights are never late."""
        return self not in (Mode.ASYNC, Mode.ASYNC_AVERAGING)

    @property
    def reads_late_rows(self) -> bool:
        """A lookup may miss pushes of earlier steps (up to the bound tau)."""
        return self not in (Mode.SYNC, Mode.LOOKAHEAD)

    @property
    def overlaps_dense_sync(self) -> bool:
        """The all-reduce of one bucket runs while the backward pass works on the next."""
        return self in (Mode.HYBRID, Mode.LOOKAHEAD)

    @property
    def may_merge(self) -> bool:
        """Merging the pushes of a step is a choice: sync and lookahead always do, async never."""
        return self.has_barrier and self.reads_late_rows

    def merges(self, chosen: bool | None) -> bool:
        """Whether a row takes one optimiser update per step from all ranks' gradients.

        >>> Mode.SYNC.merges(None), Mode.HYBRID.merges(None), Mode.HYBRID.merges(False)
        (True, True, False)
        """
        return self.has_barrier if not self.may_merge else chosen is not False


ALL = -1
"""Stands in ``rank`` for every rank at this instant (a merged push), in ``shard`` for every
shard."""


class Kind(IntEnum):
    """What took effect."""

    LOOKUP = 0
    """Rows of one batch were read at a shard. In lookahead: the prefetch, without side effect."""
    REFRESH = 1
    """Lookahead: prefetched rows with pending pushes were replaced, new rows were created."""
    PUSH = 2
    """Row gradients were applied at a shard; ``rank`` is ALL when those of a step were merged."""
    LOST_PUSH = 3
    """Row gradients that will never be applied (a fault, or non-finite values); closes the step."""
    DENSE_UPDATE = 4
    """Barrier modes: the dense weights took the step's mean gradient."""
    DENSE_PULL = 5
    """Async: a rank copied the dense weights from their server."""
    DENSE_PUSH = 6
    """Async: a rank's dense gradient was applied (at the server, or to the rank's own replica)."""
    AVERAGE_READ = 7
    """async_averaging: a rank's replica entered round ``version``."""
    AVERAGE_WRITE = 8
    """async_averaging: a rank's replica moved by (mean - what it had put in)."""


class Event(NamedTuple):
    """One row of the table."""

    kind: int
    rank: int
    step: int
    shard: int = ALL
    version: int = ALL
    """Pushes applied at the shard (or dense updates) just before; ALL if not known."""
