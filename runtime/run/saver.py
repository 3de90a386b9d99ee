"""Writes checkpoints behind training: taken between two legs, written while the next one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from persia_sim.words.trace import Trace
from runtime.checkpoint.rows import Saved, Taken
from runtime.checkpoint.state import RunState
from runtime.checkpoint.whole import Checkpoint, keep_newest, write_checkpoint
from runtime.config import CheckpointConfig
from runtime.dense.state import DenseState

Take = Callable[[Path | None, bool], "Cut"]
"""Given the folder of rows that the new ones extend (None: all rows), and whether changes are
tracked from now on."""


@dataclass(slots=True)
class Cut:
    """A whole run at one instant, not yet written."""

    state: RunState
    dense: DenseState
    trace: Callable[[], Trace] | None
    rows: Taken
    recordings: Sequence[np.ndarray] = ()
    """Of server processes."""
    saved: Saved | None = None
    """What was written of the rows, after `write`."""

    def write(self, run: Path) -> Checkpoint:
        """Write into the run's folder. Raises OSError or MemoryError; then nothing is lost."""

        def write_rows(folder: Path) -> None:
            self.saved = self.rows.write(folder)

        try:
            trace = self.trace() if self.trace else None
            recordings = self.recordings
            return write_checkpoint(run, self.state, self.dense, trace, write_rows, recordings)
        finally:
            self.rows.drop()  # if they were not come to


class Saver:
    """One checkpoint at a time; the newest ones stay."""

    def __init__(
        self, run: Path, config: CheckpointConfig, on_warning: Callable[[str], None]
    ) -> None:
        self._run, self._config, self._on_warning = run, config, on_warning
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._base: Path | None = None
        self._whole_bytes = self._changed_bytes = 0
        self.last: Checkpoint | None = None
        """The newest one that is whole on the disk."""
        self.failed = 0

    def save(self, samples: int, take: Take) -> None:
        """Write the run at this cut; returns when it is taken, not when it is written.

        The checkpoint before is waited for. One that the disk refuses is told and counted; the one
        before it stays, and training goes on.
        """
        self.wait()
        if self.last is not None and self.last.state.samples == samples:
            return  # it is there already
        base = self._base if self._changed_bytes < self._whole_bytes else None
        cut = take(base, self._config.checkpoint_incremental)
        work = threading.Thread(target=self._write, args=(cut,), name="checkpoint")
        self._thread = work
        work.start()

    def wait(self) -> bool:
        """Return when nothing is being written; whether the last one asked for is on the disk."""
        if self._thread is None:
            return True
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            return True
        if not isinstance(error, OSError | MemoryError):
            raise error
        self.failed += 1
        last = self.last.state.samples if self.last else None
        stays = "there is none"
        if last is not None:
            stays = f"that at {last:,} samples stays, and older ones do until a newer one is whole"
        self._on_warning(f"a checkpoint was not written: {error}; {stays}")
        return False

    def _write(self, cut: Cut) -> None:
        try:
            self.last = cut.write(self._run)
            self._note(cut)
            keep_newest(self._run, self._config.keep)
        except BaseException as error:  # told by the thread that waits
            self._error, self._base = error, None

    def _note(self, cut: Cut) -> None:
        """All rows are written anew when the changes since have grown to as much."""
        file_bytes = cut.saved.file_bytes if cut.saved else 0
        if cut.rows.extends is None:
            self._whole_bytes, self._changed_bytes = file_bytes, 0
        else:
            self._changed_bytes += file_bytes
        tracks = self._config.checkpoint_incremental and self.last is not None
        self._base = self.last.rows if tracks and self.last is not None else None
