"""Files that are trusted by their digest: arrays, dense weights, and the documents that name them.

A file is what its digest says (blake2b of all its bytes), which stands in a document; a document
holds the digest of what it says itself. Nothing that is read is code, nor asks for more memory than
the file has bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast
from zipfile import ZipFile

import numpy as np

from persia_sim.base.archive import damage_told
from persia_sim.base.files import (
    MOST_DOCUMENT_BYTES,
    atomic_write,
    open_regular,
    parsed,
    read_document,
    read_regular,
    refuse_bomb,
    refuse_loss,
)
from persia_sim.base.schema import parse
from persia_sim.base.vocabulary import ENDLESS

T = TypeVar("T")
_MAGIC = b"PERSIA-TESTBED-ARRAYS-2\n"
_BLOCK_BYTES = 1 << 24
_DTYPES = ("<u8", "<u4", "|u1", "<i8", "<f4")
_MOST_HEADER_BYTES = 1 << 24


@cache
def table_beside(module: str) -> dict[str, Any]:
    """What the TOML file beside a module, which has its name, says."""
    file = Path(module).with_suffix(".toml")
    return cast(dict[str, Any], parsed(file.read_bytes(), file, toml=True))


class BrokenFileError(ValueError):
    """A file that cannot be trusted: its name and the reason."""


def ensure_place(out: Path, kind: str, *keys: set[str]) -> None:
    """Find out before any work whether a document can be written where it is wanted; its folder is
    made.

    ``keys``: an earlier one of its ``kind``, which may be replaced, has one of each set. Raises
    ValueError for what would be lost; OSError for what cannot be made.
    """

    def has_keys(file: Path) -> bool:
        try:
            document = read_document(file)
        except ValueError:
            return False
        return isinstance(document, dict) and all(key_set & document.keys() for key_set in keys)

    refuse_loss("--out", out, kind, has_keys)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The system's own answer: rights, a read-only disk, a folder that takes no files.
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from None


def digest_of(file: Path) -> str:
    """The digest of a file's bytes, in hex; raises `BrokenFileError` where it cannot be read."""
    with _opened(file) as content:
        return hashlib.file_digest(content, _blake2b).hexdigest()


def check_file(file: Path, digest: str) -> None:
    """Read the file once; raises `BrokenFileError` unless it is the one with this digest."""
    _check(file, digest_of(file), digest)


def _check(file: Path, digest: str, named: str) -> None:
    if digest != named:
        raise BrokenFileError(
            f"{file} is damaged, or not the file that the checkpoint names: its digest begins with"
            f" {digest[:12]}, that of the checkpoint with {named[:12]}"
        )


def _blake2b(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=32)


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader]:
    try:
        with open_regular(file) as content:
            yield content
    except OSError as error:
        raise BrokenFileError(f"{file} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Written:
    """What stands on the disk after a write."""

    file_bytes: int
    digest: str


def write_arrays(
    path: Path, facts: dict[str, Any], arrays: dict[str, np.ndarray], *, flush: bool = True
) -> Written:
    """Write magic, length of the header, the header (JSON: facts; dtype, shape of each array) and
    the bytes of the arrays; with ``flush`` they are on the disk then."""
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    header = json.dumps({"facts": facts, "arrays": shapes}).encode()
    head = _MAGIC + len(header).to_bytes(8, "little") + header
    content = (_bytes_of(np.ascontiguousarray(array)) for array in arrays.values())
    return _write(path, head, *content, flush=flush)


def _write(path: Path, *pieces: bytes | memoryview, flush: bool = True) -> Written:
    digest = _blake2b()
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        if flush:
            file.flush()
            os.fsync(file.fileno())
        return Written(file.tell(), digest.hexdigest())


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def read_arrays(path: Path, digest: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of the file with this digest; raises `BrokenFileError` for any other."""
    with _opened(path) as file:
        # The header, which says what follows; its size is bounded first.
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_MAGIC) + 8)
        if len(start) < len(_MAGIC) + 8 or not start.startswith(_MAGIC):
            raise BrokenFileError(f"{path} is not a file of arrays (wrong first bytes)")
        header_bytes = int.from_bytes(start[len(_MAGIC) :], "little")
        if header_bytes > _MOST_HEADER_BYTES:
            raise BrokenFileError(f"{path} has a damaged header: it claims {header_bytes} bytes")
        raw = file.read(header_bytes)
        running = _blake2b(start + raw)
        facts, layout = _header(path, raw)

        # The file must be as long as its shapes say.
        item_bytes = (np.dtype(d).itemsize * math.prod(shape) for d, shape in layout.values())
        expected = len(start) + header_bytes + sum(item_bytes)
        if size != expected:  # before any array is made: a damaged shape asks for any memory
            raise BrokenFileError(f"{path} is truncated or overlong: {size} of {expected} bytes")

        # Read each array in place, and hash it as it comes.
        arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in layout.items()}
        for array in arrays.values():
            view = _bytes_of(array)
            for at in range(0, len(view), _BLOCK_BYTES):
                file.readinto(view[at : at + _BLOCK_BYTES])
            running.update(view)
    _check(path, running.hexdigest(), digest)
    return facts, arrays


def _header(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]:
    """Facts, and per array its dtype and shape, all of the types that they must have."""
    try:
        header = parsed(raw, "it")
        facts = header["facts"]
        layout = dict(header["arrays"])
        for name, (dtype, shape) in layout.items():
            if dtype not in _DTYPES:
                raise ValueError(f"array {name} has dtype {dtype}")
            if not all(type(n) is int and 0 <= n < ENDLESS for n in shape):
                raise ValueError(f"array {name} has shape {shape}")
        if not isinstance(facts, dict):
            raise ValueError("its facts are no object")
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFileError(f"{path} has a damaged header: {error}") from None
    return facts, layout


def read_bounded(file: Path, most_bytes: int) -> bytes:
    """The content of a plain file of so many bytes at most; `BrokenFileError` for any other."""
    try:
        return read_regular(file, most_bytes)
    except OSError as error:
        raise BrokenFileError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BrokenFileError(str(error)) from None


def write_dense(file: Path, state: Mapping[str, Any]) -> str:
    """Write and flush the dense network: tensors, numbers and words; gives the file's digest."""
    import torch  # who reads rows alone does without

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return _write(file, buffer.getbuffer()).digest


_KINDS = {
    "model": dict,
    "optimizers": list,
    "replicas": list,
    "version": int,
    "rounds": int,
    "pending": list,
    "generators": dict,
}
"""What a `DenseState` holds, and as what."""


def read_dense(file: Path, digest: str) -> Any:
    """What `write_dense` wrote, on the CPU; raises `BrokenFileError` for any other content."""
    import torch

    # The bytes that were hashed are the bytes that are read; torch unpacks what is packed in them,
    # so what Python cannot look into first is not given to it.
    with _opened(file) as opened:
        content = opened.read()
    _check(file, _blake2b(content).hexdigest(), digest)
    try:
        with damage_told(file, "it is no archive of weights"):
            archive = ZipFile(io.BytesIO(content))
        refuse_bomb(file, archive, len(content))
    except ValueError as error:
        raise BrokenFileError(str(error)) from None

    # Weights alone: torch would run code that lies in a pickle.
    try:
        result = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch has a dozen kinds for bytes that it did not write
        reason = str(error).partition(". ")[0].partition("\n")[0]  # then it advises to run code
        raise BrokenFileError(f"{file} holds more than weights: {reason}") from None
    if not isinstance(result, dict) or not {"model", "optimizers"} <= set(result):
        raise BrokenFileError(f"{file} holds no dense network with its optimisers")
    for name, kind in _KINDS.items():
        if name in result and not isinstance(result[name], kind):
            is_now = type(result[name]).__name__
            raise BrokenFileError(f"{file}: {name} must be a {kind.__name__}, got a {is_now}")
    return result


def write_sealed(file: Path, content: Any) -> None:
    """Replace the document at once by what a dataclass or an object says; its new content is on
    the disk when this returns."""
    document: dict[str, Any] = content if isinstance(content, dict) else asdict(content)
    sealed = document | {"digest": _digest_of(document)}
    with atomic_write(file) as out:
        out.write(json.dumps(sealed, indent=1, allow_nan=False).encode())
    flush_folder(file.parent)


def read_sealed(
    kind: type[T], file: Path, format: str, what: str, most_bytes: int = MOST_DOCUMENT_BYTES
) -> T:
    """The dataclass that the document says, of a file of so many bytes at most; raises
    `BrokenFileError` naming what is wrong.

    ``format`` must stand under the key of that name; ``what`` is the word for such a file.
    """
    try:
        # Another format, a changed byte, a wrong value: one kind of error, and each sentence names
        # the file.
        document = parsed(read_regular(file, most_bytes), file)
        if not isinstance(document, dict) or document.get("format") != format:
            raise BrokenFileError(f"{file} is not the {what} ({format}); this version reads that")
        if document.pop("digest", None) != _digest_of(document):
            raise BrokenFileError(f"{file} is damaged: its digest does not match its content")
        return parse(kind, document, str(file))
    except FileNotFoundError:
        raise BrokenFileError(
            f"{file.parent} holds no checkpoint: there is no {file.name}"
        ) from None
    except OSError as error:
        raise BrokenFileError(f"{file} cannot be read: {error.strerror or error}") from None
    except BrokenFileError:
        raise
    except ValueError as error:
        raise BrokenFileError(f"{error}; {file.name} is damaged, or of another version") from None


def flush_folder(folder: Path) -> None:
    """Names that were made, replaced or removed in the folder are on the disk when this returns."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def folder_lock(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Wait for others in this folder, threads or processes, then hold it; ``shared``: a reader, who
    waits for savers.

    Where the file system knows no locks (some network ones), nobody waits.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # the lock goes with it


def _digest_of(content: dict[str, Any]) -> str:
    """Digest of what the JSON means, whatever its spaces and order of keys."""
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return _blake2b(plain.encode()).hexdigest()
