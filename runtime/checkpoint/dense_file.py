"""The dense network on disk: tensors, numbers and words; never code."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import torch

from persia_sim.words.files import read_regular
from runtime.checkpoint.array_file import BrokenFileError
from runtime.dense.state import DenseState


def write_dense(file: Path, state: DenseState) -> str:
    """Write and flush to the disk; gives the file's digest."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_dense(file: Path, digest: str) -> DenseState:
    """What `write_dense` wrote, on the CPU; raises `BrokenFileError` for any other content."""
    try:
        content = read_regular(file)
    except OSError as error:
        raise BrokenFileError(f"{file} cannot be read: {error.strerror}") from None
    check_digest(file, content, digest)
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch has a dozen kinds for bytes that it did not write
        reason = str(error).partition(". ")[0].partition("\n")[0]  # then it advises to run code
        raise BrokenFileError(f"{file} holds more than weights: {reason}") from None
    if not isinstance(found, dict) or not {"model", "optimizers"} <= set(found):
        raise BrokenFileError(f"{file} holds no dense network with its optimisers")
    for name, kind in _KINDS.items():
        if name in found and not isinstance(found[name], kind):
            is_now = type(found[name]).__name__
            raise BrokenFileError(f"{file}: {name} must be a {kind.__name__}, got a {is_now}")
    return found


_KINDS = {
    "model": dict, "optimizers": list, "replicas": list, "version": int, "rounds": int,
    "pending": list, "generators": dict,
}  # fmt: skip
"""What a `DenseState` holds, and as what."""


def check_digest(file: Path, content: bytes, digest: str) -> None:
    """Raise `BrokenFileError` unless the content is what the state names."""
    found = hashlib.blake2b(content, digest_size=32).hexdigest()
    if found != digest:
        raise BrokenFileError(
            f"{file} is not the file that state.json names: its digest begins with {found[:12]},"
            f" that in state.json with {digest[:12]}"
        )
