"""A run's model judged again: on the test part of its own data, or of other data of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from runtime.data.batch import Layout
from runtime.data.open import open_source
from runtime.run.evaluate import HeldOut, evaluate
from runtime.run.folder import plain
from runtime.serving.trained import find_checkpoint, open_trained

_MOST_TOLD = 3


def evaluate_run(
    path: Path,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    test_rows: int | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The scores of each task, with what they are of; plain JSON values.

    Raises ValueError for a path without a checkpoint, and for data of another kind.
    """
    trained = open_trained(find_checkpoint(path, on_warning))
    config = trained.config
    torch.set_num_threads(config.engine.threads)
    own = config.data
    if data is None:
        directory = data_dir if data_dir is not None else own.dir
        source = open_source(
            own.name, directory, own.rows, own.skip_bad_rows,
            validation_fraction=own.validation_fraction,
        )  # fmt: skip
        test_rows = config.evaluation.test_rows if test_rows is None else test_rows
    else:
        source = open_source(data, data_dir, skip_bad_rows=own.skip_bad_rows)
    refuse_other_layout(trained.layout, source.layout, data or own.name)
    held_out = HeldOut(source, test_rows)
    found = evaluate(trained.learner, trained.learner.model, trained.worker, held_out)
    if not len(found.labels):
        raise ValueError(f"data set {data or own.name} gave no test sample; is its split right?")
    return {
        "checkpoint": str(trained.checkpoint.folder),
        "samples": trained.checkpoint.state.samples,
        "updates": trained.checkpoint.state.updates,
        "data": plain(source.provenance()),
        "data_says": str(source.provenance()),
        "rows_evaluated": len(found.labels),
        "tasks": {name: plain(score.figures()) for name, score in found.tasks.items()},
        "warnings": found.warnings,
    }


def refuse_other_layout(trained: Layout, given: Layout, name: str) -> None:
    """Raise ValueError, naming what differs, where the data are not of the model's kind."""
    differences = [
        f"{field.name.replace('dense', 'dense features')}: {_difference(was, now)}"
        for field in fields(Layout)
        if field.name != "group"  # by which a model is judged, not of what kind it is
        if (was := getattr(trained, field.name)) != (now := getattr(given, field.name))
    ]
    if differences:
        raise ValueError(
            f"data set {name} has another schema than the model was trained on;"
            f" {'; '.join(differences)}"
        )


def _difference(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    lacking = [part for part in was if part not in now]
    new = [part for part in now if part not in was]
    if not lacking and not new:
        return "the same in another order"
    found = [("lacks", lacking), ("has beside them", new)]
    return ", ".join(f"{word} {_told(parts)}" for word, parts in found if parts)


def _told(parts: list[Any]) -> str:
    words = [p if isinstance(p, str) else f"{p.name} ({p.pooling}, {p.table})" for p in parts]
    rest = f" and {len(words) - _MOST_TOLD} more" if len(words) > _MOST_TOLD else ""
    return ", ".join(words[:_MOST_TOLD]) + rest
