"""How a server that has died comes back while the run goes on: empty, then it reads the rows of
its last checkpoint; what was applied after that is lost, and counted.

Only for modes that read late rows: in exact modes the run goes back to its last checkpoint instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from persia_sim.words.vocabulary import ALL
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import STALENESS_BINS
from runtime.engines.transport.batches import SentBatch
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_placed,
    pack_segment,
)
from runtime.engines.transport.peers import BEATS_EVERY_S, START_WITHIN_S, until
from runtime.engines.transport.waits import Steps, Wait
from runtime.files import BrokenFileError
from runtime.stop import PeerError, Silence

MOST_REVIVALS = 16
"""Of one server in one run: one that dies again and again will not be helped by one more start."""

NOTHING_COUNTED: dict[str, Any] = {
    "version": 0, "updates": 0, "rows_replaced": 0, "lost": 0,
    "row_staleness": [0] * STALENESS_BINS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedServer:
    """One server as the last checkpoint has it; without one, as it was when the run began."""

    rules: ServerRules
    first_steps: Sequence[int]
    """Per rank, the steps whose pushes are in these rows."""
    counters: Mapping[str, Any] = field(default_factory=lambda: NOTHING_COUNTED)
    folder: str | None = None
    """Of its rows; the server reads them there."""


@dataclass(frozen=True, slots=True)
class Revival:
    """What a process can do for a server that has died; the launcher of the servers can do all."""

    restart: Callable[[int], None] | None = None
    """Starts the process of a server again, empty; None where somebody else does."""
    saved: Callable[[int], Iterable[SavedServer]] | None = None
    """A server as checkpoints have it, the one to try first first; needed by who restarts it."""
    told: Callable[[str], None] = lambda text: None
    """Called with a sentence when a server is back."""


Call = Callable[..., dict[str, Any]]


def bring_back(found: Iterable[SavedServer], call: Call) -> None:
    """Have a server that was started again read its rows and take its counters; then ranks are let
    in. Where files of a checkpoint are damaged, the next one is tried."""
    for saved in found:
        with suppress(BrokenFileError):
            call("come_back", **asdict(saved))
            return


class Fresh(NamedTuple):
    """A server that has come back, before anybody else uses it."""

    shard: int
    life: int
    channels: dict[tuple[str, int], Channel]
    """By role and rank."""
    call: Call


def rejoin(
    fresh: Fresh,
    batches: Mapping[tuple[int, int], SentBatch],
    begun: Mapping[int, int],
    finished: Mapping[int, int],
) -> int:
    """Tell a server that has come back what of each rank is closed, and what is open: batches that
    were read are opened again, pushes on their way are sent again.

    ``batches`` by rank and step; ``begun`` and ``finished`` by rank, in steps. Returns how many
    pushes are lost.
    """
    shard, lost = fresh.shard, 0
    for rank, steps in begun.items():
        still_open = [step for r, step in batches if r == rank]
        lost += int(fresh.call("rejoin", rank=rank, begun=steps, open=still_open)["lost"])
    for (rank, step), sent in batches.items():
        if shard not in sent.read_at:
            continue  # whoever waits for its rows asks again
        channel = fresh.channels["lookups", rank]
        body = pack_segment(sent.number, sent.segment.size)
        channel.send(Message(MessageKind.SEGMENT, rank, ALL, body), segment=sent.segment)
        reopen = Message(MessageKind.REOPEN, rank, step, pack_placed(sent.placed(shard)))
        channel.send(reopen, sent.arrays("ids", shard))
        answer, _ = channel.receive(until(START_WITHIN_S, f"embedding server {shard}"))
        if answer.kind is not MessageKind.ROWS:
            raise PeerError(f"embedding server {shard} does not open a batch again: {answer}")
        if sent.push is not None:
            given = () if sent.push.number else sent.arrays("gradients", shard)
            fresh.channels["pushes", rank].send(sent.push, given)
    for rank, steps in finished.items():
        fresh.channels["pushes", rank].send(Message(MessageKind.FINISH, rank, steps))
    return lost


# At the server.

FILLED_WITHIN_S = 3600.0
"""For the rows of one server: 360 GB at 100 MB/s (assumed: a network disk)."""


class Filling:
    """Whether the rows are here, and who waits for them."""

    def __init__(self, *, awaited: bool, patience_s: float) -> None:
        """``patience_s``: how long it may take until the server reads them."""
        self._within_s = patience_s
        self._ready = threading.Event()
        if not awaited:
            self._ready.set()

    def begin(self) -> None:
        """The server reads them."""
        self._within_s = FILLED_WITHIN_S

    def done(self) -> None:
        """All rows are here."""
        self._ready.set()

    def wait(self, client: Channel) -> Steps[None]:
        """Return when the rows are here; the client is told again and again that they are coming.

        Raises BadMessageError when they do not come in time; PeerGoneError when the client does not
        wait any more.
        """
        silence, waited_s = Silence(), 0.0
        while not self._ready.is_set():
            if silence.look() < BEATS_EVERY_S:
                yield Wait(lambda: self._ready.is_set() or silence.look() >= BEATS_EVERY_S)
                continue
            silence.heard()
            waited_s += BEATS_EVERY_S
            if waited_s > self._within_s:
                raise BadMessageError(
                    "this server was started again, and does not have the rows of the last"
                    f" checkpoint after {self._within_s:.0f} s: who knows where they are, or the"
                    " disk, is stuck"
                )
            client.send(Message(MessageKind.FILLING))
