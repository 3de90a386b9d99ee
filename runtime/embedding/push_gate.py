"""The instants at which a store may be copied: no push is applied at some of its servers only."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from runtime.embedding.batch_rows import Handle

MOST_WAIT_S = 60.0
"""A push that stands half applied for longer than this stops the cut with an error."""


class PushGate:
    """Counts pushes that have begun at one shard and not ended at the last, for a consistent cut:
    an instant at which no push is applied at some shards and not at others.

    While somebody waits for a cut, no push begins; those under way go on. So training pauses for as
    long as a push takes, and for the copy.
    """

    def __init__(self, shards: Collection[int]) -> None:
        self._shards = shards  # of this process
        self._changed = threading.Condition()
        self._open: dict[int, tuple[Handle, set[int]]] = {}
        self._cutters = 0

    @cached_property
    def of_fresh_tables(self) -> PushGate:
        """The gate of their pushes, which are others than those of late tables."""
        return PushGate(self._shards)

    @contextmanager
    def pushing(self, handles: Sequence[Handle], shard: int) -> Iterator[None]:
        """Around the push of these handles at one shard."""
        with self._changed:
            fresh = [h for h in handles if id(h) not in self._open]
            if len(fresh) == len(handles):
                self._changed.wait_for(lambda: not self._cutters)
            for handle in fresh:
                self._open[id(handle)] = handle, set(self._shards)
        try:
            yield
        finally:
            self.leave(handles, shard)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Hold back new pushes once those under way have ended."""
        # From now on no push may begin.
        with self._changed:
            self._cutters += 1

        # A push is under way until all shards have applied it: wait for those that have begun (law
        # 9).
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._open, MOST_WAIT_S):
                    pushes = (
                        f"rank {h.rank} step {h.step}: {sorted(s)}" for h, s in self._open.values()
                    )
                    raise TimeoutError(
                        f"no consistent cut within {MOST_WAIT_S:.0f} s: pushes are applied at some"
                        f" shards only ({'; '.join(pushes)} are missing); push them or call lose()"
                        " before saving"
                    )
            yield
        finally:
            # Pushes that were held back may begin.
            with self._changed:
                self._cutters -= 1
                self._changed.notify_all()

    def leave(self, handles: Sequence[Handle], shard: int) -> None:
        """Their push is over at one shard, or lost there."""
        with self._changed:
            for handle in handles:
                _, left = self._open.get(id(handle), (handle, set()))
                left.discard(shard)
                if not left:
                    self._open.pop(id(handle), None)
            self._changed.notify_all()
