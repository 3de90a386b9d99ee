"""Do the rows fit? Resident, nominal and evicted rows, miss rate, time to fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, expm1, inf, isinf
from typing import Annotated

from persia_sim.base.popularity import (
    batch_miss_rate,
    characteristic_time,
    expected_distinct,
    lru_after,
)
from persia_sim.base.rules import Usual, require, require_within
from persia_sim.base.schema import require_possible
from persia_sim.cluster.cluster import MOST_PROCESSES, Cluster
from persia_sim.cluster.tables import Table
from persia_sim.cluster.workload import Workload, mean

_MOST_LN_SAMPLES = 80.0
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How a server keeps a row."""

    name: str
    """Short name."""
    value_bytes: Annotated[int, Usual.NUMBER]
    """Bytes of one number of a row, >= 1."""
    state_values_per_value: float
    """Numbers of optimiser state per number of a row (1 for Adagrad, 2 for Adam), >= 0."""
    state_bytes: Annotated[int, Usual.NUMBER]
    """Bytes of one number of optimiser state, >= 1."""
    overhead_bytes: float
    """Key, links, locks and hash slot of a row, >= 0."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_possible(self)
        require_within(self, state_values_per_value=(0, 1e6), overhead_bytes=(0, 1e6))

    def row_bytes(self, dim: float) -> float:
        """Memory of one row.

        >>> FORMATS["fp16-lean"].row_bytes(128)
        346.0
        """
        state = self.state_values_per_value * self.state_bytes
        return dim * (self.value_bytes + state) + self.overhead_bytes


_RELEASED = "the original's released store: float32 and 66 bytes beside a row, {}"


def _released(name: str, state_values: float, state: str) -> RowFormat:
    return RowFormat(
        name=name,
        value_bytes=4,
        state_values_per_value=state_values,
        state_bytes=4,
        overhead_bytes=66.0,
        source=_RELEASED.format(state),
    )


FORMATS = {
    rows.name: rows
    for rows in (
        RowFormat(
            name="fp16-lean", value_bytes=2, state_values_per_value=0.0, state_bytes=4,
            overhead_bytes=90.0,
            source="the original's experiment branch: float16 values without optimiser state, "
            "83-103 bytes beside them",
        ),
        _released("f32-adagrad", 1.0, "Adagrad's sum of squares"),
        _released("f32-adam", 2.0, "Adam's two moments"),
        _released("f32-sgd", 0.0, "no optimiser state"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the servers can hold of a workload."""

    nominal_rows: float
    resident_rows: float
    row_bytes: float
    bytes_per_server: float
    """Needed by the nominal rows, evenly spread."""
    limit_bytes_per_server: float
    miss_rate: float
    """Share of the ids that a batch sends that miss, under independent Zipf requests to LRU stores:
    in their steady state, or while they fill."""
    filled_rows: float
    """Rows that are there: all that have room, or those that the samples so far have touched."""
    rows: str = ""
    """Name of the format."""

    @property
    def evicted_rows(self) -> float:
        """Nominal rows that find no room."""
        return self.nominal_rows - self.resident_rows

    @property
    def fits(self) -> bool:
        """Whether every nominal row has room."""
        return self.evicted_rows <= 0

    def refuse(self, cluster: Cluster) -> None:
        """Raise ValueError when the nominal rows do not fit."""
        if not self.fits:
            each = self.limit_bytes_per_server // self.row_bytes  # whole rows
            servers = ceil(self.nominal_rows / each) if each else 0
            hosts = ceil(servers / cluster.servers.processes_per_host)
            enough = f"use at least {hosts:,} server hosts, " if servers else "use "
            if servers > MOST_PROCESSES:
                enough = f"more than {MOST_PROCESSES:,} servers would be needed: use fewer rows, "
            raise ValueError(
                f"memory per server is {binary(self.limit_bytes_per_server)} on {cluster.name}, "
                f"but {self.nominal_rows:.3g} rows of {self.row_bytes:.0f} bytes need "
                f"{binary(self.bytes_per_server)}: {enough}a leaner row format, or --evict to keep "
                "only the most recently used rows"
            )


def capacity(
    cluster: Cluster, workload: Workload, rows: RowFormat, samples: float | None = None
) -> Capacity:
    """Compare what the rows need with what the servers have.

    ``samples``: since the servers were empty; None is long ago (or rows were made beforehand).
    """
    each = rows.row_bytes(workload.kept_dim)
    servers = cluster.servers.processes
    limit = cluster.servers.ram_bytes_per_process
    needed = workload.rows * each / servers
    tables = workload.alike
    held_of = [table.rows for table in tables]
    held = workload.rows
    if workload.rows > (room := servers * (limit // each)):
        held_of, held = _held(
            tables, [rows.row_bytes(t.dim) for t in tables], room, servers * limit
        )

    # Who misses, and what is there so far.
    miss = 0.0
    filled = held
    if samples is not None or held < workload.rows:
        require(samples is None or samples >= 0, "after_samples", samples, "must be >= 0")
        parts = []
        for table, own in zip(tables, held_of, strict=True):
            draws = inf if samples is None else samples * table.ids
            law = own, table.rows, table.zipf
            there, missed = lru_after(draws, *law)
            if workload.wire.deduplicate:
                missed = batch_miss_rate(draws, workload.batch_per_rank * table.ids, *law)
            parts.append((there, missed))
        miss = mean([missed for _, missed in parts], [workload.sent_of(table) for table in tables])
        if samples is not None:
            filled = sum(there * t.count for (there, _), t in zip(parts, tables, strict=True))
    return Capacity(workload.rows, held, each, needed, limit, miss, filled, rows.name)


def _held(
    tables: Sequence[Table], row_bytes: Sequence[float], room_rows: float, room_bytes: float
) -> tuple[list[float], float]:
    """Rows of one table of each entry that stay, where not all have room; and of all together. A
    store keeps what was asked for last, whatever its table."""
    if len(tables) == 1:
        return [room_rows / tables[0].count], room_rows
    samples = _samples_until(room_bytes, tables, row_bytes)
    held = [expected_distinct(samples * t.ids, t.rows, t.zipf) for t in tables]
    return held, sum(own * t.count for own, t in zip(held, tables, strict=True))


def _samples_until(most: float, tables: Sequence[Table], weights: Sequence[float]) -> float:
    """Samples whose distinct rows, each with its table's weight, are expected to be so many."""
    low = 0.0
    high = _MOST_LN_SAMPLES
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        met = sum(
            weight
            * table.count
            * expected_distinct(expm1(middle) * table.ids, table.rows, table.zipf)
            for table, weight in zip(tables, weights, strict=True)
        )
        low, high = (middle, high) if met < most else (low, middle)
    return expm1(high)


def fill_s(workload: Workload, samples_per_s: float, rows: float) -> float:
    """Time in which training is expected to meet so many rows, from empty servers; inf for all."""
    if rows >= workload.rows:
        return inf
    tables = workload.alike
    if len(tables) > 1:
        return _samples_until(rows, tables, [1.0] * len(tables)) / samples_per_s
    (table,) = tables
    draws = characteristic_time(rows / table.count, table.rows, table.zipf)
    return draws / table.ids / samples_per_s


def binary(size_bytes: float) -> str:
    """A memory size.

    >>> binary(2500 * 2**30), binary(1.5e7), binary(12.0)
    ('2,500 GiB', '14.3 MiB', '12 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 2**power:
            size = size_bytes / 2**power
            return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def lasting(seconds: float) -> str:
    """A time.

    >>> lasting(28.2 * 3600), lasting(90), lasting(0.004), lasting(float("inf"))
    ('28.2 h', '1.5 min', '4 ms', 'never')
    """
    if isinf(seconds):
        return "never"
    for least_s, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= least_s:
            return f"{seconds / least_s:,.1f} {unit}"
    return f"{seconds * 1e3:.3g} ms"
