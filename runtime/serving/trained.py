"""A trained model out of a run's checkpoint: its rows and its weights, ready to be judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from persia_sim.words.schema import parse
from runtime.checkpoint.rows import load
from runtime.checkpoint.state import NAME as STATE
from runtime.checkpoint.whole import Checkpoint, run_of
from runtime.config import EngineConfig, TrainConfig
from runtime.data.batch import Layout
from runtime.dense.state import drain_into, load_model
from runtime.embedding.config import TableConfig
from runtime.embedding.features import Admission, Capacity
from runtime.embedding.native.store import NativeStore
from runtime.embedding.worker import EmbeddingWorker
from runtime.models.imported import refuse_code_in
from runtime.rank.learner import Learner


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
