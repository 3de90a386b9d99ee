"""One server's rows in its own files of a checkpoint, in whatever process the server lives, and the
manifest: which files count, and of which tables.

A server writes what was frozen as one file, and reads its rows back from files of any number of
shards, with no more than one of them in memory beside its own rows. The names of the files follow
from the manifest (see `file_of`), so none can be swapped in it, and each file's own digest stands
there, so none can be swapped on the disk.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from persia_sim.base.rules import require
from runtime.embedding.batch_rows import shard_of
from runtime.embedding.config import TableConfig
from runtime.files import BrokenFileError, read_arrays, read_sealed, write_arrays, write_sealed
from runtime.object_store import Store, opened_file, url_of

if TYPE_CHECKING:
    from runtime.embedding.native.store import NativeShard  # loads the compiled kernels

FORMAT = "persia-testbed-embedding-7"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """A checkpoint in words."""

    seed: int
    tables: dict[str, dict[str, Any]]
    """Per table its configuration as it was saved."""
    name: str
    """12 hex digits, different in each save."""
    digests: list[str]
    """One for the file of each shard."""
    format: str = FORMAT

    def __post_init__(self) -> None:
        """What holds between the fields, and makes the names of files safe."""
        require(bool(self.tables), "tables", "empty", "must have a key per table")
        safe = re.fullmatch(r"[0-9a-f]{12}", self.name) is not None
        require(safe, "name", self.name[:80], "must be 12 hex digits")
        several = bool(self.digests) and len(set(self.digests)) == len(self.digests)
        require(several, "digests", self.digests, "must be one for each shard, all different")

    @property
    def files(self) -> list[str]:
        """The names of its files, by shard."""
        return [file_of(self.name, shard) for shard in range(len(self.digests))]

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest at once; the new name is on the disk when this returns."""
        write_sealed(folder / MANIFEST, self)


def file_of(name: str, shard: int) -> str:
    """The name of a shard's file of a save, beside the manifest."""
    return f"{name}-shard-{shard:04d}.rows"


def read_manifest(folder: Path) -> ShardManifest:
    """The folder's manifest; raises `BrokenFileError` with its name, the key, value and rule."""
    return read_sealed(
        ShardManifest, folder / MANIFEST, FORMAT, "manifest of an embedding checkpoint"
    )


_SHAPE = ("dim", "dtype")
_INITIAL = ("initial", "initial_scale")


def _deciding(table: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the meaning of a table's rows, its shape first, by the names of an error."""
    written = table.get("optimizer")
    rule = written if isinstance(written, dict) else {}
    return {key: table.get(key) for key in (*_SHAPE, *_INITIAL)} | {
        "optimizer.kind": rule.get("kind"),
        "optimizer.initial_accumulator": rule.get("initial_accumulator"),
    }


def check_same_rows(
    manifest: ShardManifest, tables: Mapping[str, TableConfig], seed: int | None, path: str
) -> None:
    """Raise ValueError with what is in the checkpoint and what is in the store.

    Capacity, admission, rates and the like may change from one to the other; where values alone are
    taken (no ``seed``), all but the shape.
    """
    # Rows that nobody has read yet are made from the seed.
    if seed not in (None, manifest.seed):
        raise ValueError(
            f"{path} was saved with seed {manifest.seed}, the store has {seed}: initial values of"
            " new rows would differ; open the store with the saved seed"
        )
    if set(manifest.tables) != set(tables):
        raise ValueError(
            f"{path} holds the tables {', '.join(sorted(manifest.tables))}, the store has"
            f" {', '.join(sorted(tables))}; open the store with the saved tables"
        )

    # What the stored numbers mean must be what this store takes them for.
    for table, config in tables.items():
        saved = _deciding(manifest.tables[table])
        now = _deciding(asdict(config))
        for key in _SHAPE if seed is None else now:
            if saved[key] != now[key]:
                raise ValueError(
                    f"{path}: table {table} was saved with {key}={saved[key]}, the store has"
                    f" {key}={now[key]}; configure it as saved"
                )


_COLUMNS = {
    "ids": ("<u8", 1),
    "words": ("<u4", 1),
    "stamps": ("<u4", 1),
    "rows": ("|u1", 2),
}
"""Type and number of dimensions of each array of a table."""


class Arrays(NamedTuple):
    """The rows of one table and shard, the next one to be evicted first; n rows."""

    ids: np.ndarray
    """uint64 [n]"""
    words: np.ndarray
    """uint32 [n]: write counts and marks."""
    stamps: np.ndarray
    """uint32 [n], last used at step; empty where rows do not expire."""
    rows: np.ndarray
    """uint8 [n, bytes per row], as stored."""
    latest_step: int
    """The last step seen."""

    def check(self) -> None:
        """Raise `Refused` for columns that no server writes."""
        for name, (dtype, dims) in _COLUMNS.items():
            column = getattr(self, name)
            is_so = (column.dtype.str, column.ndim) == (dtype, dims)
            what = f"{column.dtype.str} of {column.ndim} dimensions"
            require(is_so, name, what, f"must be {dtype} of {dims}")
        count = len(self.ids)
        for name, fits in (
            ("words", len(self.words) == count),
            ("rows", len(self.rows) == count),
            ("stamps", len(self.stamps) in (0, count)),
        ):
            require(fits, f"the number of {name}", len(getattr(self, name)), f"must be {count}")
        within = 0 <= self.latest_step < 2**32
        require(within, "latest_step", self.latest_step, "must be a step")

    def where(self, rows: np.ndarray) -> Arrays:
        """The rows that are marked, or in this order."""
        stamps = self.stamps[rows] if len(self.stamps) else self.stamps
        return self._replace(
            ids=self.ids[rows],
            words=self.words[rows],
            stamps=stamps,
            rows=self.rows[rows],
        )


def see_folder(server: NativeShard, *, mark: str) -> dict[str, Any]:
    """Raise ValueError unless this server sees a file that who leads has just made, and can write
    beside it."""
    url = url_of(mark)
    folder = str(Path(mark).parent) if url is None else url.rpartition("/")[0]
    try:
        # The mark is seen, and a file can be made beside it; in a store, too.
        if url is None:
            os.stat(mark)
            tempfile.TemporaryFile(dir=folder).close()
        else:
            _see_store(Store(folder), url.rpartition("/")[2], f"server-{server.shard}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"embedding server {server.shard} (pid {os.getpid()}) on host {socket.gethostname()}"
            f" cannot write its rows into the run folder {folder} ({reason}): name a folder"
            " with --out that all hosts share, or leave --checkpoint-every out"
        ) from None
    return {}


def _see_store(store: Store, mark: str, suffix: str) -> None:
    """Raise OSError unless the mark is there, and a file can be sent beside it."""
    if store.info(mark) is None:
        raise OSError(f"{store.url}/{mark} is not seen there")
    with tempfile.NamedTemporaryFile() as empty:
        store.put(Path(empty.name), f"{mark}-{suffix}")
    store.remove(f"{mark}-{suffix}")


def write_rows(server: NativeShard, *, folder: str, save: str) -> dict[str, Any]:
    """Write what was frozen as this server's file of a save; gives what `Written` says.

    The file has its name when it is whole. Where the folder is a URL, it is written on this host
    and sent. Raises OSError that names it; then nothing is left.
    """
    # What was frozen, as columns of all tables.
    tables = server.collect()
    columns = {f"{t}/{c}": np.asarray(s[c]) for t, s in tables.items() for c in _COLUMNS}
    steps = {t: s["latest_step"] for t, s in tables.items()}
    facts = {"save": save, "shard": server.shard, "latest_step": steps}
    name = file_of(save, server.shard)

    # To a store by way of this host's disk, or to the folder itself.
    url = url_of(folder)
    if url is not None:
        with tempfile.TemporaryDirectory(prefix="persia-testbed-") as here:
            sent = write_arrays(Path(here) / name, facts, columns, flush=False)
            Store(url).put(Path(here) / name, name)
        return asdict(sent)
    file = Path(folder) / name
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
    # What is there, and whether it is of these tables.
    configs = server.configs
    with opened_file(folder, MANIFEST) as file:
        manifest = read_manifest(file.parent)
    seed = None if values_only else server.seed
    check_same_rows(manifest, configs, seed, url_of(folder) or folder)

    # All of this server's rows, and only then do they fill its tables.
    rows = _rows_of_shard(server, folder, manifest, living_only=values_only)
    for name, arrays in rows.items():
        _restore(server, name, _as_created(server, name, arrays) if values_only else arrays)
    return {}


def _restore(server: NativeShard, table: str, arrays: Arrays) -> None:
    """Put rows into an empty table."""
    server.tables[table].restore(**arrays._asdict())


def load_vectors(server: NativeShard, *, table: str, file: str, digest: str) -> dict[str, Any]:
    """Put those rows of a file of ids and values that are this server's into its empty table, as if
    they were just created with these values."""
    _, arrays = read_arrays(Path(file), digest)
    here = shard_of(arrays["ids"], server.shards) == server.shard
    ids, values = arrays["ids"][here], np.ascontiguousarray(arrays["values"][here])
    nothing = np.empty(0, np.uint32)
    rows = values.view(np.uint8).reshape(len(ids), -1)
    found = Arrays(ids, nothing, nothing, rows, latest_step=0)
    _restore(server, table, _as_created(server, table, found))
    return {}


def _rows_of_shard(
    server: NativeShard, folder: str, manifest: ShardManifest, *, living_only: bool
) -> dict[str, Arrays]:
    """Per table the server's rows.

    Rows that have expired are left out where nothing depends on them, else a table with less room
    would evict others for them.
    With another number of shards, the order of recency is that of each old shard, interleaved.
    """
    # With as many shards as before each file is one server's; else all are read and the rows sorted
    # out.
    alone = len(manifest.digests) == server.shards
    parts = defaultdict[str, list[tuple[Arrays, np.ndarray]]](list)
    for number in [server.shard] if alone else range(len(manifest.digests)):
        saved = _read_shard(folder, manifest, number)
        if saved.keys() != manifest.tables.keys():
            raise BrokenFileError(
                f"{folder}/{manifest.files[number]} holds the tables {', '.join(sorted(saved))},"
                f" its manifest has {', '.join(sorted(manifest.tables))}"
            )
        for name in manifest.tables:
            table = saved[name]
            before = manifest.tables[name]
            now = server.configs[name]
            if living_only or not alone or before.get("capacity") != asdict(now.capacity):
                table = _living(table, before)

            # The order of recency stays, also between rows that come from several old shards.
            age = np.arange(len(table.ids)) / max(len(table.ids), 1)
            if not alone:
                here = shard_of(table.ids, server.shards) == server.shard
                table = table.where(here)
                age = age[here]
            parts[name].append((table, age))

    # One file a table, or all old shards interleaved.
    if alone:
        return {name: table for name, ((table, _),) in parts.items()}
    return {name: _merged(*zip(*of, strict=True)) for name, of in parts.items()}


def _merged(shards: Sequence[Arrays], ages: Sequence[np.ndarray]) -> Arrays:
    """All rows as one, old shards interleaved by the relative age of their rows."""
    order = np.argsort(np.concatenate(ages), kind="stable")
    every = {c: np.concatenate([getattr(s, c) for s in shards]) for c in _COLUMNS}
    return Arrays(**every, latest_step=max(s.latest_step for s in shards)).where(order)


def _living(arrays: Arrays, saved: dict[str, Any]) -> Arrays:
    """Without rows that had expired in the saved table."""
    capacity = saved.get("capacity")
    expiry = capacity.get("expire_after_steps") if isinstance(capacity, dict) else None
    if not (isinstance(expiry, int) and len(arrays.stamps)):
        return arrays
    return arrays.where(arrays.stamps.astype(np.int64) >= arrays.latest_step - expiry)


def _as_created(server: NativeShard, name: str, saved: Arrays) -> Arrays:
    """The saved values in rows of this table, each laid out as `kernels.hpp` says."""
    rows = len(saved.ids)
    table = server.configs[name]
    values = saved.rows[:, : table.dim * np.dtype(table.dtype).itemsize]
    floats = rows, server.tables[name].state_floats
    state = np.full(floats, table.optimizer.initial_accumulator, table.dtype).view(np.uint8)
    return saved._replace(
        words=np.zeros(rows, np.uint32),
        stamps=np.empty(0, np.uint32),
        latest_step=0,
        rows=np.hstack([values, state]),
    )


def _read_shard(folder: str, manifest: ShardManifest, shard: int) -> dict[str, Arrays]:
    """Per table the rows of one file."""
    digest = manifest.digests[shard]
    with opened_file(folder, manifest.files[shard], digest) as file:
        facts, arrays = read_arrays(file, digest)
    try:
        steps = {str(table): int(step) for table, step in facts["latest_step"].items()}
        tables = {
            table: Arrays(latest_step=step, **{c: arrays[f"{table}/{c}"] for c in _COLUMNS})
            for table, step in steps.items()
        }
        for table in tables.values():
            table.check()
        return tables
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        name = f"{folder}/{manifest.files[shard]}"
        raise BrokenFileError(f"{name} is not what a server writes: {error}") from None
