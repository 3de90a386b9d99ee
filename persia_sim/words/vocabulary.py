"""The words that runtime, replay and simulator share (paper, section 3 and figure 3)."""

from enum import StrEnum


class Stage(StrEnum):
    """What a rank does with one batch, in this order; async adds the last three."""

    LOAD = "load"
    LOOKUP = "lookup"
    FORWARD = "forward"
    BACKWARD = "backward"
    DENSE_SYNC = "dense_sync"
    PUSH = "push"
    DENSE_PULL = "dense_pull"
    DENSE_PUSH = "dense_push"
    AVERAGE = "average"


class Mode(StrEnum):
    """How the embedding layer and the dense network are kept up to date."""

    SYNC = "sync"
    LOOKAHEAD = "lookahead"
    RAW_HYBRID = "raw_hybrid"
    HYBRID = "hybrid"
    ASYNC = "async"
    ASYNC_AVERAGING = "async_averaging"

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
