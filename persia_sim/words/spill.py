"""Events of a long run on disk: a table that grows there and is read as if it lay in memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from persia_sim.words.events import Event


class EventFile:
    """Rows of events in a file without a name: nobody else sees it, and nothing is left behind."""

    def __init__(self, folder: Path | None = None) -> None:
        """In ``folder``; else in TMPDIR or /var/tmp, which, unlike /tmp, is a disk everywhere."""
        self._folder = folder or _folder_on_disk()
        # Open for as long as the recorder lives.
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
        self._rows = 0

    def append(self, block: np.ndarray) -> None:
        """More rows, int [n, 5]. Raises OSError with a remedy when they cannot be written."""
        try:
            self._file.write(np.ascontiguousarray(block, np.int64).data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"the order of events of this long run does not fit into {self._folder}"
                f" ({error.strerror}); set TMPDIR to a larger disk, or leave the order out with"
                " --no-trace-order",
            ) from error
        self._rows += len(block)

    def table(self) -> np.ndarray:
        """int64 [n, 5]: all rows so far, mapped; later rows do not change it."""
        shape = self._rows, len(Event._fields)
        return np.asarray(np.memmap(self._file, np.int64, "r", shape=shape)).view(np.ndarray)


def _folder_on_disk() -> Path:
    if named := os.environ.get("TMPDIR"):
        return Path(named)
    usual = Path("/var/tmp")
    return usual if os.access(usual, os.W_OK) else Path(tempfile.gettempdir())
