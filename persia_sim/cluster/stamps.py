"""The instants of a batch's life: what every engine reports, and what every statistic reads."""

from __future__ import annotations

from enum import IntEnum


class Mark(IntEnum):
    """An instant in the life of one batch of one rank, in program order."""

    LOADED = 0
    """The loader has delivered it."""
    LOOKUP = 1
    """The batch's lookup starts: loaded, inside the window, with a permit and a lookup task."""
    READ = 2
    """The batch's rows have been read at every server."""
    ROWS = 3
    """The batch's pooled rows are on the rank's host."""
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
    """The copy of its gradients is done."""
    PUSH = 12
    """A push task takes it."""
    APPLIED = 13
    """The batch's rows are updated at every server."""
    RETURNED = 14
    """The rank knows; its permit is free."""


class Leg(IntEnum):
    """An instant between two marks, at which one resource hands a batch to the next; those of the
    second look of lookahead come in the same order as those of the lookup."""

    ASKED = 0
    """The lookup: the worker has written its requests, and the first byte is on its way."""
    ARRIVED = 1
    """The last request is at its server."""
    ADMITTED = 2
    """The window has let in the last request, which waits for that at its server."""
    READ = 3
    """The last server has read its rows."""
    ANSWERED = 4
    """All rows are at the worker."""
    POOLED = 5
    """The rows are pooled, and the first byte is on its way to the rank."""
    ROWS = 6
    """The rows are on the rank's host."""
    ASKED_AGAIN = 7
    ARRIVED_AGAIN = 8
    ADMITTED_AGAIN = 9
    READ_AGAIN = 10
    ANSWERED_AGAIN = 11
    POOLED_AGAIN = 12
    ROWS_AGAIN = 13
    DENSE_SERVED = 14
    """The home of the dense weights has read them (async)."""
    AT_WORKER = 15
    """The push: gradients are at the worker."""
    SCATTERED = 16
    """The worker has written the pushes, and the first byte is on its way."""
    AT_SERVERS = 17
    """The last push is at its server."""
    FORWARDED = 18
    """Lookahead `forwarded`: its gradients are at the workers that hold the rows."""
    DENSE_SENT = 19
    """The dense gradient is at the home of the dense weights (async)."""
    DENSE_APPLIED = 20
    FRESH_AT_WORKER = 21
    """The push of fresh tables, where others are late: as AT_WORKER and its like."""
    FRESH_SCATTERED = 22
    FRESH_AT_SERVERS = 23
    FRESH_APPLIED = 24
