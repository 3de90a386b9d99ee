"""The folder of a study: one writer at a time, and finished points that no second run repeats."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from persia_sim.words.files import lock_file


class Kept:
    """Results by label, in a file that grows by a line each.

    A label must name everything that decides its result. A line that a crash cut short is left out,
    so that its point is computed again; so is one that somebody else wrote. One writer at a time:
    see `sole_writer`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Any] = {}
        self._is_cut = False
        if path.is_file():
            text = path.read_text(errors="replace")
            self._is_cut = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                try:
                    record = json.loads(line)
                    self._rows[record["label"]] = record["row"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    continue

    def __contains__(self, label: str) -> bool:
        return label in self._rows

    def __getitem__(self, label: str) -> Any:
        return self._rows[label]

    def add(self, label: str, row: Any) -> None:
        """Keep what JSON can hold; it is on disk when this returns."""
        self._rows[label] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"label": label, "row": row})
        with self._path.open("a") as file:
            file.write(f"\n{line}\n" if self._is_cut else f"{line}\n")
        self._is_cut = False

    def row(self, label: str, compute: Callable[[], Any]) -> Any:
        """What is kept under this label, or else what is computed now, which is then kept."""
        if label not in self._rows:
            self.add(label, compute())
        return self._rows[label]

    def fill(
        self,
        work: Mapping[str, Callable[[], Any]],
        said: str,
        jobs: int = 1,
        preloaded: Sequence[str] = (),
    ) -> list[Any]:
        """What is kept under these labels; what is missing is computed now, and kept as it comes.

        ``said``: what the progress bar is of; the rest as `computed` takes it.
        """
        from tqdm import tqdm

        from experiments.processes import computed  # late: numpy

        missing = {label: compute for label, compute in work.items() if label not in self}
        done = len(work) - len(missing)
        with tqdm(total=len(work), initial=done, desc=said, disable=None) as bar:
            for label, row in computed(missing, jobs, preloaded):
                self.add(label, row)
                bar.update()
        return [self[label] for label in work]


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
