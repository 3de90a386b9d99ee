"""Named arrays in one file that knows when it is truncated, damaged or not ours.

Layout: magic, length of the header, the header (JSON: facts, and name, dtype, shape of each array),
the arrays' bytes, and the blake2b digest of all before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.words.files import open_regular

_MAGIC = b"PERSIA-TESTBED-ROWS-1\n"
_DIGEST_BYTES = 32
_BLOCK_BYTES = 1 << 24
_DTYPES = ("<u8", "<u4", "|u1")
_MOST_HEADER_BYTES = 1 << 24


class BrokenFileError(ValueError):
    """A file that cannot be trusted: its name and the reason."""


@dataclass(frozen=True, slots=True)
class Written:
    """What stands on the disk after a write."""

    file_bytes: int
    digest: str
    """The file's own digest, in hex: a manifest that names it tells this file from any other."""


def write_arrays(path: Path, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Written:
    """Write and flush to the disk."""
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
        return Written(file.tell(), digest.hexdigest())


def read_arrays(path: Path, digest: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of the file with this digest; no more memory is asked for than it has bytes.

    Raises `BrokenFileError` with the file's name and what is wrong.
    """
    try:
        return _read(path, digest)
    except OSError as error:
        raise BrokenFileError(f"{path} cannot be read: {error.strerror}") from None


def check_arrays(path: Path, digest: str) -> None:
    """Read the file once, without making an array; raises `BrokenFileError` unless it is whole."""
    running = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        with open_regular(path) as file:
            left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                running.update(block)
                left -= len(block)
    except OSError as error:
        raise BrokenFileError(f"{path} cannot be read: {error.strerror}") from None
    if running.hexdigest() != digest:
        raise BrokenFileError(f"{path} is damaged, or not the file that the manifest names")


def _read(path: Path, expected_digest: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_MAGIC) + 8)
        if len(start) < len(_MAGIC) + 8 or not start.startswith(_MAGIC):
            raise BrokenFileError(f"{path} is not a file of embedding rows (wrong first bytes)")
        header_bytes = int.from_bytes(start[len(_MAGIC) :], "little")
        if header_bytes > _MOST_HEADER_BYTES:
            raise BrokenFileError(f"{path} has a damaged header: it claims {header_bytes} bytes")
        if len(start) + header_bytes + _DIGEST_BYTES > size:
            raise _truncated(path, size)
        raw = file.read(header_bytes)
        running = hashlib.blake2b(start + raw, digest_size=_DIGEST_BYTES)
        facts, layout = _header(path, raw)
        item_bytes = {n: np.dtype(d).itemsize * math.prod(s) for n, (d, s) in layout.items()}
        expected = len(start) + header_bytes + sum(item_bytes.values()) + _DIGEST_BYTES
        if size != expected:  # before any array is made: a damaged shape asks for any memory
            raise _truncated(path, size, expected)
        arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in layout.items()}
        for array in arrays.values():
            view = array.reshape(-1).view(np.uint8).data
            for at in range(0, len(view), _BLOCK_BYTES):
                file.readinto(view[at : at + _BLOCK_BYTES])
            running.update(view)
        if file.read(_DIGEST_BYTES) != running.digest():
            raise BrokenFileError(f"{path} is damaged: its checksum does not match its content")
    if running.hexdigest() != expected_digest:
        raise BrokenFileError(
            f"{path} is not the file that the manifest names: its digest begins with"
            f" {running.hexdigest()[:12]}, that in the manifest with {expected_digest[:12]}"
        )
    return facts, arrays


def _header(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]:
    """Facts, and per array its dtype and shape, all of the types that they must have."""
    try:
        header = json.loads(raw)
        facts, layout = header["facts"], dict(header["arrays"])
        for name, (dtype, shape) in layout.items():
            if dtype not in _DTYPES:
                raise ValueError(f"array {name} has dtype {dtype}")
            if not all(type(n) is int and 0 <= n < 2**62 for n in shape):
                raise ValueError(f"array {name} has shape {shape}")
        if not isinstance(facts, dict):
            raise ValueError("its facts are no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenFileError(f"{path} has a damaged header: {error}") from None
    return facts, layout


def _truncated(path: Path, size: int, expected: int | None = None) -> BrokenFileError:
    wanted = "" if expected is None else f" of {expected}"
    return BrokenFileError(f"{path} is truncated or overlong: it has {size}{wanted} bytes")
