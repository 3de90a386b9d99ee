"""A rank's side of embedding workers that are processes of their own (paper, section 4.1)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

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
from runtime.hosts.pooling.worker_calls import WorkerCalls
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.connections import Incarnation, ServerRestoredError
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.remote_store import RemoteStore, call_living
from runtime.hosts.wire.calls import Method, Payload, R, payload_of, send_call
from runtime.hosts.wire.messages import Message, MessageKind
from runtime.stop import Stop

_NO_ROWS = BatchPlan(
    {},
    np.zeros(0, np.int64),
    np.zeros(0, np.uint64),
    np.zeros((0, 3), np.int64),
    np.zeros((0, 1), np.int64),
    np.zeros(0, np.int32),
    np.zeros(0, np.int64),
    np.zeros((2, 1), np.int64),
)


@dataclass(slots=True)
class RemoteHandle(Handle):
    """A batch whose rows are at a worker; here are its vectors."""

    vectors: list[FieldVectors] = field(default_factory=list)
    """One; two where tables are fresh: those of the others come before those of theirs."""


class WorkerClient(ServerClient):
    """What the ranks of one process send to their workers, and receive from them.

    Rank r has worker r mod E.
    """

    role = "worker"

    def ranks_of(self, shard: int) -> tuple[int, ...]:
        """Ranks of this process that a worker has."""
        return tuple(rank for rank in self.ranks if rank % self.servers == shard)

    def of(self, rank: int) -> Incarnation:
        """The present incarnation of a rank's worker."""
        return self.at(rank % self.servers)

    def request(
        self, role: str, rank: int, method: Method[..., R], /, **arguments: Any
    ) -> tuple[Incarnation, R]:
        """Call a rank's worker; in which incarnation it answered, and the result.

        Calls again where it dies meanwhile and comes back. Raises what the worker failed with,
        PeerError when it has gone, RunStopped.
        """
        while True:
            worker = self.of(rank)
            number = next(self.numbers)
            with suppress(ServerRestoredError):
                self.send_to(worker, role, rank, method, {"rank": rank, **arguments}, number)
                return worker, self.answer_of(worker, role, rank, method, number)

    def answer_of(
        self, worker: Incarnation, role: str, rank: int, method: Method[..., R], number: int
    ) -> R:
        """The result of the call of that ``number``, which was sent to this incarnation.

        Raises as `request`, and ServerRestoredError where it has died and is back.
        """
        text = f"rank {rank} waits for {method.__name__} of {self.name_with_pid(worker.shard)}"
        with self.waits.waiting(text), self.stop.waiting_elsewhere():
            message, segment = self.receive(
                worker.channels[role, rank], worker, awaited=partial(_answers, number)
            )
        return cast(R, payload_of(message, segment))

    def send_to(
        self,
        worker: Incarnation,
        role: str,
        rank: int,
        method: Callable[..., Any],
        arguments: Payload,
        number: int = 0,
    ) -> None:
        """Call without an answer, or for one of this ``number``. Raises as `send`."""
        send = partial(self.send, role, worker.shard, server=worker)
        send_call(send, Message(MessageKind.CALL, rank, number=number), method, arguments)

    def call_each(self, method: Method[..., R], **arguments: Any) -> None:
        """Call every worker of these ranks, between batches."""
        called = [shard for shard in range(self.servers) if self.ranks_of(shard)]
        self.call_all(method, dict.fromkeys(called, arguments))


def _answers(number: int, message: Message) -> bool:
    """Whether it answers the call of that number; an error may be of all calls."""
    return message.number in (0, number)


class RemoteWorkerStore(RemoteStore):
    """An `EmbeddingStore` whose batches go by workers; rare calls go to the servers from here."""

    def __init__(
        self,
        client: ServerClient,
        workers: WorkerClient,
        close: Callable[[], None],
        restart_worker: Callable[[int], None] | None,
        workers_may_return: bool,
        **given: Any,
    ) -> None:
        """``given`` as to a `RemoteStore`; ``restart_worker`` as ``restart`` there,
        ``workers_may_return`` as of `SyncConfig`."""
        super().__init__(client=client, segments=0, close=partial(_close, workers, close), **given)
        self._workers = workers
        self._restart_worker = restart_worker
        self._workers_may_return = workers_may_return
        self._open: set[tuple[int, int]] = set()
        """Batches whose vectors are here, or were, and whose pushes are not closed."""
        self._numbers: dict[tuple[str, int, int], int] = {}
        """Of the calls for lookups that are not answered, by role, rank and step."""
        self._report: Callable[[str], None] = lambda text: None
        workers.stop = self._stop
        closed = weakref.WeakMethod(self._closed_at_all)
        rejoin = weakref.WeakMethod(self._go_on_with)
        workers.on_closed = lambda rank, step, worker: call_living(closed, rank, step)
        workers.rejoin = lambda worker: call_living(rejoin, worker) or 0

    def begin(self, rank: int, step: int, batch: Batch) -> RemoteHandle:
        """Duplicates are merged at the worker."""
        return RemoteHandle(rank, step, batch, _NO_ROWS, ByTable(np.zeros(0), _NO_ROWS, wide=True))

    def ask(self, handle: Handle) -> None:
        """Send off what `look_up` waits for."""
        self._ask_worker(handle, self._look_ups)

    def ask_ahead(self, handle: Handle) -> None:
        """Send off what `look_up_ahead` waits for."""
        self._ask_worker(handle, "prefetches")

    def look_up(self, handle: Handle) -> None:
        """Have the worker read the rows, when window and order allow it, and pool them."""
        self._take(handle, self._looked_up(handle, self._look_ups))

    def look_up_ahead(self, handle: Handle) -> None:
        """A prefetch of lookahead, to the worker."""
        self._looked_up(handle, "prefetches")

    def bring_up_to_date(self, handle: Handle) -> None:
        """Have the worker replace what was written since its prefetch, and pool it."""
        method = WorkerCalls.bring_up_to_date
        _, vectors = self._workers.request("lookups", handle.rank, method, step=handle.step)
        self._take(handle, vectors)

    def push(self, handle: Handle, *, lost: bool, factor: float = 1.0, **vectors: Any) -> None:
        """Give the worker the vectors' gradients; without any the batch had no samples. Of a worker
        that has died the push is closed already."""
        rank = handle.rank
        step = handle.step
        arguments = {"rank": rank, "step": step, "lost": lost, "factor": factor, **vectors}
        while True:
            worker = self._workers.of(rank)
            with self._changed:
                if (rank, step) not in self._open:
                    return
            with suppress(ServerRestoredError):
                return self._workers.send_to(worker, "pushes", rank, WorkerCalls.push, arguments)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        with self._changed:
            self._finished[rank] = steps
        self._workers.request("prefetches", rank, WorkerCalls.finish, steps=steps)

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        super().begin_run(rules, stop)
        self._open.clear()
        self._numbers.clear()
        self._workers.stop = stop
        self._workers.call_each(WorkerCalls.begin_run)
        self._workers.pass_over_earlier_run()

    def note_leg(self, first_steps: Sequence[int]) -> None:
        """A server, or worker, that comes back is told of this leg, not of the one before."""
        super().note_leg(first_steps)
        self._workers.call_each(WorkerCalls.note_leg, first_steps=list(first_steps))

    def allow_failover(self, saved: Any, report: Callable[[str], None]) -> None:
        """Workers, too, and these wait for servers and say what is open."""
        super().allow_failover(saved, report)
        self._report = report
        if self._workers_may_return:
            self._workers.failover = Failover(self._restart_worker, None, report)

    def _ask_worker(self, handle: Handle, role: str) -> None:
        """Ask the rank's worker for the vectors, behind those of earlier steps; where it has died
        meanwhile, behind those that are asked again."""
        rank = handle.rank
        step = handle.step
        unanswered = self._unanswered[role, rank, 0]

        def is_its_turn() -> bool:
            worker = self._workers.of(rank)
            return all(at is worker for at in unanswered.values())

        with self._changed:
            self._changed.wait_until(
                is_its_turn,
                self._stop,
                lambda: f"rank {rank}, step {step} waits for lookups that are asked again",
            )
            unanswered[step] = worker = self._workers.of(rank)
        with suppress(ServerRestoredError):
            self._send_look_up(handle, role, worker)

    def _looked_up(self, handle: Handle, role: str) -> Payload:
        """The rank's worker has looked a batch up, which is open then."""
        rank = handle.rank
        step = handle.step
        unanswered = self._unanswered[role, rank, 0]
        if step not in unanswered:
            self._ask_worker(handle, role)
        while True:
            worker = unanswered[step]
            with suppress(ServerRestoredError):
                number = self._numbers[role, rank, step]
                vectors = self._workers.answer_of(worker, role, rank, WorkerCalls.look_up, number)

                # A worker that ended meanwhile has lost the batch: ask the one in its place.
                with self._changed:
                    if not worker.has_ended:
                        self._open.add((rank, step))
                        self._begun[rank] = step + 1
                        del unanswered[step], self._numbers[role, rank, step]
                        self._changed.notify_all()
                        return vectors
            worker = self._workers.of(rank)
            with suppress(ServerRestoredError):
                self._send_look_up(handle, role, worker)
            with self._changed:
                unanswered[step] = worker
                self._changed.notify_all()

    def _send_look_up(self, handle: Handle, role: str, worker: Incarnation) -> None:
        """The ids go to the worker; vectors come back."""
        number = self._numbers[role, handle.rank, handle.step] = next(self._workers.numbers)
        batch = handle.batch
        arguments = {
            "rank": handle.rank,
            "step": handle.step,
            "ids": batch.ids,
            "samples": batch.size,
            "ahead": role != self._look_ups,
        }
        if batch.offsets is not None:
            arguments["offsets"] = batch.offsets
        method = WorkerCalls.look_up
        self._workers.send_to(worker, role, handle.rank, method, arguments, number)

    def _go_on_with(self, worker: Incarnation) -> int:
        """Tell a worker that has come back how many steps of its ranks have begun: what is open of
        them is lost, and closed. How many pushes are."""
        # What is open of its ranks; the dead incarnation adds nothing from now on.
        ranks = self._workers.ranks_of(worker.shard)
        with self._changed:
            self._workers.at(worker.shard).has_ended = True
            begun = [(r, self._begun.get(r, 0), self._finished.get(r)) for r in ranks]
            closed = [(rank, step) for rank, step in self._open if rank in ranks]

        # Servers take it as lost, then so do the ranks.
        lost = 0
        control = worker.channels["control", ALL]
        for rank, steps, finished in begun:
            result = self._workers.call_on(
                control, worker, WorkerCalls.rejoin, rank=rank, begun=steps, finished=finished
            )
            lost += int(result["lost"])
        for rank, step in closed:
            self._closed_at_all(rank, step)
        return lost

    def _take(self, handle: Handle, vectors: Mapping[str, Any]) -> None:
        """Give a batch its vectors; with them comes what a worker has to report."""
        assert isinstance(handle, RemoteHandle)
        arrays = dict(vectors)
        for text in arrays.pop("reports"):
            self._report(text)
        for shard, seconds in arrays.pop("waited"):
            self.waited_s[handle.rank, shard] = seconds
        handle.vectors.append(FieldVectors.of_named(arrays))

    def _closed_at_all(self, rank: int, step: int) -> None:
        """By the one thread that hears of it; of a worker that has died, perhaps once more."""
        if (rank, step) not in self._open:
            return
        for _ in range(self.shards):
            self._on_closed(rank, step)
        with self._changed:
            self._open.discard((rank, step))
            self._changed.notify_all()


class RemoteWorker(EmbeddingWorker):
    """An `EmbeddingWorker` whose sums are done in another process; evaluation pools here."""

    store: RemoteWorkerStore

    def pool(self, handle: Handle, allocate: Allocate | None = None) -> FieldVectors:
        """The fields' vectors, where ``allocate`` wants them."""
        if not isinstance(handle, RemoteHandle):
            return super().pool(handle, allocate)
        first, *others = handle.vectors
        handle.vectors = []
        vectors = self._joined(first, *others) if others else first
        if not self._live_row_seen:
            self._live_row_seen = bool(vectors.pooled.any()) or _has_nonzero(vectors.sequences)
        if allocate is None:
            return vectors
        moved = {name: _moved(a, allocate) for name, a in vectors.sequences.items()}
        return FieldVectors(_moved(vectors.pooled, allocate), moved, vectors.masks)

    def _joined(self, late: FieldVectors, fresh: FieldVectors) -> FieldVectors:
        """The vectors of all fields, in their order."""
        columns = []
        result = FieldVectors(late.pooled, {}, {})
        at = {id(late): 0, id(fresh): 0}  # columns taken
        for one in self.store.layout.fields:
            part = fresh if one.table in self.store.fresh else late
            if one.pooling == "sequence":
                result.sequences[one.name] = part.sequences[one.name]
                result.masks[one.name] = part.masks[one.name]
                continue
            start = at[id(part)]
            at[id(part)] = end = start + self.store.tables[one.table].dim
            columns.append(part.pooled[:, start:end])
        return replace(result, pooled=np.concatenate(columns, axis=1)) if columns else result

    def give_back(self, handle: Handle, gradients: VectorGradients | None) -> None:
        """Give the worker the gradients."""
        if gradients is None:
            return self.store.push(handle, lost=False)
        with gradients.held:
            gradients.arrived()
            vectors = gradients.vectors
            if not self.row_gradient_seen:
                has_sequences = _has_nonzero(vectors.sequences)
                self.row_gradient_seen = bool(vectors.pooled.any()) or has_sequences
            self.store.push(handle, lost=False, factor=gradients.factor, **vectors.named())

    def give_up(self, handle: Handle, gradients: VectorGradients | None) -> None:
        """Have the worker close the handle's step without its gradients."""
        if gradients is not None:
            gradients.held.close()
        self.store.push(handle, lost=True)


def _has_nonzero(arrays: Mapping[str, np.ndarray]) -> bool:
    return any(bool(array.any()) for array in arrays.values())


def _moved(array: np.ndarray, allocate: Allocate) -> np.ndarray:
    moved = allocate(array.shape, array.dtype)
    moved[...] = array
    return moved


def _close(workers: WorkerClient, close: Callable[[], None]) -> None:
    workers.close()
    close()
