"""Parsed data that is kept: files are parsed and hashed once, then mapped into memory.

A part of a data set is written down while a run streams it whole for the first time, and from then
on every run that reads the same files by the same schema maps it: points of a sweep, other modes,
other seeds. Several processes may do so at once; the first that is done wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from runtime.data.batch import Batch, Layout
from runtime.data.files import FileSource
from runtime.data.kept_part import KeptPart, PartWriter, facts_of, folder_bytes, write_facts
from runtime.data.same_data import document
from runtime.data.source import Part, Provenance

MOST_BYTES = 4 << 30
"""Of the whole folder; what was read longest ago goes first. A part of more than half is not kept:
a data set of that size streams as fast as it is read."""


@dataclass(slots=True)
class KeptSource:
    """A data set on disk, by its kept parts where they are there."""

    parsed: FileSource
    """Where they are not."""
    root: Path
    """Folder of all kept data."""
    most_bytes: int = MOST_BYTES
    _folder: Path | None = field(default=None, init=False)
    _parts: dict[Part, KeptPart] = field(default_factory=dict, init=False)

    @property
    def layout(self) -> Layout:
        """Fields, dense features and tasks."""
        return self.parsed.layout

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The samples of one part in the file's own order; a kept one is a single chunk."""
        folder = self._folder_of_data()
        if part not in self._parts and (found := KeptPart.open(folder / part)):
            self._parts[part] = found
        if part in self._parts:
            yield self._parts[part].batch
            return
        writer = PartWriter(folder / part, self.most_bytes // 2)
        try:
            for chunk in self.parsed.chunks(part):
                writer.add(chunk)
                yield chunk
            if writer.finish():
                make_room(self.root, self.most_bytes, folder)
        finally:
            writer.discard()

    def provenance(self) -> Provenance:
        """Name, checksum and split, known without reading the files again."""
        folder = self._folder_of_data()
        found = facts_of(folder)
        if found is None:
            found = self.parsed.provenance()
            write_facts(folder, found)
        return replace(found, private=self.parsed.is_private)  # a mode changes without the bytes

    def _folder_of_data(self) -> Path:
        if self._folder is None:
            with suppress(OSError):  # a place that cannot be written keeps nothing
                self.root.mkdir(parents=True, exist_ok=True)
                self.root.chmod(0o700)  # ids and labels of files that may be the user's alone
            self._folder = self.root / self._key()
        return self._folder

    def _key(self) -> str:
        """Of all that decides what is parsed: the files, how they are read, and by which code."""
        source = self.parsed
        meaning = json.dumps([source.schema.name, document(source.schema), source.rows])
        decides = [*source.checksums(), meaning, parser_version()]
        return hashlib.sha256("\n".join(decides).encode()).hexdigest()[:32]


def keeping(source: FileSource, root: Path) -> FileSource | KeptSource:
    """The source by way of kept parts, where it may be kept.

    Bad rows that are left out are counted while they are read, and files that are larger than what
    is kept would not fit: such data is parsed anew each time.
    """
    size_bytes = sum(path.stat().st_size for path in source.main_files() if path.is_file())
    if source.skip_bad_rows or size_bytes > MOST_BYTES // 2:
        return source
    return KeptSource(source, root)


def make_room(root: Path, most_bytes: int, newest: Path) -> None:
    """Remove what was used longest ago, but ``newest``, until the folder is small enough.

    A process that has mapped a part keeps it: only its name goes.
    """
    try:
        folders = [entry for entry in root.iterdir() if entry.is_dir() and entry != newest]
        by_age = sorted(folders, key=lambda folder: folder.stat().st_mtime)
        total = sum(map(folder_bytes, [newest, *by_age]))
        for folder in by_age:
            if total <= most_bytes:
                return
            total -= folder_bytes(folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # another process is making room, too


@cache
def parser_version() -> str:
    """A digest of the code that parses: this folder's sources and the libraries behind them."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    libraries = [metadata.version(name) for name in ("pyarrow", "numpy")]
    return f"{digest.hexdigest()} {libraries} {os.uname().machine}"
