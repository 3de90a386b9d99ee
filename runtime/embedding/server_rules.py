"""What the embedding servers must know of a run: who reads and writes, how late, and how time goes.

The same rules stand in every engine: threads, processes, hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """How lookups and pushes of many ranks meet at one server."""

    ranks: int = 1
    """Ranks; each sends every server one lookup and one push a step, empty where it needs no
    row there."""
    tau: int | None = None
    """A lookup of step s waits until all pushes of steps < s - tau are closed here; None: never."""
    sync_steps: int = 0
    """Before this step tau is 0: a synchronous start."""
    per_rank_window: bool = False
    """Async: only the rank's own pushes count for the window."""
    merges: bool = False
    """A row takes one optimiser update a step, from all ranks' gradients summed in rank order."""
    updates_per_step: int = 1
    """Row updates by which the clock of admission and expiry moves one step: 1 when merged, else
    the pushes that hold ``batch`` samples together."""
    in_rank_order: bool = False
    """The ranks' lookups of a step whose window is 0 are served in rank order: which rows a full
    table evicts must not depend on timing where the run promises the bytes of sync."""
    fresh_in_rank_order: bool = False
    """The same of the fresh tables, whose window is always 0."""
    delay_compensation: float = 0.0
    """Strength lambda with which gradients follow rows that have moved since they were read."""
    lr_by_staleness: bool = False
    """A push that missed k steps is applied with the rows' rate divided by max(1, k)."""
    fresh: tuple[str, ...] = ()
    """Tables that are exact while the others are late: a group with pushes, window and counters of
    its own."""
    half: bool = False
    """Rows and gradients travel to and from other hosts as `embedding.half` has it."""

    def of_fresh_tables(self) -> ServerRules:
        """What holds for the fresh tables: nothing is late, and a step's pushes are one update."""
        return ServerRules(
            ranks=self.ranks, tau=0, merges=True, in_rank_order=self.fresh_in_rank_order
        )

    def window(self, step: int) -> int | None:
        """The bound in force for a lookup of this step.

        >>> [ServerRules(tau=4, sync_steps=2).window(step) for step in (1, 2)]
        [0, 4]
        """
        return 0 if step < self.sync_steps else self.tau

    def batch_step(self, rank: int, step: int) -> int:
        """The global step of a batch: what admission draws and expiry go by.

        In async a rank counts its own steps, and the batches of all ranks go round in turn.

        >>> ServerRules(ranks=4, per_rank_window=True).batch_step(1, 10)
        41
        """
        if not self.per_rank_window:
            return step
        return (step * self.ranks + rank) // self.updates_per_step

    def rate(self, missed_pushes: Sequence[int]) -> float:
        """What the rows' learning rate is multiplied by, for one update made of pushes that each
        missed so many others: 1 / max(1, k), k the whole steps among them, on average.

        >>> rules = ServerRules(ranks=4, lr_by_staleness=True)
        >>> [rules.rate([missed]) for missed in (3, 4, 11)], rules.rate([4, 8])
        ([1.0, 1.0, 0.5], 0.6666666666666666)
        """
        steps = [max(0, missed) // self.ranks for missed in missed_pushes]
        return 1.0 / max(1.0, sum(steps) / len(steps))
