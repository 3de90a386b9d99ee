"""What a source of batches is, and how a stream is cut, shuffled and shared out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

import numpy as np

from persia_sim.base.schema import Count
from runtime.data.batch import Batch, Layout
from runtime.stop import Stop

Part = Literal["train", "validation", "test"]
SHUFFLE_WINDOW = 1 << 20
"""Samples that are shuffled together."""


class FileRows(TypedDict):
    """A file of samples by its content, and how many of its rows the split places where."""

    sha256: str
    part: Part | None
    """The part that the whole file is of, where files decide."""
    rows: Count
    trains: Count
    """Rows that train, or would but for a validation part or a limit that takes the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a result says of its data."""

    name: str
    sha256: str
    """Checksum of the data's bytes (files), or of the generator's settings (synthetic)."""
    split: str
    """The split in words."""
    schema: dict[str, Any] = field(default_factory=dict)
    """Every key that decides what the bytes mean (`runtime.data.schema.document`); empty where
    the checksum says it all."""
    train_rows: int | None = None
    """Rows of the training part, bad ones among them, where they were counted."""
    test_rows: int | None = None
    """Rows of the test part, bad ones among them, where they were counted."""
    rows_skipped: int = 0
    """Bad rows that were counted and left out because the user asked for it, in what was read."""
    skipped_where: str = ""
    """How many of them lay where, and how far the file was read; empty when there were none."""
    private: bool = False
    """Whether a file of it may be read by its owner alone; what copies its labels is as private."""
    files: list[FileRows] = field(default_factory=list)
    """The files of samples in their order; empty where there are none."""
    joined: list[str] = field(default_factory=list)
    """SHA-256 of each joined file."""
    absent: dict[str, float] = field(default_factory=dict)
    """Column -> its share of absent values in the first rows; only of those that have any."""

    @property
    def digest(self) -> str:
        """Digest of what decides a sample: the bytes, their meaning, and which of them train."""
        decides = json.dumps([self.sha256, self.split, dict(self.schema)], sort_keys=True)
        return hashlib.sha256(decides.encode()).hexdigest()

    def __str__(self) -> str:
        """One line: the name, the split, and what it comes to.

        >>> print(Provenance(name="mine", sha256="", split="test day >= 5", test_rows=1200))
        mine: test day >= 5; test 1,200 samples
        """
        counts = {"train": self.train_rows, "test": self.test_rows}
        sizes = [f"{part} {rows:,} samples" for part, rows in counts.items() if rows is not None]
        return f"{self.name}: {self.split}" + ("; " if sizes else "") + ", ".join(sizes)


_READ = ("columns", "missing")
"""Keys of a schema that say what a model reads."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, each column and each other key of a schema's document that is not as it was."""
    lines = list(_columns(before.get("columns", []), now.get("columns", [])))
    for key in dict.fromkeys((*before, *now)):
        was = before.get(key)
        is_ = now.get(key)
        if key == "columns":
            continue
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            lines += _changes(f"{key}: ", was, is_)
        else:
            lines += _changes("", {key: was}, {key: is_})
    return lines


def refuse_other_columns(before: Mapping[str, Any], now: Provenance) -> None:
    """Raise ValueError where a trained model would read other columns than it was trained on, or
    read them otherwise; files, labels and split of what it is judged by may be others."""
    was, is_ = (
        {key: schema_of.get(key, []) for key in _READ} for schema_of in (before, now.schema)
    )
    if lines := differences(was, is_):
        raise ValueError(
            f"data set {now.name} has another schema than the model was trained on:"
            f" {'; '.join(lines)}; correct the schema, or train a model with it"
        )


def heads_taken_over(before: Mapping[str, Any], now: Provenance) -> list[str]:
    """The labels whose heads would be those of another label: "click -> buy".

    Raises ValueError where no head could be meant so: the same labels in another order, or a
    number in place of a click.
    """
    # Heads stand in the order of the labels: compare them place by place.
    was = list(before.get("labels", []))
    is_ = list(now.schema.get("labels", []))
    numbers = [
        [label in schema.get("regression", []) for label in schema.get("labels", [])]
        for schema in (before, now.schema)
    ]
    changed = [f"{old} -> {new}" for old, new in zip(was, is_, strict=False) if old != new]
    if changed and sorted(was) == sorted(is_):
        rule = "the labels stand in another order, and each would have another's head"
    elif len(was) == len(is_) and numbers[0] != numbers[1]:
        rule = "regression is of another label's place, and a number is no click"
    else:
        return changed

    # No head would be meant so.
    raise ValueError(
        f"data set {now.name} has labels {', '.join(is_)}, the model was trained on"
        f" {', '.join(was)}: {rule}; put them back, or train a model for them alone"
    )


def refuse_other_data(before: Mapping[str, Any], now: Provenance) -> None:
    """Raise ValueError when a run would go on with other data than it began with.

    ``before`` are the facts of the run, as `runtime.executors.replayable.trace_meta` has them. The
    split is among them: a row that has trained must not test, and none trains twice.
    """
    known = str(before["data_sha256"])
    if known != now.sha256:
        raise ValueError(
            f"data set {now.name} has changed since the run began (checksum {known[:12]} then,"
            f" {now.sha256[:12]} now): put the old data back, or start a new run"
        )
    if lines := differences(before.get("data_schema", now.schema), now.schema):
        raise ValueError(
            f"the schema of data set {now.name} is not the one that the run began with:"
            f" {'; '.join(lines)}. Rows that have trained must mean the same, and none of them may"
            " test: put the schema back, or start a new run (`evaluate RUN --data` takes another"
            " split)"
        )


def _columns(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    was = _by_name(before)
    is_ = _by_name(now)
    yield from (f"column {name} is gone" for name in was if name not in is_)
    yield from (f"column {name} is new" for name in is_ if name not in was)
    shared = [n for n in was if n in is_]
    order = [n for n in is_ if n in was]
    for name in shared:
        yield from _changes(f"column {name}: ", was[name], is_[name])
    if shared != order:
        old, new = next(pair for pair in zip(shared, order, strict=True) if pair[0] != pair[1])
        yield (
            f"the columns stand in another order ({new} where {old} was), which decides the ids of"
            " each"
        )


def _by_name(columns: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """A name may stand there several times, as columns of different kinds."""
    result: dict[str, Mapping[str, Any]] = {}
    for column in columns:
        count = sum(known["name"] == column["name"] for known in result.values())
        result[f"{column['name']} ({count + 1})" if count else column["name"]] = column
    return result


def _changes(where: str, was: Mapping[str, Any], is_: Mapping[str, Any]) -> list[str]:
    return [
        f"{where}{key} was {_shown(was.get(key))}, is {_shown(is_.get(key))}"
        for key in dict.fromkeys((*was, *is_))
        if was.get(key) != is_.get(key)
    ]


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


class Source(Protocol):
    """A data set that can be streamed any number of times, in bounded memory."""

    @property
    def layout(self) -> Layout:
        """Fields, dense features and tasks."""
        ...

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The samples of one part in the source's own order, as chunks of any size."""
        ...

    def provenance(self) -> Provenance:
        """Name, checksum and split; complete after a part was streamed."""
        ...


class SharedSource(Source, Protocol):
    """A source whose chunks several readers can make, each its own."""

    def turns(self, part: Part, turn: int, of: int) -> Iterator[Batch]:
        """Chunks number ``turn``, ``turn + of``, ... of one part; some may be empty.

        In turns, those of all ``of`` readers are the chunks of the part, before any limit of rows.
        """
        ...

    def left_out(self, part: Part) -> tuple[int, int, int | None]:
        """Bad rows of a part, rows of no part, and the last row that was read (None: all)."""
        ...

    def note_left_out(self, part: Part, skipped: int, outside: int, row: int | None) -> None:
        """What readers of a part have left out, for the provenance."""
        ...


@runtime_checkable
class Wrapped(Protocol):
    """A source in front of another one, whose samples it gives: from kept parts, or by loaders."""

    parsed: Source
    """The same data, read here."""


@runtime_checkable
class LoadedElsewhere(Protocol):
    """A source whose training part is read by others: its stream has names of samples, and whoever
    trains asks for these."""

    stop: Stop
    """The stop of the run: it ends a wait for data."""

    def ask(self, part: Batch) -> Callable[[], Batch]:
        """Request the samples that a part of the stream names; what is returned waits for them."""
        ...

    def passed(self, names: Batch) -> None:
        """The stream is behind these samples: they are requested, or nobody will."""
        ...


def parsed_by(source: Source) -> Source:
    """Who parses the data: what stands behind kept parts and loaders, or the source itself."""
    return source.parsed if isinstance(source, Wrapped) else source


def rebatch(chunks: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Cut a stream into batches of ``size`` samples; only the last may be shorter."""
    if size < 1:
        raise ValueError(f"batch size must be >= 1, got {size}")

    # Collect chunks until there is a batch, cut as many as there are, and carry the rest over.
    waiting: list[Batch] = []
    count = 0
    for chunk in chunks:
        waiting.append(chunk)
        count += chunk.size
        if count < size:
            continue
        whole = Batch.concat(waiting)
        cut = count - count % size
        for start in range(0, cut, size):
            yield whole.rows(start, start + size)
        waiting, count = ([whole.rows(cut, count)], count - cut) if count > cut else ([], 0)

    # The stream may end in a short one.
    if count:
        yield Batch.concat(waiting)


def shuffled(
    chunks: Iterator[Batch], seed: int, pass_: int, window_rows: int = SHUFFLE_WINDOW
) -> Iterator[Batch]:
    """Permute a stream inside windows of ``window_rows`` samples (the whole part if it fits)."""
    for number, window in enumerate(rebatch(chunks, window_rows)):
        yield window.take(shuffled_order(seed, pass_, number, window.size))


def shuffled_order(seed: int, pass_: int, window: int, size: int) -> np.ndarray:
    """int64 [size]: in which order the samples of a window come."""
    return np.random.default_rng([seed, pass_, window]).permutation(size)


_LEAST_BLOCK_ROWS = 1 << 16
"""Samples that a shuffle buffer takes in at once, or as many as it holds."""


def shuffled_in_buffer(
    chunks: Iterator[Batch], seed: int, pass_: int, buffer_rows: int
) -> Iterator[Batch]:
    """Shuffle a stream as `tf.data.Dataset.shuffle` does, by a buffer of ``buffer_rows`` samples.

    A place of the buffer is drawn, its sample goes out, and the next one of the stream takes its
    place; at the end of the stream the buffer goes out in a drawn order. So a sample is at most
    ``buffer_rows - 1`` places early, and late by about as many on average. What is drawn depends
    on seed and pass alone, so a resumed run, which reads the stream again, has the same order.
    """
    generator = np.random.default_rng([seed, pass_, buffer_rows])
    blocks = rebatch(chunks, max(buffer_rows, _LEAST_BLOCK_ROWS))
    buffer: Batch | None = None
    for block in blocks:
        # The buffer fills with the first samples of the stream.
        if buffer is None:
            buffer = block.rows(0, min(buffer_rows, block.size))
            block = block.rows(buffer.size, block.size)
            if not block.size:
                continue
        # Sample i of the block takes the drawn place, from which it goes out when the place is
        # drawn again: numbers below `size` are of the buffer as it was, the others of the block.
        size = buffer.size
        places = generator.integers(0, size, block.size)
        order = np.argsort(places, kind="stable")
        is_first = np.r_[True, places[order[1:]] != places[order[:-1]]]
        leaves = np.empty(block.size, np.int64)
        leaves[order] = np.where(is_first, places[order], size + np.roll(order, 1))
        stays = np.arange(size)
        stays[places] = size + np.arange(block.size)  # of several the last one stays
        pool = Batch.concat([buffer, block])
        yield pool.take(leaves)
        buffer = pool.take(stays)
    if buffer is not None:
        yield buffer.take(generator.permutation(buffer.size))


@lru_cache(maxsize=8)
def held_in_buffer(rows: int, samples: int, buffer_rows: int, seed: int) -> np.ndarray:
    """int64 [H], sorted: which rows of the first pass over so many, counted from 0, the buffer has
    taken in and not given out when ``samples`` have gone out. It is drawn again, in the memory that
    such a buffer takes."""
    held = np.empty(0, np.int64)
    out = taken_in = 0
    for given in shuffled_in_buffer(_numbered(rows), seed, 0, buffer_rows):
        if out >= samples:
            break
        given = given.rows(0, min(given.size, samples - out))
        out += given.size
        fresh = np.arange(taken_in, min(out + buffer_rows, rows))
        taken_in += len(fresh)
        held = np.concatenate([held, fresh])
        held = held[~np.isin(held, given.ids.astype(np.int64))]
    return held


def _numbered(rows: int) -> Iterator[Batch]:
    """Samples that are nothing but their number."""
    for start in range(0, rows, _LEAST_BLOCK_ROWS):
        numbers = np.arange(start, min(start + _LEAST_BLOCK_ROWS, rows), dtype=np.uint64)
        nothing = np.empty((len(numbers), 0), np.float32)
        yield Batch(numbers, None, nothing, nothing)


def share(batch: Batch, ranks: int) -> list[Batch]:
    """Split the batch of one dense update over the ranks, in order, as evenly as it goes.

    Every sample goes to exactly one rank; a rank may get none of a short last batch.
    """
    if ranks == 1:
        return [batch]
    bounds = np.linspace(0, batch.size, ranks + 1).round().astype(int)
    return [batch.rows(a, b) for a, b in pairwise(bounds)]
