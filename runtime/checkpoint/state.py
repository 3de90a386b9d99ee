"""What a checkpoint of a run says in words and numbers: where its stream stands, its counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from runtime.checkpoint.array_file import BrokenFileError
from runtime.checkpoint.sealed import read_sealed, write_sealed

FORMAT = "persia-testbed-run-1"
NAME = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two legs: all pushes are applied and no batch is in flight.

    All plain JSON. What holds arrays stands beside it in files, whose digests are in ``files``.
    """

    samples: int
    """The cursor: samples of the stream, all passes in a row, that are trained. It fits any number
    of ranks and any way to cut the stream into batches."""
    updates: int
    """Dense updates so far."""
    config: dict[str, Any]
    """The `TrainConfig` that it was trained with."""
    tables: dict[str, dict[str, Any]]
    """Per table the `TableConfig` that it was trained with, whoever set it."""
    layout: dict[str, Any] | None = None
    """The `Layout` that it was trained on; None: that of the data that the config names."""
    facts: dict[str, Any]
    """What must be the same for a replay (`trace_meta`): seed, data, versions and so on."""
    servers: list[dict[str, Any]]
    """Per embedding server: version, updates, rows_replaced, row_staleness."""
    clock: dict[str, int]
    """The servers' clock: the update and the step from which it counts."""
    learner: dict[str, Any]
    """The loss scale, and what was noticed of the model."""
    meter: dict[str, Any]
    """Losses, instants, and what was skipped or lost."""
    staleness: dict[str, Any] | None = None
    """Staleness so far, of a run that keeps no trace."""
    told: dict[str, Any]
    """What the summary says of the time before: seconds, warnings, pauses."""
    files: dict[str, str]
    """Digests of the files beside it."""
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """Make the folder's checkpoint complete."""
        write_sealed(folder / NAME, asdict(self))


def read_state(folder: Path) -> RunState:
    """The folder's state; raises `BrokenFileError` with the file's name and what is wrong."""
    file = folder / NAME
    found, whole = read_sealed(file, FORMAT, "state of a run")
    if not whole:
        raise BrokenFileError(f"{file} is damaged: its digest does not match its content")
    known = {f.name for f in fields(RunState)}
    if set(found) != known:
        odd = ", ".join(sorted(set(found) ^ known))
        raise BrokenFileError(f"{file} is not of this version: it lacks, or alone has, {odd}")
    return RunState(**found)
