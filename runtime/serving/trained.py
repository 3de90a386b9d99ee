"""A trained model out of a run's checkpoint: its rows and its weights, and judged again, on the
test part of its own data or of other data of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia_sim.words.schema import parse
from runtime.checkpoint.rows import load
from runtime.checkpoint.state import NAME as STATE
from runtime.checkpoint.whole import Checkpoint, find_checkpoint, run_of
from runtime.config import EngineConfig, TrainConfig
from runtime.data.batch import Layout
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.open import open_source
from runtime.data.source import Source, heads_taken_over, refuse_other_columns
from runtime.data.split import CODES, Split
from runtime.dense.state import drain_into, load_model
from runtime.embedding.config import Admission, Capacity, TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.worker import EmbeddingWorker
from runtime.models.imported import refuse_code_in
from runtime.rank.learner import Learner
from runtime.run.evaluate import HeldOut, evaluate
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
    refuse_code_in(run_of(checkpoint.folder), config.model.name, on_warning)
    config = replace(config, engine=on_device(config.engine, device or _device_here(config)))
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
        [_read_only(table) for table in tables.values()],
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


def _device_here(config: TrainConfig) -> str:
    import torch

    return config.engine.device if torch.cuda.is_available() else "cpu"


def _read_only(table: TableConfig) -> TableConfig:
    """A table that takes every saved row and lets none go."""
    return replace(table, capacity=Capacity(), admission=Admission())


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
    torch.set_num_threads(config.engine.threads)
    own = config.data
    skips = skip_bad_rows or own.skip_bad_rows
    if data is None:
        directory = data_dir if data_dir is not None else own.dir
        source = open_source(
            own.name, directory, own.rows, skips, validation_fraction=own.validation_fraction
        )
        test_rows = config.evaluation.test_rows if test_rows is None else test_rows
    else:
        source = open_source(data, data_dir, skip_bad_rows=skips)
    refuse_other_layout(trained.layout, source.layout, data or own.name)
    before = trained.checkpoint.state.facts.get("data_schema", {})
    refuse_other_columns(before, source.provenance())
    if changed := heads_taken_over(before, source.provenance()):
        on_warning(f"judged by another label than it was trained on: {', '.join(changed)}")
    leaked = rows_trained_on(trained, source, test_rows)
    held_out = HeldOut(source, test_rows)
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


def rows_trained_on(trained: Trained, source: Source, test_rows: int | None) -> int:
    """Rows of the source's test part on which the model was trained, because another split of the
    same files had them in its training part; at most so many where the training was shuffled or
    left bad rows out."""
    state, config = trained.checkpoint.state, trained.config
    known = state.facts.get("data_schema", {})
    if not isinstance(source, FileSource) or "split" not in known:
        return 0
    then = {"file": known["file"], "split": Split(**known["split"])}
    if then == {name: getattr(source.schema, name) for name in then}:
        return 0
    before = FileSource(
        schema=replace(source.schema, md5=(), **then),
        folder=source.folder,
        rows=config.data.rows,
        skip_bad_rows=source.skip_bad_rows,
    )
    try:
        if before.provenance().sha256 != state.facts["data_sha256"]:
            return 0
    except DataError:  # the files that were trained on are not there
        return 0
    was = {path: codes == CODES["train"] for path, codes in before.placed().items()}
    read = sum(map(len, was.values())) if config.data.rows is None else config.data.rows
    seen = _first(was, read if config.data.shuffle else min(read, state.samples))
    judged = _first({p: c == CODES["test"] for p, c in source.placed().items()}, test_rows)
    return sum(int((seen[path] & judged[path]).sum()) for path in seen.keys() & judged.keys())


def _first(wanted: dict[Path, np.ndarray], count: int | None) -> dict[Path, np.ndarray]:
    """Of the wanted rows of all files, in their order, the first so many."""
    found, left = {}, sum(map(len, wanted.values())) if count is None else count
    for path, rows in wanted.items():
        found[path] = rows & (np.cumsum(rows) <= left)
        left -= int(found[path].sum())
    return found


def _leak(rows: int, of: int) -> list[str]:
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
