"""Seconds that the stages of one rank's batch take: by law, or as a run measured them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf

from persia_sim.words.chrome import Span
from persia_sim.words.vocabulary import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Means over batches, without waiting for other steps or ranks."""

    load_s: float
    """Cut the batch out of the samples, merge duplicates."""
    read_s: float
    """Copy the rows out of the store."""
    pool_s: float
    forward_s: float
    backward_s: float
    update_s: float
    """Once a step: sum the ranks' dense gradients and apply them."""
    scatter_s: float
    """Gradients of vectors to gradients of rows."""
    push_s: float
    """Update the rows."""
    refresh_s: float = 0.0
    """Lookahead: replace the rows that were written since they were read."""

    def work_s(self, ranks: int) -> float:
        """Of all threads in one step."""
        each = sum(getattr(self, field.name) for field in fields(self))
        return ranks * each - (ranks - 1) * self.update_s

    def times(self, factor: float) -> Stages:
        """Every stage so many times as long."""
        return replace(self, **{f.name: factor * getattr(self, f.name) for f in fields(self)})

    def parts(self) -> dict[str, float]:
        """As spans can tell them apart."""
        return {
            "load": self.load_s,
            "lookup": self.read_s + self.refresh_s + self.pool_s,
            "dense": self.forward_s + self.backward_s + self.update_s,
            "push": self.scatter_s + self.push_s,
        }


@dataclass(slots=True)
class RowWork:
    """Seconds of the rows' own work, by the step that it belongs to; of all ranks and shards."""

    read: list[tuple[int, float]]
    refresh: list[tuple[int, float]]
    update: list[tuple[int, float]]

    def mean_s(self, name: str, first: int, batches: int) -> float:
        """A batch of the steps >= ``first``, of which there are so many."""
        return sum(s for step, s in getattr(self, name) if step >= first) / max(1, batches)


def measured_stages(spans: Sequence[Span], rows: RowWork, first: int, prefetches: bool) -> Stages:
    """From spans of the steps >= ``first`` and what the rows' own work took.

    The update of the dense weights is what the last rank of a step sees of it: the others' spans
    hold their waiting. A span of a push holds the scatter and the rows' update; with
    ``prefetches`` that of a lookup holds the read, too.
    """
    kept = [s for s in spans if s.step >= first]
    batches = len({(s.rank, s.step) for s in kept if s.stage == Stage.FORWARD})

    def mean(stage: Stage) -> float:
        own = [s.end_s - s.start_s for s in kept if s.stage == stage]
        return sum(own) / max(1, len({(s.rank, s.step) for s in kept if s.stage == stage}))

    updates: dict[int, float] = {}
    for s in kept:
        if s.stage == Stage.DENSE_SYNC:
            updates[s.step] = min(updates.get(s.step, inf), s.end_s - s.start_s)
    read_s, push_s = rows.mean_s("read", first, batches), rows.mean_s("update", first, batches)
    return Stages(
        load_s=mean(Stage.LOAD),
        read_s=read_s,
        pool_s=max(0.0, mean(Stage.LOOKUP) - (read_s if prefetches else 0.0)),
        forward_s=mean(Stage.FORWARD),
        backward_s=mean(Stage.BACKWARD),
        update_s=sum(updates.values()) / max(1, len(updates)),
        scatter_s=max(0.0, mean(Stage.PUSH) - push_s),
        push_s=push_s,
        refresh_s=rows.mean_s("refresh", first, batches),
    )
