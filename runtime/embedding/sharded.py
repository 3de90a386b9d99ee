"""The embedding store in one process: tables partitioned over embedding servers.

A server (shard) is the unit of locking: a read or a push of one batch takes effect at one shard in
one instant, which the trace records under the shard's lock. A subclass (`native`) says what rows
are made of.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from persia_sim.base.rules import require
from persia_sim.base.trace import ALL, TraceRecorder
from runtime.data.batch import Batch, Layout
from runtime.embedding.batch_rows import STALENESS_BINS, Handle, RankPush, ShardRows
from runtime.embedding.config import TableConfig
from runtime.embedding.push_gate import PushGate
from runtime.embedding.server import EmbeddingServer, Span
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import EmbeddingStore, Lease
from runtime.stop import Stop


class ShardedStore(EmbeddingStore):
    """A store whose ``servers`` are objects of this process: every method is a loop over them.

    Executors of an order call single servers: `EmbeddingServer.read` and `EmbeddingServer.apply`
    are instants at one shard.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[TableConfig],
        *,
        shards: int = 1,
        seed: int = 0,
        recorder: TraceRecorder | None = None,
        rules: ServerRules | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Raises ValueError for a seed beyond 64 bits, a table named twice or not at all, and what
        the rows refuse."""
        if shards < 1:
            raise ValueError(f"shards must be >= 1, got {shards}")
        fits = type(seed) is int and 0 <= seed < 2**64
        require(fits, "seed", seed, "must be a whole number >= 0 that fits 64 bits")
        used = {field.table for field in layout.fields}
        configured = sorted(table.name for table in tables)
        twice = sorted({name for name in configured if configured.count(name) > 1})
        require(not twice, "tables", configured, f"{', '.join(twice)} may stand only once")
        if unknown := sorted(used - set(configured)):
            raise ValueError(f"fields use tables {unknown}, but only {configured} are configured")

        self.layout = layout
        self.shards = shards
        self.seed = seed
        self.tables = {t.name: t for t in tables if t.name in used}
        self._gate = PushGate(range(shards))
        self.saving = threading.Lock()
        self.waited_s = {}

        # Every server has the same rules; each has rows of its own.
        rules = rules or ServerRules()
        recorder = recorder or TraceRecorder()
        stop = Stop() if stop is None else stop  # one that is not set counts as False
        self.half = rules.half
        self.servers = [
            EmbeddingServer(k, rows, rules, recorder, self._gate, stop)
            for k, rows in enumerate(self._open_rows())
        ]

    def record_spans(self, span: Span) -> None:
        """Have the work on rows timed from now on."""
        for server in self.servers:
            server.span = span

    # Where a run, or a leg of it, begins.

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        for server in self.servers:
            server.begin_run(rules, stop)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks begin, or go on, with these steps; every push before them is closed."""
        for server in self.servers:
            server.begin_leg(first_steps)

    def resume_run(self, rules: ServerRules, counters: Sequence[Mapping[str, Any]]) -> None:
        """Count on under these rules from what servers, perhaps others in number, have counted."""
        for server, counted in zip(self.servers, divided(counters, self.shards), strict=True):
            server.resume_run(rules, counted)

    # What a rank's stages call.

    def look_up(self, handle: Handle) -> None:
        """Read the batch's rows, creating absent ones, when window and order allow it."""
        for server in self.servers:
            server.look_up(handle)

    def look_up_ahead(self, handle: Handle) -> None:
        """Prefetch the rows for lookahead: read at any time, without side effect."""
        for server in self.servers:
            server.look_up_ahead(handle)

    def bring_up_to_date(self, handle: Handle) -> None:
        """Replace prefetched rows that were written since, when all earlier pushes are applied."""
        for server in self.servers:
            server.bring_up_to_date(handle)

    def lease(self, handle: Handle, ahead: int) -> Lease:
        """lookahead `forwarded`: the batch's rows with their state, at most ``ahead`` steps old."""
        return [server.lease(handle, ahead) for server in self.servers]

    def give(self, push: RankPush) -> None:
        """Take a rank's push; None for its gradients closes its step without them. Fresh tables
        come first, at all servers: the next step waits for them."""
        for server in self.servers:
            if server.fresh is not None:
                server.fresh.give(push)
        for server in self.servers:
            server.give(push)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        for server in self.servers:
            server.finish(rank, steps)

    def on_closed(self, callback: Callable[[int, int], None]) -> None:
        """Have ``callback`` called with (rank, step) by each server that closes its push."""
        for server in self.servers:
            server.on_closed = callback

    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first ``steps`` steps is applied or lost everywhere."""
        for server in self.servers:
            server.wait_until_closed(steps)

    # What evaluation, summaries and checkpoints ask.

    def statuses(self) -> list[dict[str, Any]]:
        """`EmbeddingServer.status` of each server."""
        return [server.status() for server in self.servers]

    def server_counters(self) -> list[dict[str, Any]]:
        """`EmbeddingServer.counters` of each server."""
        return [server.counters() for server in self.servers]

    def export_table(self, table: str) -> list[dict[str, np.ndarray]]:
        """`EmbeddingServer.export` of one table at each server."""
        return [server.export(table) for server in self.servers]

    def at_each_server(
        self, function: Callable[..., dict[str, Any]], **arguments: Any
    ) -> list[Any]:
        """Have a function of `checkpoint.shard` called on the rows of each server."""
        return [function(server.rows, **arguments) for server in self.servers]

    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""
        handle = self.begin(ALL, ALL, batch)
        for server in self.servers:
            server.peek(handle)
        return handle

    @abstractmethod
    def _open_rows(self) -> Sequence[ShardRows]:
        """The rows of each server, none yet."""

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold every shard, so that a snapshot can be evaluated while other threads wait."""
        with ExitStack() as held:
            for server in self.servers:
                held.enter_context(server.lock)
            yield

    @contextmanager
    def consistent_cut(self) -> Iterator[None]:
        """Hold every shard at an instant at which no push is half applied."""
        with self._gate.cut(), self._gate.of_fresh_tables.cut(), self.frozen():
            yield


def divided(counters: Sequence[Mapping[str, Any]], shards: int) -> Sequence[Mapping[str, Any]]:
    """What servers have counted, for another number of servers.

    Every server sees every step, so the newest clock is that of all; counts of rows go to the
    first, and their sums stay.
    """
    if len(counters) == shards:
        return counters
    staleness = np.sum([c["row_staleness"] for c in counters], axis=0)
    clock = {name: max(c[name] for c in counters) for name in ("version", "updates")}
    none = {"rows_replaced": 0, "lost": 0, "row_staleness": [0] * STALENESS_BINS, "counters": {}}
    sums = {name: sum(c[name] for c in counters) for name in ("rows_replaced", "lost")}
    of_rows = sum((Counter(c["counters"]) for c in counters), Counter[str]())
    first = sums | {"row_staleness": staleness.tolist(), "counters": of_rows}
    result = [clock | (first if shard == 0 else none) for shard in range(shards)]
    if "fresh" not in counters[0]:
        return result
    of_fresh = divided([{"counters": {}} | c["fresh"] for c in counters], shards)
    for one, fresh in zip(result, of_fresh, strict=True):
        one["fresh"] = {name: count for name, count in fresh.items() if name != "counters"}
    return result
