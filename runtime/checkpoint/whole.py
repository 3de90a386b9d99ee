"""Checkpoints of a whole run: a folder each, named by the samples trained, complete or ignored.

`checkpoints/<samples>/` holds `rows/` (see `rows`), `dense.pt`, `trace.npz` where the order is
kept (and beside it, not yet merged, what each server process has written down), and `state.json`,
written last: a folder without it was never finished, and nobody reads it. The state seals the other
files by their digests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from persia_sim.words.trace import Trace
from runtime.checkpoint.shard import MANIFEST, read_manifest
from runtime.checkpoint.state import NAME, RunState, read_state
from runtime.dense.state import DenseState
from runtime.files import (
    BrokenFileError,
    check_file,
    digest_of,
    flush_folder,
    read_arrays,
    read_dense,
    write_arrays,
    write_dense,
)

CHECKPOINTS = "checkpoints"
ROWS, DENSE, TRACE, RECORDINGS = "rows", "dense.pt", "trace.npz", "servers.arrays"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, and the doors to what it holds."""

    folder: Path
    state: RunState

    @property
    def rows(self) -> Path:
        """The folder that `runtime.checkpoint.rows.load` takes."""
        return self.folder / ROWS

    def dense(self) -> DenseState:
        """The dense network and its optimisers; weights only."""
        found: DenseState = read_dense(self.folder / DENSE, self.state.files[DENSE])
        return found

    def trace(self) -> Trace | None:
        """The order of events so far, without that of servers; None of a run that keeps none."""
        if TRACE not in self.state.files:
            return None
        file = self.folder / TRACE
        check_file(file, self.state.files[TRACE])
        return Trace.load(file)

    def recordings(self) -> list[np.ndarray]:
        """What each server process has written down, int64 [n, 5], in its order."""
        if RECORDINGS not in self.state.files:
            return []
        return list(read_arrays(self.folder / RECORDINGS, self.state.files[RECORDINGS])[1].values())


def folder_of(run: Path, samples: int) -> Path:
    """Where the checkpoint of this cursor lies in a run's folder; they sort by name."""
    return run / CHECKPOINTS / f"{samples:015d}"


def run_of(checkpoint: Path) -> Path:
    """The run's folder that a checkpoint's folder lies in; a copy elsewhere stands for itself."""
    within = checkpoint.parent.name == CHECKPOINTS
    return checkpoint.parent.parent if within else checkpoint


def write_checkpoint(
    run: Path,
    state: RunState,
    dense: DenseState,
    trace: Trace | None,
    write_rows: Callable[[Path], object],
    recordings: Sequence[np.ndarray] = (),
) -> Checkpoint:
    """Write a checkpoint into the run's folder; it counts from the instant of its last file.

    ``write_rows`` fills a folder with the rows of the same instant. ``recordings`` are of server
    processes: merging them takes long, and is left to who goes on. ``state.files`` is filled in
    here. Raises OSError when the disk does, and then leaves nothing behind; the checkpoints before
    are untouched.
    """
    folder = folder_of(run, state.samples)
    _remove(folder)
    try:
        folder.mkdir(parents=True)
        write_rows(folder / ROWS)
        files = {f"{ROWS}/{MANIFEST}": digest_of(folder / ROWS / MANIFEST)}
        files[DENSE] = write_dense(folder / DENSE, dense)
        if trace is not None:
            trace.save(folder / TRACE, compress=False)  # there is little time after a signal
            files[TRACE] = digest_of(folder / TRACE)
        if recordings:
            arrays = {str(server): events for server, events in enumerate(recordings)}
            files[RECORDINGS] = write_arrays(folder / RECORDINGS, {}, arrays).digest
        whole = replace(state, files=files)
        whole.write(folder)
        flush_folder(folder.parent)
    except BaseException:
        _remove(folder)
        raise
    return Checkpoint(folder, whole)


def complete_checkpoints(run: Path) -> list[Path]:
    """The folders of a run's complete checkpoints, the newest last."""
    return sorted(file.parent for file in (run / CHECKPOINTS).glob(f"[0-9]*/{NAME}"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """A complete checkpoint; raises `BrokenFileError` naming the file that cannot be trusted.

    Rows, weights and trace are checked when they are read.
    """
    state = read_state(folder)
    manifest = f"{ROWS}/{MANIFEST}"
    for name in (manifest, DENSE):
        if name not in state.files:
            raise BrokenFileError(f"{folder / NAME} names no {name}")
    check_file(folder / manifest, state.files[manifest])
    return Checkpoint(folder, state)


def newest(run: Path, on_warning: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """The newest checkpoint that can be trusted; ``on_warning`` is told of damaged newer ones.

    Raises `BrokenFileError` when there is none.
    """
    damaged = []
    for folder in reversed(complete_checkpoints(run)):
        try:
            found = read_whole(folder)
        except BrokenFileError as error:
            damaged.append(str(error))
            continue
        for reason in damaged:
            on_warning(f"{reason}; the checkpoint at {found.state.samples:,} samples is used")
        return found
    why = "; ".join(damaged) or f"there is no complete folder in {run / CHECKPOINTS}"
    raise BrokenFileError(f"{run} holds no checkpoint that can be used: {why}")


def read_whole(folder: Path) -> Checkpoint:
    """As `read_checkpoint`, with every file read once and held against its digest."""
    found = read_checkpoint(folder)
    for name, digest in found.state.files.items():
        check_file(folder / name, digest)
    for part in read_manifest(found.rows).parts:
        for name, digest in zip(part.files, part.digests, strict=True):
            check_file(found.rows / name, digest)
    return found


LOWER_IS_BETTER = ("log_loss", "mse")


def best(run: Path, by: str | None) -> Path | None:
    """The folder of the complete checkpoint with the best score, the newest of equal ones; None
    where none was judged so (a resume may ask for another score), or nothing is asked for."""
    sign = -1.0 if by in LOWER_IS_BETTER else 1.0
    judged: list[tuple[float, Path]] = []
    for folder in complete_checkpoints(run) if by else []:
        with suppress(BrokenFileError):  # whoever reads it says so
            state = read_state(folder)
            if state.score is not None and state.config["checkpoint"].get("keep_best") == by:
                judged.append((sign * state.score, folder))
    return max(judged)[1] if judged else None


def find_checkpoint(
    path: Path, on_warning: Callable[[str], None] = lambda text: None
) -> Checkpoint:
    """The checkpoint of this folder, or of this run's folder: the best where the run was
    to keep it, else the newest that can be trusted.

    Raises ValueError naming the path and what it would have to hold; ``on_warning`` is told of
    damaged newer checkpoints.
    """
    if not path.is_dir():
        there = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {there}; give the folder of a run, or of one of its checkpoints")
    if (path / NAME).exists():
        return read_whole(path)
    if path.parent.name == CHECKPOINTS:
        raise BrokenFileError(f"{path} was never finished: it has no {NAME}; give another one")
    if not (path / CHECKPOINTS).is_dir() and (path / "config.json").exists():
        raise ValueError(
            f"the run in {path} wrote no checkpoint, so its model is gone; train with"
            " --checkpoint-every end, or with steps or a time, to keep one"
        )
    if not (path / CHECKPOINTS).is_dir():
        raise ValueError(
            f"{path} holds no {CHECKPOINTS}/ and no {NAME}: it is neither the folder of a run that"
            " wrote checkpoints nor a checkpoint"
        )
    last = newest(path, on_warning)
    folder = best(path, last.state.config["checkpoint"].get("keep_best"))
    if folder in (None, last.folder):
        return last
    try:
        return read_whole(folder)
    except BrokenFileError as error:
        on_warning(f"{error}; the newest checkpoint is used in place of this, the best")
        return last


def keep_newest(run: Path, last: Path, count: int, best_by: str | None = None) -> None:
    """Remove all complete checkpoints but the newest ``count`` up to ``last``, which was written
    just now, and the best; what was left half written; and what lies behind ``last``: a run that
    went on from before it could not trust it."""
    for folder in complete_checkpoints(run):
        if folder.name > last.name:
            _remove(folder)
    keep = {*complete_checkpoints(run)[-count:], best(run, best_by)}
    for folder in (run / CHECKPOINTS).glob("[0-9]*"):
        if folder not in keep:
            _remove(folder)


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # moved to another disk by somebody, whose copy it is now
        folder.unlink()
        return
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)  # first: half of a folder must not count
    shutil.rmtree(folder, ignore_errors=True)
