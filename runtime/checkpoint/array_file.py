"""Named arrays in one file that knows when it is truncated, damaged or not ours.

Layout: magic, length of the header, the header (JSON: facts, and name, dtype, shape of each array),
the arrays' bytes, and the blake2b digest of all before it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"PERSIA-TESTBED-ROWS-1\n"
_DIGEST_BYTES = 32
_BLOCK_BYTES = 1 << 24


class BrokenFileError(ValueError):
    """A file that cannot be trusted: its name and the reason."""


def write_arrays(path: Path, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> int:
    """Write and flush to the disk; returns the bytes written."""
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    header = json.dumps({"facts": facts, "arrays": shapes}).encode()
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("wb") as file:
        head = _MAGIC + len(header).to_bytes(8, "little") + header
        digest.update(head)
        file.write(head)
        for array in arrays.values():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            digest.update(data)
            file.write(data)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a file; raises `BrokenFileError` with its name and what is wrong."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BrokenFileError(f"{path} cannot be read: {error.strerror}") from None
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + 8)
        if not start.startswith(_MAGIC):
            raise BrokenFileError(f"{path} is not a file of embedding rows (wrong first bytes)")
        header_bytes = int.from_bytes(start[len(_MAGIC) :], "little")
        if len(start) + header_bytes + _DIGEST_BYTES > size:
            raise _truncated(path, size)
        raw = file.read(header_bytes)
        digest = hashlib.blake2b(start + raw, digest_size=_DIGEST_BYTES)
        try:
            header = json.loads(raw)
            layout = {n: (np.dtype(d), tuple(s)) for n, (d, s) in header["arrays"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenFileError(f"{path} has a damaged header: {error}") from error
        arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in layout.items()}
        expected = file.tell() + sum(a.nbytes for a in arrays.values()) + _DIGEST_BYTES
        if size != expected:
            raise _truncated(path, size, expected)
        for array in arrays.values():
            view = array.reshape(-1).view(np.uint8).data
            for at in range(0, len(view), _BLOCK_BYTES):
                file.readinto(view[at : at + _BLOCK_BYTES])
            digest.update(view)
        if file.read(_DIGEST_BYTES) != digest.digest():
            raise BrokenFileError(f"{path} is damaged: its checksum does not match its content")
    return header["facts"], arrays


def _truncated(path: Path, size: int, expected: int | None = None) -> BrokenFileError:
    wanted = "" if expected is None else f" of {expected}"
    return BrokenFileError(f"{path} is truncated or overlong: it has {size}{wanted} bytes")
