"""A small JSON document that knows when it was changed: it holds the digest of what it says."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from persia_sim.words.documents import parsed
from persia_sim.words.files import atomic_write, read_regular
from runtime.checkpoint.array_file import BrokenFileError


def write_sealed(file: Path, content: dict[str, Any]) -> None:
    """Replace the file at once; its new content is on the disk when this returns."""
    sealed = content | {"digest": _digest_of(content)}
    with atomic_write(file) as out:
        out.write(json.dumps(sealed, indent=1, allow_nan=False).encode())
    flush_folder(file.parent)


def read_sealed(file: Path, kind: str, what: str) -> tuple[dict[str, Any], bool]:
    """The document, and whether its digest is that of what it says.

    ``kind`` must stand under the key format; ``what`` is the word for such a file. Raises
    `BrokenFileError` with its name.
    """
    try:
        found = parsed(read_regular(file), file)
    except FileNotFoundError:
        raise BrokenFileError(
            f"{file.parent} holds no checkpoint: there is no {file.name}"
        ) from None
    except OSError as error:
        raise BrokenFileError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BrokenFileError(f"{error}; {file.name} is damaged") from None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise BrokenFileError(f"{file} is not the {what} ({kind})")
    digest = found.pop("digest", None)
    return found, digest == _digest_of(found)


def flush_folder(folder: Path) -> None:
    """Names that were made, replaced or removed in the folder are on the disk when this returns."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _digest_of(content: dict[str, Any]) -> str:
    """Of what the JSON means, whatever its spaces and order of keys."""
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(plain.encode(), digest_size=32).hexdigest()
