"""A rank's side of embedding workers that are processes of their own (paper, section 4.1)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from persia_sim.base.vocabulary import ALL
from runtime.data.batch import Batch
from runtime.embedding.batch_rows import (
    Allocate,
    BatchPlan,
    ByTable,
    FieldVectors,
    Handle,
    VectorGradients,
)
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.worker import EmbeddingWorker
from runtime.engines.rows.client import Links
from runtime.engines.rows.connections import Life, ServerRevivedError
from runtime.engines.rows.failover import Revival
from runtime.engines.rows.remote_store import RemoteStore, call_living
from runtime.engines.wire.calls import Said, said_in, send_said
from runtime.engines.wire.messages import Message, MessageKind
from runtime.stop import Stop

_NO_ROWS = BatchPlan(
    {}, np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros((0, 3), np.int64),
    np.zeros((0, 1), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64),
    np.zeros((2, 1), np.int64),
)  # fmt: skip


@dataclass(slots=True)
class Ticket(Handle):
    """A batch whose rows are at a worker; here are its vectors."""

    vectors: FieldVectors | None = None


class WorkerLinks(Links):
    """What the ranks of one process say to their workers, and hear from them: rank r has worker
    r mod E."""

    role = "worker"
    _numbers = count(1)

    def ranks_of(self, shard: int) -> tuple[int, ...]:
        """Those of this process that a worker has."""
        return tuple(rank for rank in self.ranks if rank % self.servers == shard)

    def of(self, rank: int) -> Life:
        """The present life of a rank's worker."""
        return self.at(rank % self.servers)

    def ask(self, role: str, rank: int, verb: str, /, **asked: Any) -> tuple[Life, Said]:
        """What a rank's worker answers, in which life; again where it dies meanwhile and comes
        back. Raises what the worker failed with, PeerError when it has gone, RunStopped."""
        text = f"rank {rank} waits for {verb} of {self.name(rank % self.servers)}"
        while True:
            life, number = self.of(rank), next(self._numbers)
            with suppress(ServerRevivedError):
                self.say(life, role, rank, {"verb": verb, "rank": rank, **asked}, number)
                with self.waits.waiting(text), self.stop.waiting_elsewhere():
                    found = self.receive(
                        life.channels[role, rank], life,
                        awaited=lambda m, n=number: m.number in (0, n),  # type: ignore[misc]
                    )  # fmt: skip
                return life, said_in(*found)

    def say(self, life: Life, role: str, rank: int, said: Said, number: int = 0) -> None:
        """Ask for no answer, or for one of this ``number``. Raises as `send`."""
        send = partial(self.send, role, life.shard, life=life)
        send_said(send, Message(MessageKind.CALL, rank, number=number), said)

    def ask_each(self, verb: str, **asked: Any) -> None:
        """Ask every worker of these ranks, between batches."""
        for shard in range(self.servers):
            if self.ranks_of(shard):
                self.call(shard, verb, **asked)


class StoreApart(RemoteStore):
    """As an `EmbeddingStore`: what is rare goes to the servers from here, batches by workers."""

    def __init__(
        self,
        links: Links,
        workers: WorkerLinks,
        close: Callable[[], None],
        restart_worker: Callable[[int], None] | None,
        **given: Any,
    ) -> None:
        """``given`` as to a `RemoteStore`; ``restart_worker`` as ``restart`` there."""
        super().__init__(links=links, segments=0, close=partial(_close, workers, close), **given)
        self._workers, self._restart_worker = workers, restart_worker
        self._open: set[tuple[int, int]] = set()
        """Batches whose vectors are here, or were, and whose pushes are not closed."""
        self._told: Callable[[str], None] = lambda text: None
        workers.stop = self._stop
        closed, again = weakref.WeakMethod(self._closed_at_all), weakref.WeakMethod(self._goes_on)
        workers.on_closed = lambda rank, step, worker: call_living(closed, rank, step)
        workers.rejoin = lambda life: call_living(again, life) or 0

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
        self._take(handle, self._workers.ask("lookups", rank, "bring_up_to_date", step=step)[1])

    def push(self, ticket: Handle, *, lost: bool, factor: float = 1.0, **vectors: Any) -> None:
        """Give the worker the vectors' gradients; without any the batch had no samples. Of a worker
        that has died the push is closed already."""
        rank, step = ticket.rank, ticket.step
        said = {"verb": "push", "rank": rank, "step": step, "lost": lost, "factor": factor}
        while True:
            life = self._workers.of(rank)
            with self._changed:
                if (rank, step) not in self._open:
                    return
            with suppress(ServerRevivedError):
                return self._workers.say(life, "pushes", rank, said | vectors)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        with self._changed:
            self._finished[rank] = steps
        self._workers.ask("prefetches", rank, "finish", steps=steps)

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        super().begin_run(rules, stop)
        self._open.clear()
        self._workers.stop = stop
        self._workers.ask_each("begin_run")

    def note_leg(self, first_steps: Sequence[int]) -> None:
        """A server, or worker, that comes back is told of this leg, not of the one before."""
        super().note_leg(first_steps)
        self._workers.ask_each("note_leg", first_steps=list(first_steps))

    def let_servers_come_back(self, saved: Any, report: Callable[[str], None]) -> None:
        """Workers, too, and these wait for servers and say what is open."""
        super().let_servers_come_back(saved, report)
        self._told = report
        self._workers.revival = Revival(self._restart_worker, None, report)

    def _ask_for(self, handle: Handle, role: str, *, ahead: bool) -> Said:
        batch, key = handle.batch, (handle.rank, handle.step)
        bags = {} if batch.offsets is None else {"offsets": batch.offsets}
        while True:
            life, said = self._workers.ask(
                role, handle.rank, "look_up", step=handle.step, ids=batch.ids,
                samples=batch.size, ahead=ahead, **bags,
            )  # fmt: skip
            with self._changed:
                if life.is_over:
                    continue
                self._open.add(key)
                self._begun[handle.rank] = handle.step + 1
            return said

    def _goes_on(self, life: Life) -> int:
        """Tell a worker that has come back how many steps of its ranks have begun: what is open of
        them is lost, and closed. How many pushes are."""
        ranks, lost = self._workers.ranks_of(life.shard), 0
        with self._changed:
            self._workers.at(life.shard).is_over = True
            known = [(r, self._begun.get(r, 0), self._finished.get(r)) for r in ranks]
            closed = [(rank, step) for rank, step in self._open if rank in ranks]
        for rank, begun, finished in known:
            said: Said = {"rank": rank, "begun": begun, "finished": finished}
            control = life.channels["control", ALL]
            lost += int(self._workers.call_on(control, life, "rejoin", **said)["lost"])
        for rank, step in closed:
            self._closed_at_all(rank, step)
        return lost

    def _take(self, handle: Handle, said: Mapping[str, Any]) -> None:
        assert isinstance(handle, Ticket)
        arrays = dict(said)
        for text in arrays.pop("told"):
            self._told(text)
        for shard, seconds in arrays.pop("waited"):
            self.waited_s[handle.rank, shard] = seconds
        handle.vectors = FieldVectors.of_named(arrays)

    def _closed_at_all(self, rank: int, step: int) -> None:
        """By the one thread that hears of it; of a worker that has died, perhaps once more."""
        if (rank, step) not in self._open:
            return
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


def _close(workers: WorkerLinks, close: Callable[[], None]) -> None:
    workers.close()
    close()
