"""The interface of an embedding store, whether its servers are objects here or processes elsewhere.

Rows of this process: `ShardedStore` (plain loops over servers), with rows in C++: `NativeStore`.
Rows of server processes: `RemoteStore` in `runtime.hosts`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from runtime.data.batch import Batch, Layout
from runtime.embedding.batch_rows import STALENESS_BINS, Handle, RankPush
from runtime.embedding.config import TableConfig
from runtime.embedding.server_rules import ServerRules
from runtime.stop import Stop

TableSnapshot = dict[str, Any]
"""Rows of one table at one server, the next one to be evicted first: ids, words (write counts and
marks), stamps, rows (their bytes: values, then state), latest_step."""

Lease = list[dict[str, dict[str, Any]]]
"""Per server and table: ids, and the bytes of their rows as they were there."""

TableArrays = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Per table ids [n], values [n, d] and optimiser state [n, k], sorted by id."""


NOTHING_COUNTED: dict[str, Any] = {
    "version": 0,
    "updates": 0,
    "rows_replaced": 0,
    "lost": 0,
    "row_staleness": [0] * STALENESS_BINS,
    "counters": {},
}


@dataclass(frozen=True, slots=True)
class SavedServer:
    """One server as the last checkpoint has it; without one, as it was when the run began."""

    rules: ServerRules
    first_steps: Sequence[int]
    """Per rank, the steps whose pushes are in these rows."""
    counters: Mapping[str, Any] = field(default_factory=lambda: NOTHING_COUNTED)
    folder: str | None = None
    """Folder of its rows; the server reads them there."""


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
    """Held from the freezing of a snapshot until it is dropped."""
    waited_s: dict[tuple[int, int], float]
    """By rank and server, where these are processes: how long its answers were waited for."""
    run_folder: Path | None = None
    """Checkpoints are written below it."""
    answers_later: bool = False
    """Whether requests travel: what is asked for now is answered some time later."""

    # Where a run, or a leg of it, begins.

    @abstractmethod
    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""

    def note_leg(self, first_steps: Sequence[int]) -> None:  # noqa: B027 - most need no notes
        """Note the first steps of a leg; called in every process with ranks before any begins."""

    @abstractmethod
    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks begin, or go on, with these steps; every push before them is closed. One process
        tells the servers."""

    @abstractmethod
    def resume_run(self, rules: ServerRules, counters: Sequence[Mapping[str, Any]]) -> None:
        """Count on under these rules from what servers, perhaps others in number, have counted."""

    # What a rank's stages call: each goes to all servers, and waits as they do.

    @abstractmethod
    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; touches no row."""

    def ask(self, handle: Handle) -> None:  # noqa: B027 - here nothing travels
        """Send off what `look_up` then waits for, of later batches meanwhile; in step order."""

    def ask_ahead(self, handle: Handle) -> None:  # noqa: B027 - nor here
        """Send off what `look_up_ahead` then waits for."""

    def ask_lease(self, handle: Handle, ahead: int) -> None:  # noqa: B027 - nor here
        """Send off what `lease` then waits for."""

    @abstractmethod
    def look_up(self, handle: Handle) -> None:
        """Read the batch's rows, creating absent ones, when window and order allow it."""

    @abstractmethod
    def look_up_ahead(self, handle: Handle) -> None:
        """Prefetch the rows for lookahead: read at any time, without side effect."""

    @abstractmethod
    def bring_up_to_date(self, handle: Handle) -> None:
        """Replace prefetched rows that were written since, when all earlier pushes are applied."""

    @abstractmethod
    def lease(self, handle: Handle, ahead: int) -> Lease:
        """lookahead `forwarded`: the batch's rows with their state, at most ``ahead`` steps old."""

    @abstractmethod
    def give(self, push: RankPush) -> None:
        """Take a rank's push; None for its gradients closes its step without them."""

    def write_back(self, push: RankPush) -> None:
        """lookahead `forwarded`: the lookup of a batch that was on lease, and its push behind it;
        nobody needs the rows."""
        self.look_up(push[0])
        self.give(push)

    @abstractmethod
    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""

    @abstractmethod
    def on_closed(self, callback: Callable[[int, int], None]) -> None:
        """Have ``callback`` called with (rank, step) by each server that closes its push."""

    @abstractmethod
    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first ``steps`` steps is applied or lost everywhere."""

    def drain(self) -> None:  # noqa: B027 - who has given a push here has waited, or for nobody
        """Return when every push that was given has been applied or lost."""

    def allow_failover(  # noqa: B027 - inside this process none dies without it
        self, saved: Callable[[int], Iterable[SavedServer]], report: Callable[[str], None]
    ) -> None:
        """A server that dies is started again with what ``saved`` gives for its shard, while the
        run goes on; ``report`` is called with a sentence about it."""

    def close(self) -> None:  # noqa: B027 - rows of this process go with their object
        """The run is over: give back what was opened for the rows outside this process."""

    # What evaluation, summaries and checkpoints ask.

    @abstractmethod
    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""

    def peek_all(self, batches: Iterable[Batch]) -> Generator[Handle, None, None]:
        """As `peek` of each batch, which is not read before it is its turn; closed by who takes
        not all of them."""
        yield from map(self.peek, batches)

    @abstractmethod
    def frozen(self) -> AbstractContextManager[None]:
        """Hold every shard, so that a snapshot can be evaluated while other threads wait."""

    @abstractmethod
    def consistent_cut(self) -> AbstractContextManager[None]:
        """Hold every shard at an instant at which no push is half applied."""

    @abstractmethod
    def freeze_snapshots(self) -> None:
        """Remember all rows as they are; inside `consistent_cut`."""

    @abstractmethod
    def drop_snapshots(self) -> None:
        """Forget what was remembered, and not collected."""

    @abstractmethod
    def at_each_server(
        self, function: Callable[..., dict[str, Any]], **arguments: Any
    ) -> list[Any]:
        """Have each server call a function of `checkpoint.shard` on its own rows, where they are;
        ``arguments`` and results, one of each server, are plain JSON."""

    @abstractmethod
    def statuses(self) -> list[dict[str, Any]]:
        """`EmbeddingServer.status` of each server, in their order."""

    @abstractmethod
    def server_counters(self) -> list[dict[str, Any]]:
        """`EmbeddingServer.counters` of each server, in their order: what `resume_run` takes."""

    @abstractmethod
    def export_table(self, table: str) -> list[dict[str, np.ndarray]]:
        """`EmbeddingServer.export` of one table at each server, in their order."""

    def export(self) -> TableArrays:
        """Per table all (ids, values, state), sorted by id, whatever the number of shards."""
        tables = {}
        for name in self.tables:
            parts = self.export_table(name)
            columns = [np.concatenate([p[c] for p in parts]) for c in ("ids", "values", "state")]
            order = np.argsort(columns[0])
            tables[name] = (columns[0][order], columns[1][order], columns[2][order])
        return tables

    def recorded(self) -> list[np.ndarray]:
        """Events that servers have written down themselves, int64 [n, 5] each, in their order.

        Servers of this process have none: they write into the run's own recorder.
        """
        return []

    def __len__(self) -> int:
        return sum(int(status["rows"]) for status in self.statuses())

    @property
    def resident_bytes(self) -> int:
        """Bytes of rows, state, records and index."""
        return sum(int(status["resident_bytes"]) for status in self.statuses())

    @property
    def counters(self) -> dict[str, int]:
        """Rows created, evicted and expired, lookups that were refused a row (not_admitted), and
        row gradients dropped because they found no row, since the start."""
        of_servers = [status["counters"] for status in self.statuses()]
        return {name: sum(c[name] for c in of_servers) for name in of_servers[0]}

    @property
    def row_staleness(self) -> np.ndarray:
        """int64 [STALENESS_BINS]: rows pushed, by how many updates of others each had missed."""
        of_servers = [status["row_staleness"] for status in self.statuses()]
        return cast(np.ndarray, np.array(of_servers, np.int64).sum(axis=0))
