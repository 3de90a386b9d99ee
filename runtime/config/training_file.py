"""A file of training: the options of a run, and perhaps what was simulated of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from persia_sim.base.files import read_document
from persia_sim.base.schema import Checked, Within, parse
from runtime.config.train import TrainConfig

_Rate = Annotated[float, Within(0, inf, without="least")]
PREDICTED = "predicted"
"""The table of a file of training that says what was simulated of its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted(Checked):
    """What was simulated of a run, as `which-mode` leaves it beside the options: told at the end of
    the run beside what was measured, and read by nothing else."""

    cluster: str
    """Where it would run."""
    ranks: Annotated[int, Within(1, 2**31)]
    samples_per_s: _Rate
    samples_per_s_low: _Rate
    """The least and the most that it may be, by what the simulator does not know."""
    samples_per_s_high: _Rate
    updates_missed: Annotated[float, Within(0, 2**31)]
    """Updates that a mean lookup misses."""


def predicted_in(path: Path) -> Predicted | None:
    """What a file of training says of its run, None where it says nothing. Raises ValueError."""
    document = read_document(path)
    said = document.get(PREDICTED) if isinstance(document, dict) else None
    return None if said is None else parse(Predicted, said, f"{path}: {PREDICTED}")


def read_config(path: Path) -> TrainConfig:
    """The config in a .json or .toml file; groups and options that it leaves out have defaults, and
    what it predicts is no option.

    Raises ValueError naming the file, the option, its value and what it may be.
    """
    document = read_document(path)
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key != PREDICTED}
    return parse(TrainConfig, document, str(path))
