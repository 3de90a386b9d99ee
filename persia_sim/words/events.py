"""The rows of a trace: which instants it knows, and who was there."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

ALL = -1
"""In ``rank``: every rank at this instant (a merged push). In ``shard``: every shard."""


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
