"""Save and load the rows of a store: sharded, atomic, checksummed, a consistent cut.

A checkpoint is a directory: one file per shard, which the server of the shard writes and reads
itself, and ``manifest.json``, which names the files that count. Who leads writes the manifest, last
and at once, so a save that dies leaves the previous one whole. Saving again to the same directory
replaces what it held.

Where a store is behind the directory, the servers' files go there, each sent by its server, and the
manifest alone lies here: who writes the whole run sends it.
"""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.checkpoint.shard import (
    ShardManifest,
    file_of,
    load_rows,
    see_folder,
    write_rows,
)
from runtime.embedding.store import EmbeddingStore
from runtime.files import BrokenFileError, folder_lock
from runtime.object_store import address_of, store_behind


def take(store: EmbeddingStore) -> Taken:
    """All rows as they are at this instant, to be written later; nothing is copied yet.

    Until they are written, whoever changes a row copies it first (`freeze_snapshots`). The next
    taking waits until this one is written or dropped.
    """
    store.saving.acquire()
    try:
        # The instant: no push is half applied. Rows are copied later, by whoever changes one.
        with store.consistent_cut():
            store.freeze_snapshots()
    except BaseException:
        store.drop_snapshots()
        store.saving.release()
        raise
    return Taken(store)


@dataclass(slots=True)
class Taken:
    """The rows of a store at one instant; the store may be trained while they are written."""

    _store: EmbeddingStore
    _is_dropped: bool = False

    def write(self, path: Path) -> None:
        """Write to a folder. Raises OSError when the disk does; then nothing has been lost."""
        path.mkdir(parents=True, exist_ok=True)
        store = self._store
        with folder_lock(path):  # one writer a folder
            try:
                name = uuid.uuid4().hex[:12]
                digests = self._written_by_servers(path, name)
                configs = {t: asdict(config) for t, config in store.tables.items()}
                manifest = ShardManifest(
                    seed=store.seed, tables=configs, name=name, digests=digests
                )
                manifest.write(path)
            finally:
                self.drop()

            # The manifest is there: files that it does not name belong to no checkpoint.
            for old in path.glob("*.rows*"):
                if old.name not in manifest.files:
                    old.unlink(missing_ok=True)

    def drop(self) -> None:
        """Nobody wants them, unless they are written."""
        if self._is_dropped:
            return
        self._is_dropped = True
        self._store.drop_snapshots()
        self._store.saving.release()

    def _written_by_servers(self, path: Path, name: str) -> list[str]:
        """Each server writes its file; their digests. None is left behind if one of them cannot be
        written, or is not seen here."""
        try:
            folder = address_of(path.absolute())
            written = self._store.at_each_server(write_rows, folder=folder, save=name)
            for shard, one in enumerate(written):
                if _size_of(path / file_of(name, shard)) != one["file_bytes"]:
                    raise OSError(
                        f"{folder}/{file_of(name, shard)} is not as its server wrote it: is it"
                        " shared?"
                    )
        except BaseException:
            for left in path.glob(f"{name}-*"):
                left.unlink(missing_ok=True)
            raise
        return [one["digest"] for one in written]


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
