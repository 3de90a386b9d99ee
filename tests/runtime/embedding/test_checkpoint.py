"""Saved rows come back: any number of shards, at one instant, or not at all with the reason."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoint.files import BrokenFileError
from runtime.checkpoint.rows import load, save
from runtime.embedding.config import RowOptimizer
from runtime.embedding.features import Admission, Capacity
from runtime.embedding.shard import shard_of
from tests.runtime.embedding.conftest import OneTable

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
    assert result.rows == len(saved.store)
    load(loaded.store, tmp_path)
    assert train(loaded, range(12, 30)) == train(saved, range(12, 30))


CAPACITIES = st.builds(
    Capacity,
    rows=st.integers(4, 40),
    eviction=st.sampled_from(["lru", "clock"]),
    expire_after_steps=st.sampled_from([None, 1, 2, 4]),
) | st.builds(Capacity, expire_after_steps=st.sampled_from([1, 3]))
# Steps of training since the save before, and whether only changes are saved then.
SAVES = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4)


@given(
    capacity=CAPACITIES,
    admission=st.sampled_from([Admission(), Admission(kind="probability", probability=0.6)]),
    shards=st.sampled_from([1, 2]),
    saves=SAVES,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_whatever_makes_rows_go_a_store_of_several_saves_goes_on_with_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    capacity: Capacity,
    admission: Admission,
    shards: int,
    saves: list[tuple[int, bool]],
    seed: int,
) -> None:
    """Which row goes next is part of what is saved, also if only changes are: law 11."""
    rng = np.random.default_rng(seed)
    config = {"dim": 2, "capacity": capacity, "admission": admission}
    saved, loaded = (OneTable(shards=shards, **config) for _ in range(2))

    def step(number: int, tables: list[OneTable]) -> None:
        ids = rng.choice(60, rng.integers(1, 12), replace=False)
        pushed, gradient = rng.random() < 0.7, rng.standard_normal()  # some pushes are lost
        handles = [table.look_up(ids, number) for table in tables]
        for table, handle in zip(tables, handles, strict=True):
            assert handle.values["rows"].tobytes() == handles[0].values["rows"].tobytes()
            if pushed:
                table.push(handle, gradient)

    folder, done = tmp_path_factory.mktemp("rows"), 0
    save(saved.store, folder, track_changes=True)
    for steps, incremental in saves:
        for number in range(done, done + steps):
            step(number, [saved])
        done += steps
        save(saved.store, folder, incremental=incremental, track_changes=True)
    load(loaded.store, folder)
    for number in range(done, done + 12):
        step(number, [saved, loaded])
        equal_stores(loaded, saved)


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
            before = pushes[0]
            while pushes[0] == before and thread.is_alive():
                stop.wait(0.001)
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
    thread.join(60)
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

    target = "persia_sim.words.files" if where == "manifest" else "runtime.checkpoint.files"
    monkeypatch.setattr(f"{target}.os.fsync", fsync)


@pytest.mark.parametrize("where", ["rows", "manifest"])
@pytest.mark.parametrize("eviction", [None, "lru", "clock"])
@pytest.mark.parametrize("failing", ["incremental", "whole"])
def test_what_a_failed_save_would_have_written_is_in_the_next_one(
    one_table: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    eviction: Any,
    failing: str,
) -> None:
    capacity = Capacity() if eviction is None else Capacity(rows=60, eviction=eviction)
    config = {"dim": 3, "optimizer": ADAM, "capacity": capacity}
    table = one_table(shards=2, **config)
    train(table, range(8))
    save(table.store, tmp_path, track_changes=True)
    before = {file.name for file in tmp_path.iterdir()}
    train(table, range(8, 12))
    with monkeypatch.context() as patched:
        full_disk(patched, where)
        with pytest.raises(OSError, match="No space left"):
            save(table.store, tmp_path, incremental=failing == "incremental", track_changes=True)
    assert {f.name for f in tmp_path.iterdir() if f.name.endswith(".rows")} >= {
        name for name in before if name.endswith(".rows")
    }
    train(table, range(12, 14))
    save(table.store, tmp_path, incremental=True)
    other = one_table(shards=2, **config)
    load(other.store, tmp_path)
    equal_stores(other, table)
    left = {file.name for file in tmp_path.iterdir()}
    parts = 1 if eviction == "clock" else 2  # every save of a table with a clock is whole
    assert len(left) == 2 * parts + 1  # a file a shard, and the manifest: no half-written file


def test_the_checkpoint_before_a_failed_save_still_loads(
    one_table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = one_table(shards=2, dim=3), one_table(shards=2, dim=3)
    train(table, range(4))
    save(table.store, tmp_path, track_changes=True)
    saved = table.store.export()["rows"][1].copy()
    train(table, range(4, 6))
    full_disk(monkeypatch, "rows")
    with pytest.raises(OSError, match="No space left"):
        save(table.store, tmp_path, incremental=True)
    load(other.store, tmp_path)
    np.testing.assert_array_equal(other.store.export()["rows"][1], saved)


@pytest.mark.parametrize("eviction", ["lru", "clock"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_evicted_rows_do_not_come_back_with_incremental_saves(
    one_table: Any, tmp_path: Path, eviction: Any, shards: int
) -> None:
    """150 ids pass through 60 rows, so each save sees rows that have gone since the last one."""
    capacity = Capacity(rows=60, eviction=eviction)
    table = one_table(shards=2, dim=3, optimizer=ADAM, capacity=capacity)
    train(table, range(10))
    save(table.store, tmp_path, track_changes=True)
    ever = set()
    for start in (10, 12, 14):
        train(table, range(start, start + 2))
        save(table.store, tmp_path, incremental=True)
        ever |= table.resident()
    assert len(ever - table.resident()) > 20
    roomy = Capacity(rows=60 * 3)  # so that another number of shards evicts nothing by itself
    other = one_table(shards=shards, dim=3, optimizer=ADAM, capacity=roomy)
    load(other.store, tmp_path)
    equal_stores(other, table)


@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 5), (1, 3)])
@pytest.mark.parametrize("incremental", [False, True])
def test_a_resharded_store_trains_on_as_the_one_that_was_not(
    one_table: Any, tmp_path: Path, old: int, new: int, incremental: bool
) -> None:
    """Rows must lie in the shard where lookups look for them, or they would start afresh."""
    saved, loaded = (one_table(shards=n, dim=4, optimizer=ADAM) for n in (old, new))
    train(saved, range(8))
    save(saved.store, tmp_path, track_changes=True)
    if incremental:
        train(saved, range(8, 11))
        save(saved.store, tmp_path, incremental=True)
    load(loaded.store, tmp_path)
    created = [t.store.counters["created"] for t in (saved, loaded)]
    for step in range(11, 20):
        ids = np.random.default_rng(step).choice(150, 40, replace=False)
        seen = []
        for table in (saved, loaded):
            handle = table.look_up(ids, step)
            inverse = handle.plans["rows"].inverse
            gradients = np.empty((40, 4), np.float32)
            gradients[inverse] = (ids[:, None] + np.arange(4)) / 100  # by id, whatever the order
            table.push(handle, gradients)
            seen.append(handle.values["rows"][inverse])
        np.testing.assert_array_equal(seen[0], seen[1])
    equal_stores(loaded, saved)
    fresh = [t.store.counters["created"] for t in (saved, loaded)]
    assert fresh[0] - created[0] == fresh[1] - created[1] > 0


def relative_ages(ids: list[int], shards: int) -> list[int]:
    """Ids that were used in this order, as that many shards merge theirs: by place in their own."""
    own = [[one for one in ids if shard_of(np.array([one]), shards)[0] == k] for k in range(shards)]
    aged = [(place / len(of), k, one) for k, of in enumerate(own) for place, one in enumerate(of)]
    return [one for _, _, one in sorted(aged)]


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 3), (2, 3), (3, 2)])
def test_a_full_table_on_other_shards_goes_on_to_evict_its_oldest_rows(
    one_table: Any, tmp_path: Path, old: int, new: int
) -> None:
    """Against a list a shard; new shards do not hold equally many rows, so loading evicts, too."""
    saved, loaded = (one_table(shards=n, dim=2, capacity=Capacity(rows=24)) for n in (old, new))
    used = [int(i) for i in np.random.default_rng(old).permutation(60)[:30]]
    for number, one in enumerate([*used, *used[10:14]]):  # four of them are used again
        saved.look_up([one], number)
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    gone = len(saved.resident()) - len(loaded.resident())
    assert loaded.store.counters["evicted"] == gone  # nothing is lost without being counted
    used = [one for one in used if one not in used[10:14]] + used[10:14]
    full = relative_ages([one for one in used if one in saved.resident()], old)
    kept: list[list[int]] = [[] for _ in range(new)]
    for one in [*full, *range(100, 130)]:
        if one >= 100:
            loaded.look_up([one], one)
        shard = kept[shard_of(np.array([one]), new)[0]]
        shard.append(one)
        del shard[: -(24 // new)]
        if one >= 100 or one == full[-1]:
            assert loaded.resident() == {i for of in kept for i in of}


@pytest.mark.parametrize("capacity", [None, 90])
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_each_row_on_other_shards_expires_when_its_own_time_is_over(
    one_table: Any, tmp_path: Path, old: int, new: int, capacity: int | None
) -> None:
    config = {"dim": 2, "capacity": Capacity(rows=capacity, expire_after_steps=30)}
    saved, loaded = (one_table(shards=n, **config) for n in (old, new))
    last = {int(i): step for step, i in enumerate(np.random.default_rng(new).permutation(60)[:25])}
    for one, step in last.items():
        saved.look_up([one], step)
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    for step in range(26, 60):
        loaded.look_up([1000], step)
        assert loaded.resident() == {1000} | {i for i, used in last.items() if used >= step - 30}


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_that_had_expired_do_not_come_back_where_rows_do_not_expire(
    one_table: Any, tmp_path: Path, shards: int
) -> None:
    capacity = Capacity(rows=90, eviction="clock", expire_after_steps=5)
    saved, loaded = one_table(shards=2, dim=2, capacity=capacity), one_table(shards=shards, dim=2)
    saved.look_up(np.arange(30), 0)
    saved.look_up([4], 5)
    saved.look_up([30], 9)
    assert len(saved.store) > 2, "some have not gone yet"
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    assert loaded.resident() == {4, 30} and len(loaded.store) == 2


def test_a_lookup_without_a_push_keeps_a_row_from_expiring_after_a_load(
    one_table: Any, tmp_path: Path
) -> None:
    config = {"dim": 2, "capacity": Capacity(expire_after_steps=10)}
    table, other = one_table(**config), one_table(**config)
    table.push(table.look_up([1, 2], step=0))
    save(table.store, tmp_path, track_changes=True)
    table.look_up([1], step=8)
    save(table.store, tmp_path, incremental=True)
    load(other.store, tmp_path)
    other.look_up([3], step=12)
    assert other.resident() == {1, 3}


def test_threads_that_save_to_one_folder_wait_for_each_other(
    one_table: Any, tmp_path: Path
) -> None:
    """Two stores and a third thread that loads: every load finds one whole save."""
    tables = [one_table(dim=2, shards=3) for _ in range(2)]
    for number, table in enumerate(tables):
        table.look_up(np.arange(100 * (number + 1)))
    save(tables[0].store, tmp_path)
    errors: list[BaseException] = []
    sizes: set[int] = set()

    def saving(table: Any) -> None:
        try:
            for _ in range(15):
                save(table.store, tmp_path)
        except BaseException as error:
            errors.append(error)

    def loading() -> None:
        try:
            for _ in range(15):
                other = one_table(dim=2, shards=3)
                load(other.store, tmp_path)
                sizes.add(len(other.store))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=saving, args=(t,)) for t in [*tables, tables[0]]]
    threads.append(threading.Thread(target=loading))
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    assert not errors
    assert sizes <= {100, 200}
    assert len(list(tmp_path.iterdir())) == 4


def test_a_row_written_2_to_the_24_times_is_still_seen_to_change(
    one_table: Any, tmp_path: Path
) -> None:
    """Its count has 24 bits; a prefetched copy must be replaced, and staleness counted, beyond."""
    sgd = RowOptimizer(kind="sgd", lr=1.0)
    source = one_table(dim=2, optimizer=sgd)
    source.push(source.look_up([7]))
    state = source.store.snapshots(only_changed=False, track=False)[0]["rows"]
    state["words"] = (state["words"] & ~np.uint32(2**24 - 1)) | np.uint32(2**24 - 3)
    table = one_table(dim=2, optimizer=sgd)
    table.store.restore("rows", [state])
    for step in range(6):
        ahead = table.look_up([7], step, create=False)
        early = table.look_up([7], step)
        for _ in range(2):
            table.push(table.look_up([7], step))
        replaced = table.store.rows_replaced
        table.store.refresh(ahead, 0)
        assert table.store.rows_replaced == replaced + 1
        np.testing.assert_array_equal(ahead.values["rows"], table.values([7]))
        before = table.store.row_staleness.copy()
        table.push(early)
        missed = np.flatnonzero(table.store.row_staleness - before)
        assert missed.tolist() == [2]
