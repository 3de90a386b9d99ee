"""What a table can do beside holding every row for ever: capacity, admission, hash stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from persia_sim.words.rules import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many rows a table keeps, over all its shards, and which go first.

    A row that goes loses its optimiser state; when its id comes back it starts from its initial
    value (law 10). Gradients that were on their way to it are dropped and counted.
    """

    rows: int | None = None
    """Most rows, >= 1; None: no limit."""
    memory_bytes: int | None = None
    """Most bytes of rows, state, records and index; None: no limit. The smaller limit counts."""
    eviction: Literal["lru", "clock"] = "lru"
    """lru: exactly the least recently used goes, 31 bytes a row beside values and state. clock: one
    that was not used for a whole turn of the hand goes, 23 bytes a row and faster."""
    expire_after_steps: int | None = None
    """A row not looked up in training for more than this many steps starts afresh; None: never."""

    def __post_init__(self) -> None:
        require(self.rows is None or self.rows >= 1, "capacity.rows", self.rows, "must be >= 1")
        require(
            self.memory_bytes is None or self.memory_bytes >= 1,
            "capacity.memory_bytes",
            self.memory_bytes,
            "must be >= 1",
        )
        require(
            self.expire_after_steps is None or self.expire_after_steps >= 1,
            "capacity.expire_after_steps",
            self.expire_after_steps,
            "must be >= 1",
        )

    @property
    def limited(self) -> bool:
        """Whether rows are evicted."""
        return self.rows is not None or self.memory_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Which ids get a row at a training lookup; the others are read as their initial value."""

    kind: Literal["all", "probability", "frequency"] = "all"
    """probability: by a draw that is a function of (seed, table, id, step); an id seen k times is
    in with probability 1 - (1 - p)**k, as in the original. frequency: after some sightings."""
    probability: float = 1.0
    """p of one sighting, in (0, 1]."""
    sightings: int = 2
    """frequency: batches that an id must have been seen in, 1 to 255, this one counted."""
    counters: int = 1 << 20
    """frequency: width of the count-min sketch (two rows of one byte each), over all shards. A few
    times the number of rare ids; when too narrow, ids get in early, never late."""

    def __post_init__(self) -> None:
        require(
            0 < self.probability <= 1,
            "admission.probability",
            self.probability,
            "must be in (0, 1]",
        )
        require(
            1 <= self.sightings <= 255, "admission.sightings", self.sightings, "must be 1 to 255"
        )
        require(self.counters >= 1, "admission.counters", self.counters, "must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HashStack:
    """Each id becomes several rows of a small table, whose sum is its vector (the original's).

    Round r of a field uses its rows r * rows_per_round + hash_r(id) mod rows_per_round.
    """

    rounds: int = 0
    """Rows an id is made of; 0: no hash stack, an id is a row of its own."""
    rows_per_round: int = 1 << 16
    """Rows of one round of one field, >= 1."""

    def __post_init__(self) -> None:
        require(self.rounds >= 0, "hash_stack.rounds", self.rounds, "must be >= 0")
        require(
            self.rows_per_round >= 1,
            "hash_stack.rows_per_round",
            self.rows_per_round,
            "must be >= 1",
        )
