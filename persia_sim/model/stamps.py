"""The instants of a batch's life: what every engine reports, and what every statistic reads."""

from __future__ import annotations

from enum import IntEnum

from persia_sim.words.vocabulary import Stage


class Mark(IntEnum):
    """An instant in the life of one batch of one rank, in program order."""

    LOADED = 0
    """The loader has delivered it."""
    LOOKUP = 1
    """Its lookup starts: loaded, inside the window, with a permit and a lookup task."""
    READ = 2
    """Its rows have been read at every server."""
    ROWS = 3
    """Its pooled rows are on the rank's host."""
    COPY_IN = 4
    """The copy to the GPU starts."""
    ON_GPU = 5
    """The copy to the GPU is done."""
    REFRESHED = 6
    """Lookahead: rows with pending pushes were replaced (else: taken by the training loop)."""
    START = 7
    """Forward starts (in async after the dense weights were pulled)."""
    BACKWARD_END = 8
    """Backward is done."""
    UPDATED = 9
    """The dense weights are updated (barrier modes), or the gradient is on its way (async)."""
    COPY_OUT = 10
    """The copy of the row gradients to the host starts."""
    COPIED_OUT = 11
    """That copy is done."""
    PUSH = 12
    """A push task takes it."""
    APPLIED = 13
    """Its rows are updated at every server."""
    RETURNED = 14
    """The rank knows; its permit is free."""


STAGE_OF: dict[Mark, Stage] = {
    Mark.LOADED: Stage.LOAD,
    Mark.READ: Stage.LOOKUP,
    Mark.ROWS: Stage.LOOKUP,
    Mark.ON_GPU: Stage.LOOKUP,
    Mark.REFRESHED: Stage.LOOKUP,
    Mark.START: Stage.DENSE_PULL,
    Mark.BACKWARD_END: Stage.BACKWARD,
    Mark.UPDATED: Stage.DENSE_SYNC,
    Mark.COPIED_OUT: Stage.PUSH,
    Mark.APPLIED: Stage.PUSH,
    Mark.RETURNED: Stage.PUSH,
}
"""The stage that ends at a mark."""
