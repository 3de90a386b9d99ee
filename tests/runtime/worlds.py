"""Small worlds for tests: a source in memory, a config, and a run with everything in hand."""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import os
import tempfile
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import torch
from torch import nn

from persia_sim.base.command_line import AsGroup, option_values, options_of
from persia_sim.base.trace import Event, Trace
from runtime.config import ModelConfig, TrainConfig
from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import hash_integers, tag
from runtime.data.source import Part, Provenance
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.store import EmbeddingStore
from runtime.embedding.worker import EmbeddingWorker
from runtime.executors.given_order import OrderedRun
from runtime.executors.open import assemble_for, merged_trace
from runtime.executors.threads import ConcurrentRun
from runtime.process import flushing_denormals
from runtime.rank.components import Components, fresh_tables
from runtime.rank.learner import Learner
from runtime.rank.progress import Meter, SpanRecorder
from runtime.run.session import Outcome
from runtime.run.training import open_executor


class ArraySource:
    """Random clicks: two single-valued fields, one multi-valued, two dense features, two tasks."""

    def __init__(self, samples: int, seed: int = 0, ids_per_field: int = 40) -> None:
        draw = np.random.default_rng(seed)
        lengths = np.column_stack(
            [np.ones(samples, int), np.ones(samples, int), draw.integers(0, 4, samples)]
        )
        offsets = np.concatenate([[0], np.cumsum(lengths.ravel())])
        field = np.repeat(np.tile(np.arange(3), samples), lengths.ravel())
        hashes = hash_integers(draw.integers(0, ids_per_field, len(field)))
        ids = np.select([field == k for k in range(3)], [tag(k, hashes) for k in range(3)])
        self._all = Batch(
            ids,
            offsets,
            draw.normal(size=(samples, 2)).astype(np.float32),
            (draw.random((samples, 2)) < 0.4).astype(np.float32),
        )

    @property
    def layout(self) -> Layout:
        fields = (Field(name="user"), Field(name="item"), Field(name="tags", pooling="mean"))
        return Layout(fields=fields, dense=("age", "price"), tasks=("click", "buy"))

    def chunks(self, part: Part) -> Iterator[Batch]:
        for start in range(0, self._all.size, 37):
            yield self._all.rows(start, min(start + 37, self._all.size))

    def provenance(self) -> Provenance:
        return Provenance(name="array", sha256="0", split="all rows in every part")


class TwoTables(ArraySource):
    """The second field has a table of its own."""

    @property
    def layout(self) -> Layout:
        first, second, third = super().layout.fields
        return replace(super().layout, fields=(first, replace(second, table="items"), third))


TUNED = ModelConfig(hidden=(8,), optimizer="adamw", lr=0.02)
"""A network whose optimiser has moments and a decay."""


def config(**changes: Any) -> TrainConfig:
    """A small run: two layers, Adagrad, 24 samples a step; ``changes`` by name, of any group."""
    optimizer = changes.pop("optimizer", RowOptimizer(kind="adagrad", lr=0.1))
    dtype = changes.pop("dtype", "float32")
    model = changes.pop("model", ModelConfig(hidden=(8,)))
    rows = TableConfig(dim=4, optimizer=optimizer, dtype=dtype, initial_scale=0.1)
    if changes.get("executor", "constant_lag") == "constant_lag":
        # One by one: the bytes of the other executors, which never fuse. Law 14 compares the two.
        changes.setdefault("fuse_ranks", False)
    base: dict[str, Any] = {"batch": 24, "rows": rows, "model": model, "test_rows": 64}
    if dtype == "float64":
        base["precision"] = "float64"
    return changed(TrainConfig(), **{**base, **changes})


def changed(settings: TrainConfig, **changes: Any) -> TrainConfig:
    """The config with other values, each in the group that has a field of its name."""
    if changes.get("executor", "constant_lag") != "constant_lag":
        changes.setdefault("fuse_ranks", True)  # not a choice there
    groups: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        found = [
            g
            for g in ("sync", "engine", "evaluation", "checkpoint")
            if hasattr(getattr(settings, g), name)
        ]
        groups.setdefault(found[0] if found else "", {})[name] = value
    top = groups.pop("", {})
    return replace(
        settings, **top, **{g: replace(getattr(settings, g), **own) for g, own in groups.items()}
    )


OPTIONS = {option.name: option.kind for option in options_of(TrainConfig)}
"""Every option of a run, and its annotation."""


def _another(value: Any, kind: Any) -> Any:
    """A value of the annotated kind that is not this one; no check of a config is asked."""
    if get_origin(kind) is Annotated:
        return _another(value, get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [k for k in get_args(kind) if k is not types.NoneType][:1]
        return _another(None, kind)
    if isinstance(kind, AsGroup):
        return {"users": {"dim": 3}}
    if get_origin(kind) is tuple:
        return (*(value or ()), "all" if str in get_args(kind) else 3)  # as `fresh` takes it
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    choices = list(kind) if isinstance(kind, type) and issubclass(kind, Enum) else choices
    if choices:
        return next(choice for choice in choices if choice != value)
    if kind is bool:
        return not value
    return kind(f"{value}-other") if kind in (str, Path) else kind((value or 0) + 1)


def with_another(settings: TrainConfig, option: str) -> TrainConfig:
    """The config with one option changed, whatever other options that would ask for."""
    value = _another(dict(option_values(settings))[option], OPTIONS[option])
    found = copy.deepcopy(settings)
    groups: list[Any] = [found, found.sync, found.engine, found.evaluation, found.checkpoint]
    *path, name = option.replace("-", "_").split(".")
    if path:
        groups = [functools.reduce(getattr, path, found)]
    (group,) = [group for group in groups if hasattr(group, name)]
    object.__setattr__(group, name, value)
    return found


def on_engine(name: str, servers: int = 1) -> dict[str, Any]:
    """Options of an engine: constant_lag (one thread), threads, processes (servers of their own),
    network (the same, over TCP), or workers (embedding workers, too, are processes of their
    own)."""
    if name == "constant_lag":
        return {"executor": "constant_lag", "shards": servers}
    if name == "threads":
        return {"executor": "concurrent", "shards": servers}
    found: dict[str, Any] = {"executor": "concurrent", "shards": 1, "servers": servers}
    if name == "workers":
        found["workers"] = 1
    if name == "network":
        found["servers_at"], found["servers_secret"] = host_of_servers()
    return found


ENGINES = ["threads"]
"""Those that run many ranks at once."""
if find_spec("runtime.hosts"):  # else the annexes are left out (tests/test_annexes.py)
    ENGINES += ["processes", "network", "workers"]


def predictions_in(run: Path) -> bytes:
    """What the model of a run's folder predicts of its test part."""
    with np.load(run / "predictions.npz") as arrays:
        return arrays["predictions"].tobytes()


@functools.cache
def host_of_servers() -> tuple[tuple[str, ...], Path]:
    """Where servers start that are reached over TCP, for all tests of this process; its secret."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "secret"
    file.touch(0o600)
    file.write_text("a secret for tests alone")
    from runtime.hosts.launch.hosts import ProcessHost, read_secret  # late: an annexe

    host = ProcessHost("127.0.0.1:0", read_secret(file))
    threading.Thread(target=host.serve, daemon=True, name="host of servers").start()
    return (host.name,), file


@dataclass
class World:
    """A finished run."""

    worker: EmbeddingWorker
    learner: Learner
    trace: Trace
    meter: Meter
    model: nn.Module

    @property
    def store(self) -> EmbeddingStore:
        """The rows of the run."""
        return self.worker.store

    def state(self) -> dict[str, np.ndarray]:
        return state_of(self)


def state_of(run: World | Outcome) -> dict[str, np.ndarray]:
    """Rows, optimiser state and dense weights."""
    found = {
        f"{name}.{part}": array
        for name, arrays in run.store.export().items()
        for part, array in zip(("ids", "values", "state"), arrays, strict=True)
    }
    for name, tensor in run.model.state_dict().items():
        found[name] = tensor.cpu().numpy()
    return found


def run(
    settings: TrainConfig,
    source: ArraySource,
    *,
    order: Iterable[Event] | None = None,
    spans: SpanRecorder | None = None,
    **concurrent: Any,
) -> World:
    """Execute one run, as `train` does; ``order`` replaces the constant lag."""
    with flushing_denormals():
        return _run(settings, source, order, spans, concurrent)


def _run(
    settings: TrainConfig,
    source: ArraySource,
    order: Iterable[Event] | None,
    spans: SpanRecorder | None,
    concurrent: dict[str, Any],
) -> World:
    torch.set_num_threads(settings.engine.threads)
    if len(os.listdir("/proc/self/fd")) > 256:
        gc.collect()  # connections of earlier worlds, which lie in circles: hundreds of open files
    components = assemble_for(settings, source)
    if spans is not None:
        components = replace(components, spans=spans)
    components.meter.start()
    if settings.engine.executor == "concurrent":
        threads = ConcurrentRun(components, **concurrent)
        threads.run()
        rule = threads.rule
    else:
        alone = open_executor(components) if order is None else OrderedRun(components)
        alone.run(*() if order is None else [order])
        rule = alone.rule
    rule.drain()
    return World(
        components.worker,
        components.learner,
        trace_of(components),
        components.meter,
        rule.snapshot(),
    )


def trace_of(components: Components) -> Trace:
    """The order of a run, also where servers have written it down."""
    sync = components.config.sync
    fresh = list(fresh_tables(sync.fresh, components.store.layout))
    meta = {"mode": str(sync.mode), "ranks": sync.ranks, "tau": sync.window, "fresh": fresh}
    return merged_trace(components.recorder.finish(**meta), components.store.recorded())


def assert_same_bytes(one: World | Outcome, other: World | Outcome) -> None:
    """Equal rows, optimiser state and dense weights, to the last bit."""
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    assert [n for n, array in first.items() if array.tobytes() != second[n].tobytes()] == []


def difference(one: World, other: World) -> tuple[float, float]:
    """Largest elementwise difference, and the largest difference relative in norm."""
    first, second = one.state(), other.state()
    largest = relative = 0.0
    for name, array in first.items():
        if name.endswith(".ids"):
            assert np.array_equal(array, second[name])
            continue
        gap = np.abs(array - second[name])
        largest = max(largest, float(gap.max(initial=0.0)))
        norm = float(np.linalg.norm(array))
        relative = max(relative, float(np.linalg.norm(gap)) / max(norm, 1e-30))
    return largest, relative
