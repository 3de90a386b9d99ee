"""lookahead `forwarded`: rows of the window on lease at the embedding worker.

A prefetch brings rows with their optimiser state. Until the window has passed them, the worker's
own copies are the rows that count: it applies every step's gradients to them at once, with the
same kernels in the same order, so the next step reads them without asking a server. The servers
get the same lookups and pushes later, in the same order, and so end with the same bytes; nobody
waits for them but the prefetch of ``ahead`` steps on (law 15).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from persia_sim.words.trace import TraceRecorder
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.shard import RankPush
from runtime.embedding.store import Handle
from runtime.embedding.verbs import EmbeddingStore, Lease
from runtime.stop import Stop


class LeasedRows:
    """The copies of one embedding worker, which serves all ranks of a process."""

    def __init__(
        self,
        store: EmbeddingStore,
        ranks: int,
        ahead: int,
        recorder: TraceRecorder,
        stop: Stop,
    ) -> None:
        tables = list(store.tables.values())
        forgetful = sorted(t.name for t in tables if t.forgets_rows)
        if forgetful:
            raise ValueError(
                f"lookahead forwarded needs tables that keep every row, but tables {forgetful}"
                " evict, expire or refuse rows; use --lookahead reread"
            )
        self._ranks, self._ahead = ranks, ahead
        self._rules = ServerRules(ranks=ranks, tau=0, merges=True)
        self._copies = NativeStore(
            store.layout, tables, shards=store.shards, seed=store.seed,
            recorder=recorder, rules=self._rules, stop=stop,
        )  # fmt: skip
        self.servers = self._copies.servers
        self._held: dict[int, dict[str, list[np.ndarray]]] = {}
        self._given: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    def begin_leg(self, first_steps: Sequence[int], counters: Sequence[Mapping[str, Any]]) -> None:
        """Ranks begin with these steps, on rows whose servers have counted so many updates."""
        self._copies.go_on(self._rules, counters)
        self._copies.begin_leg(first_steps)

    def begin(self, handle: Handle) -> Handle:
        """A handle of these copies for the batch of a server's handle."""
        return self._copies.begin_with(handle.rank, handle.step, handle.batch, handle.plans)

    def take_in(self, handle: Handle, lease: Lease) -> None:
        """A prefetch has arrived: keep its rows, but for those that are here and so newer."""
        with self._lock:
            held = self._held.setdefault(handle.step, {name: [] for name in handle.plans})
            for name, plan in handle.plans.items():
                held[name].append(plan.ids)
                rows = [tables[name] for tables in lease]
                self._copies.restore(name, rows, keep_present=True)
        for server in self.servers:
            server.look_up_ahead(handle)

    def bring_up_to_date(self, handle: Handle) -> None:
        """The step's rows as all earlier steps left them; waits only for the other ranks."""
        for server in self.servers:
            server.bring_up_to_date(handle)

    def give(self, push: RankPush) -> None:
        """A rank's gradients; the last rank's have them applied, and end old leases."""
        for server in self.servers:
            server.give(push)
        step = push[0].step
        with self._lock:
            self._given[step] += 1
            if self._given[step] == self._ranks:
                del self._given[step]
                self._release(step - self._ahead)

    def _release(self, step: int) -> None:
        """Drop the rows of a step that no later step of the window holds.

        All prefetches that the window let read before this step's push was applied are here.
        """
        held = self._held.pop(step, None)
        if held is None:
            return
        for name, parts in held.items():
            later = [ids for tables in self._held.values() for ids in tables[name]]
            gone = np.setdiff1d(np.concatenate(parts), np.concatenate([*later, parts[0][:0]]))
            self._copies.forget(name, gone)
