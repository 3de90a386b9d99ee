"""The manifest of the rows of a checkpoint: which files count, and of which tables.

The names of the files follow from the manifest (see `file_of`), so none can be swapped in it, and
each file's own digest stands there, so none can be swapped on the disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from persia_sim.words.rules import require
from runtime.embedding.config import TableConfig
from runtime.files import BrokenFileError, read_sealed, write_sealed

FORMAT = "persia-testbed-embedding-3"
NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one save wrote: a whole, or the changes since the part before it."""

    name: str
    """12 hex digits, different in each part."""
    digests: list[str]
    """One for the file of each shard."""
    whole: list[str] = field(default_factory=list)
    """Tables of which it has all rows, so that nothing in the parts before it counts."""

    def file_of(self, shard: int) -> str:
        """The name of a shard's file, beside the manifest."""
        return f"{self.name}-shard-{shard:04d}.rows"

    @property
    def files(self) -> list[str]:
        """The names of all its files, by shard."""
        return [self.file_of(shard) for shard in range(len(self.digests))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint in words; parts are loaded in their order."""

    seed: int
    tables: dict[str, dict[str, Any]]
    """Per table its configuration as it was saved."""
    parts: list[Part] = field(default_factory=list)
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest at once; the new name is on the disk when this returns."""
        write_sealed(folder / NAME, self)


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; raises `BrokenFileError` with its name, the key, value and rule."""
    file = folder / NAME
    found = read_sealed(Manifest, file, FORMAT, "manifest of an embedding checkpoint")
    try:
        _check(found)
    except ValueError as error:
        raise BrokenFileError(f"{file}: {error}") from None
    return found


def _check(manifest: Manifest) -> None:
    """What holds between the fields, and makes the names of files safe."""
    require(bool(manifest.tables), "tables", "empty", "must have a key per table")
    require(bool(manifest.parts), "parts", "empty", "must be a list of one or more saves")
    names = [part.name for part in manifest.parts]
    for number, part in enumerate(manifest.parts):
        at, digests = f"parts[{number}]", part.digests
        safe = re.fullmatch(r"[0-9a-f]{12}", part.name) is not None
        require(safe, f"{at}.name", part.name[:80], "must be 12 hex digits")
        fresh = part.name not in names[:number]
        require(fresh, f"{at}.name", part.name, "must be different from those of the parts before")
        several = bool(digests) and len(set(digests)) == len(digests)
        require(several, f"{at}.digests", digests, "must be one for each shard, all different")
        known = set(part.whole) <= set(manifest.tables)
        require(known, f"{at}.whole", part.whole, "must be some of the tables")


_SHAPE = ("dim", "dtype", "storage", "share_rows", "hash_stack")
_INITIAL = ("initial", "initial_scale", "initial_mean", "initial_shape")


def check_same_rows(
    manifest: Manifest, tables: Mapping[str, TableConfig], seed: int, path: Path
) -> None:
    """Raise ValueError with what is in the checkpoint and what is in the store.

    Capacity, admission, rates and the like may change from one to the other.
    """
    if manifest.seed != seed:
        raise ValueError(
            f"{path} was saved with seed {manifest.seed}, the store has {seed}: initial values of"
            " new rows would differ; open the store with the saved seed"
        )
    check_same_shape(manifest, tables, path)
    for table, config in tables.items():
        saved, now = manifest.tables[table], asdict(config)
        for key in _INITIAL:
            _same(path, table, key, saved.get(key), now[key])
        rule, state = saved.get("optimizer"), now["optimizer"]
        saved_rule: dict[str, Any] = rule if isinstance(rule, dict) else {}
        for key in ("kind", "initial_accumulator"):
            _same(path, table, f"optimizer.{key}", saved_rule.get(key), state[key])
        has, needs = bool(saved_rule.get("momentum")), bool(state["momentum"])
        _same(path, table, "optimizer.momentum > 0", has, needs)


def check_same_shape(manifest: Manifest, tables: Mapping[str, TableConfig], path: Path) -> None:
    """As `check_same_rows`, but only that the values of saved rows can be those of the store's."""
    if set(manifest.tables) != set(tables):
        raise ValueError(
            f"{path} holds the tables {', '.join(sorted(manifest.tables))}, the store has"
            f" {', '.join(sorted(tables))}; open the store with the saved tables"
        )
    for table, config in tables.items():
        saved, now = manifest.tables[table], asdict(config)
        for key in _SHAPE:
            _same(path, table, key, saved.get(key), now[key])


def _same(path: Path, table: str, key: str, saved: object, now: object) -> None:
    if saved != now:
        raise ValueError(
            f"{path}: table {table} was saved with {key}={saved}, the store has {key}={now};"
            " configure it as saved"
        )
