"""The folder of a study, which one process writes and no second run repeats; work in processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from persia_sim.base.files import MOST_UNPACKED_BYTES, lock_file, read_regular
from runtime.process import die_with_parent, enter_process, fork_server, unblock_interrupts


class ResultCache:
    """Results by label, in a file that grows by a line each.

    A label must name everything that decides its result. A line that a crash cut short is left out,
    so that its point is computed again; so is one that somebody else wrote. One writer at a time:
    `fill` sees to it, for the rest see `sole_writer`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Any]] = {}  # by label: the row, and the commit it is of
        self._is_cut = False
        if path.is_file():
            text = read_regular(path, MOST_UNPACKED_BYTES).decode(errors="replace")
            self._is_cut = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                # A damaged line is skipped: its point is computed again.
                try:
                    entry = json.loads(line)
                    self._lines[entry["label"]] = {
                        "row": entry["row"],
                        "commit": entry.get("commit"),
                    }
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue

    def __contains__(self, label: str) -> bool:
        return label in self._lines

    def __getitem__(self, label: str) -> Any:
        return self._lines[label]["row"]

    def add(self, label: str, row: Any) -> None:
        """Store a row that JSON can hold; it is on disk when this returns."""
        entry = {"commit": _commit(), "row": row}
        self._lines[label] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"label": label} | entry)
        with os.fdopen(lock_file(self._path), "a") as file:  # of a regular file, at its end
            file.write(f"\n{line}\n" if self._is_cut else f"{line}\n")
        self._is_cut = False

    def fill(
        self,
        work: Mapping[str, Callable[[], Any]],
        title: str,
        jobs: int = 1,
    ) -> list[Any]:
        """The results of these labels; a missing one is computed now, and stored as it comes.

        ``title``: that of the progress bar; the rest as `computed` takes it.
        """
        from persia_sim.base.progress import Progress

        # Only labels that the file lacks are computed.
        missing = {label: compute for label, compute in work.items() if label not in self}
        done = len(work) - len(missing)
        say_older([self._lines[label]["commit"] for label in work if label in self])

        # Each result is written as soon as it comes, so that an interrupted study goes on there.
        with (
            sole_writer(self._path.parent),
            Progress(total=len(work), initial=done, desc=title) as bar,
        ):
            for label, row in computed(missing, jobs):
                self.add(label, row)
                bar.update()
        return [self[label] for label in work]

    def of(
        self, compute: Callable[..., Any], calls: Sequence[tuple[Any, ...]], title: str
    ) -> list[Any]:
        """The result of each tuple of arguments, labelled by their text; computed as by `fill`."""
        self.fill({_label_of(call): partial(compute, *call) for call in calls}, title)
        return [self[_label_of(call)] for call in calls]

    def missing(self, calls: Sequence[tuple[Any, ...]]) -> int:
        """How many of these calls `of` would have to compute."""
        return sum(_label_of(call) not in self for call in calls)


def say_older(commits: Sequence[str | None]) -> None:
    """Print how many of the points that are done were made by another commit than this one."""
    if older := sum(commit != _commit() for commit in commits):
        print(f"  {older} of the done points were made by another commit of this project")


def _commit() -> str | None:
    from runtime.run.folder import environment  # late: numpy

    return environment()["commit"]


def _label_of(arguments: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]


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

    # The lock belongs to the open file, so closing it, also by the end of the process, frees it.
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


def computed(work: Mapping[str, Callable[[], Any]], jobs: int = 1) -> Iterator[tuple[str, Any]]:
    """Labels with what their work returns, as it comes; with several ``jobs`` in processes of their
    own, for work that can be pickled."""
    # One job, or one piece of work, needs no process beside this one.
    if jobs == 1 or len(work) < 2:
        yield from ((label, compute()) for label, compute in work.items())
        return

    # Each worker is a cheap fork of a server, which is there already where others need it, too.
    context = fork_server(())
    pool = ProcessPoolExecutor(
        min(jobs, len(work)), context, initializer=settle_in, initargs=(surroundings(),)
    )
    running = {pool.submit(compute): label for label, compute in work.items()}
    try:
        for job in as_completed(running):
            yield running[job], job.result()
    finally:
        if not all(job.done() for job in running):  # whoever is interrupted waits for no piece
            for process in list((pool._processes or {}).values()):
                process.kill()
        pool.shutdown(cancel_futures=True)


def surroundings() -> dict[str, str | None]:
    """Variables of the environment that a point's process must take over: the server that it is
    forked from still has those of its start."""
    from runtime.data.catalogue import DATA_DIR_VARIABLE  # late: numpy
    from runtime.object_store import CACHE

    return {name: os.environ.get(name) for name in (DATA_DIR_VARIABLE, CACHE)}


def settle_in(environment: Mapping[str, str | None]) -> None:
    """Take over the `surroundings` of whoever started this process, and end with it."""
    unblock_interrupts()
    enter_process()
    die_with_the_parent()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def die_with_the_parent() -> None:
    """A killed sweep must leave no process behind whose work a second run would start again."""
    if sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
    sweep = multiprocessing.parent_process()
    if sweep is not None:  # then the kernel's parent is a server that forks, and outlives the sweep

        def watch() -> None:
            sweep.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="sweep", daemon=True).start()


def children_of(pid: int | str = "self") -> list[int]:
    """Processes that a process has started and that are still there (Linux)."""
    children: list[int] = []
    with suppress(OSError):  # the process has ended, perhaps while its threads were listed
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has ended
                file = Path(f"/proc/{pid}/task/{thread}/children")
                children += map(int, file.read_text().split())
    return children


def cpu_s_of(pid: int) -> float:
    """CPU seconds of a process and its descendants until now; 0 if it is not there (Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    ticks = sum(map(int, fields[11:15]))  # user and system, and those of children that have ended
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s_of, children_of(pid)))


def ends_in_time(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether a process that leads a session ends in time; else it is killed with its children."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True
