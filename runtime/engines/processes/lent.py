"""A batch in its segment of shared memory: where ids, rows and gradients lie for each server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from runtime.embedding.config import TableConfig
from runtime.embedding.store import Plans, RowGradients
from runtime.engines.processes.messages import Message, Part, pack_placed
from runtime.engines.processes.segments import Places, Segment


@dataclass(slots=True)
class Lent:
    """A batch whose segment the servers may write and read."""

    number: int
    segment: Segment
    placed: list[bytes]
    """By server, where its part lies: the body of a lookup."""
    gradients: RowGradients
    open_at: set[int]
    """Servers that have not closed its push."""
    read_at: set[int] = field(default_factory=set)
    """Servers whose rows are here."""
    push: Message | None = None
    """What was sent to the servers, once it was."""


def bytes_needed(plans: Plans, tables: Mapping[str, TableConfig]) -> int:
    """Of a segment that holds such a batch."""
    places = Places()
    for name, plan in plans.items():
        for size in _sizes(len(plan.ids), tables[name]):
            places.take(size)
    return places.size


def lay_out(
    plans: Plans, tables: Mapping[str, TableConfig], shards: int, number: int, segment: Segment
) -> tuple[Lent, dict[str, np.ndarray]]:
    """Ids are in the segment then, rows and gradients have their place; also the rows, by table."""
    places, values, gradients = Places(), {}, {}
    parts: list[list[Part]] = [[] for _ in range(shards)]
    for name, plan in plans.items():
        table, rows = tables[name], len(plan.ids)
        ids_at, values_at, gradients_at = map(places.take, _sizes(rows, table))
        segment.array(ids_at, (rows,), np.uint64)[:] = plan.ids
        shape = rows, table.dim
        values[name] = segment.array(values_at, shape, table.dtype)
        gradients[name] = segment.array(gradients_at, shape, table.dtype)
        row_bytes = values[name].itemsize * table.dim
        for shard, found in enumerate(parts):
            own = plan.part(shard)
            at = ids_at + 8 * own.start, values_at + row_bytes * own.start
            there = gradients_at + row_bytes * own.start
            found.append(Part(own.stop - own.start, *at, there))
    placed = [pack_placed(number, found) for found in parts]
    return Lent(number, segment, placed, gradients, set(range(shards))), values


def _sizes(rows: int, table: TableConfig) -> tuple[int, int, int]:
    """Bytes of ids, values and gradients."""
    values = rows * table.dim * np.dtype(table.dtype).itemsize
    return rows * 8, values, values
