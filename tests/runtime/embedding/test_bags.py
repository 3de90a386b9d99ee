"""Bags of any length: sums, means and roots against loops over the ids, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.data.batch import Batch, Field
from runtime.embedding.batch_rows import BatchPlan, ByTable, FieldVectors, TablePlan
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.plan import Planner
from runtime.embedding.native.plan import Pooling as NativePooling
from tests.oracles.reference.pooling import Pooling
from tests.oracles.reference.store import side_by_side

POOLINGS = [NativePooling, Pooling]

LENGTHS = [0, 1, 2, 9, 10, 11, 16, 17, 31, 63, 64, 65, 66, 130, 257]
WEIGHTS = {"sum": lambda n: 1.0, "mean": lambda n: 1.0 / n, "sqrtn": lambda n: n**-0.5}


def rows_of(plan: BatchPlan, rows: dict[str, np.ndarray]) -> ByTable:
    return ByTable(np.concatenate([rows[name].ravel() for name in plan]), plan, wide=True)


def random_bags(
    rng: np.random.Generator, fields: list[Field], samples: int, dim: int
) -> tuple[Batch, BatchPlan, list[list[np.ndarray]]]:
    """A batch, its plans, and per sample and field the numbers of distinct rows.

    No row belongs to two fields, so that its sum has one order in both engines.
    """
    tables = list(dict.fromkeys(f.table for f in fields))
    bags = [
        [rng.integers(50 * f, 50 * f + 50, rng.choice(LENGTHS)) for f in range(len(fields))]
        for _ in range(samples)
    ]
    count = 50 * len(fields)
    lengths = [len(bag) for sample in bags for bag in sample]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.concatenate([bag for sample in bags for bag in sample])
    table_of = np.repeat(np.tile([tables.index(f.table) for f in fields], samples), lengths)
    plans = {}
    for number, table in enumerate(tables):
        where: Any = np.flatnonzero(table_of == number) if len(tables) > 1 else slice(None)
        distinct = np.arange(count, dtype=np.uint64)
        plans[table] = TablePlan(
            distinct, np.array([0, count]), flat[where].astype(np.int32), where
        )
    batch = Batch(flat.astype(np.uint64), offsets, np.zeros((samples, 0)), np.zeros((samples, 1)))
    return batch, side_by_side(plans, dict.fromkeys(plans, dim)), bags


@pytest.mark.parametrize("pooling_of", POOLINGS, ids=["native", "reference"])
@pytest.mark.parametrize("dim", [1, 5, 8, 128])
@pytest.mark.parametrize("tables", [1, 2])
def test_long_bags_pool_and_scatter_as_loops_do(pooling_of, dim, tables):
    rng = np.random.default_rng(dim + tables)
    fields = [Field(name=p, pooling=p, table=f"t{n % tables}") for n, p in enumerate(WEIGHTS)]
    batch, plans, bags = random_bags(rng, fields, 40, dim)
    rows = {t: rng.standard_normal((150, dim)).astype(np.float32) for t in plans}
    pooling = pooling_of(fields, dict.fromkeys(plans, dim))
    out = pooling.forward(batch, plans, rows_of(plans, rows)).pooled
    gradient = rng.standard_normal(out.shape).astype(np.float32)
    found = pooling.backward(batch, plans, FieldVectors(gradient, {}, {}))

    expected = np.zeros(out.shape)
    sums = {t: np.zeros((150, dim)) for t in plans}
    for b, sample in enumerate(bags):
        for f, (bag, field) in enumerate(zip(sample, fields, strict=True)):
            if len(bag):
                weight, columns = WEIGHTS[field.pooling](len(bag)), slice(f * dim, (f + 1) * dim)
                expected[b, columns] = weight * rows[field.table][bag].astype(np.float64).sum(0)
                for one in bag:
                    sums[field.table][one] += weight * gradient[b, columns].astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)
    for table in plans:
        np.testing.assert_allclose(found[table], sums[table], rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize(("threads", "apart"), [(1, False), (3, False), (1, True), (3, True)])
def test_long_bags_give_the_bytes_of_the_reference(dtype, tables, threads, apart):
    """700 samples, so that three threads share the forward pass. The way back they share by rows,
    or by fields where these are known to have no row in common."""
    rng = np.random.default_rng(7)
    fields = [Field(name=p, pooling=p, table=f"t{n % tables}") for n, p in enumerate(WEIGHTS)]
    batch, plans, _ = random_bags(rng, fields, 700, 8)
    plans = replace(plans, apart=(apart,) * tables)
    rows = {t: rng.standard_normal((150, 8)).astype(dtype) for t in plans}
    native.set_threads(threads)
    try:
        results = []
        for pooling_of in POOLINGS:
            pooling = pooling_of(fields, dict.fromkeys(plans, 8))
            out = pooling.forward(batch, plans, rows_of(plans, rows)).pooled
            back = pooling.backward(batch, plans, FieldVectors(out, {}, {}))
            results.append([out.tobytes(), *(back[t].tobytes() for t in plans)])
    finally:
        native.set_threads(1)
    assert results[0] == results[1]


def test_a_long_sequence_keeps_its_first_ids_and_no_gradient_reaches_the_others():
    field = Field(name="s", pooling="sequence", max_length=70)
    ids = np.arange(100, dtype=np.uint64)
    plan = TablePlan(ids, np.array([0, 100]), np.arange(100, dtype=np.int32), slice(None))
    plans = side_by_side({"rows": plan}, {"rows": 3})
    batch = Batch(ids, np.array([0, 100]), np.zeros((1, 0)), np.zeros((1, 1)))
    rows = np.arange(300, dtype=np.float32).reshape(100, 3)
    for pooling_of in POOLINGS:
        pooling = pooling_of([field], {"rows": 3})
        out = pooling.forward(batch, plans, rows_of(plans, {"rows": rows}))
        np.testing.assert_array_equal(out.sequences["s"][0], rows[:70])
        assert out.masks["s"].all()
        ones = FieldVectors(out.pooled, {"s": np.ones((1, 70, 3), np.float32)}, {})
        back = pooling.backward(batch, plans, ones)["rows"]
        np.testing.assert_array_equal(
            back, np.repeat([[1.0], [0.0]], [70, 30], axis=0) * np.ones(3)
        )


@pytest.mark.parametrize("of", [{"a"}, {"b"}, {"a", "b"}])
def test_vectors_of_some_tables_are_those_of_all_without_the_others(of):
    """Nothing of another field is made, not even an array without numbers, which would travel."""
    fields = [
        Field(name="first", pooling="mean", table="a"),
        Field(name="list", pooling="sequence", max_length=3, table="a"),
        Field(name="second", pooling="sum", table="b"),
        Field(name="path", pooling="sequence", max_length=2, table="b"),
    ]
    dims = {"a": 4, "b": 3}
    rng = np.random.default_rng(3)
    batch, _, _ = random_bags(rng, fields, 9, 4)
    tables = [TableConfig(name=table, dim=dim) for table, dim in dims.items()]
    plan = Planner(fields, tables, shards=1).plan(batch)
    values = ByTable(rng.standard_normal(plan.elements()).astype(np.float32), plan, wide=True)
    every = NativePooling(fields, dims).forward(batch, plan, values)
    some = NativePooling(fields, dims, of).forward(batch, plan, values)
    columns = np.repeat(["a", "b"], [4, 3])
    np.testing.assert_array_equal(some.pooled, every.pooled[:, np.isin(columns, list(of))])
    wanted = {name for name, table in (("list", "a"), ("path", "b")) if table in of}
    assert some.sequences.keys() == some.masks.keys() == wanted
    for name in wanted:
        np.testing.assert_array_equal(some.sequences[name], every.sequences[name])
        np.testing.assert_array_equal(some.masks[name], every.masks[name])
