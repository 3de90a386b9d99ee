"""The connections of a process to all embedding servers, or to all embedding workers, which below
are servers, too; and what the death of one means."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf

from persia_sim.base.vocabulary import ALL
from runtime.engines.launch.processes import Address
from runtime.engines.rows.failover import Revival
from runtime.engines.wire.calls import goodbye
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    Place,
    error_from,
    unpack_json,
)
from runtime.engines.wire.peers import START_WITHIN_S, Waits, come_in, until
from runtime.engines.wire.segments import Segment
from runtime.stop import PeerError, Stop


def named_ranks(ranks: Sequence[int]) -> str:
    """What a sentence calls the ranks of one process."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


class ServerGoneError(PeerError):
    """An embedding server has died."""


class ServerRevivedError(Exception):
    """A server has died and is back: whoever waited for it asks again."""


@dataclass(eq=False, slots=True)
class Life:
    """One incarnation of an embedding server, as this process knows it."""

    shard: int
    number: int
    channels: dict[tuple[str, int], Channel]
    """By role and rank; ``heartbeat`` and ``control`` (what is rare) are of `ALL`."""
    mapped: dict[tuple[int, int], Segment] = field(default_factory=dict)
    """The segments that the server has, by rank and number."""
    is_over: bool = False
    """What is heard of it from now on is not known to the server that came after it."""


class Connections:
    """Every rank of this process has its own connections for lookups and for pushes, so that a
    lookup that waits holds up nobody; what is rare goes over one that all share."""

    role = "server"

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str],
        who: str,
        *,
        waits: Waits | None = None,
        own_life: int | None = None,
    ) -> None:
        """Connect to all, for no rank's batches, too; ``how_it_ended`` says of a dead server what
        its launcher knows, ``who`` is this process, in words, and ``waits`` is what it waits for;
        ``own_life``: its incarnation, where its death is not that of the run."""
        self.ranks, self.stop, self.waits = tuple(ranks), Stop(), waits or Waits()
        self.closing = threading.Event()
        self.revival: Revival | None = None
        """How servers that have died come back; None: their death is the run's."""
        self.reviver: threading.Thread | None = None
        """The one thread that brings servers back; it never waits for one to come back."""
        self.who = who
        self.run_folder: str | None = None
        """Servers write files below it, asked for over connections that are made from now on."""
        self.pids = [-1] * len(address.names)
        self._address, self._how_it_ended = address, how_it_ended
        about_us = {"ranks": self.who, "pid": os.getpid(), "own_life": own_life}
        self._hello = {"client": secrets.token_hex(8), **about_us}
        self._open: list[Channel] = []
        self._changed, self._noticing = threading.Condition(), threading.Lock()
        self._lives = [Life(shard, 0, {}) for shard in range(self.servers)]
        self._deaths: dict[int, str] = {}
        self._given_up: set[int] = set()
        try:
            for life in self._lives:
                # Of a new incarnation that comes at the same time as one of a server.
                awaited_s = START_WITHIN_S if own_life else 0.0
                control, life.number = self.connect(life.shard, "control", awaited_s=awaited_s)
                life.channels = self.channels_beside(control, life.shard)
        except BaseException:
            Connections.close(self)
            raise

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._address.names)

    def ranks_of(self, shard: int) -> tuple[int, ...]:
        """Those of this process that talk to a server."""
        return self.ranks

    def at(self, shard: int) -> Life:
        """A server's present life."""
        return self._lives[shard]

    def connect(
        self, shard: int, role: str, rank: int = ALL, *, awaited_s: float = 0.0
    ) -> tuple[Channel, int]:
        """One more connection, and to which of the server's lives.

        Raises PeerError where nobody is there, perhaps also ``awaited_s`` from now, or refuses.
        """
        server, ends_s = self.called(shard), time.monotonic() + awaited_s
        is_there = partial(self.refuse_given_up, shard)
        about_us = {"life": self._lives[shard].number, "role": role, "run": self.run_folder}
        try:
            channel = come_in(
                self._address.names[shard], server, self._address.secrets[shard],
                self._hello | about_us, rank, awaited_s=awaited_s, goes_on=is_there,
            )  # fmt: skip
            self._open.append(channel)
            while True:
                message, _ = channel.receive(until(START_WITHIN_S, server, is_there))
                if message.kind is not MessageKind.FILLING:
                    break
        except PeerGoneError:
            if (left_s := ends_s - time.monotonic()) < 0 or self.closing.is_set() or self.stop:
                raise self.gone(shard) from None
            time.sleep(0.2)  # it was the dying one, whose socket outlived its connections
            return self.connect(shard, role, rank, awaited_s=left_s)
        except TimeoutError as error:
            raise PeerError(f"{error}: it is stopped or stuck") from None
        if message.kind is MessageKind.FAILED:
            raise self.failure(message)
        about = unpack_json(message.body)
        if (about.get("shard"), about.get("shards")) != (shard, self.servers):
            raise PeerError(f"{server} of {self.servers} says it is {about}")
        self.pids[shard] = int(about["pid"])
        return channel, int(about["life"])

    def receive(
        self,
        channel: Channel,
        life: Life,
        *,
        stops: bool = True,
        place: Place = lambda message: None,
        within_s: float = inf,
        awaited: Callable[[Message], bool] = lambda message: True,
    ) -> tuple[Message, Segment | None]:
        """The next message that is ``awaited``, and no answer from before a stop, as
        `Channel.receive`.

        Raises what the server failed with, as `Links.send` does, RunStopped where the run
        ``stops``, PeerError after ``within_s``, for a server whose signs of life nobody hears yet.
        """
        name = self.name(life.shard)
        in_time = until(within_s, name)

        def goes_on() -> None:
            in_time()
            if stops:
                self.stop.check()
            self.refuse_given_up(life.shard)

        try:
            message, segment = channel.receive(goes_on, place)
            while not awaited(message):
                message, segment = channel.receive(goes_on, place)
        except TimeoutError as error:
            raise PeerError(f"{error}: it is stopped or stuck") from None
        except PeerGoneError:
            if stops:
                self.stop.check()
            raise self.after_death(life) from None
        except BadMessageError as error:
            channel.close()
            raise PeerError(f"{name} sent what is no answer: {error}") from None
        if message.kind is MessageKind.FAILED:
            raise self.failure(message)
        return message, segment

    def failure(self, message: Message) -> Exception:
        """What a server says that it failed with."""
        said = unpack_json(message.body)
        told = self.waits.told() if said.get("kind") == "PeerError" else ""
        return error_from(said, told)

    # A server that has died.

    def after_death(self, life: Life) -> ServerGoneError | ServerRevivedError:
        """What to raise: another life of the server has begun, or there will be none.

        The thread that hears of closed pushes brings it back: it alone knows that it has heard all
        that the dead one said. Every other one waits here.
        """
        shard = life.shard
        if threading.current_thread() is self.reviver:
            return self.gone(shard)
        with self._changed, self.stop.working():
            if self._lives[shard] is life:  # one connection is lost for good: so all are
                for channel in life.channels.values():
                    channel.hang_up()
            while (
                self.revival is not None
                and not self.closing.is_set()
                and not self.stop
                and self._lives[shard] is life
            ):
                self._changed.wait(0.1)
        return self.gone(shard) if self._lives[shard] is life else ServerRevivedError()

    def gone(self, shard: int) -> ServerGoneError:
        """Whoever notices first says who waited; those that notice later say the same."""
        with self._noticing:
            if shard not in self._deaths:
                how = self._how_it_ended(shard)
                self._deaths[shard] = f"{self.name(shard)} {how}{self.waits.told()}"
            return ServerGoneError(self._deaths[shard])

    def give_up(self, shard: int, why: str) -> None:
        """The run ends by a server that is alive and says nothing: nobody waits for it any more."""
        with self._noticing:
            self._deaths.setdefault(shard, why)
        self._given_up.add(shard)  # for who waits over a connection that is no part of its life
        self.stop.set(ServerGoneError(why))
        self.let_go(shard)

    def refuse_given_up(self, shard: int) -> None:
        """Raise why nobody waits for a server any more, if so it is."""
        if shard in self._given_up:
            raise self.gone(shard)

    def let_go(self, shard: int) -> None:
        """Close the connections to a server that has died."""
        for channel in self.at(shard).channels.values():
            channel.close()

    def channels_beside(self, control: Channel, shard: int) -> dict[tuple[str, int], Channel]:
        """With new connections to a server beside the one given."""
        ranks = self.ranks_of(shard)
        roles = [("heartbeat", ALL), *product(RANK_ROLES, ranks)]
        found = {("control", ALL): control} | {key: self.connect(shard, *key)[0] for key in roles}
        if not ranks:  # nothing comes over it but the server's end
            found["pushes", ALL] = self.connect(shard, "control")[0]
        return found

    def lives_again(self, life: Life) -> None:
        """From now on everybody uses its channels; those that waited go on."""
        with self._changed:
            self._lives[life.shard].mapped.clear()  # a checkpoint may keep the life itself
            self._lives[life.shard] = life
            self._deaths.pop(life.shard, None)
            self._changed.notify_all()

    def called(self, shard: int) -> str:
        """What a sentence calls a server."""
        return f"embedding {self.role} {shard}"

    def name(self, shard: int) -> str:
        """The same of its present process."""
        return f"{self.called(shard)} (pid {self.pids[shard]})"

    def close(self) -> None:
        """Say goodbye and close every connection."""
        self.closing.set()
        while self._open:
            self.end(self._open[-1])

    def end(self, channel: Channel) -> None:
        """Say goodbye and close this one."""
        goodbye(channel, within_s=0.2)
        with suppress(ValueError):
            self._open.remove(channel)
