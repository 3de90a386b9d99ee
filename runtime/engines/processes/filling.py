"""Whether a server has its rows: one that was started again gets them before anybody reads."""

from __future__ import annotations

import threading

from runtime.engines.processes.channel import Channel
from runtime.engines.processes.messages import BadMessageError, Message, MessageKind
from runtime.engines.processes.peers import BEATS_EVERY_S

FILLED_WITHIN_S = 3600.0
"""For the rows of one server: 360 GB at 100 MB/s (assumed: a network disk). Who fills it is at
work as long as its connection is open; this ends a run whose filler is stopped or stuck."""


class Filling:
    """Who brings the rows, and who waits for them."""

    def __init__(self, *, awaited: bool, patience_s: float) -> None:
        """``patience_s``: how long it may take until somebody begins."""
        self._patience_s = patience_s
        self._ready = threading.Event()
        self._filler: Channel | None = None
        if not awaited:
            self._ready.set()

    def begin(self, filler: Channel) -> None:
        """The client of this connection brings the rows."""
        self._filler = filler

    def done(self) -> None:
        """All rows are here."""
        self._ready.set()

    def end(self, client: Channel) -> None:
        """This connection has ended; if it was the filler's, nobody fills."""
        if self._filler is client:
            self._filler = None

    def wait(self, client: Channel) -> None:
        """Return when the rows are here; the client is told again and again that they are coming.

        Raises BadMessageError when nobody fills the server, or not in time; PeerGoneError when the
        client does not wait any more.
        """
        idle_s = filling_s = 0.0
        while not self._ready.wait(BEATS_EVERY_S):
            if self._filler is None:
                idle_s += BEATS_EVERY_S
            else:
                idle_s, filling_s = 0.0, filling_s + BEATS_EVERY_S
            if idle_s > self._patience_s:
                raise BadMessageError(
                    f"this server was started again, and for {self._patience_s:.0f} s nobody has"
                    " filled it with the rows of the last checkpoint"
                )
            if filling_s > FILLED_WITHIN_S:
                raise BadMessageError(
                    f"this server was not filled with its rows within {FILLED_WITHIN_S:.0f} s;"
                    " what fills it is stopped or stuck"
                )
            client.send(Message(MessageKind.FILLING))
