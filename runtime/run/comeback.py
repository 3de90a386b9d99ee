"""A server that dies gets its part of the run's newest checkpoint, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtime.checkpoint.array_file import BrokenFileError
from runtime.checkpoint.rows import rows_of_shard
from runtime.checkpoint.whole import newest
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.sharded import divided
from runtime.embedding.verbs import EmbeddingStore
from runtime.engines.processes.revival import SavedServer


class Comeback:
    """What the servers of one run had at its cuts, and which of them have died."""

    def __init__(self, store: EmbeddingStore, rules: ServerRules, run: Path | None) -> None:
        """``run``: the folder with the checkpoints; None: a server comes back empty."""
        self._store, self._rules, self._run = store, rules, run
        self._first_steps: dict[int, list[int]] = {}
        self.told: list[str] = []
        """A sentence for each server that came back."""

    def note_cut(self, samples: int, first_steps: list[int]) -> None:
        """From this cursor on the ranks go on with these steps."""
        self._first_steps[samples] = first_steps

    def allow(self, on_warning: Callable[[str], None]) -> None:
        """From now on the death of a server is no longer that of the run."""

        def told(text: str) -> None:
            self.told.append(text)
            on_warning(text)

        self._store.let_servers_come_back(self.saved, told)

    def saved(self, shard: int) -> SavedServer:
        """The rows and counters of a server in the newest checkpoint; empty when there is none."""
        store, rules = self._store, self._rules
        try:
            if self._run is None:
                raise BrokenFileError("no run folder")
            found = newest(self._run)
        except BrokenFileError:
            return SavedServer(rules, self._first_steps[min(self._first_steps)])
        shards = store.shards
        return SavedServer(
            rules,
            self._first_steps[found.state.samples],
            divided(found.state.servers, shards)[shard],
            rows_of_shard(found.rows, store.tables, store.seed, shard, shards),
        )
