"""Requests to embedding servers: those of a rank, which wait by themselves, and rare ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from runtime.engines.processes.channel import Channel, PeerGoneError, Place
from runtime.engines.processes.connections import Connections, ServerRevivedError
from runtime.engines.processes.launch import Address
from runtime.engines.processes.listening import Fresh, Listening
from runtime.engines.processes.messages import Message, MessageKind, pack_json, unpack_json
from runtime.engines.processes.revival import Revival
from runtime.engines.processes.segments import Segment, pack_arrays, unpack_arrays
from runtime.stop import PeerError, Stop


class Links:
    """What the ranks of one process say to all servers, and hear from them."""

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str] = lambda shard: "has died",
    ) -> None:
        self._all = Connections(address, ranks, how_it_ended)
        self._control_lock = threading.RLock()
        self._listening = Listening(self._all, self.call_on)

    @property
    def servers(self) -> int:
        """How many there are."""
        return self._all.servers

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of this process."""
        return self._all.ranks

    @property
    def pids(self) -> list[int]:
        """Of the servers."""
        return self._all.pids

    @property
    def stop(self) -> Stop:
        """Of the run that goes on."""
        return self._all.stop

    def life_of(self, shard: int) -> int:
        """Times that a server has been brought back."""
        return self._all.life_of(shard)

    def who_waits(self) -> str:
        """What the threads of this process wait for; "" if for nothing."""
        return self._all.waits.told()

    # What the store gives: once, or anew with each run.

    def use_stop(self, stop: Stop) -> None:
        """The run that from now on stops with a server's failure, and whose stop ends a wait."""
        self._all.stop = stop

    def on_closed(self, told: Callable[[int, int, int], None]) -> None:
        """Have ``told`` called with (rank, step, shard) when a server has closed a push."""
        self._listening.on_closed = told

    def on_return(self, rejoin: Callable[[Fresh], int]) -> None:
        """How a server that has come back is told what it must know; returns how much was lost."""
        self._listening.rejoin = rejoin

    def let_servers_come_back(self, revival: Revival) -> None:
        """From now on a dead server is not the end of the run."""
        self._all.revival = revival

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
        life, seats = self._all.at(shard)
        try:
            seats.of_rank[role, message.rank].send(message, arrays, segment=segment)
        except PeerGoneError:
            raise self._all.after_death(shard, life) from None
        except TimeoutError:
            raise PeerError(f"{self._all.name(shard)} takes no message, so it is stuck") from None

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
        text = f"rank {rank} waits for {what} of step {step} from embedding server {shard}"
        channel = self._all.seats_of(shard, life).of_rank[role, rank]
        with self._all.waits.waiting(text), self._all.stop.waiting_elsewhere():
            while True:
                message, segment = self._all.receive(
                    channel,
                    shard,
                    life,
                    place=lambda m: place(m) if (m.rank, m.step) == (rank, step) else None,
                )
                if message.kind is MessageKind.FAILED:
                    raise self._all.failure(message)
                if (message.rank, message.step) == (rank, step):
                    return message, segment
                # an answer from before a stop

    # Rare requests.

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else of this process asks for anything rare meanwhile."""
        with self._control_lock:
            yield

    def call(
        self, shard: int, verb: str, given: Mapping[str, np.ndarray] | None = None, **asked: Any
    ) -> dict[str, Any]:
        """Ask for something rare and wait for the answer: JSON, or arrays.

        Asks again where the server dies meanwhile and comes back. Raises what the server failed
        with, PeerError when it has gone.
        """
        with self._control_lock:
            while True:
                life, seats = self._all.at(shard)
                with suppress(ServerRevivedError):
                    return self.call_on(seats.control, shard, life, verb, given, **asked)

    def call_on(
        self,
        channel: Channel,
        shard: int,
        life: int,
        verb: str,
        given: Mapping[str, np.ndarray] | None = None,
        **asked: Any,
    ) -> dict[str, Any]:
        """The same over a connection of its own, once."""
        asked = {**asked, "verb": verb}
        if given is None:
            self._tell(channel, shard, life, Message(MessageKind.CALL, body=pack_json(asked)))
        else:
            asked["arrays"], segment = pack_arrays(given)
            try:
                call = Message(MessageKind.CALL, body=pack_json(asked))
                self._tell(channel, shard, life, call, segment=segment)
            finally:
                segment.close()
        message, found = self._hear(channel, shard, life, verb)
        about = unpack_json(message.body)
        return about if found is None else unpack_arrays(about, found)

    def tell_control(
        self,
        shard: int,
        life: int,
        message: Message,
        arrays: Sequence[Any] = (),
        segment: Segment | None = None,
    ) -> None:
        """One message on the connection for rare requests; call it inside `alone`."""
        seats = self._all.seats_of(shard, life)
        self._tell(seats.control, shard, life, message, arrays, segment)

    def hear_control(self, shard: int, life: int, what: str, place: Place) -> None:
        """The answer of that life. Both raise as `send` does."""
        self._hear(self._all.seats_of(shard, life).control, shard, life, what, place)

    def close(self) -> None:
        """Say goodbye and close every connection."""
        self._listening.close()

    def _tell(
        self,
        channel: Channel,
        shard: int,
        life: int,
        message: Message,
        arrays: Sequence[Any] = (),
        segment: Segment | None = None,
    ) -> None:
        try:
            channel.send(message, arrays, segment=segment)
        except PeerGoneError:
            raise self._all.after_death(shard, life) from None

    def _hear(
        self,
        channel: Channel,
        shard: int,
        life: int,
        what: str,
        place: Place = lambda message: None,
    ) -> tuple[Message, Segment | None]:
        text = f"{self._all.who} waits for {what} from embedding server {shard}"
        with self._all.waits.waiting(text):
            found = self._all.receive(channel, shard, life, stops=False, place=place)
        if found[0].kind is MessageKind.FAILED:
            raise self._all.failure(found[0])
        return found
