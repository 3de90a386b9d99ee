"""Arrays in an .npz archive of a run, which may be a stranger's: what numpy writes, and no more.

Neither what the archive says of its entries is believed nor what an entry says of its array, before
memory is asked for.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from persia_sim.base.files import open_regular, refuse_bomb

_SUFFIX = ".npy"
_KINDS = "biufU"
"""Of numpy's types: whole numbers, floats and texts; none is code."""
_BLOCK_BYTES = 1 << 24


def read_archive(
    path: Path, needed: Collection[str], remedy: str, others: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays of an archive that holds those of all ``needed`` names, some of ``others`` and
    nothing else.

    Raises ValueError, naming the file, the reason and the ``remedy``, for all that numpy does not
    write and for what unpacks beyond bounds; OSError when the file cannot be read.
    """
    with open_regular(path) as file:
        with damage_told(path, remedy):
            archive = ZipFile(file)
            entries = _entries(archive, needed, others)
        refuse_bomb(path, archive, os.fstat(file.fileno()).st_size)
        with damage_told(path, remedy):
            return {name: _array(archive, entry) for name, entry in entries.items()}


def is_archive_of(path: Path, names: Collection[str]) -> bool:
    """Whether a regular file is an archive of arrays with all of these names and no others."""
    try:
        with open_regular(path) as file, damage_told(path, ""):
            _entries(ZipFile(file), names, ())
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def damage_told(path: Path, remedy: str) -> Iterator[None]:
    """Zipfile and numpy have a dozen kinds of errors for bytes that they did not write: one is
    raised for all. An error of the system, which has a number, stays."""
    try:
        yield
    except Exception as error:
        # An archive may name a place before its own beginning.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged; {remedy} ({reason})") from None


def _entries(
    archive: ZipFile, needed: Collection[str], others: Collection[str]
) -> dict[str, ZipInfo]:
    """By the names of the arrays."""
    entries = archive.infolist()
    names = [entry.filename.removesuffix(_SUFFIX) for entry in entries]
    for name in needed:
        if name not in names:
            raise ValueError(f"it lacks {name}")
    for name, entry in zip(names, entries, strict=True):
        if name not in (*needed, *others) or names.count(name) > 1:
            raise ValueError(f"it holds {name!r}, which no run writes, or twice")
        # Other ways to pack are unpacked whole before anybody counts the bytes.
        if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise ValueError(f"{name} is packed in a way that numpy does not use")
    return dict(zip(names, entries, strict=True))


def _array(archive: ZipFile, entry: ZipInfo) -> np.ndarray:
    with archive.open(entry) as content:
        # The header, whose array must be as large as the entry is.
        if np.lib.format.read_magic(content) != (1, 0):
            raise ValueError(f"{entry.filename} is of another version of numpy's format")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(content)
        if dtype.kind not in _KINDS or not dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{entry.filename} claims to hold {dtype} of shape {shape}")
        items = math.prod(shape)
        if content.tell() + items * dtype.itemsize != entry.file_size:
            raise ValueError(f"{entry.filename} is not as long as its shape {shape} says")

        # Its numbers, in place.
        flat = np.empty(items, dtype)
        _fill(content, flat.view(np.uint8).data)
        return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


def _fill(content: IO[bytes], view: memoryview) -> None:
    for start in range(0, len(view), _BLOCK_BYTES):
        block = view[start : start + _BLOCK_BYTES]
        block[:] = content.read(len(block))
