"""Requests to embedding servers: those of a rank, which wait by themselves, and rare ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from persia_sim.words.events import ALL
from runtime.engines.processes.calls import Said, said_in, send_said
from runtime.engines.processes.channel import Channel, PeerGoneError, Place
from runtime.engines.processes.connections import Connections, ServerRevivedError
from runtime.engines.processes.launch import Address
from runtime.engines.processes.listening import Fresh, Listening
from runtime.engines.processes.messages import Message, MessageKind
from runtime.engines.processes.segments import Segment
from runtime.stop import PeerError


class Links(Connections):
    """What the ranks of one process say to all servers, and hear from them."""

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str] = lambda shard: "has died",
    ) -> None:
        super().__init__(address, ranks, how_it_ended)
        self._control_lock = threading.RLock()
        self._listening = Listening(self, self.call_on)

    # What the store gives.

    def on_closed(self, told: Callable[[int, int, int], None]) -> None:
        """Have ``told`` called with (rank, step, shard) when a server has closed a push."""
        self._listening.on_closed = told

    def on_return(self, rejoin: Callable[[Fresh], int]) -> None:
        """How a server that has come back is told what it must know; returns how much was lost."""
        self._listening.rejoin = rejoin

    # Requests of a rank.

    def send(
        self,
        role: str,
        shard: int,
        message: Message,
        arrays: Sequence[Any] = (),
        segment: Segment | None = None,
    ) -> None:
        """Send for the message's rank, as `Channel.send`.

        Raises ServerRevivedError when the server has died and is back, PeerError when it is not.
        """
        life, seats = self.at(shard)
        try:
            seats.of_rank[role, message.rank].send(message, arrays, segment=segment)
        except PeerGoneError:
            raise self.after_death(shard, life) from None
        except TimeoutError:
            raise PeerError(f"{self.name(shard)} takes no message, so it is stuck") from None

    def answer(
        self,
        role: str,
        shard: int,
        life: int,
        rank: int,
        step: int,
        what: str,
        place: Place = lambda message: None,
    ) -> tuple[Message, Segment | None]:
        """What the server, which was asked in this ``life``, answers about (rank, step).

        Raises what the server failed with, ServerRevivedError when it has died and is back,
        PeerError when it is not, RunStopped.
        """
        who = f"rank {rank} waits for {what} of step {step}"
        text = f"{self.who} waits for {what}" if rank == ALL else who
        text += f" from embedding server {shard}"
        channel = self.seats_of(shard, life).of_rank[role, rank]
        with self.waits.waiting(text), self.stop.waiting_elsewhere():
            while True:
                message, segment = self.receive(
                    channel,
                    shard,
                    life,
                    stops=role != "control",
                    place=lambda m: place(m) if (m.rank, m.step) == (rank, step) else None,
                )
                if message.kind is MessageKind.FAILED:
                    raise self.failure(message)
                if (message.rank, message.step) == (rank, step):
                    return message, segment
                # an answer from before a stop

    # Rare requests.

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else of this process asks for anything rare meanwhile."""
        with self._control_lock:
            yield

    def call(self, shard: int, verb: str, **asked: Any) -> Said:
        """Ask for something rare and wait for the answer.

        Asks again where the server dies meanwhile and comes back. Raises what the server failed
        with, PeerError when it has gone.
        """
        with self._control_lock:
            while True:
                life, seats = self.at(shard)
                with suppress(ServerRevivedError):
                    return self.call_on(seats.control, shard, life, verb, **asked)

    def call_on(self, channel: Channel, shard: int, life: int, verb: str, **asked: Any) -> Said:
        """The same over a connection of its own, once."""
        try:
            send_said(channel.send, Message(MessageKind.CALL), {**asked, "verb": verb})
        except PeerGoneError:
            raise self.after_death(shard, life) from None
        with self.waits.waiting(f"{self.who} waits for {verb} from embedding server {shard}"):
            message, segment = self.receive(channel, shard, life, stops=False)
        if message.kind is MessageKind.FAILED:
            raise self.failure(message)
        return said_in(message, segment)

    def close(self) -> None:
        """Say goodbye and close every connection; the threads that listen have ended then."""
        super().close()
        self._listening.join()
