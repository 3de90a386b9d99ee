"""A gradient whose row is not there is dropped and counted, and touches no other row."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.embedding.config import Admission, Capacity, RowOptimizer

SGD = RowOptimizer(kind="sgd", lr=1.0)


def dropped(table) -> dict[str, int]:
    counters = table.store.counters
    return {why: counters[f"gradients_{why}"] for why in ("not_admitted", "evicted")}


@pytest.mark.law9
def test_gradient_of_an_evicted_row_never_shifts_onto_another_row(one_table):
    table = one_table(dim=4, optimizer=SGD, capacity=Capacity(rows=4))
    handle = table.look_up([10, 11, 12, 13])
    late = table.look_up([20, 21], step=1)  # takes the slots of two of them
    gone = {10, 11, 12, 13} - table.resident()
    assert len(gone) == 2
    before = table.values([10, 11, 12, 13, 20, 21])
    table.push(handle, np.array([[1.0], [2.0], [3.0], [4.0]], np.float32))
    moved = before - table.values([10, 11, 12, 13, 20, 21])
    expected = [0.0 if i in gone else float(i - 9) for i in (10, 11, 12, 13)] + [0.0, 0.0]
    np.testing.assert_allclose(moved[:, 0], expected, atol=1e-6)
    assert dropped(table) == {"not_admitted": 0, "evicted": 2}
    table.push(late)
    assert dropped(table)["evicted"] == 2


def test_gradient_of_a_row_not_admitted_never_shifts_onto_another_row(one_table):
    table = one_table(dim=4, optimizer=SGD, admission=Admission(probability=0.5))
    ids = np.arange(64)
    handle = table.look_up(ids)
    admitted = np.isin(ids, list(table.resident()))
    assert 10 < admitted.sum() < 54
    before = table.values(ids)
    table.push(handle, (1.0 + ids)[:, None].astype(np.float32))
    moved = (before - table.values(ids))[:, 0]
    np.testing.assert_allclose(moved, np.where(admitted, 1.0 + ids, 0.0), atol=1e-5)
    assert dropped(table)["not_admitted"] == 64 - admitted.sum()


def test_a_row_that_was_evicted_and_created_again_takes_no_old_gradient(one_table):
    table = one_table(dim=2, optimizer=SGD, capacity=Capacity(rows=1))
    first = table.look_up([7])
    table.look_up([8], step=1)
    again = table.look_up([7], step=2)
    table.push(first)
    assert dropped(table)["evicted"] == 1
    np.testing.assert_array_equal(table.values([7]), again.values["rows"])


@pytest.mark.parametrize("others", [1, 63, 127, 64 * 5 - 1, 62, 64])
@pytest.mark.parametrize(
    "capacity",
    [Capacity(rows=1), Capacity(expire_after_steps=1)],
)
@pytest.mark.law2
def test_whatever_number_of_rows_came_between_an_old_gradient_is_dropped(
    one_table, others, capacity
):
    """So is a copy that was read ahead replaced: law 2, where a row goes and comes back."""
    table = one_table(dim=2, optimizer=SGD, capacity=capacity)
    far = 10 if capacity.expire_after_steps else 1  # each row has expired when the next one comes
    first = table.look_up([7])
    table.push(table.look_up([7]))
    table.push(table.look_up([7], step=1, create=False))  # the count of writes of a row anew
    ahead = table.look_up([7], step=1, create=False)
    for step in range(1, others + 1):
        table.look_up([1000 + step], step * far)
    again = table.look_up([7], (others + 1) * far)
    for _ in range(2):
        table.push(table.look_up([7], (others + 1) * far), 10.0)
    trained = table.values([7])
    table.store.servers[0].refresh(ahead)
    np.testing.assert_array_equal(ahead.values["rows"], trained)
    table.push(first)
    assert dropped(table)["evicted"] == 1
    np.testing.assert_array_equal(table.values([7]), trained)
    assert not np.array_equal(trained, again.values["rows"])


def test_merged_push_drops_only_the_missing_part(one_table):
    table = one_table(dim=2, optimizer=SGD, capacity=Capacity(rows=2))
    old = table.look_up([1, 2])
    new = table.look_up([2, 3], step=1)  # evicts 1
    start = table.values([1, 2, 3])
    ones = {"rows": np.ones((2, 2), np.float32)}
    table.store.servers[0].apply([(old, ones), (new, ones)], merged=True)
    moved = (start - table.values([1, 2, 3]))[:, 0]
    np.testing.assert_allclose(moved, [0.0, 2.0, 1.0], atol=1e-6)
    assert dropped(table) == {"not_admitted": 0, "evicted": 1}


def test_a_row_that_left_and_came_back_after_a_prefetch_takes_the_gradient(one_table):
    """Its values and its count are as they were, but it lies elsewhere: the handle must know."""
    table = one_table(dim=2, optimizer=SGD, capacity=Capacity(rows=2))
    table.look_up([7])
    ahead = table.look_up([7], step=3, create=False)
    table.look_up([8, 9], step=1)
    table.look_up([7], step=2)
    table.store.servers[0].refresh(ahead)
    before = table.values([7])
    table.push(ahead, 1.0)
    np.testing.assert_allclose(before - table.values([7]), 1.0, atol=1e-6)
    assert dropped(table)["evicted"] == 0
