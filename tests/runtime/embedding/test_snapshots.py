"""A snapshot holds the rows as they were at its instant, whoever writes while it is copied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.config import Admission, Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import NativeStore
from tests.runtime.embedding.conftest import OneTable, collected, snapshots

ADAM = RowOptimizer(kind="adam")
CONFIGS: list[dict[str, Any]] = [
    {"dim": 3, "optimizer": ADAM},
    {"dim": 3, "capacity": Capacity(rows=60)},
    {"dim": 3, "capacity": Capacity(rows=60, expire_after_steps=4)},
    {"dim": 2, "capacity": Capacity(expire_after_steps=3)},
    {"dim": 2, "admission": Admission(probability=0.5)},
]
Snapshots = list[dict[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def limits_again() -> Iterator[None]:
    limit = native.memory_limit()
    yield
    native.set_memory_limit(limit)
    native.set_threads(1)


def tables_of(table: OneTable) -> list[Any]:
    return [server.rows.tables["rows"] for server in table.store.servers]


def act(table: OneTable, step: int, act_of_step: str) -> None:
    """One write of the kind that is named, drawn from the step."""
    rng = np.random.default_rng(step)
    ids = rng.choice(150, 20, replace=False).astype(np.uint64)
    if act_of_step == "restore":  # rows come from elsewhere, as in a lease of lookahead
        other = OneTable(shards=table.store.shards, seed=1, **vars_of(table))
        other.push(other.look_up(ids, step))
        arrays = [s["rows"] for s in snapshots(other.store)]
        table.store.restore("rows", arrays, keep_present=bool(step % 2))
    elif act_of_step == "forget":
        table.store.forget("rows", np.sort(ids)[:5])
    else:
        handle = table.look_up(ids, step)
        if act_of_step == "push":
            table.push(handle, rng.standard_normal((20, 1)).astype(np.float32))


def vars_of(table: OneTable) -> dict[str, Any]:
    return {name: getattr(table.config, name) for name in table.config.__dataclass_fields__}


def assert_equal(found: Snapshots, expected: Snapshots) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for column, array in theirs["rows"].items():
            np.testing.assert_array_equal(mine["rows"][column], array, err_msg=column)


def loaded(table: OneTable, snapshots: Snapshots) -> OneTable:
    other = OneTable(shards=table.store.shards, **vars_of(table))
    other.store.restore("rows", [s["rows"] for s in snapshots])
    return other


def assert_holds(snapshots: Snapshots, table: OneTable, exported: Any) -> None:
    """Loaded elsewhere, the snapshot has the rows that were exported at its instant."""
    back = loaded(table, snapshots).store.export()["rows"]
    for mine, theirs in zip(back, exported, strict=True):
        np.testing.assert_array_equal(mine, theirs)


ACTS = st.lists(
    st.sampled_from(["push", "push", "look_up", "forget", "restore"]) | st.integers(1, 60),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    shards=st.integers(1, 2),
    before=st.integers(0, 12),
    meanwhile=ACTS,
)
@pytest.mark.law11
def test_writers_between_the_slices_of_a_copy_do_not_show_in_it(config, shards, before, meanwhile):
    """A twin is copied at one instant, before the writers begin; a number copies so many slots."""
    slow, twin = (OneTable(shards=shards, **config) for _ in range(2))
    for step in range(before):
        for table in (slow, twin):
            act(table, step, "push")
    exported = slow.store.export()["rows"]
    slow.store.freeze_snapshots()
    expected = snapshots(twin.store)
    for step, one in enumerate(meanwhile, before + 1):
        if isinstance(one, int):
            for native_table in tables_of(slow):
                native_table.copy_slice(one)
        else:
            for table in (slow, twin):
                act(table, step, one)
    found = collected(slow.store)
    assert_equal(found, expected)
    assert_holds(found, slow, exported)
    for table in (slow, twin):
        act(table, before + 20, "push")
    for mine, theirs in zip(slow.store.export()["rows"], twin.store.export()["rows"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("config", CONFIGS)
def test_threads_that_write_all_the_time_do_not_show_in_a_snapshot(config):
    """Against a copy made inside the cut, of values, state, counts and stamps."""
    if "capacity" in config and config["capacity"].rows:
        expires = config["capacity"].expire_after_steps
        config = config | {"capacity": Capacity(rows=9000, expire_after_steps=expires)}
    table = OneTable(shards=2, **config)
    stop, steps = threading.Event(), [0, 0]

    def writer(which):
        rng = np.random.default_rng(which)
        while not stop.is_set():
            ids = rng.choice(12_000, 600, replace=False)
            table.push(table.look_up(ids, steps[0]), float(rng.standard_normal()))
            steps[which] += 1

    table.look_up(np.arange(12_000))
    threads = [threading.Thread(target=writer, args=(which,)) for which in range(2)]
    for one in threads:
        one.start()
    try:
        for _ in range(6):
            with table.store.consistent_cut():
                exported = table.store.export()["rows"]
                plain = [t.lease(exported[0], 0, len(exported[0])) for t in tables_of(table)]
                at = sum(steps)
                table.store.freeze_snapshots()
            while sum(steps) < at + 4:  # writers first, then both at once
                stop.wait(0.001)
            found = collected(table.store)
            assert_holds(found, table, exported)
            for mine, theirs in zip(found, plain, strict=True):
                ids = mine["rows"]["ids"]
                order = np.argsort(ids)
                for column in ("ids", "words", "stamps", "rows"):
                    kept = mine["rows"][column]
                    kept = kept[order] if len(kept) else kept
                    np.testing.assert_array_equal(kept, theirs[column], err_msg=column)
    finally:
        stop.set()
        for one in threads:
            one.join(60)


def test_threads_of_one_push_copy_each_row_once():
    """20,000 rows, so that two threads share the push and both meet rows not copied yet."""
    native.set_threads(2)
    sgd = RowOptimizer(kind="sgd", lr=1.0)
    table = OneTable(dim=2, optimizer=sgd, initial="constant", initial_scale=0.0)
    handle = table.look_up(np.arange(20_000))
    table.push(handle, -1.0)
    table.store.freeze_snapshots()
    table.push(handle, -1.0)
    (found,) = collected(table.store)
    values = found["rows"]["rows"].view(np.float32)
    assert values.shape == (20_000, 2)
    assert (values == 1).all()
    assert sorted(found["rows"]["ids"]) == sorted(handle.plans["rows"].ids)
    assert (table.values(np.arange(20_000)) == 2).all()


def test_a_snapshot_without_memory_fails_and_training_does_not():
    sgd = RowOptimizer(kind="sgd", lr=1.0)
    config = {"dim": 16, "optimizer": sgd, "initial": "constant", "initial_scale": 0.0}
    table = OneTable(**config)
    ids = np.arange(20_000)
    table.push(table.look_up(ids), -1.0)
    table.store.freeze_snapshots()
    roomy = native.memory_limit()
    native.set_memory_limit(1)
    table.push(table.look_up(ids), -1.0)
    with pytest.raises(MemoryError, match=r"a snapshot .*this process may use 1e-09 GB of memory"):
        collected(table.store)
    table.store.drop_snapshots()
    assert (table.values(ids) == 2).all()
    native.set_memory_limit(roomy)
    (found,) = snapshots(table.store)
    assert (found["rows"]["rows"].view(np.float32) == 2).all()
    assert len(found["rows"]["ids"]) == 20_000


def test_one_snapshot_at_a_time():
    table = OneTable(dim=2)
    table.push(table.look_up([1, 2, 3]))
    with pytest.raises(RuntimeError, match="there is no snapshot to collect"):
        collected(table.store)
    table.store.freeze_snapshots()
    with pytest.raises(RuntimeError, match="must be collected or dropped first"):
        table.store.freeze_snapshots()
    assert sorted(collected(table.store)[0]["rows"]["ids"]) == [1, 2, 3]


def test_a_cut_that_fails_at_one_shard_leaves_none_frozen():
    table = OneTable(dim=2, shards=2)
    table.look_up(np.arange(100))
    second = tables_of(table)[1]
    second.freeze()
    with pytest.raises(RuntimeError, match="must be collected or dropped first"):
        table.store.freeze_snapshots()
    second.drop_snapshot()
    found = snapshots(table.store)
    assert sum(len(s["rows"]["ids"]) for s in found) == 100


def test_a_row_that_has_expired_is_in_no_snapshot():
    table = OneTable(dim=2, capacity=Capacity(rows=9, expire_after_steps=3))
    table.look_up([1, 2], step=0)
    for step in (3, 5):
        table.look_up([2], step)  # creates nothing, so nothing is swept
    (found,) = snapshots(table.store)
    assert found["rows"]["ids"].tolist() == [2]


def test_every_table_and_shard_is_of_the_instant_of_the_cut():
    """Two tables of a batch in three shards; writers come after the cut, before any copy."""
    layout = Layout(fields=(Field(name="a"), Field(name="b", table="other")))
    tables = [TableConfig(dim=3, optimizer=ADAM), TableConfig(name="other", dim=3, optimizer=ADAM)]
    stores = [NativeStore(layout, tables, shards=3) for _ in range(2)]

    def train(step):
        ids = np.random.default_rng(step).integers(0, 500, 200).astype(np.uint64)
        empty = np.zeros((100, 0), np.float32)
        handle = stores[0].begin(0, step, Batch(ids, None, empty, empty))
        for shard in range(3):
            stores[0].servers[shard].read(handle)
        gradients = {name: np.ones_like(values) for name, values in handle.values.items()}
        for shard in range(3):
            stores[0].servers[shard].updates = step
            stores[0].servers[shard].apply([(handle, gradients)])

    for step in range(5):
        train(step)
    with stores[0].consistent_cut():
        expected = stores[0].export()
        stores[0].freeze_snapshots()
    for step in range(5, 9):
        train(step)
    found = collected(stores[0])
    for name in ("rows", "other"):
        stores[1].restore(name, [shard[name] for shard in found])
        for mine, theirs in zip(stores[1].export()[name], expected[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert not np.array_equal(stores[0].export()[name][1], expected[name][1])
