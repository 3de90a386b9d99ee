"""Law 11 for real: processes that are killed at any instant, and resumed till one is through."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import newest
from runtime.config import DataConfig, TrainConfig
from runtime.run.record import run_into
from tests.runtime.spawned import FORK
from tests.runtime.worlds import config


def settings(**changes) -> TrainConfig:
    data = DataConfig(name="synthetic", rows=2400)
    return config(
        mode="hybrid", tau=2, ranks=2, data=data, test_rows=300, keep_checkpoints=2, **changes
    )


def child(folder: Path, chosen: TrainConfig, dies_at: int | None) -> None:
    """Go on with the run; die like a killed process at the so manieth flush to the disk."""
    flush, left = os.fsync, [dies_at]

    def counted(descriptor):
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = counted
    run_into(folder, chosen, resume=bool(complete_checkpoints(folder)))


def start(folder, chosen, dies_at=None):
    process = FORK.Process(target=child, args=(folder, chosen, dies_at))
    process.start()
    return process


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Predictions, the order of events, and the rows and weights of the last checkpoint."""
    found = {
        name: np.load(folder / f"{name}.npz")[array].tobytes()
        for name, array in (("predictions", "predictions"), ("trace", "version"))
    }
    last = newest(folder)
    for name, weights in last.dense()["model"].items():
        found[name] = weights.numpy().tobytes()
    found["metrics"] = (folder / "metrics.jsonl").read_bytes()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_into(folder, settings(checkpoint_every=15, evaluate_every_steps=20))
    return bytes_of(folder)


@pytest.mark.multiproc
@pytest.mark.law11
def test_killed_at_any_instant_and_resumed_a_run_ends_with_the_same_bytes(tmp_path, undisturbed):
    chosen = settings(checkpoint_every=15, evaluate_every_steps=20)
    draw = np.random.default_rng(0)
    first = start(tmp_path, chosen, dies_at=4)
    first.join()
    assert first.exitcode == -signal.SIGKILL
    kills = 1
    while not (tmp_path / "summary.json").exists():
        process = start(tmp_path, chosen)
        if kills < 3:
            # Anywhere: a run of a process takes about a second.
            process.join(float(draw.uniform(0.0, 1.2)))
        else:
            process.join()
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
    assert bytes_of(tmp_path) == undisturbed


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.law11
def test_killed_inside_a_checkpoint_again_and_again_it_gets_to_the_end(tmp_path, undisturbed):
    """Each process dies some flushes further into writing than the one before."""
    chosen = settings(checkpoint_every=15, evaluate_every_steps=20)
    codes, usable = [], []
    while not codes or codes[-1] != 0:
        process = start(tmp_path, chosen, dies_at=3 + 5 * len(codes))
        process.join()
        codes.append(process.exitcode)
        usable.append(len(complete_checkpoints(tmp_path)))
        assert len(codes) < 30
    assert codes.count(-signal.SIGKILL) == len(codes) - 1 >= 4
    assert bytes_of(tmp_path) == undisturbed
