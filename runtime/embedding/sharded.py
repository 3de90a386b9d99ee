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
from runtime.embedding.config import TableConfig
from runtime.embedding.cut import PushGate
from runtime.embedding.server import EmbeddingServer, Span
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import STALENESS_BINS, Handle, ShardRows, WholePush
from runtime.embedding.verbs import EmbeddingStore
from runtime.stop import Stop


class ShardedStore(EmbeddingStore):
    """Its servers are objects; engines and the executor of an order call them."""

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
        used, configured = {f.table for f in layout.fields}, sorted(t.name for t in tables)
        twice = sorted({name for name in configured if configured.count(name) > 1})
        require(not twice, "tables", configured, f"{', '.join(twice)} may stand only once")
        if unknown := sorted(used - set(configured)):
            raise ValueError(f"fields use tables {unknown}, but only {configured} are configured")
        self.layout, self.shards, self.seed = layout, shards, seed
        self.tables = {t.name: t for t in tables if t.name in used}
        self._gate = PushGate(range(shards))
        self.saving, self.waited_s = threading.Lock(), {}
        self.last_saved: tuple[str, str] | None = None
        rules, recorder = rules or ServerRules(), recorder or TraceRecorder()
        self.half = rules.half
        stop = Stop() if stop is None else stop  # one that is not set counts as False
        self.servers = [
            EmbeddingServer(k, rows, rules, recorder, self._gate, stop)
            for k, rows in enumerate(self._open_rows())
        ]

    def record_spans(self, span: Span) -> None:
        """Have the work on rows timed from now on."""
        for server in self.servers:
            server.span = span

    def ask(self, verb: str, **said: Any) -> list[Any]:
        """What each server answers."""
        return [getattr(server, verb)(**said) for server in self.servers]

    def go_on(self, rules: ServerRules, counters: Sequence[Mapping[str, Any]]) -> None:
        """Count on under these rules from what servers, perhaps others in number, have counted."""
        for server, own in zip(self.servers, divided(counters, self.shards), strict=True):
            server.go_on(rules, own)

    def on_closed(self, told: Callable[[int, int], None]) -> None:
        """Have ``told`` called with (rank, step) by each server that closes its push."""
        for server in self.servers:
            server.on_closed = told

    def at_each_server(self, verb: Callable[..., dict[str, Any]], **said: Any) -> list[Any]:
        """Have each server do with its own rows what `checkpoint.shard` says."""
        return [verb(server.rows, **said) for server in self.servers]

    @abstractmethod
    def _open_rows(self) -> Sequence[ShardRows]:
        """The rows of each server, none yet."""

    # What the executor of a given order calls: one instant at one shard.

    def read(self, handle: Handle, shard: int, *, create: bool = True) -> None:
        """`EmbeddingServer.read` at one shard; ``create=False`` has no side effect."""
        self.servers[shard].read(handle, create=create)

    def push(
        self,
        shard: int,
        pushes: Sequence[WholePush],
        *,
        merged: bool = False,
        of_ranks: int | None = None,
    ) -> None:
        """`EmbeddingServer.apply` at one shard."""
        self.servers[shard].apply(pushes, merged=merged, of_ranks=of_ranks)

    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""
        handle = self.begin(ALL, ALL, batch)
        self.ask("peek", handle=handle)
        return handle

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
        with self._gate.cut(), self.frozen():
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
    return [clock | (first if shard == 0 else none) for shard in range(shards)]
