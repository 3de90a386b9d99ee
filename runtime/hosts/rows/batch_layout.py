"""A batch as it travels: where a rank lays its ids, rows and gradients out in its segment, and the
pieces of these that go to one server, or come from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from runtime.embedding.batch_rows import ROWS, BatchPlan, ByTable
from runtime.embedding.half import decoded, encoded
from runtime.hosts.wire.messages import (
    Message,
    MessageKind,
    Placed,
)
from runtime.hosts.wire.segments import Places, Segment, SegmentPool

Which = Literal["ids", "values", "gradients"]
OfTables = np.ndarray | slice
"""bool [T], which of a batch's tables are meant; or all of them."""
EVERY = slice(None)


def fresh_among(tables: Sequence[str], fresh: Collection[str]) -> OfTables:
    """Which of these tables are fresh; where none is, what travels is of every table."""
    return np.array([name in fresh for name in tables]) if fresh else EVERY


def tables_in(kind: MessageKind, is_fresh: OfTables) -> OfTables:
    """The tables whose rows or gradients travel with a message of this kind."""
    of_fresh = (MessageKind.FRESH_PUSH, MessageKind.BRING_UP_TO_DATE)
    if isinstance(is_fresh, slice) or kind in of_fresh:
        return is_fresh
    return ~is_fresh if kind is MessageKind.PUSH else EVERY


class Spans:
    """Pieces of an array in place, as they travel; cut only for who asks."""

    def __init__(self, cut: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """``cut`` gives the whole, where pieces start, and their sizes."""
        self._cut = cut

    def __iter__(self) -> Iterator[np.ndarray]:
        whole, starts, sizes = self._cut()
        if (total := sizes.sum()) in (0, len(whole)):  # they touch, or there are none
            yield whole[:total]
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
    which: Which,
    segment: Segment,
    placed: Placed,
    dims: np.ndarray,
    dtype: str,
    *,
    half: bool,
    tables: OfTables = EVERY,
) -> Spans:
    """One kind of array of a server's part of a batch; ``half``: how rows travel, which are those
    of ``tables`` (ids are of every one)."""

    def cut() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, rows, at = placed.spans.T
        if which == "ids":
            ids = segment.array(placed.ids_at, (int(first[-1] + rows[-1]),), np.uint64)
            return ids, first, rows
        start = placed.values_at if which == "values" else placed.gradients_at
        numbers = segment.array(start, (placed.elements(dims),), dtype)
        return numbers, at[tables], (rows * dims)[tables]

    spans = Spans(cut)
    if not half or which == "ids":
        return spans
    return HalvedSpans(spans, np.repeat(dims[tables], placed.spans[tables, ROWS]), dtype)


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
    up_to_date_at: set[int] = field(default_factory=set)
    """Servers that have brought them up to date, where they do."""
    pushes: list[Message] = field(default_factory=list)
    """What was sent to the servers, once it was: that of fresh tables first, where there are any.
    """
    is_fresh: OfTables = field(default_factory=lambda: EVERY)
    """As `fresh_among` gives them."""
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

    def ids(self, shard: int) -> Spans:
        """Those of a server's part, in place."""
        return self._arrays("ids", shard, EVERY)

    def rows(self, shard: int, asked: MessageKind) -> Spans:
        """Where those of a server's part belong that answer a request of this kind."""
        return self._arrays("values", shard, tables_in(asked, self.is_fresh))

    def given(self, shard: int, push: Message) -> Iterable[np.ndarray]:
        """The gradients of a server's part that go with a push; none with one that is lost."""
        if push.number:
            return ()
        return self._arrays("gradients", shard, tables_in(push.kind, self.is_fresh))

    def _arrays(self, which: Which, shard: int, tables: OfTables) -> Spans:
        placed = self.placed(shard)
        dims = self.plan.dims
        return spans_of(
            which, self.segment, placed, dims, self.dtype, half=self.half, tables=tables
        )


def lay_out(
    plan: BatchPlan,
    dtype: str,
    pool: SegmentPool,
    *,
    half: bool = False,
    is_fresh: OfTables = EVERY,
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
    sent = SentBatch(
        number, segment, plan, starts, gradients, servers, half=half, dtype=dtype, is_fresh=is_fresh
    )
    return sent, values
