"""The threads of a client process that listen to its servers: signs of life, and closed pushes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from runtime.engines.processes.channel import Channel, PeerGoneError
from runtime.engines.processes.connections import Connections, ServerGoneError
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_fate,
    unpack_json,
)
from runtime.engines.processes.peers import BEATS_EVERY_S, STUCK_S, clock, until
from runtime.engines.processes.revival import MOST_REVIVALS, Call, fill
from runtime.stop import PeerError

CLOSED_WITHIN_S = 5.0
"""For a thread to notice; one that starts a server again may take longer."""


class Fresh(NamedTuple):
    """A server that has come back, before anybody else uses it."""

    shard: int
    seats: dict[tuple[str, int], Channel]
    """By role and rank."""
    call: Call


class Listening:
    """A thread for each server's signs of life, and one that hears of all closed pushes and brings
    back servers that have died."""

    def __init__(self, connections: Connections, call_on: Callable[..., dict[str, Any]]) -> None:
        """``call_on`` asks over a given connection; the threads start at once."""
        self._all, self._call_on = connections, call_on
        # A selector never hears of a socket that was closed while it waited.
        self._end, self._ended = socket.socketpair()
        self.on_closed: Callable[[int, int, int], None] = lambda rank, step, shard: None
        self.rejoin: Callable[[Fresh], int] = lambda fresh: 0
        selector = selectors.DefaultSelector()  # filled here: who closes at once finds it whole
        selector.register(self._ended, selectors.EVENT_READ)
        for shard in range(connections.servers):
            self._listen_to(shard, selector)
        closings = threading.Thread(
            target=self._hear_closings, args=(selector,), daemon=True, name="closings"
        )
        connections.reviver = closings
        hearts = [
            threading.Thread(target=self._beat, args=(shard,), daemon=True, name="heart")
            for shard in range(connections.servers)
        ]
        self._threads = [*hearts, closings]
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
            life, seats = connections.at(shard)
            channel = seats.heart
            idle = pack_fate(connections.stop.only_waits())
            try:
                channel.send(Message(MessageKind.PING, body=idle))
                message, _ = channel.receive(until(STUCK_S, f"embedding server {shard}"))
                failed = unpack_json(message.body).get("failed")
                if failed:
                    raise PeerError(f"{failed}{connections.waits.told()}")
            except PeerGoneError:
                found = connections.after_death(shard, life)
                if isinstance(found, ServerGoneError):
                    if not connections.closing.is_set():
                        connections.stop.set(found)
                    return
            except TimeoutError:
                silent = f"has given no sign of life for {STUCK_S:.0f} s, since {clock(STUCK_S)}"
                stuck = f"{connections.name(shard)} {silent}: it is stopped or stuck"
                return connections.give_up(shard, f"{stuck}{connections.waits.told()}")
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
                    if self._all.at(shard)[1].of_rank["pushes", rank] is not channel:
                        continue  # of a life before
                    try:
                        try:
                            self._hear_closing(shard, channel)
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
            channel = self._all.at(shard)[1].of_rank["pushes", rank]
            selector.register(channel, selectors.EVENT_READ, (shard, rank, channel))

    def _hear_the_rest(self, shard: int, selector: selectors.BaseSelector) -> None:
        """What a dead server has said counts: rows may be read and written that it let go."""
        for rank in self._all.ranks:
            channel = self._all.at(shard)[1].of_rank["pushes", rank]
            selector.unregister(channel)
            with suppress(PeerError, BadMessageError):
                while True:
                    self._hear_closing(shard, channel)

    def _hear_closing(self, shard: int, channel: Channel) -> None:
        life = self._all.life_of(shard)
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
        if connections.life_of(shard) == MOST_REVIVALS:
            raise PeerError(f"{gone}, for the {MOST_REVIVALS + 1}th time in this run")
        connections.let_go(shard)
        if revival.restart is not None:
            revival.restart(shard)
        control = connections.connect(shard, "control")
        call = partial(self._call_on, control, shard, connections.life_of(shard))
        if revival.saved is not None:
            call("filling")  # from now on: rows may have to be read from a disk first
            fill(revival.saved(shard), call)
        seats = connections.seats_again(shard, control)
        lost = self.rejoin(Fresh(shard, seats.of_rank, call))
        connections.lives_again(shard, seats)
        who = connections.who
        revival.told(f"{gone}; it is back, and {lost} pushes of {who} are lost with it")
