"""The connections of a process to all embedding servers, or to all embedding workers, which below
are servers, too; and what the death of one means."""

from __future__ import annotations

import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any

from persia_sim.base.vocabulary import ALL
from runtime.hosts.launch.processes import Address
from runtime.hosts.rows.failover import Failover
from runtime.hosts.wire.calls import close_channel
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    Place,
    error_from,
    unpack_json,
)
from runtime.hosts.wire.peers import START_WITHIN_S, Waits, connect, deadline
from runtime.hosts.wire.segments import Segment
from runtime.stop import PeerError, Stop


def named_ranks(ranks: Sequence[int]) -> str:
    """What a sentence calls the ranks of one process."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


_OTHER_DESCRIPTORS = 256
"""Files, segments and sockets of a process beside its connections to servers."""


def allow_descriptors(connections: int) -> None:
    """Let this process have so many connections at once, as far as its hard limit goes.

    Raises PeerError where that is lower.
    """
    needed = connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise PeerError(
            f"{connections:,} connections to servers need {needed:,} open files, and this process"
            f" may have {hard:,}; raise the limit (ulimit -Hn), or use fewer --servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class ServerGoneError(PeerError):
    """An embedding server has died."""


class ServerRestoredError(Exception):
    """A server has died and is back: a request that waited for it is sent again."""


@dataclass(eq=False, slots=True)
class Incarnation:
    """One incarnation of an embedding server, as this process knows it."""

    shard: int
    number: int
    channels: dict[tuple[str, int], Channel]
    """By role and rank; ``heartbeat`` and ``control`` (what is rare) are of `ALL`."""
    mapped: dict[tuple[int, int], Segment] = field(default_factory=dict)
    """The segments that the server has, by rank and number."""
    has_ended: bool = False
    """The incarnation after it does not know what is received of this one from now on."""


class Connections:
    """The connections of this process to all servers.

    Every rank has its own for lookups and for pushes, so that a lookup that waits holds up nobody;
    what is rare goes over one that all ranks share.
    """

    role = "server"

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str],
        who: str,
        *,
        waits: Waits | None = None,
        client_incarnation: int | None = None,
    ) -> None:
        """Connect to all, for no rank's batches, too; ``how_it_ended`` says of a dead server what
        its launcher knows, ``who`` is this process, in words, and ``waits`` is what it waits for;
        ``client_incarnation``: that of this process, where its death is not that of the run."""
        self.ranks = tuple(ranks)
        self.stop = Stop()
        self.waits = waits or Waits()
        self.closing = threading.Event()
        self.failover: Failover | None = None
        """How servers that have died come back; None: their death is the run's."""
        self.failover_thread: threading.Thread | None = None
        """The one thread that restarts servers; it never waits for one to come back."""
        self.who = who
        self.run_folder: str | None = None
        """Servers write files below it, called over connections that are made from now on."""
        self.pids = [-1] * len(address.names)
        self._address = address
        self._how_it_ended = how_it_ended

        # What every server is told of this process first.
        self._hello: dict[str, Any] = {
            "client": secrets.token_hex(8),
            "ranks": self.who,
            "pid": os.getpid(),
            "client_incarnation": client_incarnation,
        }
        self._open: list[Channel] = []
        self._changed = threading.Condition()
        self._noticing = threading.Lock()
        self._incarnations = [Incarnation(shard, 0, {}) for shard in range(self.servers)]
        self._deaths: dict[int, str] = {}
        self._given_up: set[int] = set()
        allow_descriptors(self.servers * (len(RANK_ROLES) * len(self.ranks) + 3))
        # A worker that was restarted may come at the same time as a server that was.
        self._connect_all(START_WITHIN_S if client_incarnation else 0.0)

    def _connect_all(self, awaited_s: float) -> None:
        """Connect to all servers at once: each takes some twenty round trips. Raises what failed
        first."""
        errors: list[BaseException] = []

        def connect(server: Incarnation) -> None:
            try:
                control, server.number = self.connect(server.shard, "control", awaited_s=awaited_s)
                server.channels = self.channels_beside(control, server.shard)
            except BaseException as error:
                errors.append(error)
                self.closing.set()  # nobody waits for the others

        pool = ThreadPoolExecutor(self.servers)
        try:
            connecting = [pool.submit(connect, server) for server in self._incarnations]
            while wait(connecting, timeout=0.2).not_done:
                pass  # short, so that Ctrl-C is heard
            if errors:
                raise errors[0]
        except BaseException:
            self.closing.set()
            pool.shutdown()
            Connections.close(self)
            raise
        pool.shutdown()

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._address.names)

    def ranks_of(self, shard: int) -> tuple[int, ...]:
        """Ranks of this process that talk to a server."""
        return self.ranks

    def at(self, shard: int) -> Incarnation:
        """A server's present incarnation."""
        return self._incarnations[shard]

    def connect(
        self, shard: int, role: str, rank: int = ALL, *, awaited_s: float = 0.0
    ) -> tuple[Channel, int]:
        """One more connection, and to which of the server's incarnations.

        Raises PeerError where nobody is there, perhaps also ``awaited_s`` from now, or refuses.
        """
        server = self.name(shard)
        ends_s = time.monotonic() + awaited_s

        def is_there() -> None:
            self.refuse_given_up(shard)
            if self.closing.is_set():
                raise PeerError(f"{server} is not waited for any more: the run ends")

        hello = self._hello | {
            "incarnation": self._incarnations[shard].number,
            "role": role,
            "run": self.run_folder,
        }
        try:
            channel = connect(
                self._address.names[shard],
                server,
                self._address.secrets[shard],
                hello,
                rank,
                awaited_s=awaited_s,
                check=is_there,
            )
            self._open.append(channel)

            # A server that was started again says that it is reading its rows.
            message, _ = channel.receive(deadline(START_WITHIN_S, server, is_there))
            while message.kind is MessageKind.RESTORING:
                message, _ = channel.receive(deadline(START_WITHIN_S, server, is_there))
        except PeerGoneError:
            left_s = ends_s - time.monotonic()
            if left_s < 0 or self.closing.is_set() or self.stop:
                raise self.death_of(shard) from None
            time.sleep(0.2)  # it was the dying one, whose socket outlived its connections
            return self.connect(shard, role, rank, awaited_s=left_s)
        except TimeoutError as error:
            raise PeerError(f"{error}: it is stopped or stuck") from None

        # WELCOME says who it is.
        if message.kind is MessageKind.FAILED:
            raise self.failure(message)
        welcome = unpack_json(message.body)
        if (welcome.get("shard"), welcome.get("shards")) != (shard, self.servers):
            raise PeerError(f"{server} of {self.servers} says it is {welcome}")
        self.pids[shard] = int(welcome["pid"])
        return channel, int(welcome["incarnation"])

    def receive(
        self,
        channel: Channel,
        server: Incarnation,
        *,
        stops: bool = True,
        place: Place = lambda message: None,
        within_s: float = inf,
        awaited: Callable[[Message], bool] = lambda message: True,
    ) -> tuple[Message, Segment | None]:
        """The next message that is ``awaited``, and no answer from before a stop, as
        `Channel.receive`.

        Raises what the server failed with, as `ServerClient.send` does, RunStopped where the run
        ``stops``, PeerError after ``within_s``, for a server whose signs of life nobody hears yet.
        """
        name = self.name_with_pid(server.shard)
        in_time = deadline(within_s, name)

        def check() -> None:
            in_time()
            if stops:
                self.stop.check()
            self.refuse_given_up(server.shard)

        # Answers to what was requested before a stop are passed over.
        try:
            message, segment = channel.receive(check, place)
            while not awaited(message):
                message, segment = channel.receive(check, place)
        except TimeoutError as error:
            raise PeerError(f"{error}: it is stopped or stuck") from None
        except PeerGoneError:
            if stops:
                self.stop.check()
            raise self.error_of_death(server) from None
        except BadMessageError as error:
            channel.close()
            raise PeerError(f"{name} sent what is no answer: {error}") from None
        if message.kind is MessageKind.FAILED:
            raise self.failure(message)
        return message, segment

    def failure(self, message: Message) -> Exception:
        """The error that a server has sent."""
        document = unpack_json(message.body)
        waits = self.waits.summary() if document.get("kind") == "PeerError" else ""
        return error_from(document, waits)

    # A server that has died.

    def error_of_death(self, server: Incarnation) -> ServerGoneError | ServerRestoredError:
        """What to raise: another incarnation of the server has begun, or there will be none.

        The thread that hears of closed pushes restarts it: it alone knows that it has received all
        that the dead one sent. Every other one waits here.
        """
        shard = server.shard
        if threading.current_thread() is self.failover_thread:
            return self.death_of(shard)
        with self._changed, self.stop.working():
            # One connection is lost for good: so all are.
            if self._incarnations[shard] is server:
                for channel in server.channels.values():
                    channel.shut_down()

            # Until another incarnation has begun, or none will.
            while (
                self.failover is not None
                and not self.closing.is_set()
                and not self.stop
                and self._incarnations[shard] is server
            ):
                self._changed.wait(0.1)
        is_restored = self._incarnations[shard] is not server
        return ServerRestoredError() if is_restored else self.death_of(shard)

    def death_of(self, shard: int) -> ServerGoneError:
        """The death of a server: the sentence names who noticed first, also where others notice
        later."""
        with self._noticing:
            if shard not in self._deaths:
                how = self._how_it_ended(shard)
                self._deaths[shard] = f"{self.name_with_pid(shard)} {how}{self.waits.summary()}"
            return ServerGoneError(self._deaths[shard])

    def give_up(self, shard: int, why: str) -> None:
        """End the run by a server that is alive and says nothing: nobody waits for it any more."""
        with self._noticing:
            self._deaths.setdefault(shard, why)
        # Also for those that wait over a connection which is no part of its incarnation.
        self._given_up.add(shard)
        self.stop.set(ServerGoneError(why))
        self.disconnect(shard)

    def refuse_given_up(self, shard: int) -> None:
        """Raise why nobody waits for a server any more, if so it is."""
        if shard in self._given_up:
            raise self.death_of(shard)

    def disconnect(self, shard: int) -> None:
        """Close the connections to a server that has died."""
        for channel in self.at(shard).channels.values():
            channel.close()

    def channels_beside(self, control: Channel, shard: int) -> dict[tuple[str, int], Channel]:
        """The control connection given, and new connections to the server beside it."""
        ranks = self.ranks_of(shard)
        roles = [("heartbeat", ALL), *product(RANK_ROLES, ranks)]
        channels = {("control", ALL): control}
        for role, rank in roles:
            channels[role, rank], _ = self.connect(shard, role, rank)
        if not ranks:  # nothing comes over it but the server's end
            channels["pushes", ALL], _ = self.connect(shard, "control")
        return channels

    def replace_incarnation(self, server: Incarnation) -> None:
        """From now on everybody uses its channels; threads that waited go on."""
        with self._changed:
            # A checkpoint may keep the old one itself, but not its segments.
            self._incarnations[server.shard].mapped.clear()
            self._incarnations[server.shard] = server
            self._deaths.pop(server.shard, None)
            self._changed.notify_all()

    def name(self, shard: int) -> str:
        """What a sentence calls a server."""
        return f"embedding {self.role} {shard}"

    def name_with_pid(self, shard: int) -> str:
        """What a sentence calls its present process."""
        return f"{self.name(shard)} (pid {self.pids[shard]})"

    def close(self) -> None:
        """Tell every server that all is well, and close every connection."""
        self.closing.set()
        while self._open:
            self.end(self._open[-1])

    def end(self, channel: Channel) -> None:
        """Tell the server that all is well, and close this one."""
        close_channel(channel, within_s=0.2)
        with suppress(ValueError):
            self._open.remove(channel)
