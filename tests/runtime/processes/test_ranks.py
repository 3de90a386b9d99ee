"""The laws with ranks, and servers, as processes: against the same runs with ranks as threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from persia_sim.words.staleness import summarize
from persia_sim.words.trace import Kind, Trace
from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.dense.group import RankGroup
from runtime.engines.parts import assemble_for
from runtime.engines.processes.ranks import ProcessRank
from runtime.engines.threads import ConcurrentRun
from runtime.order.merge import whole_trace
from tests.runtime.spawned import Processes
from tests.runtime.worlds import ArraySource, World, config, run

RANKS, SERVERS = 3, 2
SOURCE = ArraySource(24 * 25 + 7)
"""26 steps; of the last one's 7 samples every rank has a few."""
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, ring": {"dense_sum": "ring"},
    "lookahead": {"mode": Mode.LOOKAHEAD},
    "hybrid, tau 0": {"mode": Mode.HYBRID, "tau": 0},
    "merged": {"mode": Mode.HYBRID, "tau": 3},
    "on arrival": {"mode": Mode.HYBRID, "tau": 3, "merge_pushes": False},
    "permits": {"mode": Mode.RAW_HYBRID, "tau": None, "permits": 2, "merge_pushes": False},
    "async": {"mode": Mode.ASYNC, "tau": 2},
    "averaging": {"mode": Mode.ASYNC_AVERAGING, "tau": 2, "average_every_s": 0.01},
}
EQUAL_TO_SYNC = ["sync", "lookahead", "hybrid, tau 0"]


def settings_of(name: str) -> TrainConfig:
    barrier = "async" not in str(SETTINGS[name].get("mode", "sync"))
    gather = {"dense_sum": "gather"} if barrier else {}
    chosen = {"ranks": RANKS, "servers": SERVERS, "executor": "concurrent"}
    return config(**(chosen | gather | SETTINGS[name]))


def train_all(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    for name in SETTINGS:
        settings = settings_of(name)
        group = RankGroup(rank, ranks, dist.PrefixStore(name, store), torch.device("cpu"))
        here = ProcessRank(group)
        parts = assemble_for(settings, SOURCE, rank=here)
        parts.meter.start()
        run = ConcurrentRun(parts)
        run.run()
        if here.leads:
            write_down(folder / name, World(
                parts.worker, parts.learner, trace_of(parts), parts.meter, run.snapshot()
            ))  # fmt: skip
        here.close()


def trace_of(parts) -> Trace:
    sync = parts.config.sync
    meta = {"mode": str(sync.mode), "ranks": sync.ranks, "tau": sync.window}
    return whole_trace(parts.recorder, parts.store.recorded(), meta)


def write_down(folder: Path, world: World) -> None:
    folder.mkdir()
    np.savez(folder / "state.npz", **world.state())
    world.trace.save(folder / "trace.npz")
    meter = world.meter
    told = {"losses": meter.losses, "samples": meter.samples, "updates": meter.updates}
    (folder / "told.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    Processes(RANKS, train_all, folder).join_well()
    return folder


def state_in(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "state.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def sync():
    return run(config(ranks=RANKS), SOURCE)


@pytest.mark.parametrize("name", EQUAL_TO_SYNC)
def test_sync_over_processes_is_sync_over_threads_in_bytes(name, found, sync):
    """Laws 1, 2 and 12; the loss of every step is that of all ranks."""
    state, expected = state_in(found / name), sync.state()
    assert state.keys() == expected.keys()
    for key, array in expected.items():
        assert state[key].tobytes() == array.tobytes(), key
    told = json.loads((found / name / "told.json").read_text())
    assert told["losses"] == sync.meter.losses


def test_a_ring_sums_in_another_order_and_no_more(found, sync):
    state = state_in(found / "sync, ring")
    for key, array in sync.state().items():
        if key.endswith(".ids"):
            assert np.array_equal(state[key], array)
        else:
            gap = np.linalg.norm(state[key] - array) / np.linalg.norm(array)
            assert gap < 1e-5, key


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_of_processes_replays_in_one_process(name, found):
    """Laws 6, 9 and 12: merged to one order, its events give the same bytes, each batch once."""
    order = Trace.load(found / name / "trace.npz")
    told = json.loads((found / name / "told.json").read_text())
    assert told["samples"] == 24 * 25 + 7
    assert told["updates"] == 26
    pushes = order.of_kind(Kind.PUSH)
    pairs = {tuple(row) for row in pushes[:, [2, 3, 4]].tolist()}
    assert len(pairs) == len(pushes), "a push was applied twice"
    if name == "sync, ring":
        return
    settings = settings_of(name)
    threads_only = {"permits": None, "average_every_s": 0.5}
    again = replace(
        settings,
        sync=replace(settings.sync, **threads_only),
        engine=replace(
            settings.engine,
            executor="replay",
            trace=found / name / "trace.npz",
            servers=0,
            shards=SERVERS,
            dense_sum="ring",
        ),
    )
    replayed = run(again, SOURCE, order=order)
    state = state_in(found / name)
    for key, array in replayed.state().items():
        assert state[key].tobytes() == array.tobytes(), key
    if name == "averaging":
        assert len(order.of_kind(Kind.AVERAGE_WRITE)) >= RANKS


@pytest.mark.parametrize("name", ["merged", "on arrival", "async"])
def test_no_lookup_misses_more_than_tau_steps(name, found):
    """Law 5; and something is late, else there would be nothing to bound."""
    order = Trace.load(found / name / "trace.npz")
    most = summarize(order).max_steps
    assert 0 < most <= SETTINGS[name]["tau"]
