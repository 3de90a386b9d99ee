"""Parsed data that is kept: files are parsed and hashed once, then mapped into memory.

A part of a data set is written down while a run streams it whole for the first time, and from then
on every run that reads the same files by the same schema maps it: points of a sweep, other modes,
other seeds. Several processes may do so at once; the first that is done wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.data.batch import Batch, Layout
from runtime.data.files import FileSource
from runtime.data.same_data import document
from runtime.data.source import Part, Provenance

_ARRAYS = {"ids": "uint64", "offsets": "int64", "dense": "float32", "labels": "float32"}
_SUMMARY = "part.json"
_FACTS = "provenance.json"
_ABANDONED_S = 86_400
"""A half-written part of this age belongs to no living process."""


def open_part(folder: Path) -> Batch | None:
    """A whole part, mapped, if it is there and undamaged; what is damaged is removed."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text())
        arrays = {name: _mapped(folder / name, found) for name, found in summary.items()}
        with suppress(OSError):
            os.utime(folder.parent)  # used just now
        return Batch(arrays["ids"], arrays.get("offsets"), arrays["dense"], arrays["labels"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        shutil.rmtree(folder, ignore_errors=True)
        return None


class PartWriter:
    """Takes the chunks of a part as they stream by; keeps all of them or nothing.

    A disk that is full or may not be written is no error: then nothing is kept.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._target, self._most_bytes = folder, most_bytes
        self._fresh = folder.parent / f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}"
        self._files: dict[str, BinaryIO] = {}
        self._sums: dict[str, int] = {}
        self._shapes: dict[str, list[int]] = {}
        self._bytes = 0
        self._has_offsets: bool | None = None
        self._given_up = False
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder.parent)
            self._fresh.mkdir()
        except OSError:
            self._given_up = True

    def add(self, chunk: Batch) -> None:
        """The next samples."""
        if self._given_up:
            return
        if self._has_offsets is None:
            self._has_offsets = chunk.offsets is not None
        arrays = {"ids": chunk.ids, "dense": chunk.dense, "labels": chunk.labels}
        if chunk.offsets is not None:
            # One list of all bags: each chunk after the first goes on where the one before ended.
            start = self._shapes.get("ids", [0])[0]
            first = "offsets" not in self._shapes
            arrays["offsets"] = chunk.offsets + start if first else chunk.offsets[1:] + start
        self._bytes += sum(array.nbytes for array in arrays.values())
        if self._bytes > self._most_bytes or self._has_offsets != (chunk.offsets is not None):
            self.discard()
            return
        try:
            for name, array in arrays.items():
                self._append(name, np.ascontiguousarray(array, _ARRAYS[name]))
        except OSError:
            self.discard()

    def finish(self) -> bool:
        """All samples are here: give the part its name. Whether it is kept by this process."""
        if self._given_up or not self._files:
            return False
        try:
            for file in self._files.values():
                file.close()  # what a crash of the machine cuts short, its checksum tells
            summary = {n: {"shape": s, "crc32": self._sums[n]} for n, s in self._shapes.items()}
            (self._fresh / _SUMMARY).write_text(json.dumps(summary))
            self._fresh.rename(self._target)
        except OSError:  # full, or another process was faster
            return False
        self._files = {}
        self._given_up = True
        return True

    def discard(self) -> None:
        """Keep nothing of what is not finished."""
        self._given_up = True
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        self._files = {}
        shutil.rmtree(self._fresh, ignore_errors=True)

    def _append(self, name: str, array: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self._fresh / name).open("wb")
            self._sums[name] = 0
            self._shapes[name] = [0, *array.shape[1:]]
        content = array.reshape(-1).view(np.uint8).data
        self._files[name].write(content)
        self._sums[name] = zlib.crc32(content, self._sums[name])
        self._shapes[name][0] += len(array)


def facts_of(folder: Path) -> Provenance | None:
    """What `write_facts` wrote; None where there is nothing, or something else."""
    try:
        return Provenance(**json.loads((folder / _FACTS).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_facts(folder: Path, facts: Provenance) -> None:
    """Keep what is known of the data; a folder that may not be written is no error."""
    fresh = folder / f"{_FACTS}.{os.getpid()}.{secrets.token_hex(4)}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(asdict(facts)))
        fresh.replace(folder / _FACTS)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _mapped(file: Path, found: dict[str, list[int] | int]) -> np.ndarray:
    """An array of the file, mapped; ValueError when its bytes are not those that were written."""
    shape = tuple(found["shape"])  # type: ignore[arg-type]
    dtype = np.dtype(_ARRAYS[file.name])
    if file.stat().st_size != dtype.itemsize * int(np.prod(shape)):
        raise ValueError(f"{file} is cut short")
    if not np.prod(shape):
        return np.empty(shape, dtype)
    mapped = np.memmap(file, dtype, "c", shape=shape)  # torch wants memory that may be written
    array: np.ndarray = np.asarray(mapped).view(np.ndarray)
    if zlib.crc32(array.reshape(-1).view(np.uint8).data) != found["crc32"]:
        raise ValueError(f"{file} is damaged")
    return array


def _remove_abandoned(folder: Path) -> None:
    """Half-written parts of processes that were killed."""
    for entry in folder.glob(".*"):
        with suppress(OSError):
            if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(entry, ignore_errors=True)


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
    _parts: dict[Part, Batch] = field(default_factory=dict, init=False)

    @property
    def layout(self) -> Layout:
        """Fields, dense features and tasks."""
        return self.parsed.layout

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The samples of one part in the file's own order; a kept one is a single chunk."""
        folder = self._folder_of_data()
        if part not in self._parts and (found := open_part(folder / part)):
            self._parts[part] = found
        if part in self._parts:
            yield self._parts[part]
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
