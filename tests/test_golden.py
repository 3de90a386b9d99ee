"""Fingerprints of what runs and simulations give, and names of stored results.

No rename and no move changes one. `python -m tests.test_golden` writes the file beside this one
anew; the commit says why. The bytes of a run are those of one machine and one torch; simulations
and the names of points are the same everywhere.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from experiments.lateness.runs import KEPT, StreamData, config_of, run_of
from experiments.lateness.streams import Cell, Stream
from experiments.points import Point
from persia_sim.base.vocabulary import Mode
from persia_sim.engine.simulate import simulate
from persia_sim.presets import point as simulator
from persia_sim.report.measure import throughput
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.native.extension import native
from tests.runtime.worlds import ArraySource, TwoTables, World, config, run

STORED = Path(__file__).with_suffix(".json")


def here() -> str:
    """What the bytes of a run depend on beside the code."""
    return " ".join([platform.machine(), torch.__version__, native.kernel_set()])


def worlds() -> Iterator[tuple[str, World]]:
    """Runs whose bytes nothing but the code decides, by name."""
    for mode in Mode:
        for shards in (1, 2):
            late = {"tau": 2} if mode.reads_late_rows else {}
            settings = config(mode=mode, ranks=2, shards=shards, executor="constant_lag", **late)
            yield f"{mode} constant_lag shards {shards}", run(settings, ArraySource(240))
    for mode, ranks in ((Mode.SYNC, 1), (Mode.LOOKAHEAD, 2), (Mode.HYBRID, 2)):
        late = {"tau": 0} if mode.reads_late_rows else {}
        settings = config(mode=mode, ranks=ranks, shards=2, executor="concurrent", **late)
        yield f"{mode} concurrent", run(settings, ArraySource(240))
    settings = config(mode=Mode.HYBRID, ranks=3, tau=1, dense_lag=1, merge_pushes=False)
    yield "hybrid unmerged, dense late", run(settings, TwoTables(200))
    yield (
        "hybrid fused",
        run(config(mode=Mode.HYBRID, ranks=2, tau=1, fuse_ranks=True), TwoTables(200)),
    )


def fingerprint(world: World) -> str:
    """Rows, optimiser state, dense weights, losses and counters in sixteen digits."""
    digest = hashlib.sha256()
    for name, array in sorted(world.state().items()):
        digest.update(name.encode() + array.tobytes())
    digest.update(json.dumps(world.meter.losses).encode())
    digest.update(json.dumps(world.store.counters).encode())
    return digest.hexdigest()[:16]


def order_of(world: World) -> str:
    """The recorded order of reads and writes in sixteen digits."""
    return hashlib.sha256(world.trace.events.tobytes()).hexdigest()[:16]


def points() -> Iterator[str]:
    """Folders of a sweep's points, and labels with hashes of the lateness study's."""
    base = TrainConfig()
    configs = {
        "plain": base,
        "hybrid": TrainConfig(sync=SyncConfig(mode=Mode.HYBRID, ranks=8, tau=16)),
        "async": TrainConfig(sync=SyncConfig(mode=Mode.ASYNC, ranks=8, tau=0), batch=256),
        "averaged": TrainConfig(sync=SyncConfig(mode=Mode.ASYNC_AVERAGING, ranks=4)),
        "unmerged": TrainConfig(sync=SyncConfig(mode=Mode.RAW_HYBRID, merge_pushes=False)),
        "model": TrainConfig(model=ModelConfig(name="dlrm", hidden=(32,), lr=0.01), seed=3),
        "data": TrainConfig(data=DataConfig(name="synthetic:criteo-ad", epochs=2, shuffle=True)),
        "network": TrainConfig(model=ModelConfig(optimizer="adagrad", dropout=0.1)),
        "rows": TrainConfig(rows=TableConfig(dim=16, optimizer=RowOptimizer(kind="adam", lr=0.01))),
        "judged": TrainConfig(evaluation=EvaluationConfig(evaluate_every_steps=50, test_rows=99)),
    }
    for label, settings in configs.items():
        yield Point(label=label, config=settings, data_sha256="1" * 64).folder(Path()).name
    stream = Stream(name="kuairand-pure", seeds=5, source="a test")
    data = StreamData(name="kuairand-pure", sha256="2" * 64, train_rows=100_000)
    for late in (0, 4, 7, 16, 64):
        for dense in (0, 7):
            cell = Cell(rows_late=late, dense_late=dense)
            one = run_of(stream, cell, 0.05, 0.001, late + dense, arithmetic=KEPT)
            settings = config_of(one, data)
            folder = Point(label=one.label, config=settings, data_sha256=data.sha256).folder(Path())
            yield f"{one.hash(data.sha256)} {folder.name}"


FAULTS = {
    "none": {},
    "slow": {"slow": ("rank:1x2@0.05-0.2", "server:0x3")},
}  # fmt: skip
SMALL = {"cluster": "v100-paper", "workload": "criteo-ad", "ranks": 4, "workers": 2, "servers": 2}
OTHERS = {
    "lookahead forwarded": {"mode": Mode.LOOKAHEAD, "lookahead": "forwarded", "ahead": 2},
    "hybrid not merged": {"mode": Mode.HYBRID, "tau": 2, "merge_pushes": False, "permits": 3},
    "async apart": {"mode": Mode.ASYNC, "dense_home": "apart"},
    "hybrid by server": {"mode": Mode.HYBRID, "trace_shards": True},
}
DISCIPLINES = "fluid", "fluid-each", "fifo", "unshared"
SIMULATED = {
    f"{mode}, {discipline}, {fault}": {"mode": mode, "discipline": discipline, **FAULTS[fault]}
    for mode, discipline, fault in product(Mode, DISCIPLINES, FAULTS)
} | OTHERS  # fmt: skip


def simulated(name: str) -> list[str]:
    """The bits of the rate, and the order of events in sixteen digits."""
    result = simulate(
        simulator.scenario_of(simulator.Point(**SMALL, steps=12, **SIMULATED[name])), trace=True
    )
    events = hashlib.sha256(result.trace.events.tobytes()).hexdigest()[:16]
    return [throughput(result).mean.hex(), events]


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulation_keeps_its_bits_and_its_order(name):
    assert simulated(name) == json.loads(STORED.read_text())["simulations"][name]


def test_points_keep_the_names_under_which_their_results_are_stored():
    assert list(points()) == json.loads(STORED.read_text())["points"]


@pytest.mark.skipif(
    json.loads(STORED.read_text())["machine"] != here() if STORED.exists() else True,
    reason="the stored bytes are those of another machine",
)
def test_runs_keep_their_bytes_and_their_order():
    stored = json.loads(STORED.read_text())["runs"]
    assert {name: found_of(name, world) for name, world in worlds()} == stored


def found_of(name: str, world: World) -> list[str]:
    return [fingerprint(world)] if "concurrent" in name else [fingerprint(world), order_of(world)]


if __name__ == "__main__":
    found = {
        "machine": here(),
        "points": list(points()),
        "runs": {name: found_of(name, world) for name, world in worlds()},
        "simulations": {name: simulated(name) for name in SIMULATED},
    }
    STORED.write_text(json.dumps(found, indent=1) + "\n")
