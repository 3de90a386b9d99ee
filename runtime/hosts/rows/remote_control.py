"""What a remote store knows of what is in flight, and asks now and then: figures, tables, legs, the
rows of a checkpoint."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from persia_sim.base.trace import TraceRecorder
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.push_gate import MOST_WAIT_S
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.sharded import divided
from runtime.embedding.store import EmbeddingStore, SavedServer
from runtime.files import BrokenFileError
from runtime.hosts.rows.batch_layout import SentBatch
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.connections import Incarnation, ServerRestoredError
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.calls import Method, Payload, R
from runtime.hosts.wire.messages import Message, MessageKind
from runtime.hosts.wire.segments import SegmentPool
from runtime.object_store import address_of
from runtime.stop import PeerError, Stop, Turns

_LOOK_AGAIN_S = 0.001
_MOST_EVENTS = 1 << 20
"""Events that servers send at once, together: 40 MB."""


class RemoteControl(EmbeddingStore):
    """The rare calls of a store of server processes, each to all of them at once."""

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[TableConfig],
        client: ServerClient,
        stop: Stop,
        seed: int,
        segments: int,
        restart: Callable[[int], None] | None,
    ) -> None:
        """What a `RemoteStore` is given."""
        # The tables, as every store names them.
        self.layout = layout
        self.seed = seed
        self.shards = client.servers
        self.tables = {t.name: t for t in tables}
        self.saving = threading.Lock()
        self.waited_s = {}

        # The servers, their recorded order, and which of their lives a snapshot was of.
        self._client = client
        self._restart = restart
        self._recorded = [(0, TraceRecorder()) for _ in range(client.servers)]
        """How many events of each server are here, and these."""
        self._frozen_in = self._incarnations()

        # Per rank: segments of shared memory, batches on their way, steps begun and finished.
        self._stop = client.stop = stop
        self._pools = {rank: SegmentPool(segments, stop, f"rank {rank}") for rank in client.ranks}
        self._sent: dict[tuple[int, int], SentBatch] = {}
        self._open: Collection[tuple[int, int]] = self._sent
        self._unanswered = defaultdict[tuple[str, int, int], dict[int, Incarnation]](dict)
        """By role, rank and server: steps whose rows it was asked for and has not sent, and which
        of its incarnations was."""
        self._begun: dict[int, int] = {}  # per rank: steps that have begun, or were before
        self._finished: dict[int, int] = {}
        self._changed = Turns()
        self._on_closed: Callable[[int, int], None] = lambda rank, step: None

    def allow_failover(
        self, saved: Callable[[int], Iterable[SavedServer]], report: Callable[[str], None]
    ) -> None:
        """From now on a server that dies is started again while the run goes on."""
        saved_here = saved if self._restart is not None else None
        self._client.failover = Failover(self._restart, saved_here, report)

    def _call_each(self, method: Method[..., R], **arguments: Any) -> list[R]:
        """The results of a call to every server: sent to all, then awaited."""
        return self._client.call_all(method, dict.fromkeys(range(self.shards), arguments))

    def statuses(self) -> list[dict[str, Any]]:
        """The status of each server, with what has travelled to and from it."""
        return self._call_each(ServerCalls.status)

    def server_counters(self) -> list[dict[str, Any]]:
        """`EmbeddingServer.counters` of each server."""
        return self._call_each(ServerCalls.counters)

    def export_table(self, table: str) -> list[dict[str, np.ndarray]]:
        """`EmbeddingServer.export` of one table at each server: one after the other, since a server
        that is ready before its turn stands still under what it has to send."""
        export = partial(self._client.call, method=ServerCalls.export, table=table)
        return [export(shard) for shard in range(self.shards)]

    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first ``steps`` steps is applied or lost everywhere."""
        self._call_each(ServerCalls.wait_until_closed, steps=steps)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks begin, or go on, with these steps; every push before them is closed."""
        self._call_each(ServerCalls.begin_leg, first_steps=list(first_steps))

    # What is in flight, and from which step on.

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        with self._changed:
            self._finished[rank] = steps
        for shard in range(self.shards):
            self._client.push(shard, Message(MessageKind.FINISH, rank, steps))

    def drain(self) -> None:
        """Return when every push of this process is closed at every server."""
        with self._changed, self._stop.waiting_elsewhere():
            self._changed.wait_until(
                lambda: not self._open,
                self._stop,
                lambda: f"batches {sorted(self._open)} wait for their pushes to be closed",
            )

    def on_closed(self, callback: Callable[[int, int], None]) -> None:
        """Have ``callback`` called with (rank, step) by each server that closes its push."""
        self._on_closed = callback

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        self._call_each(ServerCalls.begin_run, rules=asdict(rules))
        self.forget(stop)

    def forget(self, stop: Stop) -> None:
        """Nothing of the ranks of this process is in flight in the run that begins."""
        with self._changed:
            self._begun.clear()
            self._finished.clear()
            self._unanswered.clear()
            for (rank, _), sent in self._sent.items():
                self._pools[rank].give_back(sent.number, sent.segment)
            self._sent.clear()
        self._stop = stop
        self._client.stop = stop
        for pool in self._pools.values():
            pool.begin_run(stop)
        self._client.pass_over_earlier_run()

    def note_leg(self, first_steps: Sequence[int]) -> None:
        """A server that comes back is told of this leg, not of the one before."""
        with self._changed:
            self._begun = dict(enumerate(first_steps))
            self._finished = {}

    def rejoin(self, rank: int, begun: int, finished: int | None) -> dict[str, int]:
        """Go on for a rank whose embedding worker has died with what was open of its ``begun``
        steps, of how many if it is known. How many pushes are lost with it."""
        with self._changed:
            self._begun[rank] = begun
        results = self._call_each(ServerCalls.rejoin, rank=rank, begun=begun, open=[])
        lost = max(result["lost"] for result in results)
        if finished is not None:
            self.finish(rank, finished)
        return {"lost": lost}

    def resume_run(self, rules: ServerRules, counters: Sequence[Mapping[str, Any]]) -> None:
        """Count on under these rules from what servers, perhaps others in number, have counted."""
        shares = enumerate(divided(counters, self.shards))
        of_rules = {"rules": asdict(rules)}
        arguments = {shard: {**of_rules, "counters": dict(share)} for shard, share in shares}
        self._client.call_all(ServerCalls.resume_run, arguments)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold every server, so that a snapshot can be evaluated while ranks wait."""
        with self._client.alone:
            try:
                self._call_each(ServerCalls.freeze)
                yield
            finally:
                self._call_each(ServerCalls.thaw)

    def recorded(self) -> list[np.ndarray]:
        """Per server the events of its rows, int64 [n, 5], in their order there.

        Only those that have come since the last time travel; the order of a long run is on disk.
        """
        most = -(-_MOST_EVENTS // self.shards)
        behind = list(range(self.shards))
        while behind:
            after = {shard: {"after": self._recorded[shard][0], "most": most} for shard in behind}
            traces = self._client.call_all(ServerCalls.trace, after)
            behind = []
            for shard, trace in zip(after, traces, strict=True):
                known, recorder = self._recorded[shard]
                events = trace["events"]
                recorder.resume(events)
                self._recorded[shard] = known + len(events), recorder
                if len(events) == most:
                    behind.append(shard)
        return [recorder.finish().events for _, recorder in self._recorded]

    # The rows of a checkpoint.

    @contextmanager
    def consistent_cut(self) -> Iterator[None]:
        """Hold every server at an instant at which no push is applied at some of them only."""
        ends_s = time.monotonic() + MOST_WAIT_S
        while True:
            with self.frozen():
                closed = self._call_each(ServerCalls.closed)
                if all(steps == closed[0] for steps in closed):
                    yield
                    return
            if time.monotonic() > ends_s:
                raise TimeoutError(
                    f"no consistent cut within {MOST_WAIT_S:.0f} s: pushes are applied at some"
                    f" embedding servers only; per server: {closed}"
                )
            time.sleep(_LOOK_AGAIN_S)

    def freeze_snapshots(self) -> None:
        """Remember all rows as they are; inside `consistent_cut`."""
        self._frozen_in = self._incarnations()
        self._call_each(ServerCalls.freeze_rows)

    def drop_snapshots(self) -> None:
        """Forget what was remembered, and not collected."""
        shards = range(self.shards)
        alive = [shard for shard in shards if self._client.at(shard) is self._frozen_in[shard]]
        self._client.call_all(ServerCalls.drop_rows, {shard: {} for shard in alive})

    def at_each_server(
        self, function: Callable[..., dict[str, Any]], **arguments: Any
    ) -> list[Any]:
        """Have each server call a function of `checkpoint.shard` on its own rows, all at once.

        Raises OSError when a server has died since its rows were frozen: they are gone.
        """
        run = self.run_folder
        self._client.run_folder = None if run is None else address_of(run.absolute())
        with ThreadPoolExecutor(self.shards) as pool:
            method = getattr(ServerCalls, function.__name__)
            do = partial(self._at_server, method, arguments)
            return list(pool.map(do, range(self.shards)))

    def _at_server(
        self, method: Callable[..., Payload], arguments: Mapping[str, Any], shard: int
    ) -> Payload:
        name = self._client.name_with_pid(shard)
        try:
            return self._client.call_apart(shard, method, **arguments)
        except (ServerRestoredError, RuntimeError) as error:
            if self._client.at(shard) is self._frozen_in[shard]:
                raise
            dead = f"embedding server {shard} died before its rows of the checkpoint were written"
            raise OSError(dead) from error
        except PeerError:
            raise
        except (OSError, BrokenFileError) as error:
            raise type(error)(f"{name}: {error}") from None

    def _incarnations(self) -> list[Incarnation]:
        return [self._client.at(shard) for shard in range(self.shards)]
