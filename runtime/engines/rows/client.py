"""Requests to embedding servers, of a rank and rare ones; and the threads that listen meanwhile: to
signs of life, and to closed pushes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from math import inf
from typing import Any

from persia_sim.base.vocabulary import ALL
from runtime.engines.launch.processes import Address
from runtime.engines.rows.connections import (
    Connections,
    Life,
    ServerGoneError,
    ServerRevivedError,
    named_ranks,
)
from runtime.engines.rows.failover import (
    FILLED_WITHIN_S,
    MOST_PAUSE_S,
    MOST_REVIVALS,
    Revival,
)
from runtime.engines.wire.calls import Said, said_in, send_said
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    Place,
    pack_segment,
    unpack_json,
)
from runtime.engines.wire.peers import BEATS_EVERY_S, START_WITHIN_S, STUCK_S, clock, until
from runtime.engines.wire.segments import Segment
from runtime.files import BrokenFileError
from runtime.stop import PeerError
from runtime.torchrun import pause_before

CLOSED_WITHIN_S = 5.0
"""For a thread to notice; one that starts a server again may take longer."""


class Links(Connections):
    """What the ranks of one process say to all servers, and hear from them: a thread listens to
    each server's signs of life, and one hears of all closed pushes and brings back servers that
    have died."""

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str] = lambda shard: "has died",
        who: str = "",
        **about: Any,
    ) -> None:
        super().__init__(address, ranks, how_it_ended, who or named_ranks(ranks), **about)
        self.alone = threading.RLock()
        """Who holds it asks alone for what is rare, among the threads of this process."""
        self.on_closed: Callable[[int, int, int], None] = lambda rank, step, shard: None
        """Called with (rank, step, shard) when a server has closed a push."""
        self.rejoin: Callable[[Life], int] = lambda life: 0
        """Tells a server that has come back what it must know; returns how much was lost."""
        # A selector never hears of a socket that was closed while it waited.
        self._end, self._ended = socket.socketpair()
        selector = selectors.DefaultSelector()  # filled here: who closes at once finds it whole
        selector.register(self._ended, selectors.EVENT_READ)
        for life in self._lives:
            self._listen_to(life, selector)
        own = partial(threading.Thread, daemon=True)
        self.reviver = own(target=self._hear_closings, args=(selector,), name="closings")
        beats = [own(target=self._beat, args=(k,), name="heartbeat") for k in range(self.servers)]
        self._threads = [*beats, self.reviver]
        for thread in self._threads:
            thread.start()

    # Requests of a rank.

    def send(
        self,
        role: str,
        shard: int,
        message: Message,
        arrays: Iterable[Any] = (),
        segment: Segment | None = None,
        life: Life | None = None,
    ) -> None:
        """Send for the message's rank, as `Channel.send`, to a server in its present ``life``.

        Raises ServerRevivedError when the server has died and is back, PeerError when it is not.
        """
        life = life or self.at(shard)
        try:
            # It may take nothing for as long as an evaluation holds it: signs of life decide.
            life.channels[role, message.rank].send(
                message, arrays, segment=segment, within_s=inf, goes_on=self.stop.check
            )
        except PeerGoneError:
            raise self.after_death(life) from None

    def answer(
        self,
        role: str,
        life: Life,
        rank: int,
        step: int,
        what: str,
        place: Place = lambda message: None,
    ) -> tuple[Message, Segment | None]:
        """What the server, which was asked in this ``life``, answers about (rank, step).

        Raises what the server failed with, ServerRevivedError when it has died and is back,
        PeerError when it is not, RunStopped.
        """
        who = self.who if rank == ALL else f"rank {rank}"
        of = "" if rank == ALL else f" of step {step}"
        text = f"{who} waits for {what}{of} from {self.called(life.shard)}"
        with self.waits.waiting(text), self.stop.waiting_elsewhere():
            return self.receive(
                life.channels[role, rank],
                life,
                stops=role != "control",
                place=lambda m: place(m) if (m.rank, m.step) == (rank, step) else None,
                awaited=lambda m: m.rank == ALL or (m.rank, m.step) == (rank, step),
            )

    def push(self, shard: int, message: Message, arrays: Iterable[Any] = ()) -> None:
        """Send what may reach a server twice: it tells repeated pushes apart."""
        while True:
            with suppress(ServerRevivedError):
                return self.send("pushes", shard, message, arrays)

    def attach(self, role: str, shard: int, rank: int, number: int, segment: Segment) -> None:
        """Have the server map a segment, if it has not. Raises as `send`."""
        life = self.at(shard)
        if life.mapped.get((rank, number)) is not segment:
            there = Message(MessageKind.SEGMENT, rank, ALL, pack_segment(number, segment.size))
            self.send(role, shard, there, segment=segment)
            life.mapped[rank, number] = segment

    # Rare requests.

    def call(self, shard: int, verb: str, **asked: Any) -> Said:
        """Ask for something rare and wait for the answer.

        Asks again where the server dies meanwhile and comes back. Raises what the server failed
        with, PeerError when it has gone.
        """
        with self.alone:
            while True:
                life = self.at(shard)
                with suppress(ServerRevivedError):
                    return self.call_on(life.channels["control", ALL], life, verb, **asked)

    def call_on(
        self, channel: Channel, life: Life, verb: str, *, within_s: float = inf, **asked: Any
    ) -> Said:
        """The same over a connection of its own, once; ``within_s``, or while the run goes on."""
        try:
            send_said(channel.send, Message(MessageKind.CALL), {**asked, "verb": verb})
        except PeerGoneError:
            raise self.after_death(life) from None
        with self.waits.waiting(f"{self.who} waits for {verb} from {self.called(life.shard)}"):
            stops = within_s < inf
            return said_in(*self.receive(channel, life, stops=stops, within_s=within_s))

    def call_apart(self, shard: int, verb: str, **asked: Any) -> Said:
        """The same for what takes long, over one more connection: other requests go on."""
        life, (channel, _) = self.at(shard), self.connect(shard, "control")
        try:
            return self.call_on(channel, life, verb, **asked)
        finally:
            self.end(channel)

    def close(self) -> None:
        """Say goodbye and close every connection; the threads that listen have ended then."""
        super().close()
        self._end.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSED_WITHIN_S)
        for life in self._lives:
            life.mapped.clear()

    # The threads that listen.

    def _beat(self, shard: int) -> None:
        """Signs of life to one server, and from it."""
        while not self.closing.is_set():
            life = self.at(shard)
            channel = life.channels["heartbeat", ALL]
            idle = int(self.stop.only_waits())
            try:
                channel.send(Message(MessageKind.PING, number=idle))
                message, _ = channel.receive(until(STUCK_S, self.called(shard)))
                failed = unpack_json(message.body).get("failed")
                if failed:
                    raise PeerError(f"{failed}{self.waits.told()}")
            except (PeerGoneError, TimeoutError) as error:
                if self.closing.is_set():
                    return
                if isinstance(error, TimeoutError) and not channel.wire.is_broken():
                    silent = f"has given no sign of life for {STUCK_S:.0f} s"
                    stuck = f"{silent}, since {clock(STUCK_S)}: it is stopped or stuck"
                    return self.give_up(shard, f"{self.name(shard)} {stuck}{self.waits.told()}")
                found = self.after_death(life)
                if isinstance(found, ServerGoneError):
                    return self.stop.set(found)
            except (BadMessageError, PeerError) as error:
                self.stop.set(error)
            self.closing.wait(BEATS_EVERY_S)

    def _hear_closings(self, selector: selectors.BaseSelector) -> None:
        with self._ended, selector:
            while True:
                for key, _ in selector.select():
                    if self.closing.is_set():
                        return
                    life, channel = key.data
                    if self.at(life.shard) is not life:
                        continue
                    made = channel.wire
                    try:
                        try:
                            self._hear_closing(life, channel)
                            while channel.wire.has_more():
                                self._hear_closing(life, channel)
                            # Made again, and twice perhaps: then its number may be the old one.
                            if channel.wire is not made:
                                selector.unregister(key.fd)
                                selector.register(channel, selectors.EVENT_READ, key.data)
                        except ServerGoneError:
                            self._hear_the_rest(life, selector)
                            with self.stop.working():
                                self._revive(life)
                            self._listen_to(self.at(life.shard), selector)
                    except BaseException as error:
                        if self.closing.is_set():
                            return
                        self.stop.set(error)

    def _listen_to(self, life: Life, selector: selectors.BaseSelector) -> None:
        for channel in self._closings(life):
            selector.register(channel, selectors.EVENT_READ, (life, channel))

    def _closings(self, life: Life) -> list[Channel]:
        return [channel for (role, _), channel in life.channels.items() if role == "pushes"]

    def _hear_the_rest(self, life: Life, selector: selectors.BaseSelector) -> None:
        """What a dead server has said counts: rows may be read and written that it let go."""
        for channel in self._closings(life):
            selector.unregister(channel)
            channel.hang_up()
            with suppress(PeerError, BadMessageError):
                while True:
                    self._hear_closing(life, channel)

    def _hear_closing(self, life: Life, channel: Channel) -> None:
        if channel.wire.is_broken():  # and perhaps nothing is said when it is made again
            try:
                return channel.make_again(lambda: None)
            except PeerGoneError:
                raise self.after_death(life) from None
        message, _ = self.receive(channel, life, stops=False)
        self.on_closed(message.rank, message.step, life.shard)

    def _revive(self, dead: Life) -> None:
        """As often as it dies meanwhile. Raises what makes it impossible."""
        gone, revival = self.gone(dead.shard), self.revival
        if revival is None:
            raise gone
        self.let_go(dead.shard)
        for deaths in range(dead.number, MOST_REVIVALS):
            # One that dies again and again may do so until something else is over.
            if deaths and revival.restart is not None:
                self.closing.wait(min(pause_before(deaths), MOST_PAUSE_S))
            if self.closing.is_set() or self.stop:
                raise gone
            with suppress(PeerGoneError, ServerGoneError):
                lost = self._bring_back(dead, revival)
                back = f"it is back, and {lost} pushes of {self.who} are lost with it"
                return revival.told(f"{gone}; {back}")
        raise PeerError(f"{gone}, for the {MOST_REVIVALS + 1}th time in this run")

    def _bring_back(self, dead: Life, revival: Revival) -> int:
        """How many pushes are lost. Raises PeerGoneError, or ServerGoneError, where it has died
        again."""
        shard = dead.shard
        if revival.restart is not None:
            revival.restart(shard)
        control, number = self.connect(shard, "control", awaited_s=START_WITHIN_S)
        if number == dead.number:
            raise PeerError(str(self.gone(shard)))
        for saved in revival.saved(shard) if revival.saved else ():
            with suppress(BrokenFileError):  # then the checkpoint before it is tried
                self.call_on(control, dead, "come_back", within_s=FILLED_WITHIN_S, **asdict(saved))
                break
        life = Life(shard, number, self.channels_beside(control, shard))
        lost = self.rejoin(life)
        self.lives_again(life)
        return lost
