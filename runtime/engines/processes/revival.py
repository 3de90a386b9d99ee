"""How a server that has died comes back while the run goes on: empty, then with the rows of its
last checkpoint; what was applied after that is lost, and counted.

Only for modes that read late rows: in exact modes the run goes back to its last checkpoint instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from persia_sim.words.events import ALL
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.shard import STALENESS_BINS
from runtime.engines.processes.batches import SentBatch
from runtime.engines.processes.channel import Channel
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_placed,
    pack_segment,
)
from runtime.engines.processes.peers import BEATS_EVERY_S
from runtime.stop import PeerError

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
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Per table, part by part, what `restore` of the kernels takes."""


@dataclass(frozen=True, slots=True)
class Revival:
    """What a process can do for a server that has died; the launcher of the servers can do all."""

    restart: Callable[[int], None] | None = None
    """Starts the process of a server again, empty; None where somebody else does."""
    saved: Callable[[int], SavedServer] | None = None
    """Its rows and counters; needed by who restarts it."""
    told: Callable[[str], None] = lambda text: None
    """Called with a sentence when a server is back."""


Call = Callable[..., dict[str, Any]]


def arrays_of(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of a table as `restore` of a server takes them."""
    step = {"latest_step": int(rows["latest_step"])}
    return {name: np.asarray(array) for name, array in rows.items() if name not in step} | step


def fill(saved: SavedServer, call: Call) -> None:
    """Give a server that was started again its rows and its counters; then ranks are let in."""
    for table, parts in saved.tables.items():
        for rows in parts:
            call("restore", **arrays_of(rows), table=table, keep_present=False)
    call(
        "reloaded",
        rules=asdict(saved.rules),
        counters=dict(saved.counters),
        first_steps=[int(step) for step in saved.first_steps],
    )


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
        answer, _ = channel.receive()
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
