"""Saved rows come back: any number of shards, at one instant, or not at all with the reason."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoint.rows import load
from runtime.embedding.config import Admission, Capacity, RowOptimizer
from runtime.files import BrokenFileError
from tests.runtime.embedding.conftest import OneTable, save, snapshots

ADAM = RowOptimizer(kind="adam")
TABLES: list[dict[str, Any]] = [
    {"dim": 4, "optimizer": ADAM},
    {"dim": 3, "capacity": Capacity(rows=60)},
    {"dim": 3, "capacity": Capacity(rows=60, expire_after_steps=8)},
    {"dim": 2, "admission": Admission(probability=0.5)},
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
@pytest.mark.law11
def test_a_loaded_store_goes_on_with_the_same_bytes(one_table, config, tmp_path):
    saved, loaded = one_table(shards=2, **config), one_table(shards=2, **config)
    train(saved, range(12))
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    assert train(loaded, range(12, 30)) == train(saved, range(12, 30))


CAPACITIES = st.builds(
    Capacity,
    rows=st.integers(4, 40),
    expire_after_steps=st.sampled_from([None, 1, 2, 4]),
) | st.builds(Capacity, expire_after_steps=st.sampled_from([1, 3]))
SAVES = st.lists(st.integers(1, 6), min_size=1, max_size=4)
"""Steps of training since the save before."""


@pytest.mark.long
@given(
    capacity=CAPACITIES,
    admission=st.sampled_from([Admission(), Admission(probability=0.6)]),
    shards=st.sampled_from([1, 2]),
    saves=SAVES,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.law11
def test_whatever_makes_rows_go_a_store_of_several_saves_goes_on_with_the_same_bytes(
    tmp_path_factory, capacity, admission, shards, saves, seed
):
    """Which row goes next is part of what is saved: law 11."""
    rng = np.random.default_rng(seed)
    config = {"dim": 2, "capacity": capacity, "admission": admission}
    saved, loaded = (OneTable(shards=shards, **config) for _ in range(2))

    def step(number, tables):
        ids = rng.choice(60, rng.integers(1, 12), replace=False)
        pushed, gradient = rng.random() < 0.7, rng.standard_normal()  # some pushes are lost
        handles = [table.look_up(ids, number) for table in tables]
        for table, handle in zip(tables, handles, strict=True):
            assert handle.values["rows"].tobytes() == handles[0].values["rows"].tobytes()
            if pushed:
                table.push(handle, gradient)

    folder, done = tmp_path_factory.mktemp("rows"), 0
    for steps in saves:
        for number in range(done, done + steps):
            step(number, [saved])
        done += steps
        save(saved.store, folder)
    load(loaded.store, folder)
    for number in range(done, done + 12):
        step(number, [saved, loaded])
        equal_stores(loaded, saved)


@pytest.mark.law13
def test_a_half_applied_push_is_waited_for(one_table, tmp_path):
    table = one_table(shards=2, dim=2, optimizer=RowOptimizer(kind="sgd", lr=1.0))
    handle = table.look_up(np.arange(50))
    gradients = {"rows": np.ones((50, 2), np.float32)}
    table.store.servers[0].apply([(handle, gradients)])
    thread = threading.Thread(target=save, args=(table.store, tmp_path))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    table.store.servers[1].apply([(handle, gradients)])
    thread.join(60)
    assert not thread.is_alive()


def test_broken_and_foreign_files_are_refused_with_name_and_reason(one_table, tmp_path):
    table = one_table(dim=2)
    with pytest.raises(BrokenFileError, match=r"holds no checkpoint: there is no manifest\.json"):
        load(table.store, tmp_path)
    table.look_up(np.arange(10))
    save(table.store, tmp_path)
    rows = next(tmp_path.glob("*.rows"))
    whole = rows.read_bytes()
    for damage, reason in [
        (whole[:-5], "is truncated or overlong"),
        (whole[:10], "is not a file of arrays"),
        (whole + b"x", "is truncated or overlong"),
        (whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:], "is damaged"),
        (b"PK\x03\x04" + whole, "is not a file of arrays"),
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


@pytest.mark.law11
def test_a_save_that_dies_leaves_the_one_before(one_table, tmp_path, monkeypatch):
    table = one_table(dim=2)
    table.look_up(np.arange(10))
    save(table.store, tmp_path)
    table.look_up(np.arange(20))

    def die(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("runtime.checkpoint.rows.ShardManifest.write", die)
    with pytest.raises(OSError, match="no space"):
        save(table.store, tmp_path)
    loaded = one_table(dim=2)
    load(loaded.store, tmp_path)
    assert len(loaded.store) == 10


def equal_stores(found: Any, expected: Any) -> None:
    exports = (t.store.export()["rows"] for t in (found, expected))
    for mine, theirs in zip(*exports, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def full_disk(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The second shard's file, or the manifest, meets a full disk half-way."""
    calls = [0]

    def fsync(_: int) -> None:
        calls[0] += 1
        if where == "manifest" or calls[0] == 2:
            raise OSError(28, "No space left on device")

    target = "persia_sim.base.files" if where == "manifest" else "runtime.files"
    monkeypatch.setattr(f"{target}.os.fsync", fsync)


@pytest.mark.parametrize("where", ["rows", "manifest"])
@pytest.mark.parametrize("rows", [None, 60])
def test_a_failed_save_leaves_the_one_before_and_the_next_one_is_whole(
    one_table, tmp_path, monkeypatch, where, rows
):
    config = {"dim": 3, "optimizer": ADAM, "capacity": Capacity(rows=rows)}
    table = one_table(shards=2, **config)
    train(table, range(8))
    save(table.store, tmp_path)
    before = {file.name for file in tmp_path.iterdir()}
    train(table, range(8, 12))
    with monkeypatch.context() as patched:
        full_disk(patched, where)
        with pytest.raises(OSError, match="No space left"):
            save(table.store, tmp_path)
    assert {f.name for f in tmp_path.iterdir() if f.name.endswith(".rows")} >= {
        name for name in before if name.endswith(".rows")
    }
    train(table, range(12, 14))
    save(table.store, tmp_path)
    other = one_table(shards=2, **config)
    load(other.store, tmp_path)
    equal_stores(other, table)
    left = {file.name for file in tmp_path.iterdir()}
    assert len(left) == 2 + 1  # a file a shard, and the manifest: no half-written file


def test_a_row_written_2_to_the_24_times_is_still_seen_to_change(one_table, tmp_path):
    """Its count has 24 bits; a prefetched copy must be replaced, and staleness counted, beyond."""
    sgd = RowOptimizer(kind="sgd", lr=1.0)
    source = one_table(dim=2, optimizer=sgd)
    source.push(source.look_up([7]))
    state = snapshots(source.store)[0]["rows"]
    state["words"] = (state["words"] & ~np.uint32(2**24 - 1)) | np.uint32(2**24 - 3)
    table = one_table(dim=2, optimizer=sgd)
    table.store.restore("rows", [state])
    for step in range(6):
        ahead = table.look_up([7], step, create=False)
        early = table.look_up([7], step)
        for _ in range(2):
            table.push(table.look_up([7], step))
        replaced = sum(s["rows_replaced"] for s in table.store.statuses())
        table.store.servers[0].refresh(ahead)
        assert sum(s["rows_replaced"] for s in table.store.statuses()) == replaced + 1
        np.testing.assert_array_equal(ahead.values["rows"], table.values([7]))
        before = table.store.row_staleness.copy()
        table.push(early)
        missed = np.flatnonzero(table.store.row_staleness - before)
        assert missed.tolist() == [2]
