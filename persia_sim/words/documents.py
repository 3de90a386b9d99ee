"""JSON and TOML files read with care; `schema` says what their values may be."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from persia_sim.words.files import open_regular

MOST_BYTES = 64 * 2**20


def read_document(path: Path) -> Any:
    """The content of a file: TOML when it is called so, else JSON.

    Raises ValueError naming the file when it is no plain file of at most 64 MiB, no UTF-8, not
    well-formed, or when it gives a key twice or a number that is not finite; OSError when it cannot
    be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise ValueError(
                    f"{path} has {size:,} bytes: a document has at most {MOST_BYTES:,}"
                )
            content = file.read()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is not a plain file; name a .json or .toml file") from None
    return parsed(content, path, toml=path.suffix == ".toml")


def parsed(content: bytes, where: object, *, toml: bool = False) -> Any:
    """What the bytes of a document say; raises ValueError naming ``where``, as `read_document`."""
    try:
        text = content.decode("utf-8-sig")
        if toml:
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not text in UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a document of ours") from None
    except ValueError as error:
        kind = "TOML" if toml else "JSON"
        raise ValueError(f"{where} is not well-formed {kind}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")
