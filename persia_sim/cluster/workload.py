"""What is trained: fields, rows, skew, MLP, batch; and the bytes that a rank's batch puts on wires.

Sizes follow the message contents of the original system: (id, dimension) pairs to the servers,
float32 rows back, pooled float16 activations to and from the rank, (id, float32 gradient) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from persia_sim.base.popularity import (
    Drawn,
    busiest_extra,
    expected_distinct,
    server_shares,
)
from persia_sim.base.rules import AMOUNT, COUNT, NUMBERS, Range, Usual, require, require_within
from persia_sim.base.schema import hold_choices, nearest
from persia_sim.cluster.machine import Precision
from persia_sim.cluster.tables import IDS, ZIPF, RowUpdate, Table

FEATURES: Range = (0, 1_000_000)
"""Numbers of a sample that need no table."""
MOST_LAYERS = 1000
ALL_TABLES = "all"
"""In place of names of tables: every one."""
BY_TABLES: dict[str, Any] = {"fields": 0, "ids_per_field": 1.0, "dim": 0, "rows": 0, "zipf": 1.05}
"""What `Workload.tables` say in place of the workload -> its value where nobody says it."""


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
    >>> clicks.input_width, clicks.weights  # 2 x 16 numbers into 64, and those into one
    (32, 2177)
    >>> clicks.ids_per_batch > clicks.distinct_ids  # popular ids occur more than once
    True
    """

    name: str
    """The preset's name."""
    fields: int = 0
    """Categorical fields, >= 1. With ``tables`` these say it, as they say ids_per_field, dim, rows
    and zipf."""
    ids_per_field: float = 1.0
    """Mean ids of a field in one sample (multi-hot above 1), > 0."""
    dim: int = 0
    """Numbers in a row, >= 1; 0 where ``tables`` differ in it."""
    rows: Annotated[float, Usual.ROWS] = 0
    """Rows of all tables (nominal, resident or not), >= fields."""
    zipf: float = 1.05
    """Exponent of the ids' popularity, >= 0 (0 is uniform); the fields are alike."""
    tables: tuple[Table, ...] = ()
    """Tables with rows, dim, ids and popularity of their own; none: one a field, all alike."""
    update: RowUpdate | None = None
    """The rows' optimiser; None: Adagrad on servers, row-wise Adagrad on GPUs."""
    dense_features: int = 0
    """Numbers of a sample that need no table, >= 0."""
    mlp: tuple[int, ...] = (4096, 2048, 1024, 512, 256, 1)
    """Widths of the fully connected layers after the input."""
    dense_params: int | None = None
    """Weights of the dense network, >= 1; None: those of ``mlp``. Layers have of them what the
    layers of ``mlp`` would have."""
    dense_flops: float | None = None
    """Operations of a sample's forward and backward pass, > 0; None: six a weight."""
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
        self._hold_tables()
        require_within(
            self,
            fields=COUNT,
            ids_per_field=IDS,
            zipf=ZIPF,
            dense_features=FEATURES,
            dense_params=(1, 1e15),
            dense_flops=(1, 1e18),
        )
        if not self.tables:
            require_within(self, dim=NUMBERS)
        rule = f"must lie in [{self.fields:g}, {AMOUNT[1]:g}] (a row a field)"
        enough = self.tables or self.fields <= self.rows
        require(enough and self.rows <= AMOUNT[1], "rows", self.rows, rule)
        least, most = NUMBERS
        ok = 1 <= len(self.mlp) <= MOST_LAYERS and all(least <= w <= most for w in self.mlp)
        rule = f"needs 1 to {MOST_LAYERS} widths (the last is the output) in [{least}, {most:,}]"
        require(ok, "mlp", self.mlp, rule)
        ok = 1 <= self.batch_per_rank <= 65535
        require(ok, "batch_per_rank", self.batch_per_rank, "must lie in [1, 65535]")

    def _hold_tables(self) -> None:
        """What tables say is filled in; whoever says it again, otherwise, is refused."""
        if not self.tables:
            if not (self.fields or self.dim or self.rows):
                raise ValueError("fields is missing: give it with dim and rows, or [[tables]]")
            return

        # What follows from tables.
        fields = sum(table.count * len(table.ids_per_sample) for table in self.tables)
        ids = sum(table.count * table.ids for table in self.tables)
        dims = {table.dim for table in self.tables}
        follows = {
            "fields": fields,
            "ids_per_field": ids / fields,
            "dim": round(min(dims)) if len(dims) == 1 else 0,
            "rows": sum(table.count * table.rows for table in self.tables),
            "zipf": BY_TABLES["zipf"],
        }
        for name, value in follows.items():
            own = getattr(self, name)
            ok = own in (BY_TABLES[name], value)
            require(ok, name, own, "[[tables]] say it", "leave it out, or the tables")
            object.__setattr__(self, name, value)

        # Names are those of one table each.
        names = [name for table in self.tables for name in {table.name, *table.fields} - {""}]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, "tables", ", ".join(twice), "names of tables and fields must differ")

    def parted(self, fresh: Sequence[str]) -> tuple[Workload | None, Workload | None]:
        """The same batches with the tables named fresh alone, and with all others; None where there
        are none.

        ``fresh``: names of tables or of fields, of which each means its whole table; a number, of
        that many fields of a workload whose fields have no names; or `all`. Raises ValueError for a
        name that no table has.
        """
        tables = self.alike
        if not fresh:
            return None, self
        if list(fresh) == [ALL_TABLES]:
            return self, None
        if len(fresh) == 1 and fresh[0].isdecimal():
            chosen, others = self._first(int(fresh[0]))
        else:
            names = {name: t for t in tables for name in (t.name, *t.fields) if name}
            for name in fresh:
                rule = nearest(name, names) if names else "no table has a name: give a number"
                require(name in names, "fresh", name, rule)
            asked = [names[name] for name in fresh]
            chosen = [table for table in tables if table in asked]
            others = [table for table in tables if table not in asked]
        if not others:
            return self, None
        return tuple(
            replace(self, **BY_TABLES, tables=tuple(part)) if part else None
            for part in (chosen, others)
        )  # type: ignore[return-value]

    def _first(self, count: int) -> tuple[list[Table], list[Table]]:
        """So many fields without a name, and the other tables."""
        named = any(table.name for table in self.tables)
        single = all(len(table.ids_per_sample) == 1 for table in self.alike)
        rule = "a number is for fields without names"
        require(single and not named, "fresh", count, rule, "name tables, or fields")
        require(count <= self.fields, "fresh", count, f"the workload has {self.fields} fields")
        chosen: list[Table] = []
        others: list[Table] = []
        for table in self.alike:
            here = min(count, table.count)
            count -= here
            for part, many in (chosen, here), (others, table.count - here):
                if many:
                    part.append(replace(table, count=many))
        return chosen, others

    @property
    def alike(self) -> tuple[Table, ...]:
        """Tables, those that are alike as one entry: without ``tables`` one a field."""
        return self.tables or (
            Table(
                rows=self.rows / self.fields,
                dim=self.dim,
                ids_per_sample=(self.ids_per_field,),
                count=self.fields,
                zipf=self.zipf,
            ),
        )

    @property
    def ids_per_batch(self) -> float:
        """Occurrences of ids in one rank's batch."""
        return self.batch_per_rank * self.fields * self.ids_per_field

    @property
    def distinct_ids(self) -> float:
        """Expected distinct ids of one rank's batch, summed over fields."""
        return sum(map(self._distinct_of, self.alike))

    def _distinct_of(self, table: Table) -> float:
        """Distinct ids of a batch in all tables of an entry."""
        draws = self.batch_per_rank * table.ids
        return table.count * expected_distinct(draws, table.rows, table.zipf)

    def sent_of(self, table: Table) -> float:
        """Ids that travel to the servers for one rank's batch, of all tables of an entry."""
        if self.wire.deduplicate:
            return self._distinct_of(table)
        return self.batch_per_rank * table.count * table.ids

    @property
    def sent_ids(self) -> float:
        """Ids that travel to the servers for one rank's batch."""
        return sum(map(self.sent_of, self.alike))

    @property
    def sent_dim(self) -> float:
        """Mean numbers of a row that travels."""
        tables = self.alike
        return mean([table.dim for table in tables], [self.sent_of(table) for table in tables])

    @property
    def kept_dim(self) -> float:
        """Mean numbers of a row, over all rows."""
        tables = self.alike
        return mean([t.dim for t in tables], [t.count * t.rows for t in tables])

    @property
    def pooled(self) -> float:
        """Numbers of one sample that tables give, a vector a field."""
        return sum(table.count * table.pooled for table in self.alike)

    @property
    def input_width(self) -> int:
        """Numbers that enter the MLP per sample."""
        return round(self.pooled) + self.dense_features

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Parameters of each layer, from input to output."""
        widths = (self.input_width, *self.mlp)
        layers = tuple((a + 1) * b for a, b in pairwise(widths))
        if self.dense_params is None:
            return layers
        ends = np.rint(np.cumsum(layers) * (self.dense_params / sum(layers))).astype(int)
        return tuple(np.diff(ends, prepend=0).tolist())

    @property
    def weights(self) -> int:
        """Parameters of the dense network."""
        return sum(self.layer_params)

    @property
    def dense_bytes(self) -> float:
        """One float32 copy of the dense network's weights."""
        return 4.0 * self.weights

    @property
    def dense_gradient_bytes(self) -> float:
        """The dense network's gradient as it is summed over ranks."""
        return float(self.precision.value_bytes * self.weights)

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
        """Forward and backward: as counted, or two and four operations a parameter."""
        return 6.0 * self.weights if self.dense_flops is None else self.dense_flops

    @property
    def row_bytes(self) -> float:
        """One row on the wire between server and worker."""
        size = self.wire.row_value_bytes
        return float(size * (self.sent_dim + (size == 2)))

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
            return float(size * self.batch_per_rank * self.pooled)
        rows = (self.distinct_ids + self.fields) * self.sent_dim * size
        return rows + 8.0 * self.ids_per_batch + 8.0 * self.batch_per_rank * self.fields

    @property
    def push_bytes(self) -> float:
        """Worker to all servers: ids and the gradients of their rows."""
        return (8.0 + self.row_bytes) * self.sent_ids

    @property
    def _drawn(self) -> tuple[Drawn, ...]:
        """How often a batch draws from its tables."""
        batch = self.batch_per_rank
        return tuple((t.count, batch * t.ids, t.rows, t.zipf) for t in self.alike)

    def server_shares(self, servers: int) -> np.ndarray:
        """Expected share of each server in the ids of a batch, float64 [servers], sum 1."""
        return server_shares(servers, self._drawn, self.wire.deduplicate)

    def busiest_extra(self, servers: int) -> float:
        """Ids by which the busiest server of a batch exceeds the largest expected number."""
        return busiest_extra(servers, self._drawn, self.wire.deduplicate)

    def pending_fraction(self, batches: float) -> float:
        """Share of a batch's distinct ids that also stand in at least one of ``batches`` others."""
        if batches <= 0:
            return 0.0
        tables = self.alike
        shares = []
        for table in tables:
            draws = self.batch_per_rank * table.ids
            here = expected_distinct(draws, table.rows, table.zipf)
            other = expected_distinct(draws * batches, table.rows, table.zipf)
            union = expected_distinct(draws * (batches + 1), table.rows, table.zipf)
            shares.append(min(1.0, max(0.0, (here + other - union) / here)))
        return mean(shares, [self._distinct_of(table) for table in tables])


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted mean; of equal values that very value.

    >>> mean([1.0, 4.0], [2.0, 1.0]), mean([0.1, 0.1], [0.3, 0.7])
    (2.0, 0.1)
    """
    if len(set(values)) == 1:
        return values[0]
    return float(np.average(values, weights=weights))
