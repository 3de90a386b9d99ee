"""Save and load the rows of a store: sharded, atomic, checksummed, a consistent cut, incremental.

A checkpoint is a directory: one file per shard and save, and ``manifest.json``, which names the
files that count. The manifest is replaced last and at once, so a save that dies leaves the
previous one whole. Saving again to the same directory replaces what it held.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoint.array_file import BrokenFileError, read_arrays, write_arrays
from runtime.checkpoint.reshard import Arrays, ids_of, merge_shards, part_of
from runtime.embedding.native.store import NativeStore

_FORMAT = "persia-testbed-embedding-1"
_COLUMNS = ("ids", "words", "stamps", "rows", "removed", "sightings")


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save did."""

    rows: int
    """Rows written."""
    file_bytes: int
    """Bytes written."""
    pause_s: float
    """How long pushes and lookups were held back."""
    total_s: float
    """From the call to the return."""


def save(
    store: NativeStore, path: Path, *, incremental: bool = False, track_changes: bool = False
) -> Saved:
    """Write all rows as they are at one instant; training in other threads goes on meanwhile.

    ``track_changes`` remembers from now on which rows change; later saves to the same directory may
    then be ``incremental`` and write only those.
    """
    started = time.perf_counter()
    path.mkdir(parents=True, exist_ok=True)
    parts = _parts_to_extend(store, path) if incremental else []
    with store.consistent_cut():
        held = time.perf_counter()
        snapshots = store.snapshots(only_changed=incremental, track=incremental or track_changes)
        pause_s = time.perf_counter() - held
    name = uuid.uuid4().hex[:12]
    files, rows, file_bytes = [], 0, 0
    for shard, tables in enumerate(snapshots):
        file = f"{name}-shard-{shard:04d}.rows"
        arrays = {f"{t}/{c}": np.asarray(found[c]) for t, found in tables.items() for c in _COLUMNS}
        facts = {"shard": shard, "latest_step": {t: s["latest_step"] for t, s in tables.items()}}
        file_bytes += write_arrays(path / file, facts, arrays)
        rows += sum(len(found["ids"]) for found in tables.values())
        files.append(file)
    manifest = {
        "format": _FORMAT,
        "seed": store.seed,
        "tables": {t: asdict(config) for t, config in store.tables.items()},
        "parts": [*parts, {"name": name, "shards": store.shards, "files": files}],
    }
    _replace_manifest(path, manifest)
    store.last_saved = (str(path.resolve()), name) if incremental or track_changes else None
    return Saved(rows, file_bytes, pause_s, time.perf_counter() - started)


def load(store: NativeStore, path: Path) -> None:
    """Fill an empty store, of any number of shards, with what was saved.

    With the same number of shards and no incremental part the store goes on exactly as the saved
    one, evictions included. Otherwise the order of recency is that of each old shard, interleaved,
    and sightings of admission start anew.
    """
    if len(store):
        raise ValueError(
            f"load needs an empty store, this one has {len(store)} rows; open a new one"
        )
    manifest = _read_manifest(path)
    _check_tables(store, manifest, path)
    for part in manifest["parts"]:
        found = [read_arrays(path / file) for file in part["files"]]
        for table in store.tables:
            shards: list[Arrays] = []
            for facts, arrays in found:
                columns = {c: arrays[f"{table}/{c}"] for c in _COLUMNS}
                shards.append(Arrays(latest_step=facts["latest_step"][table], **columns))
            if part["shards"] != store.shards:
                merged = merge_shards(shards)
                owner, gone = ids_of(merged, store.shards)
                shards = [part_of(merged, owner == k, gone == k) for k in range(store.shards)]
            store.restore(table, [asdict(s) for s in shards])


def _parts_to_extend(store: NativeStore, path: Path) -> list[Any]:
    parts: list[Any] = _read_manifest(path)["parts"] if (path / "manifest.json").exists() else []
    if not parts or store.last_saved != (str(path.resolve()), parts[-1]["name"]):
        raise ValueError(
            f"{path} is not the last save of this store, so changes since then are not known; save"
            " with track_changes=True first, then incrementally to the same directory"
        )
    return parts


def _replace_manifest(path: Path, manifest: dict[str, Any]) -> None:
    fresh = path / "manifest.json.new"
    with fresh.open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path / "manifest.json")
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name is on the disk before any old file goes
    finally:
        os.close(directory)
    wanted = {file for part in manifest["parts"] for file in part["files"]}
    for old in path.glob("*.rows"):
        if old.name not in wanted:
            old.unlink()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise BrokenFileError(f"{path} holds no checkpoint: there is no manifest.json") from None
    except ValueError as error:
        raise BrokenFileError(f"{file} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise BrokenFileError(f"{file} is not the manifest of an embedding checkpoint ({_FORMAT})")
    return manifest


def _check_tables(store: NativeStore, manifest: dict[str, Any], path: Path) -> None:
    """Rows must mean the same here as there; capacity and the like may change."""
    if manifest["seed"] != store.seed:
        raise ValueError(
            f"{path} was saved with seed {manifest['seed']}, the store has {store.seed}: initial"
            " values of new rows would differ; open the store with the saved seed"
        )
    for table, config in store.tables.items():
        if table not in manifest["tables"]:
            raise ValueError(f"{path} has no table {table}, only {sorted(manifest['tables'])}")
        saved, now = manifest["tables"][table], asdict(config)
        for key in ("dim", "dtype", "storage", "share_rows", "hash_stack"):
            if saved[key] != now[key]:
                raise ValueError(
                    f"{path}: table {table} was saved with {key}={saved[key]}, the store has"
                    f" {key}={now[key]}; configure it as saved"
                )
        if saved["optimizer"]["kind"] != config.optimizer.kind or bool(
            saved["optimizer"]["momentum"]
        ) != bool(config.optimizer.momentum):
            raise ValueError(
                f"{path}: table {table} has state of {saved['optimizer']['kind']}, the store uses"
                f" {config.optimizer.kind}; configure the optimiser as saved"
            )
