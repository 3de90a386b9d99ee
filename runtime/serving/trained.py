"""A trained model out of a run's checkpoint: its rows and its weights, and judged again, on the
test part of its own data or of other data of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from persia_sim.words.schema import parse
from runtime.checkpoint.rows import load
from runtime.checkpoint.state import NAME as STATE
from runtime.checkpoint.whole import Checkpoint, find_checkpoint, run_of
from runtime.config import EngineConfig, TrainConfig
from runtime.data.batch import Layout
from runtime.data.open import open_source
from runtime.data.source import heads_taken_over, refuse_other_columns
from runtime.dense.state import drain_into, load_model
from runtime.embedding.config import Admission, Capacity, TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.worker import EmbeddingWorker
from runtime.models.imported import refuse_code_in
from runtime.rank.learner import Learner
from runtime.run.evaluate import HeldOut, evaluate, rows_trained_on, threads_of
from runtime.run.folder import plain


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that is not trained any further."""

    checkpoint: Checkpoint
    config: TrainConfig
    """As it was trained, but on the device that is here."""
    layout: Layout
    tables: dict[str, TableConfig]
    """As they were trained."""
    learner: Learner
    worker: EmbeddingWorker


def open_trained(
    checkpoint: Checkpoint,
    *,
    device: str | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Build the network and fill it and a store with what the checkpoint holds.

    ``device`` is where the network computes, else where it was trained if that is here;
    ``on_warning`` is told whose code is run. Raises ValueError for files that cannot be trusted or
    are of another model, and for code that lies beside them.
    """
    state, where = checkpoint.state, f"{checkpoint.folder / STATE}: config"
    config = parse(TrainConfig, state.config, where)
    known = state.facts.get("model_code")
    refuse_code_in(run_of(checkpoint.folder), config.model.name, on_warning, known)
    here = config.engine.device if torch.cuda.is_available() else "cpu"
    config = replace(config, engine=on_device(config.engine, device or here))
    tables = {
        name: parse(TableConfig, table, f"{checkpoint.folder / STATE}: tables.{name}")
        for name, table in state.tables.items()
    }
    layout = parse(Layout, state.layout, f"{checkpoint.folder / STATE}: layout")
    learner = Learner(config, layout, {name: table.dim for name, table in tables.items()})
    try:
        dense = checkpoint.dense()
        load_model(learner.model, dense)
        drain_into(learner.model, config, dense)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from None
    store = NativeStore(
        layout,
        # They take every saved row and let none go.
        [replace(table, capacity=Capacity(), admission=Admission()) for table in tables.values()],
        shards=max(len(state.servers), 1),
        seed=config.seed,
    )
    load(store, checkpoint.rows)
    worker = EmbeddingWorker(store)
    worker.go_on(state.learner["rows"])
    return Trained(checkpoint, config, layout, tables, learner, worker)


def on_device(engine: EngineConfig, device: str) -> EngineConfig:
    """A CPU computes in full float32 what a GPU rounded to tf32."""
    exact = device == "cpu" and engine.precision == "tf32"
    return replace(engine, device=device, precision="float32" if exact else engine.precision)


_MOST_TOLD = 3


def evaluate_run(
    path: Path,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    skip_bad_rows: bool = False,
    test_rows: int | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The scores of each task, with what they are of; plain JSON values.

    Raises ValueError for a path without a checkpoint, and for data of another kind.
    """
    trained = open_trained(find_checkpoint(path, on_warning), on_warning=on_warning)
    config = trained.config
    own = config.data
    skips = skip_bad_rows or own.skip_bad_rows
    if data is None:
        place, share = data_dir or own.dir, own.validation_fraction
        source = open_source(own.name, place, own.rows, skips, validation_fraction=share)
        test_rows = config.evaluation.test_rows if test_rows is None else test_rows
    else:
        source = open_source(data, data_dir, skip_bad_rows=skips)
    refuse_other_layout(trained.layout, source.layout, data or own.name)
    before = trained.checkpoint.state.facts.get("data_schema", {})
    refuse_other_columns(before, source.provenance())
    if changed := heads_taken_over(before, source.provenance()):
        on_warning(f"judged by another label than it was trained on: {', '.join(changed)}")
    leaked = rows_trained_on(trained.checkpoint.state, source, "test", test_rows)
    held_out = HeldOut(source, test_rows)
    with threads_of(config.engine):
        found = evaluate(trained.learner, trained.learner.model, trained.worker, held_out)
    return {
        "checkpoint": str(trained.checkpoint.folder),
        "samples": trained.checkpoint.state.samples,
        "updates": trained.checkpoint.state.updates,
        "data": plain(source.provenance()),
        "data_says": str(source.provenance()),
        "rows_evaluated": len(found.labels),
        "rows_trained_on": leaked,
        "tasks": {name: plain(score.figures()) for name, score in found.tasks.items()},
        "ids_with_row": found.ids_with_row,
        "warnings": [*_leak(leaked, len(found.labels)), *found.warnings],
    }


def _leak(rows: int | None, of: int) -> list[str]:
    if not rows:
        return []
    return [
        f"{rows:,} of the {of:,} rows were trained on, as the split was another then: these scores"
        " are better than the model; put the split back"
    ]


def refuse_other_layout(trained: Layout, given: Layout, name: str) -> None:
    """Raise ValueError, naming what differs, where the data are not of the model's kind."""
    differences = [
        f"{field.name.replace('dense', 'dense features')}: {_difference(was, now)}"
        for field in fields(Layout)
        # By which samples are judged, not of what kind the model is.
        if field.name not in ("group", "weighted")
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
