"""A full table keeps what its policy says, in the memory it was given."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from runtime.embedding.config import Capacity, RowOptimizer
from tests.runtime.embedding.conftest import OneTable

IDS = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


class LruModel(RuleBasedStateMachine):
    """The native table against a dictionary: what is resident, its values, what was dropped."""

    @initialize(capacity=st.integers(1, 20))
    def start(self, capacity: int) -> None:
        sgd = RowOptimizer(kind="sgd", lr=0.5)
        self.table = OneTable(dim=3, optimizer=sgd, capacity=Capacity(rows=capacity))
        self.capacity = capacity
        self.rows: OrderedDict[int, tuple[int, np.ndarray]] = OrderedDict()
        self.births = 0
        self.dropped = 0
        self.flying: list[tuple[Any, list[tuple[int, int]]]] = []

    @rule(ids=IDS)
    def train(self, ids: list[int]) -> None:
        handle = self.table.look_up(ids)
        seen = []
        for place, one in enumerate(ids):
            self.use(one)
            seen.append((one, self.rows[one][0]))
            np.testing.assert_array_equal(handle.values["rows"][place], self.rows[one][1])
        self.flying.append((handle, seen))

    @rule(ids=IDS)
    def read_ahead_and_refresh(self, ids: list[int]) -> None:
        handle = self.table.look_up(ids, create=False)
        self.train(ids[::-1])
        self.table.store.servers[0].refresh(handle)
        for place, one in enumerate(ids):
            self.use(one)
            np.testing.assert_array_equal(handle.values["rows"][place], self.rows[one][1])

    @rule(which=st.integers(0, 100))
    def push(self, which: int) -> None:
        if not self.flying:
            return
        handle, seen = self.flying.pop(which % len(self.flying))
        self.table.push(handle, 1.0)
        for one, birth in seen:
            if one in self.rows and self.rows[one][0] == birth:
                self.rows[one] = birth, self.rows[one][1] - np.float32(0.5)
            else:
                self.dropped += 1
        assert self.table.store.counters["gradients_evicted"] == self.dropped

    @rule(ids=IDS)
    def evaluate(self, ids: list[int]) -> None:
        found = self.table.values(ids)
        for place, one in enumerate(ids):
            expected = self.rows[one][1] if one in self.rows else self.initial(one)
            np.testing.assert_array_equal(found[place], expected)
        assert self.table.resident() == set(self.rows)

    def use(self, one: int) -> None:
        if one not in self.rows:
            if len(self.rows) == self.capacity:
                self.rows.popitem(last=False)
            self.births += 1
            self.rows[one] = self.births, self.initial(one)
        self.rows.move_to_end(one)

    def initial(self, one: int) -> np.ndarray:
        values: np.ndarray = OneTable(dim=3).values([one])[0]
        return values


TestLruEqualsADictionary = LruModel.TestCase
TestLruEqualsADictionary.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_rows_expire_by_age_and_their_memory_is_used_again(one_table):
    table = one_table(dim=2, capacity=Capacity(expire_after_steps=3))
    empty_bytes = table.store.resident_bytes
    table.push(table.look_up([1, 2], step=0))
    trained = table.values([1, 2])
    table.look_up([2], step=2)
    table.look_up([3], step=4)
    found = table.values([1, 2])
    np.testing.assert_array_equal(found[1], trained[1])
    np.testing.assert_array_equal(found[0], one_table(dim=2).values([1])[0])
    for step in range(5, 500):
        table.look_up([1000 + step], step)
    assert table.store.resident_bytes - empty_bytes < 20 * 32
    assert len(table.store) == 4 and table.store.counters["expired"] == 498 - 4


def test_a_row_that_has_expired_counts_as_gone_also_before_it_is_swept(one_table):
    table = one_table(dim=2, capacity=Capacity(expire_after_steps=3))
    early = table.look_up([1, 2], step=0)
    table.look_up([2], step=2)
    table.look_up([2], step=4)  # creates no row, so none is swept
    assert (len(table.store), table.store.counters["expired"]) == (1, 1)
    table.push(early)
    assert table.store.counters["gradients_evicted"] == 1


def test_overhead_per_row_is_what_the_words_say(one_table):
    rows = 100_000
    table = one_table(
        dim=16,
        optimizer=RowOptimizer(kind="adagrad"),
        capacity=Capacity(rows=rows),
    )
    for start in range(0, 2 * rows, 10_000):
        table.look_up(np.arange(start, start + 10_000))
    assert len(table.store) == rows
    assert table.store.resident_bytes / rows - 128 <= 36


def stream_through(virtual_ids: int, budget_bytes: int, distinct: int) -> tuple[Any, int, int]:
    """Stream ids of a huge table through a byte budget; resident size at 1/4 and at the end."""
    table = OneTable(
        dim=16,
        optimizer=RowOptimizer(kind="adagrad"),
        capacity=Capacity(rows=budget_bytes // (16 * 8 + 35)),
    )
    block = 1 << 18
    stride = 6_364_136_223  # coprime to the number of ids: every id at most once
    sizes = []
    for number, start in enumerate(range(0, distinct, block)):
        ids = (np.arange(start, start + block, dtype=np.uint64) * np.uint64(stride)) % np.uint64(
            virtual_ids
        )
        table.look_up(ids, number)
        sizes.append(resident_kib())
    return table, sizes[len(sizes) // 4], sizes[-1]


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_ten_billion_virtual_ids_stream_through_a_small_budget():
    before = resident_kib()
    table, early, late = stream_through(10_000_000_000, 64 << 20, 4_000_000)
    assert table.store.resident_bytes <= 64 << 20
    assert late - early < 4096
    assert late - before < (64 << 10) + (96 << 10)  # the batch's own arrays stand beside the budget
    assert table.store.counters["evicted"] > 3_000_000
