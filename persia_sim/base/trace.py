"""The trace: one table of the instants at which reads and writes took effect.

Written by the runtime and by the simulator, read by the replay, the staleness statistics and the
timeline. A row is a linearisation point; its place in the table (``seq``) is a total order. Rows of
one shard stand in the order in which the shard's lock was held, rows of one rank in program order.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, Self, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, is_zipfile

import numpy as np

from persia_sim.base.archive import is_archive_of, read_archive
from persia_sim.base.files import atomic_write, parsed
from persia_sim.base.vocabulary import ALL, OF_FRESH, Event, Kind, Mode

__all__ = ["ALL", "SIMULATED_BATCH", "Event", "Kind", "Trace", "TraceRecorder"]

SIMULATED_BATCH = "simulated_batch_per_rank"
"""Fact of an order whose samples stand for many: a rank's batch in the simulated cluster."""


class EventFile:
    """Rows of events in a file without a name: nobody else sees it, and nothing is left behind."""

    def __init__(self, folder: Path | None = None) -> None:
        """Make the file in ``folder``; else in TMPDIR or /var/tmp: unlike /tmp a disk
        everywhere."""
        self._folder = folder or _folder_on_disk()
        # Open for as long as the recorder lives.
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
        self._rows = 0

    def append(self, block: np.ndarray) -> None:
        """More rows, int [n, 5]. Raises OSError with a remedy when they cannot be written."""
        try:
            self._file.write(np.ascontiguousarray(block, np.int64).data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"the order of events of this long run does not fit into {self._folder}"
                f" ({error.strerror}); set TMPDIR to a larger disk, or leave the order out with"
                " --no-trace-order",
            ) from error
        self._rows += len(block)

    def table(self) -> np.ndarray:
        """int64 [n, 5]: all rows so far, mapped; later rows do not change it."""
        shape = self._rows, len(Event._fields)
        return np.asarray(np.memmap(self._file, np.int64, "r", shape=shape)).view(np.ndarray)


def _folder_on_disk() -> Path:
    if named := os.environ.get("TMPDIR"):
        return Path(named)
    usual = Path("/var/tmp")
    return usual if os.access(usual, os.W_OK) else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class Trace:
    """A finished order of events and the facts that a replay must match."""

    events: np.ndarray
    """int64 [n, 5]: the columns of `Event`, in the order of ``seq``."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Mode, ranks, steps, tau, seed, data checksum and so on; plain JSON."""

    def __post_init__(self) -> None:
        if self.events.ndim != 2 or self.events.shape[1] != len(Event._fields):
            raise ValueError(f"events must be [n, {len(Event._fields)}], got {self.events.shape}")

    @property
    def is_simulated(self) -> bool:
        """Whether nothing was trained when it was made: its versions are those of the simulator."""
        return self.meta.get("order") == "simulated"

    def __iter__(self) -> Iterator[Event]:
        for start in range(0, len(self.events), _BLOCK_EVENTS):
            for row in self.events[start : start + _BLOCK_EVENTS].tolist():
                yield Event(*row)

    def __len__(self) -> int:
        return len(self.events)

    def of_kind(self, *kinds: Kind) -> np.ndarray:
        """The rows of these kinds, with ``seq`` as a first column: int64 [m, 6]."""
        chosen = np.flatnonzero(np.isin(self.events[:, 0], [int(k) for k in kinds]))
        return np.column_stack([chosen, self.events[chosen]])

    def of_fresh_tables(self) -> Self:
        """The order of the fresh tables alone: that of a lookahead run, and of nothing where no
        table is fresh."""
        lookahead = np.array([OF_FRESH.get(kind, -1) for kind in Kind])
        kinds = lookahead[self.events[:, 0]]
        chosen = np.flatnonzero(kinds >= 0) if self.meta.get("fresh") else slice(0)
        events = np.column_stack([kinds[chosen], self.events[chosen, 1:]])
        ahead = next(mode for mode in Mode if mode.prefetches_rows)
        return type(self)(events, self.meta | {"mode": str(ahead), "fresh": []})

    @classmethod
    def of(cls, events: list[Event], **meta: Any) -> Self:
        """A trace from a list of events."""
        table = np.array(events, dtype=np.int64).reshape(-1, len(Event._fields))
        return cls(table, meta)

    def with_batch_per_rank(self, batch_per_rank: int) -> Self:
        """The simulated order for a replay of other sizes: each sample stands for many.

        `SIMULATED_BATCH` keeps what was simulated. Raises ValueError for a recorded
        order, which is of the very samples that made it.
        """
        if not self.is_simulated:
            raise ValueError("only a simulated order can be of batches of another size")
        sizes = {"batch_per_rank": batch_per_rank}
        sizes[SIMULATED_BATCH] = self.meta["batch_per_rank"]
        return replace(self, meta=self.meta | sizes)

    def sha256(self) -> str:
        """Checksum of the order and of its facts, as JSON has them."""
        digest = hashlib.sha256()
        for start in range(0, len(self.events), _BLOCK_EVENTS):
            block = self.events[start : start + _BLOCK_EVENTS]
            digest.update(np.ascontiguousarray(block, "<i8").tobytes())
        digest.update(json.dumps(json.loads(json.dumps(self.meta)), sort_keys=True).encode())
        return digest.hexdigest()

    def save(self, path: Path, *, compress: bool = True) -> None:
        """Write to ``path`` (.npz), whole or not at all.

        Not compressed, it takes a tenth of the time and several times the bytes.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = ZIP_DEFLATED if compress else ZIP_STORED
        with atomic_write(path) as file, ZipFile(file, "w", kind) as archive:
            for number, name in enumerate(Event._fields):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    _write_column(entry, self.events[:, number])
            with archive.open("meta.npy", "w") as entry:
                sealed = self.meta | {_SEAL: self.sha256()}
                np.lib.format.write_array(entry, np.array(json.dumps(sealed)))

    @staticmethod
    def is_stored_in(path: Path) -> bool:
        """Whether a regular file is an archive with the names of `save`."""
        return is_archive_of(path, _NAMES)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises ValueError with the name of a file that is no trace, with the first row that no run
        could have written, and for one that was changed since it was written.
        """
        # Only an archive is opened.
        if not path.exists():
            raise ValueError(f"trace {path} does not exist; correct the path")
        if not path.is_file() or not is_zipfile(path):
            kind = "a file, but no .npz archive" if path.is_file() else "no file"
            raise ValueError(f"{path} is not a trace of this testbed: it is {kind}; {_REMEDY}")

        # What is in it, or why it cannot be read.
        arrays = read_archive(path, _NAMES, f"record it again, or {_REMEDY}")
        columns = [arrays[name] for name in Event._fields]
        where = f"trace {path} is damaged; record it again: meta"
        meta = parsed(str(arrays["meta"]).encode(), where)

        # Nothing that no run could have written is taken, nor what was changed since.
        refuse_impossible(columns, meta, str(path))
        seal = meta.pop(_SEAL, None)
        trace = cls(np.column_stack(columns).astype(np.int64), meta)
        if seal not in (None, trace.sha256()):
            raise ValueError(
                f"trace {path} was changed since it was written: its checksum is of other events or"
                " facts; record it again"
            )
        return trace


_NAMES = (*Event._fields, "meta")
"""The arrays of a file."""
_REMEDY = "name the trace.npz of a run, or what `persia-sim --write-trace` wrote"
_SEAL = "sha256"
"""Name of the checksum of all else in a file; no fact of the run."""
_BLOCK_EVENTS = 8192
_INT32 = np.iinfo(np.int32)
MOST_BYTES_IN_MEMORY = 64 << 20
"""Bytes of 3.3 million events; those of a longer run go to disk in parts of this size."""


def _write_column(entry: IO[bytes], column: np.ndarray) -> None:
    """Write an array as numpy does, block by block: a column of a long trace never lies in
    memory."""
    header = {"descr": "<i8", "fortran_order": False, "shape": column.shape}
    np.lib.format.write_array_header_1_0(entry, header)
    for start in range(0, len(column), _BLOCK_EVENTS):
        entry.write(np.ascontiguousarray(column[start : start + _BLOCK_EVENTS], "<i8").data)


class TraceRecorder:
    """Collects events from any number of threads.

    Call `record` while holding the lock of the shard (or of the dense weights) that the event
    concerns: then the order of the table is a linear extension of every lock's order. An event
    takes 20 bytes of memory (40 when its numbers need more than 32 bits), and from
    `MOST_BYTES_IN_MEMORY` on 40 bytes of disk instead; ``keep=False`` takes none and only tells the
    listeners.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.keeps = keep
        self._blocks: list[np.ndarray] = []
        self._bytes = 0  # of the blocks
        self._on_disk: EventFile | None = None
        """What came before the blocks, once they were too many."""
        self._open = array("q")
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener`` called with every event from now on, one at a time, in their order."""
        self._listeners.append(listener)

    def record(
        self, kind: Kind, rank: int, step: int, shard: int = ALL, version: int = ALL
    ) -> None:
        """Append one event; its place in the table is its ``seq``."""
        event = Event(int(kind), rank, step, shard, version)
        with self._lock:
            if self.keeps:
                self._open.extend(event)
                if len(self._open) == _BLOCK_EVENTS * len(Event._fields):
                    self._close_block()
            for listener in self._listeners:
                listener(event)

    def resume(self, events: np.ndarray) -> None:
        """Append events of an earlier part of the run, or of another process; listeners are not
        told of them."""
        with self._lock:
            self._close_block()
            self._blocks.append(events)
            self._bytes += events.nbytes
            self._make_room()

    def after(self, count: int, most: int) -> np.ndarray:
        """int64 [n, 5]: up to ``most`` of the events behind the first ``count``."""
        with self._lock:
            self._close_block()
            on_disk = [] if self._on_disk is None else [self._on_disk.table()]
            blocks = [*on_disk, *self._blocks]
        chunks = [np.zeros((0, len(Event._fields)), np.int64)]
        for block in blocks:
            chunks.append(block[count : count + most])
            most -= len(chunks[-1])
            count = max(0, count - len(block))
        return np.concatenate(chunks, dtype=np.int64)

    def so_far(self) -> Callable[..., Trace]:
        """What `finish` would give of the events up to now, at little cost until it is called."""
        # Under the lock only references are taken: blocks never change.
        with self._lock:
            self._close_block()
            if self._on_disk is not None:
                self._write_blocks(self._on_disk)
            blocks = list(self._blocks)  # a block never changes
            on_disk = None if self._on_disk is None else self._on_disk.table()

        # The copy is made when it is called, without the lock.
        def finish(**meta: Any) -> Trace:
            if not self.keeps:
                meta.setdefault("not_replayable", "its run did not keep the order of events")
            if on_disk is not None:
                return Trace(on_disk, meta)
            none = np.zeros((0, len(Event._fields)), np.int64)
            return Trace(np.concatenate([none, *blocks], dtype=np.int64), meta)

        return finish

    def finish(self, **meta: Any) -> Trace:
        """The trace so far; empty, and marked as not replayable, when the order is not kept."""
        return self.so_far()(**meta)

    def _close_block(self) -> None:
        if not self._open:
            return
        block = np.array(self._open, np.int64).reshape(-1, len(Event._fields))
        fits = block.min() >= _INT32.min and block.max() <= _INT32.max
        self._blocks.append(block.astype(np.int32) if fits else block)
        self._bytes += self._blocks[-1].nbytes
        self._open = array("q")
        self._make_room()

    def _make_room(self) -> None:
        if self._bytes > MOST_BYTES_IN_MEMORY:
            if self._on_disk is None:
                self._on_disk = EventFile()
            self._write_blocks(self._on_disk)

    def _write_blocks(self, file: EventFile) -> None:
        for block in self._blocks:
            file.append(block)
        self._blocks = []
        self._bytes = 0


_OF_ROWS = (Kind.LOOKUP, Kind.REFRESH, Kind.PUSH, Kind.LOST_PUSH)
_PUSHES = {Kind.LOST_PUSH: Kind.PUSH, Kind.FRESH_LOST_PUSH: Kind.FRESH_PUSH}
_OF_ROUNDS = (Kind.AVERAGE_READ, Kind.AVERAGE_WRITE)
_BY_ALL_RANKS = (Kind.PUSH, Kind.FRESH_PUSH, Kind.DENSE_UPDATE)


def refuse_impossible(columns: Sequence[np.ndarray], meta: Any, name: str) -> None:
    """Raise ValueError for columns or facts of a file that no run could have written.

    ``columns`` are those of `Event`, in its order. The message names the file, the first row that
    is wrong, its value and the rule.
    """
    _check_shape(columns, name)
    mode, ranks, shards = _facts(meta, name)
    kind, rank, step, shard, version = columns

    def check(holds: np.ndarray, column: np.ndarray, what: str, rule: str) -> None:
        if not holds.all():
            row = int(np.flatnonzero(~holds)[0])
            raise ValueError(f"trace {name}, row {row}: {what} is {column[row]}: {rule}")

    # Each column by itself: kinds of the mode, ranks, steps, shards, versions.
    fresh = _fresh_of(meta, mode, name)
    possible = _kinds_of(mode, fresh)
    names = ", ".join(f"{int(k)} {k.name.lower()}" for k in possible)
    check(np.isin(kind, possible), kind, "kind", f"mode {mode} has {names}")
    whole = (rank == ALL) & np.isin(kind, _BY_ALL_RANKS)
    check(
        whole | ((rank >= 0) & (rank < ranks)),
        rank,
        "rank",
        f"must be 0 to {ranks - 1}, or {ALL} for a push or update of all ranks",
    )
    first = meta.get("first_step") or 0
    most = min(first + len(kind), 2**31)
    bounds_steps = "steps" if meta.get("order") == "simulated" else "updates"
    steps = min(most, meta.get(bounds_steps) or most)
    least = np.maximum(first - np.isin(kind, _OF_ROUNDS), 0)  # a round is of what was before it
    check((step >= least) & (step < steps), step, "step", f"must be {first} to {steps - 1}")
    check((shard >= ALL) & (shard < shards), shard, "shard", f"must be {ALL} to {shards - 1}")
    check(version >= ALL, version, "version", f"must be >= 0, or {ALL} for unknown")

    # Events together: none happens twice, and versions grow as they should.
    _check_doubles(columns, name)
    groups = {"": set(_OF_ROWS) - (set(OF_FRESH) if fresh else set())}
    if fresh:
        groups[", fresh tables"] = set(OF_FRESH)
    for group, kinds in groups.items():
        of_rows = np.flatnonzero(np.isin(kind, list(kinds)))
        for k in np.unique(shard[of_rows]):
            here = of_rows[shard[of_rows] == k]
            is_push = np.isin(kind[here], (Kind.PUSH, Kind.FRESH_PUSH))
            _check_versions(version[here], is_push, here, ranks, f"{name}, shard {k}{group}")


def _check_shape(columns: Sequence[np.ndarray], name: str) -> None:
    for name_of, column in zip(Event._fields, columns, strict=True):
        if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
            raise ValueError(
                f"trace {name}: {name_of} is {column.dtype} of shape {column.shape}:"
                " must be a column of integers"
            )
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"trace {name}: its columns have {sorted(lengths)} rows: must be equal")


def _facts(meta: Any, name: str) -> tuple[Mode, int, int]:
    """Mode, ranks and shards; without a number of shards any may occur."""
    if not isinstance(meta, dict):
        raise ValueError(f"trace {name}: its facts are {meta!r}: must be a JSON object")

    # The facts that a replay reads, one by one.
    if meta.get("mode") not in list(Mode):
        raise ValueError(
            f"trace {name}: mode is {meta.get('mode')!r}: must be one of " + ", ".join(Mode)
        )
    for fact in ("ranks", "shards", "steps", "updates", "first_step"):
        value = meta.get(fact)
        is_count = type(value) is int and value >= 1
        if not is_count and (fact == "ranks" or value is not None):
            raise ValueError(f"trace {name}: {fact} is {value!r}: must be a whole number >= 1")

    # Facts that may be absent.
    tau = meta.get("tau")
    order = meta.get("order")
    if tau is not None and (type(tau) is not int or tau < 0):
        rule = "must be a whole number >= 0, or null: unbounded"
        raise ValueError(f"trace {name}: tau is {tau!r}: {rule}")
    if order not in (None, "simulated"):
        raise ValueError(f"trace {name}: order is {order!r}: must be 'simulated', or not there")
    return Mode(meta["mode"]), meta["ranks"], meta.get("shards") or 2**31


def _fresh_of(meta: dict[str, Any], mode: Mode, name: str) -> bool:
    """Whether tables are fresh; a trace that does not say it has late ones alone."""
    fresh = meta.get("fresh") or []
    if not (isinstance(fresh, list) and all(isinstance(table, str) for table in fresh)):
        raise ValueError(f"trace {name}: fresh is {fresh!r}: must be a list of names of tables")
    if fresh and not mode.may_merge:
        raise ValueError(f"trace {name}: fresh is {fresh}: mode {mode} has no fresh tables")
    return bool(fresh)


def _kinds_of(mode: Mode, fresh: bool) -> list[Kind]:
    rows = [Kind.LOOKUP, *([Kind.REFRESH] if mode.prefetches_rows or fresh else [])]
    rows += [Kind.PUSH, Kind.LOST_PUSH]
    rows += [Kind.FRESH_PUSH, Kind.FRESH_LOST_PUSH] if fresh else []
    if mode.has_barrier:
        return [*rows, Kind.DENSE_UPDATE]
    if mode.has_dense_server:
        return [*rows, Kind.DENSE_PULL, Kind.DENSE_PUSH]
    return [*rows, Kind.DENSE_PUSH, *_OF_ROUNDS]


def _check_doubles(columns: Sequence[np.ndarray], name: str) -> None:
    """A push is applied or lost, once; the number of the round tells averagings apart."""
    kind, rank, step, shard, version = columns

    # Rows that describe one event are equal in these columns.
    round_ = np.where(np.isin(kind, _OF_ROUNDS), version, ALL)
    closes = kind
    for lost, push in _PUSHES.items():
        closes = np.where(closes == lost, int(push), closes)
    events = np.column_stack([closes, rank, step, shard, round_])
    _, firsts, which = np.unique(events, axis=0, return_index=True, return_inverse=True)
    first = firsts[which.ravel()]  # of each row the first one that is equal to it
    doubled = np.flatnonzero(first != np.arange(len(kind)))

    # A merged push stands for every rank: none of them pushes that step alone.
    for push in _PUSHES.values():
        merged = np.flatnonzero((kind == push) & (rank == ALL)).tolist()
        whole = {(int(step[row]), int(shard[row])): row for row in merged}
        if whole:  # of a merged step, nobody pushes alone
            for row in np.flatnonzero((kind == push) & (rank != ALL)).tolist():
                if (int(step[row]), int(shard[row])) in whole:
                    first[row] = whole[int(step[row]), int(shard[row])]
                    doubled = np.append(doubled, row)

    # Name the first one.
    if len(doubled):
        at = int(doubled.min())
        raise ValueError(
            f"trace {name}, row {at}: {Kind(kind[at]).name.lower()} of rank {rank[at]}, step"
            f" {step[at]}, shard {shard[at]} is the event of row {first[at]} again:"
            " each happens once"
        )


def _check_versions(
    version: np.ndarray, is_push: np.ndarray, rows: np.ndarray, ranks: int, where: str
) -> None:
    """A shard's version grows with its pushes, by one for each batch, and with nothing else."""
    unknown = version == ALL
    if unknown.all():
        return

    # Known and unknown versions do not mix.
    if unknown.any():
        raise ValueError(
            f"trace {where}, row {rows[unknown][0]}: version is {ALL}, unknown, but others of the"
            " shard are known: must be all or none"
        )

    # A version stands still between pushes.
    grown = np.diff(version)
    wrong = np.flatnonzero(np.where(is_push[:-1], (grown < 0) | (grown > ranks), grown != 0))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"trace {where}, row {rows[at + 1]}: version is {version[at + 1]} after {version[at]}"
            f" in row {rows[at]}: it grows by a push, by at most {ranks}, and by nothing else"
        )
