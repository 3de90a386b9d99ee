"""Admission and expiry against models of a few lines that know no index and no slab."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.embedding.config import Admission, Capacity, RowOptimizer
from tests.oracles.reference.initial import table_key
from tests.runtime.embedding.conftest import OneTable

SGD = RowOptimizer(kind="sgd", lr=1.0)
ZERO = {"initial": "constant", "initial_scale": 0.0}
MASK = 2**64 - 1
SALT = 0x61646D6974


def mix(z: int) -> int:
    """The finaliser of splitmix64, in whole numbers."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def ids_of(rng: np.random.Generator, most: int, count: int) -> list[int]:
    chosen: list[int] = rng.choice(most, count, replace=False).tolist()
    return chosen


def admitted(key: int, one: int, step: int, p: float) -> bool:
    bits = mix(mix(one ^ key) + (step + 1) * 0x9E3779B97F4A7C15 & MASK)
    return (bits >> 11) * 2.0**-53 < p


@given(seed=st.integers(0, 10**6), shards=st.sampled_from([1, 3]), p=st.floats(0.01, 1))
@settings(max_examples=25, deadline=None)
def test_a_draw_is_a_function_of_seed_table_id_and_step(seed, shards, p):
    rng = np.random.default_rng(seed)
    admission = Admission(probability=p)
    table = OneTable(dim=1, shards=shards, seed=seed, admission=admission)
    key = table_key(seed, "rows") ^ SALT
    resident: set[int] = set()
    for step in range(8):
        ids = ids_of(rng, 100, 30)
        table.look_up(ids, step)
        for one in ids:
            if admitted(key, one, step, p):
                resident.add(one)
        assert table.resident() == resident


def test_refused_id_reads_as_its_initial_value():
    table = OneTable(dim=4, admission=Admission(probability=1e-9))
    read = table.look_up([1, 2, 3]).values["rows"]
    np.testing.assert_array_equal(read, OneTable(dim=4).look_up([1, 2, 3]).values["rows"])
    assert table.store.counters["not_admitted"] == 3


class Expiring:
    """Ids in the order of use, each with its last step, number of pushes and birth."""

    def __init__(self, most: int, after: int) -> None:
        self.rows: OrderedDict[int, list[int]] = OrderedDict()
        self.most, self.after = most, after
        self.births = self.latest = 0

    def forget(self) -> None:
        last = self.latest - self.after
        self.rows = OrderedDict((i, row) for i, row in self.rows.items() if row[0] >= last)

    def use(self, one: int, step: int) -> tuple[int, int]:
        self.latest = max(self.latest, step)
        self.forget()
        if one not in self.rows:
            if len(self.rows) == self.most:
                self.rows.popitem(last=False)
            self.births += 1
            self.rows[one] = [0, 0, self.births]
        self.rows[one][0] = self.latest
        self.rows.move_to_end(one)
        return self.rows[one][1], self.rows[one][2]


@given(seed=st.integers(0, 10**6), after=st.integers(1, 6), most=st.sampled_from([None, 6, 14]))
@settings(max_examples=25, deadline=None)
def test_rows_expire_and_start_afresh_as_in_a_list_of_last_uses(seed, after, most):
    """Steps jump ahead and lag behind; pushes come late; a row is worth its number of pushes."""
    rng = np.random.default_rng(seed)
    capacity = Capacity(rows=most, expire_after_steps=after)
    table = OneTable(dim=2, optimizer=SGD, capacity=capacity, **ZERO)
    model = Expiring(most or 10**9, after)
    flying: list[tuple[Any, list[tuple[int, int]]]] = []
    step = 0
    for _ in range(40):
        step += int(rng.integers(0, 3))
        ids = ids_of(rng, 20, 5)
        late = max(0, step - int(rng.integers(0, 2)))
        handle = table.look_up(ids, late)
        seen = []
        for place, one in enumerate(ids):
            pushes, birth = model.use(one, late)
            assert handle.values["rows"][place].tolist() == [pushes, pushes]
            seen.append((one, birth))
        flying.append((handle, seen))
        if rng.random() < 0.7:
            handle, seen = flying.pop(int(rng.integers(len(flying))))
            table.push(handle, -1.0)
            for one, birth in seen:
                if one in model.rows and model.rows[one][2] == birth:
                    model.rows[one][1] += 1
        assert table.resident() == set(model.rows)
        expected = [model.rows[i][1] if i in model.rows else 0 for i in range(20)]
        assert table.values(np.arange(20))[:, 0].tolist() == expected


@given(seed=st.integers(0, 10**6), shards=st.sampled_from([1, 3]), after=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_an_expired_row_must_be_admitted_again(seed, shards, after):
    """Whether its memory has been swept or not: then the number of shards cannot be seen."""
    rng = np.random.default_rng(seed)
    config = {
        "admission": Admission(probability=0.4),
        "capacity": Capacity(expire_after_steps=after),
    }
    table = OneTable(dim=1, shards=shards, seed=seed, **config)
    key = table_key(seed, "rows") ^ SALT
    last: dict[int, int] = {}
    for step in range(30):
        ids = ids_of(rng, 40, 6)
        table.look_up(ids, step)
        last = {one: at for one, at in last.items() if at >= step - after}
        for one in ids:
            if one in last or admitted(key, one, step, 0.4):
                last[one] = step
    table.look_up(np.arange(1000, 1200), 29)  # every shard has seen the last step
    assert {one for one in table.resident() if one < 1000} == set(last)


def test_evaluation_and_reading_ahead_are_no_uses():
    table = OneTable(dim=1, capacity=Capacity(rows=3))
    table.look_up([0, 1, 2])
    table.look_up([3], 1)
    oldest = 1
    table.values([oldest])
    table.look_up([oldest], 2, create=False)
    table.look_up([4], 3)
    assert oldest not in table.resident()


def test_reading_ahead_is_no_step_that_lets_rows_expire():
    table = OneTable(dim=1, capacity=Capacity(expire_after_steps=5))
    table.look_up([1], step=0)
    table.look_up([2], step=50, create=False)
    table.values([3])
    assert table.resident() == {1}
    table.look_up([2], step=5)
    assert table.resident() == {1, 2}
    table.look_up([2], step=6)
    assert table.resident() == {2}
