"""What a table can do beside holding every row for ever: capacity, admission, hash stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from persia_sim.words.rules import require
from persia_sim.words.schema import Positive, ReadBy, Within, check_fields, refuse_unread
from runtime.data.ids import VALUE_BITS

Eviction = Literal["lru", "clock"]
AdmissionKind = Literal["all", "probability", "frequency"]
MOST_ROUNDS = 64
_LIMITED = ReadBy(lambda capacity: capacity.limited, "rows or memory_bytes of the capacity")
_DRAWS = ReadBy(lambda admission: admission.kind == "probability", "kind probability")
_COUNTS = ReadBy(lambda admission: admission.kind == "frequency", "kind frequency")
_STACKS = ReadBy(lambda stack: stack.rounds > 0, "rounds >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many rows a table keeps, over all its shards, and which go first.

    A row that goes loses its optimiser state; when its id comes back it starts from its initial
    value (law 10). Gradients that were on their way to it are dropped and counted.
    """

    rows: Positive | None = None
    """Most rows, >= 1; None: no limit."""
    memory_bytes: Positive | None = None
    """Most bytes of rows, state, records and index; None: no limit. The smaller limit counts."""
    eviction: Annotated[Eviction, _LIMITED] = "lru"
    """lru: exactly the least recently used goes, 35 bytes a row beside values and state. clock: one
    that was not used for a whole turn of the hand goes, 27 bytes a row and faster; an incremental
    checkpoint writes all rows of such a table."""
    expire_after_steps: Annotated[int | None, Within(1, 2**32 - 1)] = None
    """A row not looked up in training for more than this many steps starts afresh; None: never."""

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unread(self)

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
    probability: Annotated[float, Within(0, 1, without="least"), _DRAWS] = 1.0
    """p of one sighting, in (0, 1]."""
    sightings: Annotated[int, Within(1, 255), _COUNTS] = 2
    """frequency: batches that an id must have been seen in, 1 to 255, this one counted."""
    counters: Annotated[Positive, _COUNTS] = 1 << 20
    """frequency: width of the count-min sketch (two rows of one byte each), over all shards. A few
    times the number of rare ids; when too narrow, ids get in early, never late."""

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unread(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashStack:
    """Each id becomes several rows of a small table, whose sum is its vector (the original's).

    Round r of a field uses its rows r * rows_per_round + hash_r(id) mod rows_per_round.
    """

    rounds: Annotated[int, Within(0, MOST_ROUNDS)] = 0
    """Rows an id is made of, at most 64; 0: no hash stack, an id is a row of its own."""
    rows_per_round: Annotated[int, Within(1, 2**VALUE_BITS), _STACKS] = 1 << 16
    """Rows of one round of one field, >= 1."""

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unread(self)
        rule = f"must be so that rounds * rows_per_round is at most 2**{VALUE_BITS}"
        fits = self.rounds * self.rows_per_round <= 2**VALUE_BITS
        require(fits, "rows_per_round", self.rows_per_round, rule)
