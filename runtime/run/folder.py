"""A run's folder: who may write there, and the files that it holds."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from persia_sim.base.archive import read_archive
from persia_sim.base.files import (
    MOST_UNPACKED_BYTES,
    atomic_write,
    kind_of,
    lock_file,
    parsed,
    read_document,
    read_regular,
    remove_abandoned,
)
from persia_sim.base.schema import Count, parse
from runtime.checkpoint.places import fetched, refuse_ways_out
from runtime.object_store import store_behind
from runtime.store_claim import claimed_at

if TYPE_CHECKING:
    from runtime.run.evaluate import Evaluation  # loads torch


@contextmanager
def claimed(
    folder: Path, *, resume: bool = False, on_lost: Callable[[str], None] = lambda why: None
) -> Iterator[None]:
    """Make the folder and hold it for one run, also the URL that it stands for; ``resume``: hold
    that of a run to go on with. ``on_lost`` is told who has taken a URL over.

    Raises ValueError when it holds a finished run, checkpoints of an unfinished one, or a
    config.json that no run left there, unless that is to be gone on with; when another process is
    filling it, when it cannot be written, and when what is written there would be elsewhere.
    """
    if not resume:
        _refuse_taken(folder)
    refuse_ways_out(folder)
    lock = _lock_of(folder)
    try:
        _hold(lock, folder)
        remove_abandoned(folder)  # of runs here that were killed
        behind = store_behind(folder)
        if behind is None:
            yield
            return
        with claimed_at(behind, on_lost) as has_waited:
            if has_waited:  # what the run before has written meanwhile
                fetched(behind.url, folder.parent.name)
            if has_waited and not resume:
                _refuse_taken(folder)
            yield
    except OSError as error:
        if error.errno in OF_THE_DISK and error.filename is None:
            error.filename = str(folder)  # whose disk it is
        raise
    finally:
        os.close(lock)


def fresh_folder(folder: Path) -> Path:
    """Make the folder, or, where there is one already, one of that name with a number behind it:
    two runs that begin in one second have two."""
    names = (f"{folder.name}-{number}" if number > 1 else folder.name for number in count(1))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return next(f for f in map(folder.with_name, names) if _is_made(f))
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be made: {error.strerror}; name another one with --out"
        ) from error


def _is_made(folder: Path) -> bool:
    """Whether it was not there, and is now."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def wait_until_free(folder: Path, within_s: float) -> None:
    """Return when nobody fills the folder any more, or at last: then `claimed` says who does."""
    lock = _lock_of(folder)
    ends_s = time.monotonic() + within_s
    try:
        while time.monotonic() < ends_s:
            with suppress(ValueError):
                return _hold(lock, folder)
            time.sleep(0.1)
    finally:
        os.close(lock)


OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


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
    # A result is never overwritten, and no file that a run has not written.
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder")
    if (folder / "summary.json").exists():
        raise ValueError(f"{folder} holds a finished run; name another folder with --out")
    is_run = (folder / "env.json").exists() or status_of(folder) is not None
    for file in (folder / name for name in OF_A_RUN):
        remedy = "name another folder with --out"
        if file.exists() and not file.is_file():
            kind = kind_of(file.stat().st_mode)
            raise ValueError(f"{file} is {kind}, where a run writes a file; remove it, or {remedy}")
        if os.path.lexists(file) and not is_run:
            raise ValueError(f"{file} is not of a run here, and a run would overwrite it; {remedy}")

    # Nor is an unfinished run that could go on.
    if any((folder / "checkpoints").glob("[0-9]*/state.json")):
        raise ValueError(
            f"{folder} holds an unfinished run with checkpoints; go on with --resume {folder}, or"
            " name another folder with --out"
        )


SUMMARY = "summary.json"
COMMAND = "command.json"
PREDICTIONS = "predictions.npz"
TRACE = "trace.npz"
TIMELINE = "timeline.json"
METRICS = "metrics.jsonl"
"""A line for each evaluation, the last one after draining."""
ENDING = "ending.json"
"""Says of a run that is not finished how it has ended; of one under way, and of a finished one,
there is none."""
OF_A_RUN = (
    "config.json",
    "env.json",
    COMMAND,
    METRICS,
    TRACE,
    TIMELINE,
    PREDICTIONS,
    SUMMARY,
    ENDING,
)
"""Files that a run writes into its folder."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON to ``path``, whole or not at all; NaN becomes null."""
    text = json.dumps(plain(content), indent=1, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What was typed: at first, and each time that the run went on."""

    train: tuple[str, ...] | None = None
    resume: tuple[tuple[str, ...], ...] = ()


def read_command(folder: Path) -> Command:
    """The folder's command.json; an empty one where nothing was written down. Raises ValueError
    naming the file for anything that no run writes there."""
    try:
        return parse(Command, read_document(folder / COMMAND), str(folder / COMMAND))
    except FileNotFoundError:
        return Command()


def command_with(folder: Path, typed: Sequence[str], *, resume: bool) -> dict[str, Any]:
    """What the folder's command.json is to say once this is typed, too; empty for nothing."""
    if not resume:
        return {"train": list(typed)} if typed else {}
    known = read_command(folder)
    return {"train": known.train, "resume": [*known.resume, list(typed)]} if typed else {}


def write_ending(folder: Path, status: int, by: str | None, told: str) -> None:
    """Write down that a run is not finished: the exit code of its process, which torchrun turns
    into another one, who has ended it (the name of a signal; None: it has lost others), and what
    was said."""
    write_json(folder / ENDING, {"status": status, "by": by, "told": told})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What `write_ending` has written down."""

    status: int
    by: str | None
    told: str


def read_ending(folder: Path) -> Ended | None:
    """What stands in ending.json; None where no run has written one."""
    try:
        return parse(Ended, read_document(folder / ENDING), str(folder / ENDING))
    except (OSError, ValueError):
        return None


def status_of(folder: Path) -> int | None:
    """The exit code that stands in ending.json; None where no run has written one."""
    ended = read_ending(folder)
    return None if ended is None else ended.status


def plain(value: Any) -> Any:
    """Dataclasses, paths and numbers as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Path | str):
        return str(value)
    if isinstance(value, bool | int | float | type(None)):
        return value
    raise TypeError(f"{type(value).__name__} {value!r} has no plain JSON form")


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested groups by group.option."""
    result: dict[str, Any] = {}
    for name, value in document.items():
        inner = isinstance(value, Mapping)
        result |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return result


_versions: dict[str, Any] = {}


def versions() -> dict[str, Any]:
    """Code and machine, as they were when this process first asked, or whoever has started it: to
    ask takes long."""
    if not _versions:
        packages = ("torch", "numpy", "scikit-learn", "pandas", "pyarrow")
        # Stored results are no code: a study that adds to them has not changed it.
        code = ("--", ":/", ":!/docs/results")
        take_over_versions(
            {
                "commit": _git("rev-parse", "HEAD"),
                "modified": bool(_git("status", "--porcelain", "--untracked-files=no", *code)),
                "python": sys.version.split()[0],
                "packages": {name: metadata.version(name) for name in packages},
                "platform": platform.platform(),
                "cpu": _cpu_name(),
            }
        )
    return _versions


def take_over_versions(known: Mapping[str, Any]) -> None:
    """Those that whoever has started this process knows already."""
    _versions.update(known)


def environment() -> dict[str, Any]:
    """Versions, hardware and load: what a figure must say of where it was made."""
    return {
        **versions(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "process": os.getpid(),
        "load_1min": os.getloadavg()[0],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


Scores = dict[str, int | float | None]
"""Scores of one task, by name; None for a score that is no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The training loss along a run."""

    updates_per_point: Count = 1
    points: tuple[int | float | None, ...] = ()
    """The mean over each so many dense updates; None where none was a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is asked for by name of a summary, which says much beside it."""

    tasks: dict[str, Scores]
    mode: str | None = None
    tau: int | None = None
    seed: int | None = None
    samples: Count | None = None
    updates: Count | None = None
    staleness: dict[str, Any] | None = None
    training_loss: LossCurve = field(default_factory=LossCurve)


def checked_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run, all of it.

    Raises FileNotFoundError when it has not finished, ValueError naming the file and what is wrong
    when it is damaged, OSError when it cannot be read.
    """
    file = folder / SUMMARY
    result: dict[str, Any] = read_document(file)
    parse(Summary, result, str(file), others=True)
    return result


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None when it has not finished, or the file was damaged."""
    try:
        return checked_summary(folder)
    except (FileNotFoundError, ValueError):
        return None


class Predictions(NamedTuple):
    """predictions.npz: what a finished run says of its test part."""

    labels: np.ndarray
    """Numbers [B, T], 0 and 1 but for regressions; NaN where an optional label is absent."""
    predictions: np.ndarray
    """Floats [B, T]."""
    groups: np.ndarray | None
    """Ids [B] of the samples' groups, of data that has groups."""
    weights: np.ndarray | None = None
    """Floats [B], what each sample counts, of data that has weights."""

    def with_label(self, task: int) -> Predictions:
        """The samples that have a label of the task, which by default are all."""
        known = ~np.isnan(self.labels[:, task])
        if known.all():
            return self
        groups, weights = (None if a is None else a[known] for a in (self.groups, self.weights))
        return Predictions(self.labels[known], self.predictions[known], groups, weights)


def read_predictions(folder: Path) -> Predictions | None:
    """The folder's predictions; None where the run has none, ValueError naming a damaged file."""
    file = folder / PREDICTIONS
    needed = Predictions._fields[:2]
    others = Predictions._fields[2:]
    try:
        arrays: dict[str, Any] = read_archive(file, needed, "train it again", others)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None

    # Arrays that do not belong together are a damaged file.
    result = Predictions(**({"groups": None} | arrays))
    labels = result.labels
    predictions = result.predictions
    fits = labels.ndim == 2 and labels.shape == predictions.shape
    fits = fits and all(a is None or a.shape == labels.shape[:1] for a in result[2:])
    if not fits or labels.dtype.kind not in "iubf" or predictions.dtype.kind != "f":
        raise ValueError(
            f"{file} is damaged: labels and predictions must be numbers of one"
            f" shape [samples, tasks], got {labels.dtype} {labels.shape} and {predictions.dtype}"
            f" {predictions.shape}"
        )
    return result


def _git(*words: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One evaluation."""

    updates: Count
    samples: Count
    drained: bool
    """Whether it is that of the end, after all pushes."""
    tasks: dict[str, Scores]


def read_metrics(run: Path) -> list[Line]:
    """The evaluations of a run folder, none where there is no file.

    The last line of a killed run may be half there, and is left out. Raises ValueError naming the
    file and the line for anything else that no run writes, OSError when it cannot be read.
    """
    file = run / METRICS
    try:
        lines = read_regular(file, MOST_UNPACKED_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    result = []
    for number, line in enumerate(lines[:-1], 1):  # behind the last line end: nothing, or half
        where = f"{file}, line {number}"
        result.append(parse(Line, parsed(line, where), where))
    return result


def write_metrics(run: Path, lines: Sequence[Line]) -> None:
    """Begin the file anew with these; a link in its place is replaced, not followed."""
    with atomic_write(run / METRICS) as file:
        file.write("".join(_text(plain(line)) for line in lines).encode())


def append_metrics(run: Path, evaluation: Evaluation, *, drained: bool, **counts: int) -> None:
    """Add a line for this evaluation after so many updates and samples; what a killed run had
    evaluated stays."""
    line = {**counts, "drained": drained, "tasks": scores(evaluation)}
    handle = os.open(run / METRICS, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    with os.fdopen(handle, "a") as lines:
        lines.write(_text(plain(line)))


def scores(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """Task -> its figures."""
    return {name: score.figures() for name, score in evaluation.tasks.items()}


def best_auc(run: Path) -> dict[str, float]:
    """Per task, of all evaluations, also those before a resume."""
    lines = [line.tasks for line in read_metrics(run)]
    return {
        task: max(
            (auc for line in lines if (auc := line[task]["auc"]) is not None), default=math.nan
        )
        for task in lines[0]
    }


def _text(line: Any) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
