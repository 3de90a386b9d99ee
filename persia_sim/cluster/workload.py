"""What is trained: fields, rows, skew, MLP, batch; and the bytes that a rank's batch puts on wires.

Sizes follow the message contents of the original system: (id, dimension) pairs to the servers,
float32 rows back, pooled float16 activations to and from the rank, (id, float32 gradient) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from persia_sim.base.rules import AMOUNT, COUNT, NUMBERS, Range, require, require_within
from persia_sim.base.schema import hold_choices
from persia_sim.cluster.machine import Precision
from persia_sim.cluster.popularity import busiest_extra, expected_distinct, server_shares

IDS: Range = (1e-9, 1e6)
"""Mean ids of a field in a sample."""
ZIPF: Range = (0, 20)
FEATURES: Range = (0, 1_000_000)
"""Numbers of a sample that need no table."""
MOST_LAYERS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How values travel."""

    deduplicate: bool = True
    """Each distinct id of a field and batch travels once; otherwise every occurrence does."""
    pooled: bool = True
    """The embedding worker sums a field's rows, so the rank gets one vector a field; otherwise
    every row travels to the rank."""
    row_value_bytes: int = 4
    """Bytes of a number between server and embedding worker: 4 (the original), or 2 with as much
    for each row's scale (`--wire half` of a run)."""
    activation_value_bytes: int = 2
    """Bytes of a number between embedding worker and rank: 2 (the original) or 4."""

    def __post_init__(self) -> None:
        for field in ("row_value_bytes", "activation_value_bytes"):
            require(getattr(self, field) in (2, 4), field, getattr(self, field), "must be 2 or 4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A data set and the model trained on it.

    >>> clicks = Workload(
    ...     name="mine", fields=2, dim=16, rows=3e6, mlp=(64, 1), batch_per_rank=256, source="me"
    ... )
    >>> clicks.input_width, clicks.dense_params  # 2 x 16 numbers into 64, and those into one
    (32, 2177)
    >>> clicks.ids_per_batch > clicks.distinct_ids  # popular ids occur more than once
    True
    """

    name: str
    """The preset's name."""
    fields: int
    """Categorical fields, >= 1."""
    ids_per_field: float = 1.0
    """Mean ids of a field in one sample (multi-hot above 1), > 0."""
    dim: int
    """Numbers in a row, >= 1."""
    rows: float
    """Rows of all tables (nominal, resident or not), >= fields."""
    zipf: float = 1.05
    """Exponent of the ids' popularity, >= 0 (0 is uniform); the fields are alike."""
    dense_features: int = 0
    """Numbers of a sample that need no table, >= 0."""
    mlp: tuple[int, ...] = (4096, 2048, 1024, 512, 256, 1)
    """Widths of the fully connected layers after the input."""
    batch_per_rank: int
    """Samples of one rank in one step, in [1, 65535] (positions travel as 16 bits)."""
    precision: Precision = Precision.FP32
    """Arithmetic of the MLP; with 2 bytes (fp16) its gradient travels in 2 bytes, too."""
    wire: Wire = Wire()
    """How values travel."""
    source: str
    """Where these constants come from, and which are assumed."""

    def __post_init__(self) -> None:
        hold_choices(self)
        require_within(
            self, fields=COUNT, ids_per_field=IDS, dim=NUMBERS, zipf=ZIPF, dense_features=FEATURES
        )
        rule = f"must lie in [{self.fields:g}, {AMOUNT[1]:g}] (a row a field)"
        require(self.fields <= self.rows <= AMOUNT[1], "rows", self.rows, rule)
        least, most = NUMBERS
        ok = 1 <= len(self.mlp) <= MOST_LAYERS and all(least <= w <= most for w in self.mlp)
        rule = f"needs 1 to {MOST_LAYERS} widths (the last is the output) in [{least}, {most:,}]"
        require(ok, "mlp", self.mlp, rule)
        ok = 1 <= self.batch_per_rank <= 65535
        require(ok, "batch_per_rank", self.batch_per_rank, "must lie in [1, 65535]")

    @property
    def ids_per_batch(self) -> float:
        """Occurrences of ids in one rank's batch."""
        return self.batch_per_rank * self.fields * self.ids_per_field

    @property
    def distinct_ids(self) -> float:
        """Expected distinct ids of one rank's batch, summed over fields."""
        draws = self.batch_per_rank * self.ids_per_field
        return self.fields * expected_distinct(draws, self.rows / self.fields, self.zipf)

    @property
    def sent_ids(self) -> float:
        """Ids that travel to the servers for one rank's batch."""
        return self.distinct_ids if self.wire.deduplicate else self.ids_per_batch

    @property
    def input_width(self) -> int:
        """Numbers that enter the MLP per sample."""
        return self.fields * self.dim + self.dense_features

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Parameters of each layer, from input to output."""
        widths = (self.input_width, *self.mlp)
        return tuple((a + 1) * b for a, b in pairwise(widths))

    @property
    def dense_params(self) -> int:
        """Parameters of the MLP."""
        return sum(self.layer_params)

    @property
    def dense_bytes(self) -> float:
        """One float32 copy of the MLP's weights."""
        return 4.0 * self.dense_params

    @property
    def dense_gradient_bytes(self) -> float:
        """The MLP's gradient as it is summed over ranks."""
        return float(self.precision.value_bytes * self.dense_params)

    @property
    def columns(self) -> int:
        """What a loader builds for a sample: its fields and dense features."""
        return self.fields + self.dense_features

    @property
    def widths(self) -> int:
        """Numbers of a sample that the layers of the MLP hand on."""
        return self.input_width + sum(self.mlp)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward: two and four operations a parameter."""
        return 6.0 * self.dense_params

    @property
    def row_bytes(self) -> float:
        """One row on the wire between server and worker."""
        size = self.wire.row_value_bytes
        return float(size * (self.dim + (size == 2)))

    @property
    def loader_bytes(self) -> float:
        """Loader to worker: ids with 16-bit positions, counts, an index map, and a header."""
        n = self.ids_per_batch
        u = self.distinct_ids
        return 12 * u + 4 * n + 4.0 * self.batch_per_rank * self.fields + 16 * u + 40

    @property
    def input_bytes(self) -> float:
        """Loader to rank, and on to the GPU: float32 dense features and labels."""
        return 4.0 * self.batch_per_rank * (self.dense_features + 1)

    @property
    def request_bytes(self) -> float:
        """Worker to all servers: an id and its dimension, 8 bytes each."""
        return 16.0 * self.sent_ids

    @property
    def rows_bytes(self) -> float:
        """All servers to worker: the rows."""
        return self.row_bytes * self.sent_ids

    @property
    def activation_bytes(self) -> float:
        """Worker to rank (and the gradient back): one vector a field and sample if pooled; else the
        distinct rows, an 8-byte index an occurrence and an 8-byte count a sample and field."""
        size = self.wire.activation_value_bytes
        if self.wire.pooled:
            return float(size * self.batch_per_rank * self.fields * self.dim)
        rows = (self.distinct_ids + self.fields) * self.dim * size
        return rows + 8.0 * self.ids_per_batch + 8.0 * self.batch_per_rank * self.fields

    @property
    def push_bytes(self) -> float:
        """Worker to all servers: ids and the gradients of their rows."""
        return (8.0 + self.row_bytes) * self.sent_ids

    def server_shares(self, servers: int) -> np.ndarray:
        """Expected share of each server in the ids of a batch, float64 [servers], sum 1."""
        draws = self.batch_per_rank * self.ids_per_field
        return server_shares(
            servers, self.fields, draws, self.rows / self.fields, self.zipf, self.wire.deduplicate
        )

    def busiest_extra(self, servers: int) -> float:
        """Ids by which the busiest server of a batch exceeds the largest expected number."""
        draws = self.batch_per_rank * self.ids_per_field
        return busiest_extra(
            servers, self.fields, draws, self.rows / self.fields, self.zipf, self.wire.deduplicate
        )

    def pending_fraction(self, batches: float) -> float:
        """Share of a batch's distinct ids that also stand in at least one of ``batches`` others."""
        if batches <= 0:
            return 0.0
        draws = self.batch_per_rank * self.ids_per_field
        values = self.rows / self.fields
        here = expected_distinct(draws, values, self.zipf)
        other = expected_distinct(draws * batches, values, self.zipf)
        union = expected_distinct(draws * (batches + 1), values, self.zipf)
        return min(1.0, max(0.0, (here + other - union) / here))
