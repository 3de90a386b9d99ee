"""What is wrong with data, in words: the one error, and the checks of files that readers share.

ValueError
  DataError   something in a file, a schema or a name is not what it must be

What is opened as data must be a regular file that can be read: a pipe, a socket or a device would
be waited for without end, or read for ever.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from persia_sim.words.files import kind_of


class DataError(ValueError):
    """Data that cannot be read as asked; the text says where, what, which rule and what to do."""


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
