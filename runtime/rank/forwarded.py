"""The stages of a rank in lookahead `forwarded`: rows come from the worker's leased copies."""

from __future__ import annotations

from typing import NamedTuple

from persia_sim.words.vocabulary import Stage
from runtime.embedding.lease import LeasedRows
from runtime.embedding.store import Handle, RowGradients
from runtime.embedding.verbs import Lease
from runtime.rank.stages import Computed, Fetched, RankStages
from runtime.rank.team import Team


class Prefetched(NamedTuple):
    """A batch whose rows are on their way to the worker."""

    fetched: Fetched
    at_servers: Handle
    lease: Lease


class Written(NamedTuple):
    """A batch whose rows the worker has written; the servers are still to be told."""

    at_servers: Handle
    rows: RowGradients | None


class ForwardedStages(RankStages):
    """As lookahead that re-reads, but against copies that are always up to date."""

    def __init__(self, rank: int, team: Team, copies: LeasedRows, ahead: int) -> None:
        super().__init__(rank, team)
        self._copies, self._ahead = copies, ahead

    def prefetch_lease(self, step: int) -> Prefetched | None:
        """load, and a lookup of rows with their state, ``ahead`` steps late at most."""
        loaded = self._load(step)
        if loaded is None:
            return None
        handle = loaded.handle
        lease = self._store.lease(handle, self._ahead)
        return Prefetched(loaded._replace(handle=self._copies.begin(handle)), handle, lease)

    def take_in(self, prefetched: Prefetched) -> Fetched:
        """The prefetch has arrived; its rows as all earlier steps left them."""
        fetched = prefetched.fetched
        self._copies.take_in(fetched.handle, prefetched.lease)
        self._copies.bring_up_to_date(fetched.handle)
        return self._staged(fetched)

    def write(self, at_servers: Handle, computed: Computed) -> Written:
        """Apply the gradients to the copies, with those of the other ranks."""
        handle, vectors, _ = computed
        rows = self._worker.scatter(handle, vectors) if self._arrives(computed) else None
        self._copies.give((handle, rows))
        return Written(at_servers, rows)

    def write_back(self, written: Written) -> None:
        """Give the servers the same lookup and the same push, in the same order."""
        handle, rows = written
        with self._span("push", handle.step)(Stage.PUSH):
            self._store.look_up(handle)
            self._store.give((handle, rows))
