"""Ranks that are processes: how they agree, wait for each other, and say who is missing.

Tensors travel by torch.distributed; words (what was asked for, heartbeats, who is done) by its
store. Nobody waits for ever: a wait ends when the run stops, when a connection breaks, or when a
rank that is waited for has sent no heartbeat for a while.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.hosts.torchrun import address_towards, interface_of
from runtime.hosts.wire.peers import crowding
from runtime.stop import PeerError, RunStopped, Silence, Stop

BEAT_S = 2.0
"""Seconds between two signs of life."""
SILENCE_S = 30.0
"""A rank that is waited for and has given no sign of life for so long is called missing; on a
crowded host it may take longer (`crowding`)."""
JOIN_S = 300.0
"""How long the ranks may be apart when they start: loading torch and data takes its time."""
_LOOK_S = 1.0
_T = TypeVar("_T")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_NEVER = timedelta(days=1)  # our own waits are shorter, and can say more than torch's
_Seen = dict[int, tuple[str, Silence]]
"""During one wait, the last sign of life of each rank."""


class _Here(NamedTuple):
    """What the ranks must know of one before they connect."""

    pid: int
    host: str
    address: str
    """Address of its host, on the route to the store."""
    gpu: str = ""
    """The GPU of its tensors, known by the same name to all who use it; empty: the CPU, or a torch
    without NCCL."""


def gpu_of(device: torch.device) -> str:
    """The name of a GPU whose tensors NCCL can carry, whatever number it has in a process."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    number = torch.cuda.current_device() if device.index is None else device.index
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", number))


def backend_of(all_here: Sequence[_Here]) -> Literal["nccl", "gloo"]:
    """NCCL where each rank has a GPU to itself: it refuses two on one.

    >>> ranks = [_Here(1, "a", "10.0.0.1", "GPU-1"), _Here(2, "a", "10.0.0.1", "GPU-2")]
    >>> backend_of(ranks), backend_of([ranks[0], ranks[0]._replace(pid=2)])
    ('nccl', 'gloo')
    """
    gpus = {(one.host, one.gpu) for one in all_here if one.gpu}
    return "nccl" if len(gpus) == len(all_here) else "gloo"


class Heard:
    """A store of torch.distributed, whose holder (torchrun, or rank 0) may go, or be cut off: then
    torch itself would wait for minutes, so a thread asks, and its answer is waited for here."""

    def __init__(
        self, store: Any, rank: int, silence_s: float, goes_on: Callable[[], None]
    ) -> None:
        """``goes_on`` is called while an answer is waited for, and may raise; who closes it closes
        no store."""
        self._store = store
        self._rank = rank
        self._silence_s = silence_s
        self._goes_on = goes_on
        self._asked = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        threading.Thread(target=self._ask_in_turn, name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Let all ranks find it."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """What was set, which is there."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def check(self, keys: list[str]) -> bool:
        """Whether all are set."""
        return bool(self._ask(lambda: self._store.check(keys)))

    def add(self, key: str, number: int) -> int:
        """Count on, and how far that is now."""
        return int(self._ask(lambda: self._store.add(key, number)))

    def close(self) -> None:
        """No more is asked."""
        self._asked.put(None)

    def _ask(self, ask: Callable[[], _T]) -> _T:
        # A thread asks torch's store, which blocks; this one looks whether the launcher is alive.
        answer = Future[_T]()
        silence = Silence()
        self._asked.put((ask, answer))
        while True:
            try:
                return answer.result(timeout=0.2)
            except TimeoutError:
                self._goes_on()
                patience_s = self._silence_s * crowding(1)
                if silence.look() > patience_s:
                    why = f"has not answered rank {self._rank} for {patience_s:.0f} s"
                    break
            except RuntimeError:  # of torch's store, whose words name a socket
                why = "is gone"
                break

        # Without the launcher the ranks cannot agree on anything.
        raise PeerError(
            f"the launcher of rank {self._rank} {why}, and the ranks cannot agree without it;"
            " start torchrun again, with --resume if the run has a checkpoint"
        )

    def _ask_in_turn(self) -> None:
        for ask, answer in iter(self._asked.get, None):
            _answer(answer, ask)


def answered(ask: Callable[[], _T], within_s: float) -> _T:
    """What a call of torch gives that cannot be left, or TimeoutError: it goes on in a thread."""
    answer = Future[_T]()
    threading.Thread(target=_answer, args=(answer, ask), name="torch", daemon=True).start()
    return answer.result(within_s)


def _answer(answer: Future[_T], ask: Callable[[], _T]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:
        answer.set_exception(error)


class RankGroup:
    """All ranks of a run, seen from one of them."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: Any,
        device: torch.device,
        *,
        towards: str = "127.0.0.1",
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        join_s: float = JOIN_S,
    ) -> None:
        """Wait until all ranks are here, and connect them. Closed by `close`.

        NCCL carries the tensors where each rank has a GPU to itself, else gloo. ``towards``: the
        host of the store; gloo's tensors take the interface of that route.
        """
        self.rank = rank
        self.ranks = ranks
        self.status = "starts"
        """What this rank does; part of its sign of life."""
        self.legs_ended = 0
        """How many legs it has ended: who has ended more of them than another one sends it no
        more gradients."""
        self.places: dict[int, str] = {}
        """Each rank with its process and host, in words, once all are here."""
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._ranks_here = 1
        self._stop = Stop()
        self._store = Heard(store, rank, silence_s, self._go_on)
        self._torch: Any = None  # torch's own group of all ranks
        self._refuses_ended = True
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._beating.start()
        try:
            here = _Here(os.getpid(), platform.node(), address_towards(towards), gpu_of(device))
            gathered = self.gather("here", json.dumps(here), patience_s=join_s)
            all_here = [_Here(*json.loads(text)) for text in gathered]
            self.places = {r: f"rank {r} (pid {o.pid}, {o.host})" for r, o in enumerate(all_here)}
            self._ranks_here = sum(one.host == here.host for one in all_here)
            self.address = here.address
            """Address of this host, where the others reach it; its name may be of any NIC."""
            # On the store's own host the route to it may be the loopback device, where other hosts
            # do not come: then it is the route to one of those.
            away = [one.address for one in all_here if not one.address.startswith("127.")]
            if away and self.address.startswith("127."):
                self.address = address_towards(away[0])
            backend = backend_of(all_here)
            self.interface = os.environ.get(_INTERFACE) or interface_of(self.address)
            of_tensors = dist.PrefixStore("tensors", store)  # type: ignore[attr-defined]
            self._join_s = join_s
            joined = partial(dist.init_process_group, backend, store=of_tensors, timeout=_NEVER)
            self._joined(partial(joined, rank=rank, world_size=ranks))
        except BaseException:
            self._closed.set()
            raise
        self.wire = device if backend == "nccl" else torch.device("cpu")
        """Where tensors must lie to travel."""

    def beside(self) -> RankGroup:
        """A group of these ranks with separate connections, for a thread beside training, from the
        CPU; all ranks call it. There ranks meet that have ended a leg, too."""
        other = copy.copy(self)
        other._torch = self._joined(partial(dist.new_group, backend="gloo", timeout=_NEVER))
        other.wire = torch.device("cpu")
        other._refuses_ended = False
        return other

    def _joined(self, connect: Callable[[], _T]) -> _T:
        """What connects the ranks for tensors, which torch cannot leave again: in a thread, while
        this one looks whether the others are there."""
        # torch connects in a thread that is left behind if it never ends.
        connection = Future[_T]()
        is_theirs = _INTERFACE in os.environ
        os.environ[_INTERFACE] = self.interface  # meanwhile: the next group may have another one
        threading.Thread(
            target=_answer, args=(connection, connect), name="connect", daemon=True
        ).start()

        # Meanwhile look whether the other ranks are alive: one that died would be waited for in
        # vain.
        began = time.monotonic()
        seen = _Seen()
        try:
            while time.monotonic() - began < self._join_s:
                try:
                    return connection.result(_LOOK_S)
                except TimeoutError:
                    self._look_around("the connections for tensors", began, seen)
        finally:
            if not is_theirs:
                del os.environ[_INTERFACE]

        # Time is up though all live: the network is at fault.
        at = f"{self.rank} by the interface {self.interface}"
        raise PeerError(
            f"the ranks have not connected for tensors within {self._join_s:.0f} s, from rank {at}:"
            " is a firewall between them, or is it another one?"
        )

    def attach(self, stop: Stop) -> None:
        """This run is stopped when the launcher is gone."""
        self._stop = stop

    def fail(self, error: BaseException) -> None:
        """Stop this rank's run for what a thread beside it has met; the first error is told."""
        self._stop.set(error)

    def close(self) -> None:
        """Leave the group. The other ranks need not be there."""
        if not self._closed.is_set():
            self._closed.set()
            self._beating.join()
            self._store.close()
            dist.destroy_process_group()

    def all_reduce(self, buffer: Tensor) -> dist.Work:
        """Start to add up the ranks' buffers, in place; every rank ends with the same bytes."""
        start = partial(dist.all_reduce, buffer, group=self._torch, async_op=True)
        return self._or_lost(start)

    def all_gather(self, buffer: Tensor) -> tuple[dist.Work, Tensor]:
        """Start to collect the ranks' buffers: [ranks, n]."""
        rows = buffer.new_empty((self.ranks, *buffer.shape))
        parts = list(rows.unbind(0))
        start = partial(dist.all_gather, parts, buffer, group=self._torch, async_op=True)
        return self._or_lost(start), rows

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the bytes of rank 0."""
        carried = tensor.detach().to(self.wire)
        self.wait(self._or_lost(lambda: dist.broadcast(carried, 0, async_op=True)), "weights")
        with torch.no_grad():
            tensor.copy_(carried)

    def wait(self, work: dist.Work, what: str) -> None:
        """Return when it is done.

        Raises PeerError naming a rank that will not come, RunStopped when the run stops.
        """
        began = time.monotonic()
        seen = _Seen()
        while True:
            try:
                if self.wire.type == "cuda":  # NCCL's own wait cannot be left again
                    self._poll(work)
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise self._lost(error) from None
            self._look_around(what, began, seen)

    def gather(
        self, name: str, text: str, stop: Stop | None = None, *, patience_s: float | None = None
    ) -> list[str]:
        """The words of all ranks under one name, which is used once, in rank order.

        ``patience_s``: how long to wait for ranks that have given no sign of life at all.
        """
        # Say our word, and wait for those of the others.
        self._store.set(f"{name}/{self.rank}", text)
        began = time.monotonic()
        apart = Silence()
        seen = _Seen()
        keys = [f"{name}/{rank}" for rank in range(self.ranks)]
        pause_s = 0.002
        while missing := [r for r, key in enumerate(keys) if not self._store.check([key])]:
            # Looks become rarer; a rank that shows no sign of life is given up.
            self._go_on()
            if stop is not None:
                stop.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
            if patience_s is None:
                self._refuse_silent(name, began, missing, seen)
            elif apart.look() > patience_s:
                raise PeerError(self._sentence(missing, name, began, "they have not started"))
        return [self._store.get(key).decode() for key in keys]

    def give_up(self, name: str) -> None:
        """Have the others find no word of this rank under a name that all `gather`, and go on."""
        self._store.set(f"{name}/{self.rank}", "")

    def say(self, name: str) -> None:
        """Let all ranks know."""
        self._store.set(name, "")

    def is_announced(self, name: str) -> bool:
        """Whether any rank has said it."""
        return self._store.check([name])

    def agree(self, name: str, facts: Mapping[str, object]) -> None:
        """Raise ValueError, at every rank, when the ranks' facts are not the same."""
        of_ranks = [json.loads(text) for text in self.gather(name, json.dumps(facts))]
        for rank, others in enumerate(of_ranks):
            for key in sorted(of_ranks[0].keys() | others.keys()):
                here = others.get(key)
                there = of_ranks[0].get(key)
                if here != there:
                    raise ValueError(
                        f"{key} is {here} at rank {rank} and {there} at rank 0;"
                        " start all ranks with the same command, data and versions"
                    )

    def _or_lost(self, start: Callable[[], dist.Work]) -> dist.Work:
        try:
            return start()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> PeerError:
        text = str(error).splitlines()[0]
        return PeerError(
            f"rank {self.rank} has lost the connection to another rank, which ended before the"
            f" run did; what that one says comes first ({text})"
        )

    def _poll(self, work: dist.Work) -> None:
        """Wait for a GPU's work as long as one look around."""
        until = time.monotonic() + _LOOK_S
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("Operation timed out")
            time.sleep(0.0001)

    def _look_around(self, what: str, began: float, seen: _Seen) -> None:
        """While waiting for tensors: refuse to wait for a rank that will send none."""
        self._go_on()
        if time.monotonic() - began < 2 * self._beat_s:
            return
        others = [r for r in range(self.ranks) if r != self.rank]
        self._refuse_silent(what, began, others, seen)
        for rank in others:
            # A sign of life may be old: behind a cut it still says that a leg before is over.
            legs_ended, status = self._beat_of(rank)
            if legs_ended > self.legs_ended and self._refuses_ended:
                raise PeerError(self._sentence([rank], what, began, status))

    def _go_on(self) -> None:
        """Raise why the run has stopped, if it has."""
        if self._stop and self._stop.error is not None:
            raise self._stop.error
        self._stop.check()

    def _refuse_silent(self, what: str, began: float, ranks: list[int], seen: _Seen) -> None:
        for rank in ranks:
            sign = self._sign_of(rank)
            if rank not in seen or seen[rank][0] != sign:
                seen[rank] = sign, Silence()
            patience_s = self._silence_s * crowding(self._ranks_here)
            if seen[rank][1].look() > patience_s:
                last = self._beat_of(rank)[1] or "nothing"
                why = f"silent for {patience_s:.0f} s; the last that it said was: {last}"
                raise PeerError(self._sentence([rank], what, began, why))

    def _sign_of(self, rank: int) -> str:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _beat_of(self, rank: int) -> tuple[int, str]:
        """How many legs a rank has ended, and what it does, as its last sign of life says."""
        _, legs_ended, status = [*self._sign_of(rank).split(" ", 2), "", ""][:3]
        return int(legs_ended or 0), status

    def _sentence(self, ranks: list[int], what: str, began: float, why: str) -> str:
        waited_s = time.monotonic() - began
        return (
            f"rank {self.rank} has waited {waited_s:.0f} s for the {what} of"
            f" {', '.join(self.places.get(rank, f'rank {rank}') for rank in ranks)}: {why}"
        )

    def _beat(self) -> None:
        number = 0
        while not self._closed.is_set():
            number += 1
            try:
                self._store.set(f"beat/{self.rank}", f"{number} {self.legs_ended} {self.status}")
            except (PeerError, RunStopped) as error:
                self.fail(error)
                return
            self._closed.wait(self._beat_s)
