"""A rank's side of embedding workers that are processes of their own (paper, section 4.1)."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np

from runtime.data.batch import Batch
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import (
    Allocate,
    BatchPlan,
    ByTable,
    FieldVectors,
    Handle,
    VectorGradients,
)
from runtime.embedding.worker import EmbeddingWorker
from runtime.engines.clients.links import Links, named_ranks
from runtime.engines.clients.remote_store import RemoteStore
from runtime.engines.servers.launch import Address
from runtime.engines.transport.calls import Said, ask, goodbye, said_in, send_said
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.messages import RANK_ROLES, Message, MessageKind, error_from
from runtime.engines.transport.peers import Waits, come_in
from runtime.engines.transport.wire import PeerGoneError
from runtime.stop import PeerError, RunStopped, Stop

_NO_ROWS = BatchPlan(
    {}, np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros((0, 3), np.int64),
    np.zeros((0, 1), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64),
    np.zeros((2, 1), np.int64),
)  # fmt: skip


@dataclass(slots=True)
class Ticket(Handle):
    """A batch whose rows are at a worker; here are its vectors."""

    vectors: FieldVectors | None = None


class WorkerLinks:
    """What the ranks of one process say to their workers, and hear from them: rank r has worker
    r mod E. A stopped worker, or one that has died, the servers notice and tell."""

    def __init__(
        self,
        address: Address,
        ranks: Sequence[int],
        waits: Waits,
        how_it_ended: Callable[[int], str],
    ) -> None:
        """Connect; ``how_it_ended`` says of a dead worker what its launcher knows."""
        self.stop = Stop()
        self.on_closed: Callable[[int, int], None] = lambda rank, step: None
        """Called with (rank, step) when all servers have closed a push."""
        self._address, self._waits, self._how_it_ended = address, waits, how_it_ended
        self._closing = threading.Event()
        self._channels = {
            (role, rank): self._connect(role, rank) for rank, role in product(ranks, RANK_ROLES)
        }
        self._one_of_each = {self._worker_of(rank): rank for rank in ranks}.values()
        self._threads = [
            threading.Thread(target=self._hear, args=(rank,), name="closings", daemon=True)
            for rank in ranks
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, role: str, rank: int, verb: str, /, **asked: Any) -> Said:
        """Raises what the worker failed with, PeerError when it has gone, RunStopped."""
        text = f"rank {rank} waits for {verb} of {self._name(rank)}"
        try:
            with self._waits.waiting(text), self.stop.waiting_elsewhere():
                return ask(self._channels[role, rank], verb, self.stop.check, **asked)
        except PeerGoneError:
            raise self._gone(rank) from None

    def ask_each(self, verb: str, **asked: Any) -> None:
        """Ask every worker of these ranks, between batches."""
        for rank in self._one_of_each:
            self.ask("prefetches", rank, verb, **asked)

    def push(self, rank: int, **asked: Any) -> None:
        """Send; that it is closed, or why it cannot be, is heard later."""
        send = partial(self._channels["pushes", rank].send, within_s=inf, goes_on=self.stop.check)
        try:
            send_said(send, Message(MessageKind.CALL), {"verb": "push", "rank": rank, **asked})
        except PeerGoneError:
            raise self._gone(rank) from None

    def close(self) -> None:
        """Say goodbye."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for channel in self._channels.values():
            goodbye(channel, within_s=0.2)

    def _connect(self, role: str, rank: int) -> Channel:
        k, who = self._worker_of(rank), {"ranks": named_ranks([rank]), "pid": os.getpid()}
        name, secret = self._address.names[k], self._address.secrets[k]
        return come_in(name, self._name(rank), secret, {"role": role, **who}, rank)

    def _hear(self, rank: int) -> None:
        channel = self._channels["pushes", rank]
        try:
            while True:
                message, segment = channel.receive(self._still_open)
                if message.kind is MessageKind.FAILED:
                    raise error_from(said_in(message, segment))
                if message.kind is MessageKind.CLOSED:
                    self.on_closed(message.rank, message.step)
        except RunStopped:
            pass
        except PeerGoneError:
            self.stop.set(self._gone(rank))
        except BaseException as error:
            self.stop.set(error)

    def _still_open(self) -> None:
        if self._closing.is_set():
            raise RunStopped

    def _worker_of(self, rank: int) -> int:
        return rank % len(self._address.names)

    def _name(self, rank: int) -> str:
        k, pids = self._worker_of(rank), self._address.pids
        return f"embedding worker {k}" + (f" (pid {pids[k]})" if pids else "")

    def _gone(self, rank: int) -> PeerError:
        how = self._how_it_ended(self._worker_of(rank))
        return PeerError(f"{self._name(rank)} {how}{self._waits.told()}")


class StoreApart(RemoteStore):
    """As an `EmbeddingStore`: what is rare goes to the servers from here, batches by workers."""

    def __init__(
        self, links: Links, workers: WorkerLinks, close: Callable[[], None], **given: Any
    ) -> None:
        """``given`` as to a `RemoteStore`."""
        super().__init__(links=links, segments=0, close=partial(_close, workers, close), **given)
        self._workers, self._open = workers, set[tuple[int, int]]()
        self._told: Callable[[str], None] = lambda text: None
        workers.stop = self._stop
        own = weakref.WeakMethod(self._closed_at_all)
        workers.on_closed = lambda rank, step: _call(own, rank, step)

    def begin(self, rank: int, step: int, batch: Batch) -> Ticket:
        """Duplicates are merged at the worker."""
        return Ticket(rank, step, batch, _NO_ROWS, ByTable(np.zeros(0), _NO_ROWS, wide=True))

    def look_up(self, handle: Handle) -> None:
        """Have the worker read the rows, when window and order allow it, and pool them."""
        self._take(handle, self._ask_for(handle, "lookups", ahead=False))

    def look_up_ahead(self, handle: Handle) -> None:
        """A prefetch of lookahead, to the worker."""
        self._ask_for(handle, "prefetches", ahead=True)

    def bring_up_to_date(self, handle: Handle) -> None:
        """Have the worker replace what was written since its prefetch, and pool."""
        rank, step = handle.rank, handle.step
        asked = {"rank": rank, "step": step}
        self._take(handle, self._workers.ask("lookups", rank, "bring_up_to_date", **asked))

    def push(self, ticket: Handle, *, lost: bool, factor: float = 1.0, **vectors: Any) -> None:
        """Give the worker the vectors' gradients; without any the batch had no samples."""
        rank, step = ticket.rank, ticket.step
        with self._changed:
            self._open.add((rank, step))
        self._workers.push(rank, step=step, lost=lost, factor=factor, **vectors)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        self._workers.ask("prefetches", rank, "finish", rank=rank, steps=steps)

    def drain(self) -> None:
        """Return when every push of this process is closed at every server."""
        with self._changed, self._stop.waiting_elsewhere():
            self._changed.wait_until(
                lambda: not self._open,
                self._stop,
                lambda: f"batches {sorted(self._open)} wait for their pushes to be closed",
            )

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        super().begin_run(rules, stop)
        self._open.clear()
        self._workers.stop = stop
        self._workers.ask_each("begin_run")

    def note_leg(self, first_steps: Sequence[int]) -> None:
        """A server that comes back is told of this leg, not of the one before."""
        self._workers.ask_each("note_leg", first_steps=list(first_steps))

    def let_servers_come_back(self, saved: Any, told: Callable[[str], None]) -> None:
        """The workers wait for them and say what is open."""
        super().let_servers_come_back(saved, told)
        self._told = told
        self._workers.ask_each("let_servers_come_back")

    def _ask_for(self, handle: Handle, role: str, *, ahead: bool) -> Said:
        batch = handle.batch
        bags = {} if batch.offsets is None else {"offsets": batch.offsets}
        return self._workers.ask(
            role, handle.rank, "look_up", rank=handle.rank, step=handle.step, ids=batch.ids,
            samples=batch.size, ahead=ahead, **bags,
        )  # fmt: skip

    def _take(self, handle: Handle, said: Mapping[str, Any]) -> None:
        assert isinstance(handle, Ticket)
        arrays = dict(said)
        for text in arrays.pop("told"):
            self._told(text)
        for shard, seconds in arrays.pop("waited"):
            self.waited_s[handle.rank, shard] = seconds
        handle.vectors = FieldVectors.of_named(arrays)

    def _closed_at_all(self, rank: int, step: int) -> None:
        for _ in range(self.shards):
            self._on_closed(rank, step)
        with self._changed:
            self._open.discard((rank, step))
            self._changed.notify_all()


class WorkerApart(EmbeddingWorker):
    """As an `EmbeddingWorker`, whose sums are done elsewhere; evaluation pools here."""

    store: StoreApart

    def pool(self, ticket: Handle, allocate: Allocate | None = None) -> FieldVectors:
        """The fields' vectors, where ``allocate`` wants them."""
        if not isinstance(ticket, Ticket):
            return super().pool(ticket, allocate)
        found, ticket.vectors = ticket.vectors, None
        assert found is not None
        if not self._live_row_seen:
            self._live_row_seen = bool(found.pooled.any()) or _any(found.sequences)
        if allocate is None:
            return found
        moved = {name: _moved(a, allocate) for name, a in found.sequences.items()}
        return FieldVectors(_moved(found.pooled, allocate), moved, found.masks)

    def give_back(self, ticket: Handle, gradients: VectorGradients | None) -> None:
        """Give the worker the gradients."""
        if gradients is None:
            return self.store.push(ticket, lost=False)
        with gradients.held:
            gradients.arrived()
            given = gradients.vectors
            if not self.row_gradient_seen:
                self.row_gradient_seen = bool(given.pooled.any()) or _any(given.sequences)
            self.store.push(ticket, lost=False, factor=gradients.factor, **given.named())

    def give_up(self, ticket: Handle, gradients: VectorGradients | None) -> None:
        """Have the worker close the ticket's step without its gradients."""
        if gradients is not None:
            gradients.held.close()
        self.store.push(ticket, lost=True)


def _any(arrays: Mapping[str, np.ndarray]) -> bool:
    return any(bool(array.any()) for array in arrays.values())


def _moved(array: np.ndarray, allocate: Allocate) -> np.ndarray:
    found = allocate(array.shape, array.dtype)
    found[...] = array
    return found


def _call(method: weakref.WeakMethod[Callable[..., Any]], *told: Any) -> None:
    """Not kept alive by the threads that listen."""
    if (found := method()) is not None:
        found(*told)


def _close(workers: WorkerLinks, close: Callable[[], None]) -> None:
    workers.close()
    close()
