"""The folder of a study's results: found writable before the work, and written by one at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persia_sim.words.files import lock_file

_LOCK = ".lock"


def ensure_writable(folder: Path) -> None:
    """Make the folder of a study's results, so that one that cannot be written shows at once.

    Raises OSError naming it, ValueError for the current folder, which `--out ""` would fill.
    """
    if folder == Path():
        raise ValueError("out must name a folder of its own, got the current one")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextmanager
def sole_writer(folder: Path, wait: bool = False) -> Iterator[None]:
    """Make the folder and hold it, so that no other process writes into it meanwhile.

    The system lets go of it when the process ends, however it ends. Raises ValueError when another
    process holds it (``wait``: waits instead), OSError when it cannot be written: both before any
    work is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_file(folder / _LOCK)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(
                f"out {folder} is being written by another process; wait until it has ended or"
                " name another folder"
            ) from None
        yield
    finally:
        os.close(lock)
