"""Requests to embedding servers: those of a rank, which wait by themselves, and rare ones; and the
threads that listen meanwhile: to signs of life, and to closed pushes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from persia_sim.words.vocabulary import ALL
from runtime.engines.clients.connections import Connections, ServerGoneError, ServerRevivedError
from runtime.engines.servers.launch import Address
from runtime.engines.transport.calls import Said, said_in, send_said
from runtime.engines.transport.channel import Channel, PeerGoneError, Place
from runtime.engines.transport.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_segment,
    unpack_json,
)
from runtime.engines.transport.peers import BEATS_EVERY_S, START_WITHIN_S, STUCK_S, clock, until
from runtime.engines.transport.revival import FILLED_WITHIN_S, MOST_REVIVALS, Fresh, bring_back
from runtime.engines.transport.segments import Segment
from runtime.stop import PeerError

CLOSED_WITHIN_S = 5.0
"""For a thread to notice; one that starts a server again may take longer."""


class Links(Connections):
    """What the ranks of one process say to all servers, and hear from them."""

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str] = lambda shard: "has died",
    ) -> None:
        super().__init__(address, ranks, how_it_ended)
        self.alone = threading.RLock()
        """Who holds it asks alone for what is rare, among the threads of this process."""
        self.known: dict[tuple[int, int, int, int], Segment] = {}
        """What a server has mapped, by shard, life, rank and number."""
        self._known_lock = threading.Lock()
        self._listening = Listening(self)

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
        arrays: Iterable[Any] = (),
        segment: Segment | None = None,
    ) -> None:
        """Send for the message's rank, as `Channel.send`.

        Raises ServerRevivedError when the server has died and is back, PeerError when it is not.
        """
        life, channels = self.at(shard)
        try:
            # It may take nothing for as long as an evaluation holds it: signs of life decide.
            channels[role, message.rank].send(
                message, arrays, segment=segment, within_s=inf, goes_on=self.stop.check
            )
        except PeerGoneError:
            raise self.after_death(shard, life) from None

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
        channel = self.channels_of(shard, life)[role, rank]
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

    def send_again(
        self, role: str, shard: int, message: Message, arrays: Iterable[Any] = ()
    ) -> None:
        """What may reach a server twice: it tells repeated pushes apart."""
        while True:
            with suppress(ServerRevivedError):
                return self.send(role, shard, message, arrays)

    def attach(self, role: str, shard: int, rank: int, number: int, segment: Segment) -> None:
        """Have the server map a segment, if it has not. Raises as `send`."""
        life = self.life_of(shard)
        with self._known_lock:
            if self.known.get((shard, life, rank, number)) is segment:
                return
        there = Message(MessageKind.SEGMENT, rank, ALL, pack_segment(number, segment.size))
        self.send(role, shard, there, segment=segment)
        self.note(shard, life, rank, number, segment)

    def note(self, shard: int, life: int, rank: int, number: int, segment: Segment) -> None:
        """The server has the segment in this life, and what it had in earlier ones is gone."""
        with self._known_lock:
            self.known = {k: s for k, s in self.known.items() if k[0] != shard or k[1] >= life}
            self.known[shard, life, rank, number] = segment

    # Rare requests.

    def call(self, shard: int, verb: str, **asked: Any) -> Said:
        """Ask for something rare and wait for the answer.

        Asks again where the server dies meanwhile and comes back. Raises what the server failed
        with, PeerError when it has gone.
        """
        with self.alone:
            while True:
                life, channels = self.at(shard)
                with suppress(ServerRevivedError):
                    return self.call_on(channels["control", ALL], shard, life, verb, **asked)

    def call_on(
        self, channel: Channel, shard: int, life: int, verb: str, *,
        within_s: float = inf, **asked: Any,
    ) -> Said:  # fmt: skip
        """The same over a connection of its own, once; ``within_s``, or while the run goes on."""
        try:
            send_said(channel.send, Message(MessageKind.CALL), {**asked, "verb": verb})
        except PeerGoneError:
            raise self.after_death(shard, life) from None
        with self.waits.waiting(f"{self.who} waits for {verb} from embedding server {shard}"):
            message, segment = self.receive(
                channel, shard, life, stops=within_s < inf, within_s=within_s
            )
        if message.kind is MessageKind.FAILED:
            raise self.failure(message)
        return said_in(message, segment)

    def call_apart(self, shard: int, verb: str, **asked: Any) -> Said:
        """The same for what takes long, over one more connection: other requests go on."""
        life, channel = self.life_of(shard), self.connect(shard, "control")
        try:
            return self.call_on(channel, shard, life, verb, **asked)
        finally:
            self.end(channel)

    def close(self) -> None:
        """Say goodbye and close every connection; the threads that listen have ended then."""
        super().close()
        self._listening.join()
        self.known.clear()


class Listening:
    """A thread for each server's signs of life, and one that hears of all closed pushes and brings
    back servers that have died."""

    def __init__(self, links: Links) -> None:
        """The threads start at once."""
        self._all = links
        # A selector never hears of a socket that was closed while it waited.
        self._end, self._ended = socket.socketpair()
        self.on_closed: Callable[[int, int, int], None] = lambda rank, step, shard: None
        self.rejoin: Callable[[Fresh], int] = lambda fresh: 0
        selector = selectors.DefaultSelector()  # filled here: who closes at once finds it whole
        selector.register(self._ended, selectors.EVENT_READ)
        for shard in range(links.servers):
            self._listen_to(shard, selector)
        closings = threading.Thread(
            target=self._hear_closings, args=(selector,), daemon=True, name="closings"
        )
        links.reviver = closings
        heartbeats = [
            threading.Thread(target=self._beat, args=(shard,), daemon=True, name="heartbeat")
            for shard in range(links.servers)
        ]
        self._threads = [*heartbeats, closings]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads have ended; the connections are closed."""
        self._end.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSED_WITHIN_S)

    def _beat(self, shard: int) -> None:
        """Signs of life to one server, and from it."""
        connections = self._all
        while not connections.closing.is_set():
            life, channels = connections.at(shard)
            channel = channels["heartbeat", ALL]
            idle = int(connections.stop.only_waits())
            try:
                channel.send(Message(MessageKind.PING, number=idle))
                message, _ = channel.receive(until(STUCK_S, f"embedding server {shard}"))
                failed = unpack_json(message.body).get("failed")
                if failed:
                    raise PeerError(f"{failed}{connections.waits.told()}")
            except (PeerGoneError, TimeoutError) as error:
                if connections.closing.is_set():
                    return
                if isinstance(error, TimeoutError) and not channel.is_broken():
                    silent = f"has given no sign of life for {STUCK_S:.0f} s"
                    stuck = f"{silent}, since {clock(STUCK_S)}: it is stopped or stuck"
                    why = f"{connections.name(shard)} {stuck}{connections.waits.told()}"
                    return connections.give_up(shard, why)
                found = connections.after_death(shard, life)
                if isinstance(found, ServerGoneError):
                    return connections.stop.set(found)
            except (BadMessageError, PeerError) as error:
                connections.stop.set(error)
            connections.closing.wait(BEATS_EVERY_S)

    def _hear_closings(self, selector: selectors.BaseSelector) -> None:
        with self._ended, selector:
            while True:
                for key, _ in selector.select():
                    if self._all.closing.is_set():
                        return
                    shard, rank, channel = key.data
                    if self._all.at(shard)[1]["pushes", rank] is not channel:
                        continue  # of a life before
                    made = channel.connections
                    try:
                        try:
                            self._hear_closing(shard, channel)
                            while channel.has_more():
                                self._hear_closing(shard, channel)
                            # Made again, and twice perhaps: then its number may be the old one.
                            if channel.connections != made:
                                selector.unregister(key.fd)
                                selector.register(channel, selectors.EVENT_READ, key.data)
                        except ServerGoneError:
                            self._hear_the_rest(shard, selector)
                            with self._all.stop.working():
                                self._revive(shard)
                            self._listen_to(shard, selector)
                    except BaseException as error:
                        if self._all.closing.is_set():
                            return
                        self._all.stop.set(error)

    def _listen_to(self, shard: int, selector: selectors.BaseSelector) -> None:
        for rank in self._all.ranks:
            channel = self._all.at(shard)[1]["pushes", rank]
            selector.register(channel, selectors.EVENT_READ, (shard, rank, channel))

    def _hear_the_rest(self, shard: int, selector: selectors.BaseSelector) -> None:
        """What a dead server has said counts: rows may be read and written that it let go."""
        for rank in self._all.ranks:
            channel = self._all.at(shard)[1]["pushes", rank]
            selector.unregister(channel)
            channel.hang_up()
            with suppress(PeerError, BadMessageError):
                while True:
                    self._hear_closing(shard, channel)

    def _hear_closing(self, shard: int, channel: Channel) -> None:
        life = self._all.life_of(shard)
        if channel.is_broken():  # and perhaps nothing is said when it is made again
            try:
                return channel.make_again(lambda: None)
            except PeerGoneError:
                raise self._all.after_death(shard, life) from None
        message, _ = self._all.receive(channel, shard, life, stops=False)
        if message.kind is MessageKind.FAILED:
            raise self._all.failure(message)
        self.on_closed(message.rank, message.step, shard)

    def _revive(self, shard: int) -> None:
        """Raises what makes it impossible."""
        connections, revival = self._all, self._all.revival
        gone = connections.gone(shard)
        if revival is None or connections.closing.is_set() or connections.stop:
            raise gone
        if connections.life_of(shard) >= MOST_REVIVALS:
            raise PeerError(f"{gone}, for the {MOST_REVIVALS + 1}th time in this run")
        connections.let_go(shard)
        if revival.restart is not None:
            revival.restart(shard)
        control = connections.connect(shard, "control", awaited_s=START_WITHIN_S)
        life = connections.next_life_of(shard)
        call = partial(connections.call_on, control, shard, connections.life_of(shard))
        if revival.saved is not None:
            bring_back(revival.saved(shard), partial(call, within_s=FILLED_WITHIN_S))
        call = partial(call, within_s=START_WITHIN_S)
        channels = connections.channels_at(shard, control)
        fresh = Fresh(shard, life, channels, call)
        lost = self.rejoin(fresh)
        connections.lives_again(fresh)
        who = connections.who
        revival.told(f"{gone}; it is back, and {lost} pushes of {who} are lost with it")
