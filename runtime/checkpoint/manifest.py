"""The manifest of a checkpoint: which files count, of which tables, sealed by a digest of itself.

The names of the files follow from the manifest (see `file_of`), so none can be swapped in it, and
each file's own digest stands there, so none can be swapped on the disk.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runtime.checkpoint.array_file import BrokenFileError
from runtime.checkpoint.sealed import read_sealed, write_sealed

FORMAT = "persia-testbed-embedding-2"
NAME = "manifest.json"
_PART_NAME = re.compile(r"[0-9a-f]{12}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
        write_sealed(folder / NAME, asdict(self))


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; raises `BrokenFileError` with its name, the key, value and rule."""
    file = folder / NAME
    found, whole = read_sealed(file, FORMAT, "manifest of an embedding checkpoint")
    manifest = _checked(file, found)
    if not whole:
        raise BrokenFileError(f"{file} is damaged: its digest does not match its content")
    return manifest


def _checked(file: Path, found: dict[str, Any]) -> Manifest:
    def need(holds: bool, key: str, value: object, rule: str) -> None:
        if not holds:
            raise BrokenFileError(f"{file}: {key} is {str(value)[:80]}: must be {rule}")

    need(type(found.get("seed")) is int, "seed", found.get("seed"), "a whole number")
    tables, parts = found.get("tables"), found.get("parts")
    need(isinstance(tables, dict) and bool(tables), "tables", tables, "an object, a key per table")
    assert isinstance(tables, dict)
    for name, config in tables.items():
        need(isinstance(config, dict), f"tables.{name}", config, "an object of options")
    need(isinstance(parts, list) and bool(parts), "parts", parts, "a list of one or more saves")
    assert isinstance(parts, list)
    checked: list[Part] = []
    for number, part in enumerate(parts):
        at = f"parts[{number}]"
        need(isinstance(part, dict), at, part, "an object with name and digests")
        name, digests = part.get("name"), part.get("digests")
        need(_matches(_PART_NAME, name), f"{at}.name", name, "12 hex digits")
        fresh = all(name != other.name for other in checked)
        need(fresh, f"{at}.name", name, "different from those of the parts before")
        several = isinstance(digests, list) and bool(digests)
        need(several, f"{at}.digests", digests, "a list with one digest a shard")
        for digest in digests:
            need(_matches(_DIGEST, digest), f"{at}.digests", digest, "64 hex digits each")
        fresh = len(set(digests)) == len(digests)
        need(fresh, f"{at}.digests", digests, "different for each shard")
        all_of = part.get("whole", [])
        need(isinstance(all_of, list), f"{at}.whole", all_of, "a list of tables")
        need(all(t in tables for t in all_of), f"{at}.whole", all_of, "some of the tables")
        checked.append(Part(name=name, digests=digests, whole=all_of))
    extra = sorted(set(found) - {"format", "seed", "tables", "parts"})
    need(not extra, "the list of keys", extra, "format, seed, tables, parts and digest")
    return Manifest(seed=found["seed"], tables=tables, parts=checked)


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
