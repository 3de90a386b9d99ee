"""16-bit storage: exact where it can be, unbiased where it rounds, the same bytes everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.embedding.config import RowOptimizer
from runtime.embedding.native.extension import native

SGD = RowOptimizer(kind="sgd", lr=1.0)
STEP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit of the last place of 1.0


def constant(one_table: Any, storage: Any, value: float, ids: int) -> Any:
    return one_table(
        dim=8, storage=storage, optimizer=SGD, initial="constant", initial_scale=value
    ), np.arange(ids)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 2.0**-14, 2.0**-20, 192.0])
def test_values_that_fit_are_kept_exactly(one_table, storage, value):
    table, ids = constant(one_table, storage, value, 100)
    assert (table.look_up(ids).values["rows"] == value).all()


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_rounding_is_to_a_neighbour_and_right_on_average(one_table, storage):
    unit = 2 * STEP[storage]
    table, ids = constant(one_table, storage, 1.0 + 0.3 * unit, 20_000)
    found = table.values(ids)
    assert set(np.unique(found)) == {np.float32(1.0), np.float32(1.0 + unit)}
    assert (found > 1).mean() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_steps_below_the_resolution_add_up(one_table, storage):
    table, ids = constant(one_table, storage, 1.0, 2000)
    gradient = STEP[storage] / 8
    for step in range(64):
        table.push(table.look_up(ids, step), gradient)
    assert table.values(ids).mean() == pytest.approx(1.0 - 64 * gradient, abs=STEP[storage] / 20)


def test_subnormals_are_unbiased_and_overflow_saturates(one_table):
    table, ids = constant(one_table, "float16", 0.25 * 2.0**-24, 20_000)
    assert table.values(ids).mean() == pytest.approx(0.25 * 2.0**-24, rel=0.05)
    table, ids = constant(one_table, "float16", 6e4, 10)
    table.push(table.look_up(ids, 0), -1e4)
    assert (table.values(ids) == 65504).all()


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.law6
def test_every_kernel_set_gives_the_same_bytes(one_table, storage):
    widest = native.kernel_set()
    results = []
    for name in ("scalar", "avx2", "avx512"):
        try:
            native.choose_kernel_set(name)
        except ValueError:
            continue
        table = one_table(dim=24, storage=storage, optimizer=RowOptimizer(kind="adagrad", lr=0.01))
        for step in range(5):
            table.push(table.look_up(np.arange(50), step), 0.1 * (step - 2))
        results.append(table.values(np.arange(50)).tobytes())
    native.choose_kernel_set(widest)
    assert len(set(results)) == 1


def test_values_take_half_the_memory(one_table):
    sizes = []
    for storage in ("dtype", "float16"):
        table = one_table(dim=64, storage=storage, optimizer=SGD)
        table.look_up(np.arange(10_000))
        sizes.append(table.store.resident_bytes)
    assert sizes[0] - sizes[1] == 10_000 * 64 * 2
