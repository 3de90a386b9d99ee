"""What is wrong with data, in words: the one error, and the checks that every reader shares.

ValueError
  DataError   something in a file, a schema or a name is not what it must be

What is opened as data must be a regular file that can be read: a pipe, a socket or a device would
be waited for without end, or read for ever.
"""

from __future__ import annotations

import difflib
import os
import stat
import types
from collections.abc import Iterable
from dataclasses import fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from persia_sim.words.files import kind_of


class DataError(ValueError):
    """Data that cannot be read as asked; the text says where, what, which rule and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or all of them.

    >>> nearest("clik", ["click", "user"])
    'did you mean click?'
    """
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(words)}"


def regular_file(path: Path) -> os.stat_result:
    """What the system says of a regular file; DataError for all else, and where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"no file {path}\n  correct the path, or the data directory") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot open {str(path)!r}: {reason}; correct the path") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"{path} is {kind_of(found.st_mode)}: data is read more than once; name a regular file"
        )
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} may not be read by this user; change its permissions")
    return found


def check_not_empty(path: Path) -> None:
    """Raise when the path is no regular file, or holds no byte."""
    if regular_file(path).st_size == 0:
        raise no_rows(path)


def no_rows(path: Path) -> DataError:
    """The error of a file without rows."""
    size_bytes = path.stat().st_size
    why = f"nothing but a header line, or empty lines, in its {size_bytes} bytes"
    return DataError(
        f"{path} holds no rows: {why if size_bytes else 'it is empty (0 bytes)'}\n"
        "  write the rows into it, or name the file that has them"
    )


def broken_file(path: Path, error: Exception, where: str = "") -> DataError:
    """The error of bytes that a reader could not make sense of."""
    reason = str(error).splitlines()[0].rstrip(".")
    place = f", {where}" if where else ""
    return DataError(
        f"{path}{place} cannot be read: {reason}\n"
        "  the file is truncated or of another format; fetch it again and compare its sha256"
    )


_WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    date: "a date",
    types.NoneType: "nothing",
}


def check_types(record: Any) -> None:
    """Raise ValueError for the first field of a dataclass that is not of its annotated type."""
    for name, hint in _hints(type(record)).items():  # type: ignore[arg-type]
        value = getattr(record, name)
        if not fits(value, hint):
            close = difflib.get_close_matches(str(value), _choices(hint), n=1, cutoff=0.5)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name} = {value!r}: it must be {_words(hint)}{meant}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the annotated type; a whole number is a number, true is neither."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(v, get_args(hint)[0]) for v in value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if hint in (float, int):
        wanted = (int, float) if hint is float else int
        return isinstance(value, wanted) and not isinstance(value, bool)
    return isinstance(value, hint)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    known: dict[str, Any] = get_type_hints(kind)
    return {f.name: known[f.name] for f in fields(kind)}


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return tuple(choice for part in parts for choice in _choices(part))


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    if get_origin(hint) in (Union, types.UnionType):
        parts = set(get_args(hint)) - {types.NoneType}
        parts -= {int} if float in parts else set()
        return " or ".join(_words(p) for p in get_args(hint) if p in parts)
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
