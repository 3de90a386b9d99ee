"""The verbs of an embedding store, whether its servers are objects here or processes elsewhere."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np

from runtime.data.batch import Batch, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import ByTable, Handle, RankPush
from runtime.stop import Stop

TableSnapshot = dict[str, Any]
"""Of one table at one server, the next row to be evicted first: ids, words (write counts and
marks), stamps, rows (their bytes: values, then state), removed, sightings, latest_step."""

Lease = list[dict[str, dict[str, Any]]]
"""Per server and table: ids, and the bytes of their rows as they were there."""

TableArrays = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Per table ids [n], values [n, d] and optimiser state [n, k], sorted by id."""


class EmbeddingStore(ABC):
    """Rows of every table, partitioned over servers by a hash of the id. Safe for threads."""

    layout: Layout
    tables: dict[str, TableConfig]
    shards: int
    """Embedding servers."""
    seed: int
    half: bool = False
    """Rows and gradients travel between it and who pools as `embedding.half` has it."""
    saving: threading.Lock
    """Held from the freezing to the settling of a snapshot."""
    last_saved: tuple[str, str] | None
    """The folder and the part of the last save that tracks changes."""
    waited_s: dict[tuple[int, int], float]
    """By rank and server, where these are processes: how long its answers were waited for."""
    run_folder: Path | None = None
    """Checkpoints are written below it."""

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        self.ask("begin_run", rules=rules, stop=stop)

    @abstractmethod
    def ask(self, verb: str, **said: Any) -> list[Any]:
        """What each `EmbeddingServer` answers, in their order; of servers that are processes, to
        something rare: for the verbs of every batch they have messages of their own."""

    def note_leg(self, first_steps: Sequence[int]) -> None:  # noqa: B027 - most need no notes
        """The same in every process that has ranks, before any of them begins."""

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks begin, or go on, with these steps; every push before them is closed. One process
        tells the servers."""
        self.ask("begin_leg", first_steps=list(first_steps))

    @abstractmethod
    def go_on(self, rules: ServerRules, counters: Sequence[Mapping[str, Any]]) -> None:
        """Count on under these rules from what servers, perhaps others in number, have counted."""

    # What a rank's stages call: each goes to all servers, and waits as they do.

    @abstractmethod
    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; touches no row."""

    def look_up(self, handle: Handle) -> None:
        """Read the batch's rows, creating absent ones, when window and order allow it."""
        self.ask("look_up", handle=handle)

    def look_up_ahead(self, handle: Handle) -> None:
        """A prefetch of lookahead: read at any time, without side effect."""
        self.ask("look_up_ahead", handle=handle)

    def bring_up_to_date(self, handle: Handle) -> None:
        """Replace prefetched rows that were written since, when all earlier pushes are applied."""
        self.ask("bring_up_to_date", handle=handle)

    def lease(self, handle: Handle, ahead: int) -> Lease:
        """lookahead `forwarded`: the batch's rows with their state, at most ``ahead`` steps old."""
        return self.ask("lease", handle=handle, ahead=ahead)

    def gradient_arrays(self, handle: Handle) -> ByTable | None:
        """Where the servers will read the batch's gradients; None: wherever they are."""
        return None

    def give(self, push: RankPush) -> None:
        """Take a rank's push; None for its gradients closes its step without them."""
        self.ask("give", push=push)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        self.ask("finish", rank=rank, steps=steps)

    @abstractmethod
    def on_closed(self, told: Callable[[int, int], None]) -> None:
        """Have ``told`` called with (rank, step) by each server that closes its push."""

    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first ``steps`` steps is applied or lost everywhere."""
        self.ask("wait_until_closed", steps=steps)

    def drain(self) -> None:  # noqa: B027 - who has given a push here has waited, or for nobody
        """Return when every push that was given has been applied or lost."""

    def let_servers_come_back(  # noqa: B027 - inside this process none dies without it
        self, saved: Callable[[int], Any], told: Callable[[str], None]
    ) -> None:
        """A server that dies is started again with what ``saved`` gives for its shard, while the
        run goes on; ``told`` hears of it."""

    def close(self) -> None:  # noqa: B027 - rows of this process go with their object
        """The run is over: give back what was opened for the rows outside this process."""

    # What evaluation, summaries and checkpoints ask.

    @abstractmethod
    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""

    @abstractmethod
    def frozen(self) -> AbstractContextManager[None]:
        """Hold every shard, so that a snapshot can be evaluated while other threads wait."""

    @abstractmethod
    def consistent_cut(self) -> AbstractContextManager[None]:
        """Hold every shard at an instant at which no push is half applied."""

    @abstractmethod
    def freeze_snapshots(self, *, only_changed: bool, track: bool) -> None:
        """Remember all rows (or the changed ones) as they are; inside `consistent_cut`."""

    @abstractmethod
    def settle_snapshots(self, *, kept: bool) -> None:
        """Whether the last snapshots are safe; if not, what they held counts as changed still."""

    @abstractmethod
    def at_each_server(self, verb: Callable[..., dict[str, Any]], **said: Any) -> list[Any]:
        """Have each server do with its own rows, where they are, what `checkpoint.shard` says;
        ``said`` and the answers, one of each, are plain JSON."""

    def export(self) -> TableArrays:
        """Per table all (ids, values, state), sorted by id, whatever the number of shards."""
        tables = {}
        for name in self.tables:
            parts = self.ask("export", table=name)
            columns = [np.concatenate([p[c] for p in parts]) for c in ("ids", "values", "state")]
            order = np.argsort(columns[0])
            tables[name] = (columns[0][order], columns[1][order], columns[2][order])
        return tables

    def recorded(self) -> list[np.ndarray]:
        """Events that servers have written down themselves, int64 [n, 5] each, in their order; of
        servers in this process none: they write into the run's own recorder."""
        return []

    def __len__(self) -> int:
        return sum(int(status["rows"]) for status in self.ask("status"))

    @property
    def resident_bytes(self) -> int:
        """Bytes of rows, state, records and index."""
        return sum(int(status["resident_bytes"]) for status in self.ask("status"))

    @property
    def counters(self) -> dict[str, int]:
        """Rows created, evicted and expired, lookups that were refused a row (not_admitted), and
        row gradients dropped because they found no row, since the start."""
        found = [status["counters"] for status in self.ask("status")]
        return {name: sum(c[name] for c in found) for name in found[0]}

    @property
    def row_staleness(self) -> np.ndarray:
        """int64 [STALENESS_BINS]: rows pushed, by how many updates of others each had missed."""
        found = [status["row_staleness"] for status in self.ask("status")]
        return cast(np.ndarray, np.array(found, np.int64).sum(axis=0))
