"""Save and load the rows of a store: sharded, atomic, checksummed, a consistent cut, incremental.

An incremental save has the rows that were used, written or created since the one before; of a table
that evicts by a clock it has all, because the hand changes rows that nobody uses.

A checkpoint is a directory: one file per shard and save, and ``manifest.json``, which names the
files that count. The manifest is replaced last and at once, so a save that dies leaves the
previous one whole, and what it would have saved counts as changed still. Saving again to the same
directory replaces what it held.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoint.manifest import (
    NAME,
    Manifest,
    Part,
    check_same_rows,
    check_same_shape,
    read_manifest,
)
from runtime.checkpoint.reshard import NO_ID, Arrays, divide, living
from runtime.embedding.config import TableConfig
from runtime.embedding.verbs import EmbeddingStore
from runtime.files import BrokenFileError, folder_lock, read_arrays, write_arrays

_COLUMNS = ("ids", "words", "stamps", "rows", "removed", "sightings")


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save did."""

    rows: int
    """Rows written; of a table with a clock also those that have expired and are still there."""
    file_bytes: int
    """Bytes written."""
    pause_s: float
    """How long pushes and lookups were held back."""


def save(
    store: EmbeddingStore, path: Path, *, incremental: bool = False, track_changes: bool = False
) -> Saved:
    """Write all rows as they are at one instant; training in other threads goes on meanwhile.

    ``track_changes`` remembers from now on which rows change; later saves to the same directory may
    then be ``incremental`` and write only those. Saves of one store, and saves to one directory,
    wait for each other. Raises OSError when the disk does; then nothing has been lost.
    """
    path.mkdir(parents=True, exist_ok=True)
    with folder_lock(path):
        base = path if incremental else None
        return take(store, extends=base, track_changes=track_changes)._write(path)


def take(
    store: EmbeddingStore, *, extends: Path | None = None, track_changes: bool = False
) -> Taken:
    """All rows as they are at this instant, to be written later; nothing is copied yet.

    Until they are written, whoever changes a row copies it first (`freeze_snapshots`).
    ``extends`` names the folder of this store's last save: then only what changed since is taken.
    The next taking waits until this one is written or dropped.
    """
    track = track_changes or extends is not None
    store.saving.acquire()
    try:
        parts = _parts_to_extend(store, extends) if extends else []
        with store.consistent_cut():
            held = time.perf_counter()
            store.freeze_snapshots(only_changed=extends is not None, track=track)
            pause_s = time.perf_counter() - held
    except BaseException:
        store.settle_snapshots(kept=False)
        store.saving.release()
        raise
    return Taken(store, track, extends, parts, pause_s)


@dataclass(slots=True)
class Taken:
    """The rows of a store at one instant; the store may be trained while they are written."""

    _store: EmbeddingStore
    _track: bool
    extends: Path | None
    """The folder of the save whose rows these are changes of; None: all rows."""
    _parts: list[Part]
    pause_s: float
    """How long pushes and lookups were held back."""
    _settled: bool = False

    def write(self, path: Path) -> Saved:
        """Write to a folder, which then holds all rows; parts it extends come in as links.

        Raises OSError when the disk does; then nothing has been lost.
        """
        path.mkdir(parents=True, exist_ok=True)
        with folder_lock(path):
            return self._write(path)

    def drop(self) -> None:
        """Nobody wants them, unless they are written: what has changed counts as changed still."""
        self._settle(kept=False)

    def _write(self, path: Path) -> Saved:
        name, store = uuid.uuid4().hex[:12], self._store
        try:
            snapshots = store.collect_snapshots()
            if self.extends is not None and self.extends != path:
                _link_parts(self.extends, path, self._parts)
            part, file_bytes = _write_part(path, name, snapshots)
            first = not self._parts
            part.whole.extend(t for t, c in store.tables.items() if first or c.capacity.saved_whole)
            parts = [part] if len(part.whole) == len(store.tables) else [*self._parts, part]
            tables = {t: asdict(config) for t, config in store.tables.items()}
            Manifest(seed=store.seed, tables=tables, parts=parts).write(path)
            rows = sum(
                int((s["ids"] != NO_ID).sum()) for tables in snapshots for s in tables.values()
            )
        except BaseException:
            self._settle(kept=False)
            raise
        store.last_saved = (str(path.resolve()), name) if self._track else None
        self._settle(kept=True)
        _remove_all_but(path, parts)
        return Saved(rows, file_bytes, self.pause_s)

    def _settle(self, *, kept: bool) -> None:
        if self._settled:
            return
        self._settled = True
        self._store.settle_snapshots(kept=kept)
        self._store.saving.release()


def rows_of_shard(
    path: Path, tables: Mapping[str, TableConfig], seed: int, shard: int, shards: int
) -> dict[str, list[dict[str, Any]]]:
    """Per table what a server of this place takes to restore, part by part, in their order.

    Raises as `load`.
    """
    with folder_lock(path, shared=True):
        manifest = read_manifest(path)
        check_same_rows(manifest, tables, seed, path)
        found: dict[str, list[dict[str, Any]]] = {table: [] for table in tables}
        for part in manifest.parts:
            alone = len(part.digests) == shards
            files = [shard] if alone else range(len(part.digests))
            every = [_read_shard(path, part, k) for k in files]
            for name in _tables_of(manifest, part):
                saved = [of_tables[name] for of_tables in every]
                now = _shared_out(
                    saved, manifest.tables[name], tables[name], 1 if alone else shards
                )
                found[name].append(asdict(now[0 if alone else shard]))
    return found


def load(store: EmbeddingStore, path: Path) -> None:
    """Fill an empty store, of any number of shards, with what was saved.

    With the same number of shards the store goes on exactly as the saved one, evictions included.
    Otherwise the order of recency is that of each old shard, interleaved, and sightings of
    admission start anew. Raises ValueError, with what is in the checkpoint and
    what is in the store, when rows would mean something else, and `BrokenFileError` for damage.
    """
    if len(store):
        raise ValueError(
            f"load needs an empty store, this one has {len(store)} rows; open a new one"
        )
    if not path.is_dir():
        raise BrokenFileError(f"{path} holds no checkpoint: it is not a folder")
    with folder_lock(path, shared=True):
        manifest = read_manifest(path)
        check_same_rows(manifest, store.tables, store.seed, path)
        for part in manifest.parts:
            every = [_read_shard(path, part, shard) for shard in range(len(part.digests))]
            for name in _tables_of(manifest, part):
                saved = [of_tables[name] for of_tables in every]
                shards = _shared_out(saved, manifest.tables[name], store.tables[name], store.shards)
                store.restore(name, [asdict(s) for s in shards])


def load_values(store: EmbeddingStore, path: Path) -> None:
    """Fill an empty store, of any number of shards, with the values of the rows saved there.

    Each row is as one that was just created with this value: its optimiser's state is fresh, and
    nobody has used it yet. Seed, rates, optimiser and limits may be others. Raises ValueError when
    rows would mean something else, and `BrokenFileError` for damage.
    """
    for name, table in store.tables.items():
        if table.optimizer.kind == "ftrl":
            raise ValueError(
                f"rows of table {name} cannot begin with values of others under optimizer.kind"
                " ftrl, which makes each value from its state; use another kind"
            )
    with folder_lock(path, shared=True):
        manifest = read_manifest(path)
        check_same_shape(manifest, store.tables, path)
        for part in manifest.parts:
            every = [_read_shard(path, part, shard) for shard in range(len(part.digests))]
            for name in _tables_of(manifest, part):
                saved = [living(of[name], _expiry(manifest.tables[name])) for of in every]
                parts = saved if len(saved) == store.shards else divide(saved, store.shards)
                fresh = [asdict(_as_created(one, store.tables[name])) for one in parts]
                store.restore(name, fresh)


def _as_created(saved: Arrays, table: TableConfig) -> Arrays:
    """The same values in rows of this table, each laid out as `options.hpp` says."""
    rows, optimizer = len(saved.ids), table.optimizer
    itemsize = np.dtype(table.dtype).itemsize
    value_bytes = table.dim * (itemsize if table.storage == "dtype" else 2)
    values = saved.rows[:, : value_bytes + -value_bytes % itemsize]
    floats = rows, optimizer.state_floats(table.dim)
    state = np.full(floats, optimizer.initial_accumulator, table.dtype).view(np.uint8)
    return replace(
        saved,
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


def _shared_out(
    every: list[Arrays], saved: dict[str, Any], now: TableConfig, shards: int
) -> list[Arrays]:
    """A table's rows in one part, by the shards that there are now.

    Slots that stand empty, and rows that have expired, are left out where nothing depends on them.
    """
    if len(every) == shards and saved.get("capacity") == asdict(now.capacity):
        return every
    every = [living(one, _expiry(saved)) for one in every]
    return every if len(every) == shards else divide(every, shards)


def _expiry(saved: dict[str, Any]) -> int | None:
    """Steps after which rows of a saved table expire."""
    capacity = saved.get("capacity")
    expiry = capacity.get("expire_after_steps") if isinstance(capacity, dict) else None
    return expiry if isinstance(expiry, int) else None


def _write_part(
    path: Path, name: str, snapshots: list[dict[str, dict[str, Any]]]
) -> tuple[Part, int]:
    """One file a shard; none is left behind if one of them cannot be written."""
    part, file_bytes = Part(name=name, digests=[]), 0
    try:
        for shard, tables in enumerate(snapshots):
            columns = {f"{t}/{c}": np.asarray(s[c]) for t, s in tables.items() for c in _COLUMNS}
            steps = {t: s["latest_step"] for t, s in tables.items()}
            facts = {"part": name, "shard": shard, "latest_step": steps}
            written = write_arrays(path / part.file_of(shard), facts, columns)
            part.digests.append(written.digest)
            file_bytes += written.file_bytes
    except BaseException:
        for file in path.glob(f"{name}-*.rows"):
            file.unlink(missing_ok=True)
        raise
    return part, file_bytes


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


def _link_parts(source: Path, target: Path, parts: list[Part]) -> None:
    """The same files in another folder; copies where the file system knows no links."""
    for name in (file for part in parts for file in part.files):
        try:
            (target / name).hardlink_to(source / name)
        except FileExistsError:
            continue
        except OSError:
            shutil.copyfile(source / name, target / name)


def _parts_to_extend(store: EmbeddingStore, path: Path) -> list[Part]:
    parts = read_manifest(path).parts if (path / NAME).exists() else []
    if not parts or store.last_saved != (str(path.resolve()), parts[-1].name):
        raise ValueError(
            f"{path} is not the last save of this store, so changes since then are not known; save"
            " with track_changes=True first, then incrementally to the same directory"
        )
    return parts


def _remove_all_but(path: Path, parts: list[Part]) -> None:
    wanted = {file for part in parts for file in part.files}
    for old in path.glob("*.rows"):
        if old.name not in wanted:
            old.unlink(missing_ok=True)
