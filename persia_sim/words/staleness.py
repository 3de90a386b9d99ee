"""Staleness of a trace: in steps, and in pushes, with the identity that checks both.

The statistics read only the table, so a simulated run and a recorded one are measured alike.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from persia_sim.words.trace import ALL, Kind, Trace
from persia_sim.words.vocabulary import Mode

_NONE = np.zeros(0, np.int64)
_KIND, _RANK, _STEP, _SHARD, _VERSION = range(1, 6)  # columns of Trace.of_kind


@dataclass(frozen=True, slots=True)
class StepStaleness:
    """Per lookup of a batch, what its rows missed when they were read."""

    rank: np.ndarray
    """int64 [n]"""
    step: np.ndarray
    """int64 [n]"""
    missing_steps: np.ndarray
    """int64 [n]: earlier steps with a push not applied at a shard when that shard was read."""
    oldest_missing_steps: np.ndarray
    """int64 [n]: how many steps back the oldest of them lies; 0 when none is missing."""


def staleness_in_steps(trace: Trace) -> StepStaleness:
    """Count, for each (rank, step), the earlier steps whose pushes its lookup missed.

    In async the steps are the rank's own, as the window's are. The bound of the window is
    ``oldest_missing_steps <= tau`` (design law 5). In lookahead the reading that counts is the
    refresh, in which pending rows are replaced.
    """
    mode = Mode(trace.meta["mode"])
    ranks = int(trace.meta["ranks"])
    reading = Kind.REFRESH if mode is Mode.LOOKAHEAD else Kind.LOOKUP
    reads = trace.of_kind(reading)
    pushes = trace.of_kind(Kind.PUSH)
    pushes = np.vstack([pushes, trace.of_kind(Kind.LOST_PUSH)])
    closed_at = _closing_instants(pushes, ranks, mode.has_barrier)
    missing: dict[tuple[int, int], list[np.ndarray]] = {}
    frontier: dict[tuple[int, int], int] = {}
    in_order = {key: sorted(instants.tolist()) for key, instants in closed_at.items()}
    # Reads of a step with no closing between them miss the same: what the last one found.
    last: dict[tuple[int, int], tuple[int, int, np.ndarray]] = {}
    for seq, _, rank, step, shard, _ in reads.tolist():
        owner = ALL if mode.has_barrier else rank
        key = (owner, shard) if (owner, shard) in closed_at else (owner, ALL)
        closed = bisect_left(in_order.get(key, []), seq)
        at, of_step, late = last.get((owner, shard), (-1, -1, _NONE))
        if (at, of_step) != (closed, step):
            instants = closed_at.get(key, _NONE)
            first = frontier.get((owner, shard), 0)
            while first < len(instants) and instants[first] < seq:
                first += 1
            frontier[owner, shard] = first
            late = first + np.flatnonzero(instants[first:step] > seq)
            last[owner, shard] = closed, step, late
        missing.setdefault((rank, step), []).append(late)
    rows = []
    for rank, step in sorted(missing, key=lambda key: (key[1], key[0])):
        late = _union(missing[rank, step])
        rows.append((rank, step, len(late), step - int(late[0]) if len(late) else 0))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return StepStaleness(*table.T)


def _union(parts: list[np.ndarray]) -> np.ndarray:
    """A step that any shard missed is missing once."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _closing_instants(
    pushes: np.ndarray, ranks: int, all_ranks: bool
) -> dict[tuple[int, int], np.ndarray]:
    """For each (owner, shard): the ``seq`` at which the pushes of step 0, 1, ... were closed."""
    instants: dict[tuple[int, int], np.ndarray] = {}
    if not len(pushes):
        return instants
    steps = int(pushes[:, _STEP].max()) + 1
    shards = {int(s) for s in np.unique(pushes[:, _SHARD])}
    owners = [ALL] if all_ranks else list(range(ranks))
    for shard in shards:
        here = pushes[(pushes[:, _SHARD] == shard) | (pushes[:, _SHARD] == ALL)]
        for owner in owners:
            own = here if all_ranks else here[here[:, _RANK] == owner]
            last = np.full(steps, -1, np.int64)
            np.maximum.at(last, own[:, _STEP], own[:, 0])
            instants[owner, shard] = last
    return instants


@dataclass(frozen=True, slots=True)
class PushStaleness:
    """Per (rank, step, shard), how many pushes of others came between lookup and own push."""

    shard: np.ndarray
    """int64 [n]"""
    missed_pushes: np.ndarray
    """int64 [n]: version at the own push minus version at the lookup."""
    in_flight: np.ndarray
    """int64 [n]: other batches in flight at the instant of the push (an independent gauge)."""
    step: np.ndarray
    """int64 [n]"""

    def mean_by_shard(self) -> dict[int, tuple[float, float]]:
        """Both means of each shard; the discrete Little's law says that they are equal (law 7)."""
        return {
            int(k): (
                float(self.missed_pushes[self.shard == k].mean()),
                float(self.in_flight[self.shard == k].mean()),
            )
            for k in np.unique(self.shard)
        }


def staleness_in_pushes(trace: Trace) -> PushStaleness:
    """Read the versions that the stores recorded, and count batches in flight beside them.

    Needs a trace with versions and with one row per shard, as an execution writes it. Pushes merged
    into one apply take effect at the same instant and do not count as each other's. A batch whose
    push is lost at a shard never has a push instant there, so it is in neither of its figures.
    """
    lost = {(e.rank, e.step, e.shard) for e in trace if e.kind == Kind.LOST_PUSH}
    mode = Mode(trace.meta["mode"])
    reading = Kind.REFRESH if mode is Mode.LOOKAHEAD else Kind.LOOKUP
    open_reads: dict[int, dict[tuple[int, int], int]] = {}
    shards: list[int] = []
    missed: list[int] = []
    in_flight: list[int] = []
    steps: list[int] = []
    for event in trace:
        flying = open_reads.setdefault(event.shard, {})
        if event.kind == reading:
            batch = (event.rank, event.step)
            if (*batch, event.shard) not in lost and (*batch, ALL) not in lost:
                flying[batch] = event.version
        elif event.kind == Kind.PUSH:
            if event.rank == ALL:
                group = [key for key in flying if key[1] == event.step]
            else:
                group = [(event.rank, event.step)]
            versions = [flying.pop(key) for key in group if key in flying]
            for version in versions:
                shards.append(event.shard)
                missed.append(event.version - version)
                in_flight.append(len(flying))
                steps.append(event.step)
    as_array = [np.array(column, np.int64) for column in (shards, missed, in_flight, steps)]
    return PushStaleness(*as_array)


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """The figures that a results table shows."""

    mean_steps: float
    max_steps: int
    oldest_steps: int
    mean_pushes: float | None
    """None when the trace carries no versions (an order that was never executed)."""


def summarize(trace: Trace) -> StalenessSummary:
    """Mean and maximum over all lookups of a run."""
    steps = staleness_in_steps(trace)
    if not len(steps.step):
        return StalenessSummary(0.0, 0, 0, None)
    pushes = trace.of_kind(Kind.PUSH)
    has_versions = len(pushes) > 0 and bool((pushes[:, _VERSION] >= 0).all())
    mean_pushes = None
    if has_versions:
        per_push = staleness_in_pushes(trace).missed_pushes
        mean_pushes = float(per_push.mean()) if len(per_push) else 0.0
    return StalenessSummary(
        float(steps.missing_steps.mean()),
        int(steps.missing_steps.max()),
        int(steps.oldest_missing_steps.max()),
        mean_pushes,
    )
