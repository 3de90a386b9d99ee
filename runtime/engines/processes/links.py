"""The connections of one client process to all embedding servers, and the threads that listen."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from runtime.engines.processes.channel import Channel, PeerGoneError, close_all
from runtime.engines.processes.launch import Address
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_fate,
    pack_json,
    unpack_json,
)
from runtime.engines.processes.parcels import pack_arrays, unpack_arrays
from runtime.engines.processes.peers import BEATS_EVERY_S, STUCK_S, clock
from runtime.engines.processes.revival import MOST_REVIVALS, Call, Revival, fill
from runtime.stop import PeerError, Stop


class ServerGoneError(PeerError):
    """An embedding server has died."""


class ServerRevivedError(Exception):
    """A server has died and is back: whoever waited for it asks again."""


class Fresh(NamedTuple):
    """Connections to a server that has come back, before anybody else uses them."""

    shard: int
    seats: dict[tuple[str, int], Channel]
    """By role and rank."""
    call: Call


_RANK_ROLES = ("lookups", "pushes", "prefetches")
_CONNECT_WITHIN_S = 20.0
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, MemoryError, OSError, PeerError, BadMessageError)
}


class Links:
    """Every rank of this process has its own connections for lookups and for pushes, so that a
    lookup that waits holds up nobody; what is rare goes over one that all share."""

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        how_it_ended: Callable[[int], str] = lambda shard: "has died",
    ) -> None:
        self.ranks, self.stop = tuple(ranks), Stop()
        self.on_closed: Callable[[int, int, int], None] = lambda rank, step, shard: None
        self.revival: Revival | None = None
        """How servers that have died come back; None: their death is the run's."""
        self.rejoin: Callable[[Fresh], int] = lambda fresh: 0
        """The store tells a server that has come back what it must know; how much was lost."""
        self._address, self._how_it_ended = address, how_it_ended
        self._revived = threading.Condition()
        self._lives = [0] * len(address.names)
        names = ", ".join(map(str, ranks))
        self._who = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
        self._client = secrets.token_hex(8)
        self._closing = threading.Event()
        self._waits: dict[int, tuple[str, float]] = {}  # thread: what it waits for, since when
        self._control_lock, self._noticing = threading.RLock(), threading.Lock()
        self._deaths: dict[int, str] = {}
        self._channels: list[Channel] = []
        self.pids = [-1] * len(address.names)
        self._of_rank: dict[tuple[str, int, int], Channel] = {}
        servers = range(len(address.names))
        try:
            self._hearts = [self._connect(k, "heart") for k in servers]
            self._controls = [self._connect(k, "control") for k in servers]
            for role in _RANK_ROLES:
                for rank in ranks:
                    for k in servers:
                        self._of_rank[role, rank, k] = self._connect(k, role, rank)
        except BaseException:
            self.close()
            raise
        bodies = [lambda k=k: self._beat(k) for k in servers]
        self._threads = [
            threading.Thread(target=body, daemon=True, name=name)
            for body, name in [(b, "heart") for b in bodies] + [(self._hear_closings, "closings")]
        ]
        self._reviver = self._threads[-1]
        for thread in self._threads:
            thread.start()

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._address.names)

    def life_of(self, shard: int) -> int:
        """Times that a server has been brought back."""
        return self._lives[shard]

    # Requests of a rank.

    def send(
        self, role: str, shard: int, message: Message, descriptors: Sequence[int] = ()
    ) -> None:
        """Send for the message's rank.

        Raises ServerRevivedError when the server has died and is back, PeerError when it is not.
        """
        life = self._lives[shard]
        try:
            self._of_rank[role, message.rank, shard].send(message, descriptors)
        except PeerGoneError:
            raise self._after_death(shard, life) from None
        except TimeoutError:
            raise PeerError(f"{self._name(shard)} takes no message, so it is stuck") from None

    def answer(
        self, role: str, shard: int, rank: int, step: int, what: str
    ) -> tuple[Message, tuple[int, ...]]:
        """What the server answers about (rank, step), whenever it does.

        Raises what the server failed with, ServerRevivedError when it has died and is back,
        PeerError when it is not, RunStopped.
        """
        text = f"rank {rank} waits for {what} of step {step} from embedding server {shard}"
        life = self._lives[shard]
        channel = self._of_rank[role, rank, shard]
        with self._waiting(text), self.stop.waiting_elsewhere():
            while True:
                message, descriptors = self._receive(channel, shard, life)
                if message.kind is MessageKind.FAILED:
                    close_all(descriptors)
                    raise self._failure(message)
                if (message.rank, message.step) == (rank, step):
                    return message, descriptors
                close_all(descriptors)  # an answer from before a stop

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
                with suppress(ServerRevivedError):
                    return self._call_on(self._controls[shard], shard, verb, given, asked)

    def _call_on(
        self,
        channel: Channel,
        shard: int,
        verb: str,
        given: Mapping[str, np.ndarray] | None,
        asked: Mapping[str, Any],
    ) -> dict[str, Any]:
        asked = {**asked, "verb": verb}
        if given is None:
            self._tell(channel, shard, Message(MessageKind.CALL, body=pack_json(asked)))
        else:
            asked["parcel"], segment = pack_arrays(given)
            try:
                call = Message(MessageKind.CALL, body=pack_json(asked))
                self._tell(channel, shard, call, [segment.descriptor])
            finally:
                segment.close()
        message, descriptors = self._hear(channel, shard, verb)
        if message.kind is MessageKind.PARCEL and len(descriptors) == 1:
            return unpack_arrays(unpack_json(message.body), descriptors[0])
        close_all(descriptors)
        return unpack_json(message.body)

    def tell_control(self, shard: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """One message on the connection for rare requests; call it inside `alone`."""
        self._tell(self._controls[shard], shard, message, descriptors)

    def hear_control(self, shard: int, what: str) -> tuple[Message, tuple[int, ...]]:
        """The answer to it. Both raise as `send` does."""
        return self._hear(self._controls[shard], shard, what)

    def _tell(
        self, channel: Channel, shard: int, message: Message, descriptors: Sequence[int] = ()
    ) -> None:
        life = self._lives[shard]
        try:
            channel.send(message, descriptors)
        except PeerGoneError:
            raise self._after_death(shard, life) from None

    def _hear(self, channel: Channel, shard: int, what: str) -> tuple[Message, tuple[int, ...]]:
        life = self._lives[shard]
        with self._waiting(f"{self._who} waits for {what} from embedding server {shard}"):
            message, descriptors = self._receive(channel, shard, life, stops=False)
        if message.kind is MessageKind.FAILED:
            close_all(descriptors)
            raise self._failure(message)
        return message, descriptors

    def close(self) -> None:
        """Say goodbye and close every connection."""
        self._closing.set()
        for channel in self._channels:
            with suppress(PeerGoneError, TimeoutError):
                channel.send(Message(MessageKind.GOODBYE), within_s=0.2)
            channel.close()

    # Inside.

    def _connect(self, shard: int, role: str, rank: int = -1) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(_CONNECT_WITHIN_S)
            sock.connect(self._address.names[shard])
        except OSError as error:
            sock.close()
            raise PeerError(
                f"{self._who} cannot reach embedding server {shard}: {error.strerror or error}"
            ) from None
        channel = Channel(sock)
        self._channels.append(channel)
        hello = {
            "secret": self._address.secret,
            "role": role,
            "client": self._client,
            "ranks": self._who,
            "pid": os.getpid(),
        }
        try:
            channel.send(Message(MessageKind.HELLO, rank, body=pack_json(hello)))
            message, descriptors = channel.receive(_until(_CONNECT_WITHIN_S, shard))
        except PeerGoneError:
            raise self._gone(shard) from None
        close_all(descriptors)
        if message.kind is MessageKind.FAILED:
            raise self._failure(message)
        about = unpack_json(message.body)
        if (about.get("shard"), about.get("shards")) != (shard, self.servers):
            raise PeerError(f"the server at place {shard} of {self.servers} says it is {about}")
        self.pids[shard] = int(about["pid"])
        return channel

    def _receive(
        self, channel: Channel, shard: int, life: int, *, stops: bool = True
    ) -> tuple[Message, tuple[int, ...]]:
        def goes_on() -> None:
            if stops:
                self.stop.check()

        try:
            return channel.receive(goes_on)
        except PeerGoneError:
            if stops:
                self.stop.check()
            raise self._after_death(shard, life) from None
        except BadMessageError as error:
            channel.close()
            raise PeerError(f"{self._name(shard)} sent what is no answer: {error}") from None

    def _failure(self, message: Message) -> Exception:
        said = unpack_json(message.body)
        sentence = str(said.get("sentence"))
        if said.get("kind") == "PeerError":
            sentence += self._who_waits()
        return _ERRORS.get(str(said.get("kind")), RuntimeError)(sentence)

    # A server that has died.

    def _after_death(self, shard: int, life: int) -> ServerGoneError | ServerRevivedError:
        """What to raise: another life of the server has begun, or there will be none.

        The thread that hears of closed pushes brings it back: it alone knows that it has heard all
        that the dead one said. Every other one waits here.
        """
        if threading.current_thread() is self._reviver:
            return self._gone(shard)
        with self._revived, self.stop.working():
            while (
                self.revival is not None
                and not self._closing.is_set()
                and not self.stop
                and self._lives[shard] == life
            ):
                self._revived.wait(0.1)
        return ServerRevivedError() if self._lives[shard] > life else self._gone(shard)

    def _revive(self, shard: int) -> None:
        """Raises what makes it impossible."""
        revival, why = self.revival, str(self._gone(shard))
        if revival is None or self._closing.is_set() or self.stop:
            raise self._gone(shard)
        if self._lives[shard] == MOST_REVIVALS:
            raise PeerError(f"{why}, for the {MOST_REVIVALS + 1}th time in this run")
        for role, rank, k in self._of_rank:
            if k == shard:
                self._of_rank[role, rank, k].close()
        if revival.restart is not None:
            revival.restart(shard)
        control = self._connect(shard, "control")
        if revival.saved is not None:
            fill(revival.saved(shard), partial(self._call_fresh, control, shard))
        heart = self._connect(shard, "heart")
        seats = {
            (role, rank): self._connect(shard, role, rank)
            for role in _RANK_ROLES
            for rank in self.ranks
        }
        lost = self.rejoin(Fresh(shard, seats, partial(self._call_fresh, control, shard)))
        with self._revived:
            self._controls[shard], self._hearts[shard] = control, heart
            self._of_rank |= {(role, r, shard): c for (role, r), c in seats.items()}
            self._lives[shard] += 1
            self._deaths.pop(shard, None)
            self._revived.notify_all()
        revival.told(f"{why}; it is back, and {lost} pushes of {self._who} are lost with it")

    def _call_fresh(
        self,
        control: Channel,
        shard: int,
        verb: str,
        given: Mapping[str, np.ndarray] | None = None,
        **asked: Any,
    ) -> dict[str, Any]:
        return self._call_on(control, shard, verb, given, asked)

    def _gone(self, shard: int) -> ServerGoneError:
        """Whoever notices first says who waited; those that notice later say the same."""
        with self._noticing:
            if shard not in self._deaths:
                waits = self._who_waits()
                self._deaths[shard] = f"{self._name(shard)} {self._how_it_ended(shard)}{waits}"
            return ServerGoneError(self._deaths[shard])

    def _name(self, shard: int) -> str:
        return f"embedding server {shard} (pid {self.pids[shard]})"

    @contextmanager
    def _waiting(self, text: str) -> Iterator[None]:
        key = threading.get_ident()
        outer = self._waits.get(key)
        self._waits[key] = text, time.monotonic()
        try:
            yield
        finally:
            if outer is None:
                self._waits.pop(key, None)
            else:
                self._waits[key] = outer

    def _who_waits(self) -> str:
        now = time.monotonic()
        found = [f"{text} since {clock(now - s)}" for text, s in list(self._waits.values())]
        return f"; {'; '.join(sorted(found))}" if found else ""

    def _beat(self, shard: int) -> None:
        """Signs of life to one server, and from it."""
        while not self._closing.is_set():
            channel, life = self._hearts[shard], self._lives[shard]
            idle = pack_fate(self.stop.only_waits())
            try:
                channel.send(Message(MessageKind.PING, body=idle))
                message, _ = channel.receive(_until(STUCK_S, shard))
                failed = unpack_json(message.body).get("failed")
                if failed:
                    raise PeerError(f"{failed}{self._who_waits()}")
            except PeerGoneError:
                found = self._after_death(shard, life)
                if isinstance(found, ServerGoneError):
                    if not self._closing.is_set():
                        self.stop.set(found)
                    return
            except TimeoutError:
                silent = f"has given no sign of life for {STUCK_S:.0f} s, since {clock(STUCK_S)}"
                stuck = f"{self._name(shard)} {silent}: it is stopped or stuck"
                self.stop.set(PeerError(f"{stuck}{self._who_waits()}"))
                return
            except (BadMessageError, PeerError) as error:
                self.stop.set(error)
            self._closing.wait(BEATS_EVERY_S)

    def _hear_closings(self) -> None:
        """One thread hears of all closed pushes, and brings back servers that have died."""
        with selectors.DefaultSelector() as selector:
            for shard in range(self.servers):
                self._listen_to(shard, selector)
            while selector.get_map():
                for key, _ in selector.select():
                    shard, rank, channel = key.data
                    if self._of_rank["pushes", rank, shard] is not channel:
                        continue  # of a life before
                    try:
                        try:
                            self._hear_closing(shard, channel)
                        except ServerGoneError:
                            self._hear_the_rest(shard, selector)
                            with self.stop.working():
                                self._revive(shard)
                            self._listen_to(shard, selector)
                    except BaseException as error:
                        if self._closing.is_set():
                            return
                        self.stop.set(error)

    def _listen_to(self, shard: int, selector: selectors.BaseSelector) -> None:
        for rank in self.ranks:
            channel = self._of_rank["pushes", rank, shard]
            selector.register(channel, selectors.EVENT_READ, (shard, rank, channel))

    def _hear_the_rest(self, shard: int, selector: selectors.BaseSelector) -> None:
        """What a dead server has said counts: rows may be read and written that it let go."""
        for rank in self.ranks:
            channel = self._of_rank["pushes", rank, shard]
            selector.unregister(channel)
            with suppress(PeerError, BadMessageError):
                while True:
                    self._hear_closing(shard, channel)

    def _hear_closing(self, shard: int, channel: Channel) -> None:
        message, descriptors = self._receive(channel, shard, self._lives[shard], stops=False)
        close_all(descriptors)
        if message.kind is MessageKind.FAILED:
            raise self._failure(message)
        self.on_closed(message.rank, message.step, shard)


def _until(seconds: float, shard: int) -> Callable[[], None]:
    """Raises TimeoutError when it is called later than that from now."""
    ends_s = time.monotonic() + seconds

    def goes_on() -> None:
        if time.monotonic() > ends_s:
            raise TimeoutError(f"embedding server {shard} has not answered for {seconds:.0f} s")

    return goes_on
