"""Save and load the rows of a store: sharded, atomic, checksummed, a consistent cut, incremental.

An incremental save has the rows that were used, written or created since the one before.

A checkpoint is a directory: one file per shard and save, which the server of the shard writes and
reads itself, and ``manifest.json``, which names the files that count. Who leads writes the
manifest, last and at once, so a save that dies leaves the previous one whole, and what it would
have saved counts as changed still. Saving again to the same directory replaces what it held.

Where a store is behind the directory, the servers' files go there, each sent by its server, and the
manifest alone lies here: who writes the whole run sends it.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.checkpoint.shard import (
    MANIFEST,
    Part,
    ShardManifest,
    load_rows,
    read_manifest,
    see_folder,
    write_rows,
)
from runtime.embedding.store import EmbeddingStore
from runtime.files import BrokenFileError, folder_lock
from runtime.object_store import address_of, store_behind


def take(
    store: EmbeddingStore, *, extends: Path | None = None, track_changes: bool = False
) -> Taken:
    """All rows as they are at this instant, to be written later; nothing is copied yet.

    Until they are written, whoever changes a row copies it first (`freeze_snapshots`).
    ``extends`` names the folder of this store's last save: then only what changed since is taken.
    The next taking waits until this one is written or dropped.
    """
    # One taking at a time: what changes is tracked for one only.
    track = track_changes or extends is not None
    store.saving.acquire()
    try:
        # Changes are known since the last save of this very store.
        parts: list[Part] = []
        if extends is not None:
            parts = read_manifest(extends).parts if (extends / MANIFEST).exists() else []
            if not parts or store.last_saved != (str(extends.resolve()), parts[-1].name):
                raise ValueError(
                    f"{extends} is not the last save of this store, so changes since then are not"
                    " known; save with track_changes=True first, then incrementally to the same"
                    " directory"
                )

        # The instant: no push is half applied. Rows are copied later, by whoever changes one.
        with store.consistent_cut():
            store.freeze_snapshots(only_changed=extends is not None, track=track)
    except BaseException:
        store.settle_snapshots(are_safe=False)
        store.saving.release()
        raise
    return Taken(store, track, extends, parts)


@dataclass(slots=True)
class Taken:
    """The rows of a store at one instant; the store may be trained while they are written."""

    _store: EmbeddingStore
    _track: bool
    extends: Path | None
    """The folder of the save whose rows these are changes of; None: all rows."""
    _parts: list[Part]
    file_bytes: int = 0
    """Written by `write`, without those of parts before."""
    _settled: bool = False

    def write(self, path: Path) -> None:
        """Write to a folder, which then holds all rows; parts it extends come in as links.

        Raises OSError when the disk does; then nothing has been lost.
        """
        # One writer a folder; what an incremental one extends comes in as links.
        path.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex[:12]
        store = self._store
        with folder_lock(path):
            try:
                if self.extends is not None and self.extends != path:
                    _link_parts(self.extends, path, self._parts)
                part = self._written_by_servers(path, name)
                parts = [*self._parts, part]
                configs = {t: asdict(config) for t, config in store.tables.items()}
                ShardManifest(seed=store.seed, tables=configs, parts=parts).write(path)
            except BaseException:
                self._settle(are_safe=False)
                raise

            # The manifest is there: files that it does not name belong to no checkpoint.
            store.last_saved = (str(path.resolve()), name) if self._track else None
            self._settle(are_safe=True)
            wanted = {file for part in parts for file in part.files}
            for old in path.glob("*.rows*"):
                if old.name not in wanted:
                    old.unlink(missing_ok=True)

    def drop(self) -> None:
        """Nobody wants them, unless they are written: what has changed counts as changed still."""
        self._settle(are_safe=False)

    def _written_by_servers(self, path: Path, name: str) -> Part:
        """Each server writes its file. None is left behind if one of them cannot be written, or is
        not seen here."""
        try:
            folder = address_of(path.absolute())
            written = self._store.at_each_server(write_rows, folder=folder, part=name)
            part = Part(name=name, digests=[one["digest"] for one in written])
            for file, one in zip(part.files, written, strict=True):
                if _size_of(path / file) != one["file_bytes"]:
                    raise OSError(f"{folder}/{file} is not as its server wrote it: is it shared?")
        except BaseException:
            for left in path.glob(f"{name}-*"):
                left.unlink(missing_ok=True)
            raise
        self.file_bytes = sum(one["file_bytes"] for one in written)
        return part

    def _settle(self, *, are_safe: bool) -> None:
        if self._settled:
            return
        self._settled = True
        self._store.settle_snapshots(are_safe=are_safe)
        self._store.saving.release()


def _size_of(file: Path) -> int | None:
    """The bytes of a server's file, here or in the store behind its folder."""
    behind = store_behind(file.parent)
    if behind is None:
        return file.stat().st_size
    info = behind.info(file.name)
    return None if info is None else int(info["size"])


def ensure_seen(store: EmbeddingStore, run: Path) -> None:
    """Find out before any work whether all servers can write into the run's folder. Raises
    ValueError for one that does not see it."""
    run.mkdir(parents=True, exist_ok=True)
    behind = store_behind(run)
    with tempfile.NamedTemporaryFile(dir=run.absolute(), prefix="seen-by-all-servers-") as mark:
        if behind is None:
            store.at_each_server(see_folder, mark=mark.name)
            return
        name = Path(mark.name).name
        behind.put(Path(mark.name), name)
        try:
            store.at_each_server(see_folder, mark=f"{behind.url}/{name}")
        finally:
            behind.remove(name)


def load(store: EmbeddingStore, path: Path) -> None:
    """Fill an empty store, of any number of shards, with what was saved.

    With the same number of shards the store goes on exactly as the saved one, evictions included.
    Otherwise the order of recency is that of each old shard, interleaved. Raises ValueError, with
    what is in the checkpoint and what is in the store, when rows would mean something else, and
    `BrokenFileError` for damage.
    """
    if len(store):
        raise ValueError(
            f"load needs an empty store, this one has {len(store)} rows; open a new one"
        )
    if not path.is_dir():
        raise BrokenFileError(f"{path} holds no checkpoint: it is not a folder")
    with folder_lock(path, shared=True):
        store.at_each_server(load_rows, folder=address_of(path.absolute()))


def load_values(store: EmbeddingStore, path: Path) -> None:
    """Fill an empty store, of any number of shards, with the values of the rows saved there.

    Each row is as one that was just created with this value: its optimiser's state is fresh, and
    nobody has used it yet. Seed, rates, optimiser and limits may be others. Raises ValueError when
    rows would mean something else, and `BrokenFileError` for damage.
    """
    with folder_lock(path, shared=True):
        store.at_each_server(load_rows, folder=address_of(path.absolute()), values_only=True)


def _link_parts(source: Path, target: Path, parts: list[Part]) -> None:
    """Put links to the parts' files into another folder; copies where there are no links, and in a
    store, which makes them itself."""
    before, behind = store_behind(source), store_behind(target)
    for name in (file for part in parts for file in part.files):
        if before is not None and behind is not None:
            before.copy(name, behind)
            continue
        try:
            (target / name).hardlink_to(source / name)
        except FileExistsError:
            continue
        except OSError:
            shutil.copyfile(source / name, target / name)
