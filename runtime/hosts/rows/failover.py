"""How a server that has died comes back while the run goes on: empty, then it reads the rows of
its last checkpoint, and ranks tell it what is open; what was applied between is lost, and counted.
So does an embedding worker, for which servers take what its ranks have open as lost.

Only for modes that read late rows: in exact modes the run goes back to its last checkpoint instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runtime.embedding.store import SavedServer
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.coroutines import Coroutine, Future
from runtime.hosts.wire.messages import BadMessageError, Message, MessageKind
from runtime.hosts.wire.peers import BEATS_EVERY_S
from runtime.stop import Silence

MOST_FAILOVERS = 16
"""Restarts of one server in a run: if it dies again and again one more start does not help."""
MOST_PAUSE_S = 30.0
"""Before one that has died before is started again; others await it twice as long."""


@dataclass(frozen=True, slots=True)
class Failover:
    """What a process can do for a server that has died; the launcher of the servers can do all."""

    restart: Callable[[int], None] | None = None
    """Starts the process of a server again, empty; None where somebody else does."""
    saved: Callable[[int], Iterable[SavedServer]] | None = None
    """A server as checkpoints have it, the one to try first first; needed by who restarts it."""
    report: Callable[[str], None] = lambda text: None
    """Called with a sentence when a server is back."""


# At the server.

RESTORED_WITHIN_S = 3600.0
"""Time for the rows of one server: 360 GB at 100 MB/s (assumed: a network disk)."""


class Restore:
    """Whether the rows of a server that was restarted are here; clients wait for them."""

    def __init__(self, *, awaited: bool, patience_s: float) -> None:
        """``patience_s``: how long it may take until the server reads them."""
        self._within_s = patience_s
        self.is_done = not awaited

    def begin(self) -> None:
        """The server reads them."""
        self._within_s = RESTORED_WITHIN_S

    def wait(self, client: Channel) -> Coroutine[None]:
        """Return when the rows are here; the client is told again and again that they are coming.

        Raises BadMessageError when they do not come in time; PeerGoneError when the client does not
        wait any more.
        """
        silence = Silence()
        waited_s = 0.0
        while not self.is_done:
            if silence.look() < BEATS_EVERY_S:
                yield Future(lambda: self.is_done or silence.look() >= BEATS_EVERY_S)
                continue
            silence.heard()
            waited_s += BEATS_EVERY_S
            if waited_s > self._within_s:
                raise BadMessageError(
                    "this server was started again, and does not have the rows of the last"
                    f" checkpoint after {self._within_s:.0f} s: who knows where they are, or the"
                    " disk, is stuck"
                )
            client.send(Message(MessageKind.RESTORING))
