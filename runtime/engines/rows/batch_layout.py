"""A batch as it travels: where a rank lays its ids, rows and gradients out in its segment, and the
pieces of these that go to one server, or come from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from runtime.embedding.batch_rows import ROWS, BatchPlan, ByTable
from runtime.embedding.half import decoded, encoded
from runtime.engines.wire.messages import (
    Message,
    Placed,
)
from runtime.engines.wire.segments import Places, Segment, SegmentPool

Which = Literal["ids", "values", "gradients"]


class Spans:
    """Pieces of an array in place, as they travel; cut only for who asks."""

    def __init__(self, cut: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """``cut`` gives the whole, where pieces start, and their sizes."""
        self._cut = cut

    def __iter__(self) -> Iterator[np.ndarray]:
        whole, starts, sizes = self._cut()
        if sizes.sum() == len(whole):  # they touch
            yield whole
            return
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            yield whole[start : start + size]

    def room(self) -> list[memoryview]:
        """Where they are received, as sockets take it."""
        return [span.data.cast("B") for span in self if len(span)]

    def arrived(self) -> None:
        """They are all there."""


class HalvedSpans(Spans):
    """Spans of rows that travel as float16; memory that both ends see has them whole."""

    def __init__(self, spans: Spans, sizes: np.ndarray, dtype: str) -> None:
        """``sizes``: numbers of each row."""
        self._spans = spans
        self._sizes = sizes
        self._dtype = dtype
        self._came: np.ndarray | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        yield encoded(np.concatenate(list(self._spans)), self._sizes)

    def room(self) -> list[memoryview]:
        """Until they have arrived."""
        self._came = np.empty(2 * (len(self._sizes) + int(self._sizes.sum())), np.uint8)
        return [self._came.data]

    def arrived(self) -> None:
        """From there they go where they belong."""
        if self._came is not None:
            spans = list(self._spans)
            whole = decoded(self._came, self._sizes, self._dtype)
            ends = np.cumsum([len(span) for span in spans])
            for span, rows in zip(spans, np.split(whole, ends[:-1]), strict=True):
                span[...] = rows
            self._came = None


def spans_of(
    which: Which, segment: Segment, placed: Placed, dims: np.ndarray, dtype: str, *, half: bool
) -> Spans:
    """One kind of array of a server's part of a batch; ``half``: how rows travel."""

    def cut() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, rows, at = placed.spans.T
        if which == "ids":
            ids = segment.array(placed.ids_at, (int(first[-1] + rows[-1]),), np.uint64)
            return ids, first, rows
        start = placed.values_at if which == "values" else placed.gradients_at
        return segment.array(start, (placed.elements(dims),), dtype), at, rows * dims

    spans = Spans(cut)
    if not half or which == "ids":
        return spans
    return HalvedSpans(spans, np.repeat(dims, placed.spans[:, ROWS]), dtype)


@dataclass(slots=True)
class SentBatch:
    """A batch whose segment the servers may write and read."""

    number: int
    segment: Segment
    plan: BatchPlan
    starts: tuple[int, int, int]
    """Bytes of the segment where ids, values and gradients start."""
    gradients: ByTable
    open_at: set[int]
    """Servers that have not closed its push."""
    read_at: set[int] = field(default_factory=set)
    """Servers whose rows are here."""
    push: Message | None = None
    """What was sent to the servers, once it was."""
    half: bool = False
    """How rows and gradients travel."""
    dtype: str = "float32"
    """The type of rows and gradients, where they are whole."""
    parts: dict[int, Placed] = field(default_factory=dict)
    """Where the part of each server lies that was asked for: each is asked for four times."""

    def placed(self, shard: int) -> Placed:
        """Where a server's part lies."""
        if shard not in self.parts:
            self.parts[shard] = Placed(self.number, *self.starts, self.plan.spans_of(shard))
        return self.parts[shard]

    def arrays(self, which: Which, shard: int) -> Spans:
        """The spans of a server's part, in place."""
        dims = self.plan.dims
        return spans_of(which, self.segment, self.placed(shard), dims, self.dtype, half=self.half)


def lay_out(
    plan: BatchPlan, dtype: str, pool: SegmentPool, *, half: bool = False
) -> tuple[SentBatch, ByTable]:
    """Waits for a segment that is free; ids are in it then, rows and gradients have their place.
    Also the rows."""
    places = Places()
    count = plan.elements()
    value_bytes = count * np.dtype(dtype).itemsize
    starts = places.take(plan.ids.nbytes), places.take(value_bytes), places.take(value_bytes)
    number, segment = pool.take(places.size)
    segment.array(starts[0], plan.ids.shape, np.uint64)[:] = plan.ids
    values, gradients = (
        ByTable(segment.array(start, (count,), dtype), plan, wide=True) for start in starts[1:]
    )
    servers = set(range(plan.bounds.shape[1] - 1))
    sent = SentBatch(number, segment, plan, starts, gradients, servers, half=half, dtype=dtype)
    return sent, values
