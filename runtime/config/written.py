"""The options of a run as a file has them, perhaps written before some of them were taken out.

An option that is none any more is passed over where it said what every run does now. Any other
value of it would make another run, and is refused by its name.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from persia_sim.base.files import read_document
from persia_sim.base.schema import Checked, Within, parse
from runtime.config.train import TrainConfig
from runtime.embedding.config import TableConfig

_ROWS = "rows."
_NO_SCHEDULE = {"warmup_steps": 0, "decay": "none", "decay_steps": 10_000, "floor": 0.0}
TAKEN_OUT: dict[str, tuple[Any, ...]] = {
    "rows.optimizer.schedule": (_NO_SCHEDULE,),
    "model.schedule.floor": (0.0,),
    "evaluation.top": (10,),
    "sync.average_every_s": (0.5,),
    "engine.dense_sum": ("auto",),
    "engine.loss_scale": (65536.0,),
    "engine.server_threads": (None,),
    "engine.tensorboard": (False,),
    "data.keep": (True,),
    "rows.capacity.memory_bytes": (None,),
    "rows.admission.kind": ("all", "probability"),
    "rows.admission.sightings": (2,),
    "rows.admission.counters": (1 << 20,),
    "rows.optimizer.eps": (None,),
    "rows.optimizer.beta1": (0.9,),
    "rows.optimizer.beta2": (0.999,),
    "rows.optimizer.ftrl_beta": (1.0,),
    "rows.optimizer.bias_correction": ("global",),
    "rows.optimizer.weight_decay": (0.0,),
    "rows.optimizer.momentum": (0.0,),
}
"""By path: the values with which a run was what it is without the option."""


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
    return parse(TrainConfig, _as_today(document, ""), str(path))


def table_of(document: Any, where: str) -> TableConfig:
    """The table that an export says. Raises ValueError naming ``where``, the option, its value and
    what it may be."""
    return parse(TableConfig, _as_today(document, _ROWS), where)


def _as_today(document: Any, group: str) -> Any:
    """A copy without what was taken out of this group."""
    result = copy.deepcopy(document)
    for path, values in TAKEN_OUT.items():
        if path.startswith(group):
            _take_out(result, path.removeprefix(group), values)
        tables = result.get("tables") if isinstance(result, dict) and not group else None
        if path.startswith(_ROWS) and isinstance(tables, dict):  # each has the options of rows
            for table in tables.values():
                _take_out(table, path.removeprefix(_ROWS), values)
    return result


def _take_out(document: Any, path: str, values: tuple[Any, ...]) -> None:
    *groups, name = path.split(".")
    for group in groups:
        document = document.get(group) if isinstance(document, dict) else None
    if isinstance(document, dict) and document.get(name) in values:
        document.pop(name, None)
