"""What a table can do beside holding every row for ever: capacity, admission, hash stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from persia_sim.words.rules import require
from runtime.data.ids import VALUE_BITS
from runtime.embedding.rules import (
    MOST_INT64,
    require_finite,
    require_one_of,
    require_used,
    require_whole,
)

Eviction = Literal["lru", "clock"]
AdmissionKind = Literal["all", "probability", "frequency"]
MOST_ROUNDS = 64
_DEFAULT_SIGHTINGS, _DEFAULT_COUNTERS, _DEFAULT_ROWS_PER_ROUND = 2, 1 << 20, 1 << 16


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
    eviction: Eviction = "lru"
    """lru: exactly the least recently used goes, 35 bytes a row beside values and state. clock: one
    that was not used for a whole turn of the hand goes, 27 bytes a row and faster; an incremental
    checkpoint writes all rows of such a table."""
    expire_after_steps: int | None = None
    """A row not looked up in training for more than this many steps starts afresh; None: never."""

    def __post_init__(self) -> None:
        for name in ("rows", "memory_bytes"):
            value = getattr(self, name)
            if value is not None:
                rule = "must be >= 1 and fit 64 bits"
                require_whole(f"capacity.{name}", value, 1, MOST_INT64, rule)
        require_one_of("capacity.eviction", self.eviction, get_args(Eviction))
        where = "a capacity.rows or capacity.memory_bytes"
        require_used("capacity.eviction", self.eviction, "lru", self.limited, where)
        if self.expire_after_steps is not None:
            rule = "must be >= 1 and below 2**32"
            require_whole(
                "capacity.expire_after_steps", self.expire_after_steps, 1, 2**32 - 1, rule
            )

    @property
    def saved_whole(self) -> bool:
        """Whether every save has all rows: a clock's hand changes rows that nobody uses."""
        return self.eviction == "clock"

    @property
    def limited(self) -> bool:
        """Whether rows are evicted."""
        return self.rows is not None or self.memory_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Which ids get a row at a training lookup; the others are read as their initial value."""

    kind: AdmissionKind = "all"
    """probability: by a draw that is a function of (seed, table, id, step); an id seen k times is
    in with probability 1 - (1 - p)**k, as in the original. frequency: after some sightings."""
    probability: float = 1.0
    """p of one sighting, in (0, 1]."""
    sightings: int = _DEFAULT_SIGHTINGS
    """frequency: batches that an id must have been seen in, 1 to 255, this one counted."""
    counters: int = _DEFAULT_COUNTERS
    """frequency: width of the count-min sketch (two rows of one byte each), over all shards. A few
    times the number of rare ids; when too narrow, ids get in early, never late."""

    def __post_init__(self) -> None:
        require_one_of("admission.kind", self.kind, get_args(AdmissionKind))
        require_finite("admission.probability", self.probability)
        require(
            0 < self.probability <= 1,
            "admission.probability",
            self.probability,
            "must be in (0, 1]",
        )
        require_whole("admission.sightings", self.sightings, 1, 255)
        rule = "must be >= 1 and fit 64 bits"
        require_whole("admission.counters", self.counters, 1, MOST_INT64, rule)
        draws, counts = self.kind == "probability", self.kind == "frequency"
        used_by = {
            "probability": (1.0, draws, "admission.kind probability"),
            "sightings": (_DEFAULT_SIGHTINGS, counts, "admission.kind frequency"),
            "counters": (_DEFAULT_COUNTERS, counts, "admission.kind frequency"),
        }
        for name, (default, used, where) in used_by.items():
            require_used(f"admission.{name}", getattr(self, name), default, used, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashStack:
    """Each id becomes several rows of a small table, whose sum is its vector (the original's).

    Round r of a field uses its rows r * rows_per_round + hash_r(id) mod rows_per_round.
    """

    rounds: int = 0
    """Rows an id is made of, at most 64; 0: no hash stack, an id is a row of its own."""
    rows_per_round: int = _DEFAULT_ROWS_PER_ROUND
    """Rows of one round of one field, >= 1."""

    def __post_init__(self) -> None:
        require_whole("hash_stack.rounds", self.rounds, 0, MOST_ROUNDS)
        most = 2**VALUE_BITS // max(self.rounds, 1)
        rule = f"must be >= 1, and rounds * rows_per_round at most 2**{VALUE_BITS}"
        require_whole("hash_stack.rows_per_round", self.rows_per_round, 1, most, rule)
        default, where = _DEFAULT_ROWS_PER_ROUND, "hash_stack.rounds >= 1"
        require_used(
            "hash_stack.rows_per_round", self.rows_per_round, default, self.rounds > 0, where
        )
