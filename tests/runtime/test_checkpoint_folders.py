"""A run's checkpoints on disk: whole or ignored, damage is named, and the one before is used."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from persia_sim.base.trace import Event, Kind, Trace
from runtime.checkpoint import whole
from runtime.checkpoint.places import complete_checkpoints, folder_of
from runtime.checkpoint.rows import load, take
from runtime.checkpoint.whole import (
    RunState,
    keep_newest,
    newest,
    write_checkpoint,
)
from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.files import BrokenFileError
from runtime.rank.progress import Meter
from runtime.run.folder import plain

TRACE = Trace.of([Event(Kind.LOOKUP, 0, 0, 0, 0), Event(Kind.PUSH, 0, 0, 0, 0)],
                 mode="sync", ranks=1, tau=0)  # fmt: skip


class Store:
    """A store of one table that can take a step."""

    def __init__(self):
        self.rows = NativeStore(Layout(fields=(Field(name="f"),)), [TableConfig(dim=2)])
        self.step = 0

    def train(self, *ids):
        labels = np.zeros((len(ids), 1), np.float32)
        batch = Batch(np.array(ids, np.uint64), None, np.zeros((len(ids), 0), np.float32), labels)
        handle = self.rows.begin(0, self.step, batch)
        self.rows.look_up(handle)
        gradients = np.ones((len(handle.plans["rows"].ids), 2), np.float32)
        self.rows.give((handle, {"rows": gradients}))
        self.step += 1

    def values(self):
        ids, values, state = self.rows.export()["rows"]
        return dict(zip(ids.tolist(), np.hstack([values, state]).tolist(), strict=True))


def state(samples):
    meter = Meter()
    meter.samples, meter.updates = samples, samples // 10
    return RunState(
        samples=samples,
        updates=samples // 10,
        config={},
        tables={},
        layout={"fields": [{"name": "f"}]},
        facts={"ranks": 1, "shards": 1, "data_sha256": ""},
        servers=Store().rows.server_counters(),
        learner={"drew_unseeded": False, "rows": {}},
        meter=plain(meter.state_dict()),
        history={},
        files={},
    )


def dense(value):
    weights = {"w": torch.full((2, 3), float(value))}
    return {"model": weights, "optimizers": [{"state": {0: {"step": torch.tensor(value)}}}]}


def write(run, samples, store=None):
    store = store or Store()
    taken = take(store.rows)
    return write_checkpoint(run, state(samples), dense(samples), TRACE, taken.write)


def loaded(checkpoint):
    store = Store()
    load(store.rows, checkpoint.rows)
    return store.values()


def test_what_is_written_is_read(tmp_path):
    store = Store()
    store.train(3, 5)
    write(tmp_path, 10, store)
    found = newest(tmp_path)
    assert (found.state.samples, found.state.updates) == (10, 1)
    assert found.dense()["model"]["w"].tolist() == [[10.0] * 3] * 2
    assert found.dense()["optimizers"][0]["state"][0]["step"].item() == 10
    assert found.trace().events.tolist() == TRACE.events.tolist()
    assert loaded(found) == store.values() and len(store.values()) == 2


def test_the_newest_is_that_of_most_samples_and_older_ones_go(tmp_path):
    for samples in (9, 1000, 20):
        write(tmp_path, samples)
    (folder_of(tmp_path, 3000)).mkdir()  # begun, and never finished
    assert newest(tmp_path).state.samples == 1000
    keep_newest(tmp_path, folder_of(tmp_path, 1000), 2)
    assert [int(f.name) for f in complete_checkpoints(tmp_path)] == [20, 1000]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_any_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path):
    write(tmp_path, 10)
    for number, name in enumerate(
        ("state.json", "dense.pt", "trace.npz", "manifest.json", ".rows")
    ):
        folder = write(tmp_path, 20 + number).folder
        (file,) = [f for f in files_of(folder) if f.name.endswith(name)]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        told: list[str] = []
        assert newest(tmp_path, told.append).state.samples == 10
        assert name in told[0] and "10 samples is used" in told[0]
    assert len(told) == 5


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    with pytest.raises(BrokenFileError, match="holds no checkpoint that can be used: there is no"):
        newest(tmp_path)
    (write(tmp_path, 10).folder / "dense.pt").unlink()
    with pytest.raises(BrokenFileError, match=r"dense\.pt cannot be read: No such file"):
        newest(tmp_path)


class Code:
    def __reduce__(self):
        return os.mkdir, ("/tmp/never",)


@pytest.mark.parametrize("packed", [True, False])
def test_code_in_the_file_of_weights_is_not_run(packed, tmp_path, monkeypatch):
    """Neither in torch's own archive nor in a pickle without one, which torch reads as well."""
    store = Store()
    evil = {"model": Code(), "optimizers": []}
    if not packed:
        monkeypatch.setattr(torch, "save", lambda content, to: to.write(pickle.dumps(content, 2)))
    write_checkpoint(tmp_path, state(10), evil, None, take(store.rows).write)
    reason = "holds more than weights" if packed else "is damaged; it is no archive of weights"
    with pytest.raises(BrokenFileError, match=rf"dense\.pt {reason}"):
        newest(tmp_path).dense()


@pytest.mark.parametrize("function", ["write_dense", "flush_folder", "digest_of"])
def test_a_write_that_fails_leaves_nothing_and_the_one_before(tmp_path, function, monkeypatch):
    store = Store()
    store.train(1)
    write(tmp_path, 10, store)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole, function, full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 20, store)
    monkeypatch.undo()
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == [f"{10:015d}"]
    assert newest(tmp_path).state.samples == 10
    write(tmp_path, 20, store)  # the store can be saved again
    assert newest(tmp_path).state.samples == 20
