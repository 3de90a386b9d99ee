"""The client of all embedding servers: requests of a rank, rare calls, and the threads that listen
meanwhile to signs of life and to closed pushes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from math import inf
from typing import Any, cast

from persia_sim.base.vocabulary import ALL
from runtime.files import BrokenFileError
from runtime.hosts.launch.processes import Address
from runtime.hosts.rows.connections import (
    Connections,
    Incarnation,
    ServerGoneError,
    ServerRestoredError,
    named_ranks,
)
from runtime.hosts.rows.failover import (
    MOST_FAILOVERS,
    MOST_PAUSE_S,
    RESTORED_WITHIN_S,
    Failover,
)
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.calls import Method, Payload, R, payload_of, send_call
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    Place,
    pack_segment,
    unpack_json,
)
from runtime.hosts.wire.peers import (
    BEATS_EVERY_S,
    START_WITHIN_S,
    STUCK_S,
    clock,
    crowding,
    deadline,
)
from runtime.hosts.wire.segments import Segment
from runtime.stop import PeerError, pause_before

CLOSED_WITHIN_S = 5.0
"""For a thread to notice; one that starts a server again may take longer."""


class ServerClient(Connections):
    """What the ranks of one process send to all servers, and receive from them.

    A thread listens to each server's signs of life, and one hears of all closed pushes and restarts
    servers that have died.
    """

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str] = lambda shard: "has died",
        who: str = "",
        **about: Any,
    ) -> None:
        self.numbers = count(1)
        """Of calls; 0 stands for all of them."""
        super().__init__(address, ranks, how_it_ended, who or named_ranks(ranks), **about)
        self.alone = threading.RLock()
        """Held by the one thread of this process that calls for what is rare."""
        self.on_closed: Callable[[int, int, int], None] = lambda rank, step, shard: None
        """Called with (rank, step, shard) when a server has closed a push."""
        self.rejoin: Callable[[Incarnation], int] = lambda server: 0
        """Tells a server that has come back what it must know; returns how much was lost."""

        self._processes = self.servers + len(ranks)

        # A selector never hears of a socket that was closed while it waited.
        self._end, self._ended = socket.socketpair()
        selector = selectors.DefaultSelector()  # filled here: who closes at once finds it whole
        selector.register(self._ended, selectors.EVENT_READ)
        for server in self._incarnations:
            self._listen_to(server, selector)

        # The threads that listen.
        thread = partial(threading.Thread, daemon=True)
        self.failover_thread = thread(
            target=self._receive_closings, args=(selector,), name="closings"
        )
        shards = range(self.servers)
        beats = [thread(target=self._beat, args=(k,), name="heartbeat") for k in shards]
        self._threads = [*beats, self.failover_thread]
        for started in self._threads:
            started.start()

    # Requests of a rank.

    def send(
        self,
        role: str,
        shard: int,
        message: Message,
        arrays: Iterable[Any] = (),
        segment: Segment | None = None,
        server: Incarnation | None = None,
    ) -> None:
        """Send for the message's rank, as `Channel.send`, to a server in its present incarnation.

        Raises ServerRestoredError when the server has died and is back, PeerError when it is not.
        """
        server = server or self.at(shard)
        try:
            # It may take nothing for as long as an evaluation holds it: signs of life decide.
            server.channels[role, message.rank].send(
                message, arrays, segment=segment, within_s=inf, check=self.stop.check
            )
        except PeerGoneError:
            raise self.error_of_death(server) from None

    def answer(
        self,
        role: str,
        server: Incarnation,
        rank: int,
        step: int,
        what: str,
        place: Place = lambda message: None,
    ) -> tuple[Message, Segment | None]:
        """What the server, to which this incarnation the request went, answers about (rank, step).

        Raises what the server failed with, ServerRestoredError when it has died and is back,
        PeerError when it is not, RunStopped.
        """
        who = self.who if rank == ALL else f"rank {rank}"
        of = "" if rank == ALL else f" of step {step}"
        text = f"{who} waits for {what}{of} from {self.name(server.shard)}"
        with self.waits.waiting(text), self.stop.waiting_elsewhere():
            return self.receive(
                server.channels[role, rank],
                server,
                stops=role != "control",
                place=lambda m: place(m) if (m.rank, m.step) == (rank, step) else None,
                awaited=lambda m: m.rank == ALL or (m.rank, m.step) == (rank, step),
            )

    def push(self, shard: int, message: Message, arrays: Iterable[Any] = ()) -> None:
        """Send what may reach a server twice: it tells repeated pushes apart."""
        while True:
            with suppress(ServerRestoredError):
                return self.send("pushes", shard, message, arrays)

    def attach(
        self, role: str, server: Incarnation, rank: int, number: int, segment: Segment
    ) -> None:
        """Have the server map a segment, if it has not. Raises as `send`."""
        if server.mapped.get((rank, number)) is not segment:
            there = Message(MessageKind.SEGMENT, rank, ALL, pack_segment(number, segment.size))
            self.send(role, server.shard, there, segment=segment, server=server)
            server.mapped[rank, number] = segment

    def pass_over_earlier_run(self) -> None:
        """Return when nothing of a run that was stopped is left in the ranks' connections; whoever
        serves them has been told of the one that begins."""
        connections = [
            (server, role, channel)
            for server in self._incarnations
            for (role, rank), channel in server.channels.items()
            if role in RANK_ROLES and rank != ALL
        ]
        for _, _, channel in connections:
            channel.send(Message(MessageKind.RUN_BEGINS))
        for server, role, channel in connections:
            if role != "pushes":  # to which a thread listens
                self.receive(
                    channel,
                    server,
                    stops=False,
                    within_s=START_WITHIN_S,
                    awaited=lambda message: message.kind is MessageKind.RUN_BEGINS,
                )

    # Rare calls.

    def call(self, shard: int, method: Method[..., R], **arguments: Any) -> R:
        """Call a method of `ServerCalls` and wait for the result. Raises as `call_all`."""
        (result,) = self.call_all(method, {shard: arguments})
        return result

    def call_all(self, method: Method[..., R], arguments: Mapping[int, Payload]) -> list[R]:
        """Call a method of several servers at once, each with its ``arguments``, then wait for
        their results, which come in the same order.

        Calls again where a server dies meanwhile and comes back. Raises what the first of them
        failed with, PeerError when one has gone; a later call passes over what is still on its way.
        """
        with self.alone:
            calls = {
                shard: self._begin_call(shard, method, arguments[shard]) for shard in arguments
            }
            results = []
            for shard, (server, number) in calls.items():
                while True:
                    control = server.channels["control", ALL]
                    with suppress(ServerRestoredError):
                        results.append(self._result(control, server, method, number))
                        break
                    server, number = self._begin_call(shard, method, arguments[shard])
            return results

    def _begin_call(
        self, shard: int, method: Method[..., R], arguments: Payload
    ) -> tuple[Incarnation, int]:
        """Send a call over the control connection; to which incarnation, and its number."""
        while True:
            server = self.at(shard)
            control = server.channels["control", ALL]
            with suppress(ServerRestoredError):
                return server, self._send_call(control, server, method, arguments)

    def call_on(
        self,
        channel: Channel,
        server: Incarnation,
        method: Method[..., R],
        *,
        within_s: float = inf,
        **arguments: Any,
    ) -> R:
        """Call over one connection, once; ``within_s``, or while the run goes on."""
        number = self._send_call(channel, server, method, arguments)
        return self._result(channel, server, method, number, within_s)

    def _send_call(
        self, channel: Channel, server: Incarnation, method: Method[..., R], arguments: Payload
    ) -> int:
        """Send a call; the number under which it is answered."""
        number = next(self.numbers)
        try:
            send_call(channel.send, Message(MessageKind.CALL, number=number), method, arguments)
        except PeerGoneError:
            raise self.error_of_death(server) from None
        return number

    def _result(
        self,
        channel: Channel,
        server: Incarnation,
        method: Method[..., R],
        number: int,
        within_s: float = inf,
    ) -> R:
        """What the server answers to the call of that number."""
        text = f"{self.who} waits for {method.__name__} from {self.name(server.shard)}"
        with self.waits.waiting(text):
            message, segment = self.receive(
                channel,
                server,
                stops=within_s < inf,
                within_s=within_s,
                awaited=lambda m: m.number in (0, number),  # an error may be of all calls
            )
        return cast(R, payload_of(message, segment))

    def call_apart(self, shard: int, method: Method[..., R], **arguments: Any) -> R:
        """Call what takes long over one more connection: other requests go on."""
        server = self.at(shard)
        channel, _ = self.connect(shard, "control")
        try:
            return self.call_on(channel, server, method, **arguments)
        finally:
            self.end(channel)

    def close(self) -> None:
        """Close every connection; the threads that listen have ended then."""
        super().close()
        self._end.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSED_WITHIN_S)
        for server in self._incarnations:
            server.mapped.clear()

    # Signs of life.

    def _beat(self, shard: int) -> None:
        """Send signs of life to one server, and receive them from it."""
        while not self.closing.is_set():
            server = self.at(shard)
            channel = server.channels["heartbeat", ALL]
            idle = int(self.stop.only_waits())
            stuck_s = STUCK_S * crowding(self._processes)
            try:
                # Its answer also says what has ended the run, if anything has.
                channel.send(Message(MessageKind.PING, number=idle))
                message, _ = channel.receive(deadline(stuck_s, self.name(shard)))
                failed = unpack_json(message.body).get("failed")
                if failed:
                    raise PeerError(f"{failed}{self.waits.summary()}")
            except (PeerGoneError, TimeoutError) as error:
                if self.closing.is_set():
                    return
                # Alive for the kernel, and silent: it is stuck, and the run ends.
                if isinstance(error, TimeoutError) and not channel.connection.is_broken():
                    silent = f"has given no sign of life for {stuck_s:.0f} s"
                    stuck = f"{silent}, since {clock(stuck_s)}: it is stopped or stuck"
                    name = self.name_with_pid(shard)
                    return self.give_up(shard, f"{name} {stuck}{self.waits.summary()}")
                # It has died: perhaps it comes back.
                death = self.error_of_death(server)
                if isinstance(death, ServerGoneError):
                    return self.stop.set(death)
            except (BadMessageError, PeerError) as error:
                self.stop.set(error)
            self.closing.wait(BEATS_EVERY_S)

    # Closed pushes, and servers that have died.

    def _receive_closings(self, selector: selectors.BaseSelector) -> None:
        """The thread that hears of closed pushes of all servers, and restarts those that die."""
        with self._ended, selector:
            while True:
                for key, _ in selector.select():
                    if self.closing.is_set():
                        return
                    server, channel = key.data

                    # A connection of a life that has ended says nothing more.
                    if self.at(server.shard) is not server:
                        continue
                    before = channel.connection
                    try:
                        try:
                            self._receive_closing(server, channel)
                            while channel.connection.has_buffered():
                                self._receive_closing(server, channel)
                            # Made again, and twice perhaps: then its number may be the old one.
                            if channel.connection is not before:
                                selector.unregister(key.fd)
                                selector.register(channel, selectors.EVENT_READ, key.data)
                        except ServerGoneError:
                            # The server has died: take what it has sent, and have another one
                            # started.
                            self._receive_the_rest(server, selector)
                            with self.stop.working():
                                self._fail_over(server)
                            self._listen_to(self.at(server.shard), selector)
                    except BaseException as error:
                        if self.closing.is_set():
                            return
                        self.stop.set(error)

    def _listen_to(self, server: Incarnation, selector: selectors.BaseSelector) -> None:
        for channel in self._closings(server):
            selector.register(channel, selectors.EVENT_READ, (server, channel))

    def _closings(self, server: Incarnation) -> list[Channel]:
        return [channel for (role, _), channel in server.channels.items() if role == "pushes"]

    def _receive_the_rest(self, server: Incarnation, selector: selectors.BaseSelector) -> None:
        """What a dead server has sent counts: it may have applied more than was received here."""
        for channel in self._closings(server):
            selector.unregister(channel)
            channel.shut_down()
            with suppress(PeerError, BadMessageError):
                while True:
                    self._receive_closing(server, channel)

    def _receive_closing(self, server: Incarnation, channel: Channel) -> None:
        if channel.connection.is_broken():  # and perhaps nothing is sent when it is made again
            try:
                return channel.await_reconnection(lambda: None)
            except PeerGoneError:
                raise self.error_of_death(server) from None
        message, _ = self.receive(channel, server, stops=False)
        if message.kind is MessageKind.CLOSED:
            self.on_closed(message.rank, message.step, server.shard)

    def _fail_over(self, dead: Incarnation) -> None:
        """Restart a server, as often as it dies meanwhile. Raises what makes it impossible."""
        death = self.death_of(dead.shard)
        failover = self.failover
        if failover is None:
            raise death
        self.disconnect(dead.shard)
        for deaths in range(dead.number, MOST_FAILOVERS):
            # One that dies again and again may do so until something else is over.
            if deaths and failover.restart is not None:
                self.closing.wait(min(pause_before(deaths), MOST_PAUSE_S))
            if self.closing.is_set() or self.stop:
                raise death
            with suppress(PeerGoneError, ServerGoneError):
                lost = self._restart(dead, failover)
                back = f"it is back, and {lost} pushes of {self.who} are lost with it"
                return failover.report(f"{death}; {back}")
        raise PeerError(f"{death}, for the {MOST_FAILOVERS + 1}th time in this run")

    def _restart(self, dead: Incarnation, failover: Failover) -> int:
        """How many pushes are lost. Raises PeerGoneError, or ServerGoneError, where it has died
        again."""
        # A new process, empty; the launcher starts it, and every other process waits for it.
        shard = dead.shard
        if failover.restart is not None:
            failover.restart(shard)
        control, number = self.connect(shard, "control", awaited_s=START_WITHIN_S)
        if number == dead.number:
            raise PeerError(str(self.death_of(shard)))

        # Its rows of the last checkpoint; of the one before it where that is damaged.
        for saved in failover.saved(shard) if failover.saved else ():
            with suppress(BrokenFileError):
                self.call_on(
                    control,
                    dead,
                    ServerCalls.restore,
                    within_s=RESTORED_WITHIN_S,
                    **asdict(saved),
                )
                break

        # What was open is opened again, then everybody goes on with it.
        server = Incarnation(shard, number, self.channels_beside(control, shard))
        lost = self.rejoin(server)
        self.replace_incarnation(server)
        return lost
