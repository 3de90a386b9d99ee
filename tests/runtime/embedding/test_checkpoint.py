"""Saved rows come back: any number of shards, at one instant, or not at all with the reason."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.checkpoint.array_file import BrokenFileError
from runtime.checkpoint.rows import load, save
from runtime.embedding.config import RowOptimizer
from runtime.embedding.features import Admission, Capacity

ADAM = RowOptimizer(kind="adam", eps=1e-8, bias_correction="row")
TABLES: list[dict[str, Any]] = [
    {"dim": 4, "optimizer": ADAM},
    {"dim": 3, "storage": "bfloat16", "capacity": Capacity(rows=60)},
    {"dim": 3, "capacity": Capacity(rows=60, eviction="clock", expire_after_steps=8)},
    {"dim": 2, "admission": Admission(kind="frequency", sightings=2, counters=64)},
]


def train(table: Any, steps: range) -> bytes:
    """Some steps; the bytes of everything that was read."""
    seen = []
    for step in steps:
        rng = np.random.default_rng(step)
        handle = table.look_up(rng.choice(150, 20, replace=False), step)
        seen.append(handle.values["rows"].tobytes())
        table.push(handle, rng.standard_normal((20, 1)).astype(np.float32))
    seen += [a.tobytes() for a in table.store.export()["rows"]]
    return b"".join(seen)


@pytest.mark.parametrize("config", TABLES)
def test_a_loaded_store_goes_on_with_the_same_bytes(
    one_table: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    saved, loaded = one_table(shards=2, **config), one_table(shards=2, **config)
    train(saved, range(12))
    result = save(saved.store, tmp_path)
    assert result.rows == len(saved.resident())
    load(loaded.store, tmp_path)
    assert train(loaded, range(12, 30)) == train(saved, range(12, 30))


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_resharding_keeps_every_row_and_its_state(
    one_table: Any, shards: int, tmp_path: Path
) -> None:
    saved, loaded = (one_table(shards=n, dim=4, optimizer=ADAM) for n in (2, shards))
    train(saved, range(6))
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    assert train(loaded, range(6, 6)) == train(saved, range(6, 6))
    save(loaded.store, tmp_path)  # replaces what was there
    back = one_table(shards=2, dim=4, optimizer=ADAM)
    load(back.store, tmp_path)
    assert back.store.export()["rows"][1].tobytes() == saved.store.export()["rows"][1].tobytes()


@pytest.mark.parametrize("shards", [2, 3])
def test_incremental_saves_add_up_to_the_whole(one_table: Any, shards: int, tmp_path: Path) -> None:
    config = {"dim": 3, "optimizer": ADAM, "capacity": Capacity(rows=100 * shards)}
    table, other = one_table(shards=2, **config), one_table(shards=shards, **config)
    train(table, range(10))
    save(table.store, tmp_path, track_changes=True)
    for start in (10, 13):
        train(table, range(start, start + 1))
        changed = save(table.store, tmp_path, incremental=True)
        assert changed.rows == 20
    load(other.store, tmp_path)
    for found, expected in zip(
        other.store.export()["rows"], table.store.export()["rows"], strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_incremental_save_needs_a_tracked_one_before(one_table: Any, tmp_path: Path) -> None:
    table = one_table(dim=2)
    table.look_up([1])
    save(table.store, tmp_path)
    with pytest.raises(ValueError, match="save with track_changes=True first"):
        save(table.store, tmp_path, incremental=True)


def test_a_cut_during_training_holds_whole_pushes_only(one_table: Any, tmp_path: Path) -> None:
    """Every push adds 1 to all rows of two shards, so a whole cut has one value everywhere."""
    sgd = RowOptimizer(kind="sgd", lr=1.0)
    config = {"dim": 2, "optimizer": sgd, "initial": "constant", "initial_scale": 0.0}
    table = one_table(shards=4, **config)
    ids, stop, pushes = np.arange(400), threading.Event(), [0]

    def trainer() -> None:
        while not stop.is_set():
            table.push(table.look_up(ids, pushes[0]), -1.0)
            pushes[0] += 1

    table.look_up(ids)
    thread = threading.Thread(target=trainer)
    thread.start()
    values = []
    try:
        for _ in range(10):
            save(table.store, tmp_path)
            other = one_table(shards=1, **config)
            load(other.store, tmp_path)
            values.append(np.unique(other.store.export()["rows"][1]))
    finally:
        stop.set()
        thread.join()
    assert all(len(v) == 1 for v in values)
    assert values[-1] > values[0]
    assert (table.values(ids) == pushes[0]).all()


def test_a_half_applied_push_is_waited_for(one_table: Any, tmp_path: Path) -> None:
    table = one_table(shards=2, dim=2, optimizer=RowOptimizer(kind="sgd", lr=1.0))
    handle = table.look_up(np.arange(50))
    gradients = {"rows": np.ones((50, 2), np.float32)}
    table.store.push(0, [(handle, gradients)])
    thread = threading.Thread(target=save, args=(table.store, tmp_path))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    table.store.push(1, [(handle, gradients)])
    thread.join(10)
    assert not thread.is_alive()


def test_broken_and_foreign_files_are_refused_with_name_and_reason(
    one_table: Any, tmp_path: Path
) -> None:
    table = one_table(dim=2)
    with pytest.raises(BrokenFileError, match=r"holds no checkpoint: there is no manifest\.json"):
        load(table.store, tmp_path)
    table.look_up(np.arange(10))
    save(table.store, tmp_path)
    rows = next(tmp_path.glob("*.rows"))
    whole = rows.read_bytes()
    for damage, reason in [
        (whole[:-5], "is truncated or overlong"),
        (whole[:10], "is not a file of embedding rows"),
        (whole + b"x", "is truncated or overlong"),
        (whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:], "checksum does not match"),
        (b"PK\x03\x04" + whole, "is not a file of embedding rows"),
    ]:
        rows.write_bytes(damage)
        with pytest.raises(BrokenFileError, match=f"{rows.name} .*{reason}"):
            load(one_table(dim=2).store, tmp_path)
    rows.write_bytes(whole)
    with pytest.raises(ValueError, match="dim=2, the store has dim=3"):
        load(one_table(dim=3).store, tmp_path)
    with pytest.raises(ValueError, match="seed 0, the store has 1"):
        load(one_table(dim=2, seed=1).store, tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BrokenFileError, match="is not the manifest"):
        load(one_table(dim=2).store, tmp_path)


def test_a_save_that_dies_leaves_the_one_before(
    one_table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = one_table(dim=2)
    table.look_up(np.arange(10))
    save(table.store, tmp_path)
    table.look_up(np.arange(20))

    def die(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("runtime.checkpoint.rows.Manifest.write", die)
    with pytest.raises(OSError, match="no space"):
        save(table.store, tmp_path)
    loaded = one_table(dim=2)
    load(loaded.store, tmp_path)
    assert len(loaded.store) == 10
