"""One part of a data set as arrays on disk: written in one go, checked, then mapped into memory."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.data.batch import Batch
from runtime.data.source import Provenance

_ARRAYS = {"ids": "uint64", "offsets": "int64", "dense": "float32", "labels": "float32"}
_SUMMARY = "part.json"
_FACTS = "provenance.json"
_ABANDONED_S = 86_400
"""A half-written part of this age belongs to no living process."""


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A whole part, mapped; a write to it would stay in this process."""

    batch: Batch

    @classmethod
    def open(cls, folder: Path) -> KeptPart | None:
        """The part, if it is there and undamaged; what is damaged is removed."""
        try:
            summary = json.loads((folder / _SUMMARY).read_text())
            arrays = {name: _mapped(folder / name, found) for name, found in summary.items()}
            with suppress(OSError):
                os.utime(folder.parent)  # used just now
            return cls(
                Batch(arrays["ids"], arrays.get("offsets"), arrays["dense"], arrays["labels"])
            )
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
