"""One server's rows in its own files of a checkpoint, in whatever process the server lives.

A server writes what was frozen as one file, and reads its rows back from files of any number of
shards, with no more than one of them in memory beside its own rows.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from runtime.checkpoint.manifest import (
    Manifest,
    Part,
    check_same_rows,
    check_same_shape,
    read_manifest,
)
from runtime.embedding.config import TableConfig
from runtime.embedding.shard import shard_of
from runtime.files import BrokenFileError, read_arrays, write_arrays

if TYPE_CHECKING:
    from runtime.embedding.native.store import NativeShard  # loads the compiled kernels

NO_ID = np.uint64(2**64 - 1)
"""In place of an id where a slot stands empty; no id of a batch is this one (runtime.data.ids)."""
_COLUMNS = ("ids", "words", "stamps", "rows", "removed", "sightings")


class Arrays(NamedTuple):
    """The rows of one table and shard, the next one to be evicted first; n rows.

    Of a table with a clock, slots that stand empty and rows that have expired are among them.
    """

    ids: np.ndarray
    """uint64 [n]"""
    words: np.ndarray
    """uint32 [n]: write counts and marks."""
    stamps: np.ndarray
    """uint32 [n], last used at step; empty where rows do not expire."""
    rows: np.ndarray
    """uint8 [n, bytes per row], as stored."""
    removed: np.ndarray
    """uint64: ids that went since the part before this one."""
    sightings: np.ndarray
    """uint8: the sketch of admission by frequency."""
    latest_step: int
    """The last step seen."""

    def where(self, rows: np.ndarray, removed: np.ndarray) -> Arrays:
        """The rows and removed ids that are marked."""
        return self._replace(
            ids=self.ids[rows],
            words=self.words[rows],
            stamps=self.stamps[rows] if len(self.stamps) else self.stamps,
            rows=self.rows[rows],
            removed=self.removed[removed],
        )


def see_folder(server: NativeShard, *, mark: str) -> dict[str, Any]:
    """Raise ValueError unless this server sees a file that who leads has just made, and can write
    beside it."""
    folder = Path(mark).parent
    try:
        os.stat(mark)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"embedding server {server.shard} (pid {os.getpid()}) on host {socket.gethostname()}"
            f" cannot write its rows into the run folder {folder} ({error.strerror}): name a folder"
            " with --out that all hosts share, or leave --checkpoint-every out"
        ) from None
    return {}


def write_rows(server: NativeShard, *, folder: str, part: str) -> dict[str, Any]:
    """Write what was frozen as this server's file of a part; gives what `Written` says.

    The file has its name when it is whole. Raises OSError that names it; then nothing is left.
    """
    tables = server.collect()
    columns = {f"{t}/{c}": np.asarray(s[c]) for t, s in tables.items() for c in _COLUMNS}
    steps = {t: s["latest_step"] for t, s in tables.items()}
    facts = {"part": part, "shard": server.shard, "latest_step": steps}
    file = Path(folder) / Part(name=part, digests=[]).file_of(server.shard)
    unfinished = file.with_suffix(".rows.tmp")
    try:
        written = write_arrays(unfinished, facts, columns)
        unfinished.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        unfinished.unlink(missing_ok=True)
    return asdict(written)


def load_rows(server: NativeShard, *, folder: str, values_only: bool = False) -> dict[str, Any]:
    """Fill this server's empty tables with its rows of a checkpoint; with ``values_only`` as if
    they were just created with these values.

    Raises ValueError when rows would mean something else, `BrokenFileError` for damage; then the
    tables are empty still.
    """
    path, configs = Path(folder), server.configs
    manifest = read_manifest(path)
    if values_only:
        check_same_shape(manifest, configs, path)
    else:
        check_same_rows(manifest, configs, server.seed, path)
    found = [
        (name, _as_created(arrays, configs[name]) if values_only else arrays)
        for part in manifest.parts
        for name, arrays in _own(server, path, manifest, part, living_only=values_only).items()
    ]
    for name, arrays in found:
        server.tables[name].restore(**arrays._asdict(), keep_present=False)
    return {}


def _own(
    server: NativeShard, path: Path, manifest: Manifest, part: Part, *, living_only: bool
) -> dict[str, Arrays]:
    """Per table the server's rows in one part.

    Slots that stand empty, and rows that have expired, are left out where nothing depends on them.
    With another number of shards, the order of recency is that of each old shard, interleaved, and
    sightings of admission start anew.
    """
    alone = len(part.digests) == server.shards
    found = defaultdict[str, list[tuple[Arrays, np.ndarray]]](list)
    for number in [server.shard] if alone else range(len(part.digests)):
        saved = _read_shard(path, part, number)
        for name in _tables_of(manifest, part):
            table, before, now = saved[name], manifest.tables[name], server.configs[name]
            if living_only or not alone or before.get("capacity") != asdict(now.capacity):
                table = _living(table, before)
            age = np.arange(len(table.ids)) / max(len(table.ids), 1)
            if not alone:
                of_ids, of_removed = (
                    shard_of(ids, server.shards) == server.shard
                    for ids in (table.ids, table.removed)
                )
                table, age = table.where(of_ids, of_removed), age[of_ids]
            found[name].append((table, age))
    if alone:
        return {name: table for name, ((table, _),) in found.items()}
    return {name: _merged(*zip(*of, strict=True)) for name, of in found.items()}


def _merged(shards: Sequence[Arrays], ages: Sequence[np.ndarray]) -> Arrays:
    """All rows as one, old shards interleaved by the relative age of their rows."""
    order = np.argsort(np.concatenate(ages), kind="stable")
    every = {c: np.concatenate([getattr(s, c) for s in shards]) for c in _COLUMNS}
    every["sightings"] = np.empty(0, np.uint8)
    merged = Arrays(**every, latest_step=max(s.latest_step for s in shards))
    return merged.where(order, np.ones(len(merged.removed), bool))


def _living(arrays: Arrays, saved: dict[str, Any]) -> Arrays:
    """Without the slots that stand empty and the rows that had expired in the saved table."""
    kept, capacity = arrays.ids != NO_ID, saved.get("capacity")
    expiry = capacity.get("expire_after_steps") if isinstance(capacity, dict) else None
    if isinstance(expiry, int) and len(arrays.stamps):
        kept &= arrays.stamps.astype(np.int64) >= arrays.latest_step - expiry
    return arrays.where(kept, np.ones(len(arrays.removed), bool))


def _as_created(saved: Arrays, table: TableConfig) -> Arrays:
    """The same values in rows of this table, each laid out as `options.hpp` says."""
    rows, optimizer = len(saved.ids), table.optimizer
    itemsize = np.dtype(table.dtype).itemsize
    value_bytes = table.dim * (itemsize if table.storage == "dtype" else 2)
    values = saved.rows[:, : value_bytes + -value_bytes % itemsize]
    floats = rows, optimizer.state_floats(table.dim)
    state = np.full(floats, optimizer.initial_accumulator, table.dtype).view(np.uint8)
    return saved._replace(
        words=np.zeros(rows, np.uint32),
        stamps=np.empty(0, np.uint32),
        rows=np.hstack([values, state]),
        sightings=np.empty(0, np.uint8),
        latest_step=0,
    )


def _tables_of(manifest: Manifest, part: Part) -> list[str]:
    """The tables whose rows in this part no later part has all of."""
    later = manifest.parts[manifest.parts.index(part) + 1 :]
    return [name for name in manifest.tables if not any(name in other.whole for other in later)]


def _read_shard(path: Path, part: Part, shard: int) -> dict[str, Arrays]:
    """Per table the rows of one file."""
    file = path / part.file_of(shard)
    facts, arrays = read_arrays(file, part.digests[shard])
    try:
        steps = {str(table): int(step) for table, step in facts["latest_step"].items()}
        return {
            table: Arrays(latest_step=step, **{c: arrays[f"{table}/{c}"] for c in _COLUMNS})
            for table, step in steps.items()
        }
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise BrokenFileError(f"{file} lacks a column of a table: {error}") from None
