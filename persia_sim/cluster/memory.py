"""Do the rows fit? Resident, nominal and evicted rows, miss rate, time to fill."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isinf
from typing import Annotated

from persia_sim.base.rules import Usual, require, require_within
from persia_sim.base.schema import require_possible
from persia_sim.cluster.cluster import MOST_PROCESSES, Cluster
from persia_sim.cluster.popularity import batch_miss_rate, characteristic_time, lru_after
from persia_sim.cluster.workload import Workload


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

    def row_bytes(self, dim: int) -> float:
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
            hosts = ceil(servers / min(kind.processes_per_host for kind in cluster.servers.kinds))
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
    each = rows.row_bytes(workload.dim)
    servers = cluster.servers.processes
    # Rows are spread evenly, so of several kinds of host the smallest is full first.
    limit = min(kind.ram_bytes_per_process for kind in cluster.servers.kinds)
    room = servers * (limit // each)
    per_field = workload.rows / workload.fields
    held = min(workload.rows, room)
    miss = 0.0
    filled = held
    if samples is not None or held < workload.rows:
        require(samples is None or samples >= 0, "after_samples", samples, "must be >= 0")
        draws = inf if samples is None else samples * workload.ids_per_field
        table = held / workload.fields, per_field, workload.zipf
        of_field, miss = lru_after(draws, *table)
        if workload.wire.deduplicate:
            miss = batch_miss_rate(draws, workload.batch_per_rank * workload.ids_per_field, *table)
        filled = held if samples is None else of_field * workload.fields
    needed = workload.rows * each / servers
    return Capacity(workload.rows, held, each, needed, limit, miss, filled, rows.name)


def fill_s(workload: Workload, samples_per_s: float, rows: float) -> float:
    """Time in which training is expected to meet so many rows, from empty servers; inf for all."""
    of_field = rows / workload.fields
    per_field = workload.rows / workload.fields
    draws = characteristic_time(of_field, per_field, workload.zipf)
    return draws / workload.ids_per_field / samples_per_s


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
