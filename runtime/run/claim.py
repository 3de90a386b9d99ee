"""One run to a folder: nobody else's files are overwritten, and no two runs write at once."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persia_sim.words.files import lock_file


@contextmanager
def claimed(folder: Path, *, resume: bool = False) -> Iterator[None]:
    """Make the folder and hold it for one run; ``resume``: hold the folder of one to go on with.

    Raises ValueError when it holds a finished run, checkpoints of an unfinished one, a config.json
    that no run left there, or when another process is filling it; to go on with, when it holds no
    run, and when it cannot be written.
    """
    if resume:
        if not (folder / "config.json").is_file():
            raise ValueError(f"--resume {folder}: there is no run, it holds no config.json")
    else:
        _refuse_taken(folder)
    lock = _lock_of(folder)
    try:
        _hold(lock, folder)
        yield
    except OSError as error:
        if error.errno in _OF_THE_DISK and error.filename is None:
            error.filename = str(folder)  # whose disk it is
        raise
    finally:
        os.close(lock)


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def _hold(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the process ends
    except BlockingIOError:
        raise ValueError(
            f"another run is filling {folder}; wait for it or name another folder with --out"
        ) from None


def _lock_of(folder: Path) -> int:
    lock = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_file(lock)
    except OSError as error:
        odd = error.errno == errno.EINVAL  # no lock of a run
        raise ValueError(
            f"{lock} cannot be locked: {error.strerror}; remove it"
            if odd
            else f"the run folder {folder} cannot be written: {error.strerror}; name another one"
            " with --out"
        ) from error


def _refuse_taken(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder")
    if (folder / "summary.json").exists():
        raise ValueError(f"{folder} holds a finished run; name another folder with --out")
    if (folder / "config.json").exists() and not (folder / "env.json").exists():
        raise ValueError(
            f"{folder / 'config.json'} is not of a run here, and a run would overwrite it;"
            " name another folder with --out"
        )
    if any((folder / "checkpoints").glob("[0-9]*/state.json")):
        raise ValueError(
            f"{folder} holds an unfinished run with checkpoints; go on with --resume {folder}, or"
            " name another folder with --out"
        )
