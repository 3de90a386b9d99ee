"""The options of a run as a file has them, perhaps written before some of them were taken out.

An option that is none any more is passed over where it said what every run does now. Any other
value of it would make another run, and is refused by its name.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from persia_sim.base.files import read_document
from persia_sim.base.schema import parse
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


def read_config(path: Path) -> TrainConfig:
    """The config in a .json or .toml file; groups and options that it leaves out have defaults.

    Raises ValueError naming the file, the option, its value and what it may be.
    """
    return parse(TrainConfig, _as_today(read_document(path), ""), str(path))


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
