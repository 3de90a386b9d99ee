"""Hash stacks and feature groups: which rows an id is made of, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import tag
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import HashStack, RowOptimizer, TableConfig
from runtime.embedding.native.plan import Pooling
from runtime.embedding.native.store import NativeStore
from tests.oracles.reference.initial import stacked

SGD = RowOptimizer(kind="sgd", lr=1.0)


def make(fields: list[Field], **config: Any) -> tuple[Any, Any]:
    store = NativeStore(Layout(fields=tuple(fields)), [TableConfig(dim=4, **config)], shards=2)
    return store, Pooling(fields, {"rows": 4})


def look_up(store: Any, batch: Batch) -> Any:
    handle = store.begin(0, 0, batch)
    for shard in range(store.shards):
        store.servers[shard].read(handle)
    return handle


def bags(ids: np.ndarray, lengths: list[int], size: int) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Batch(ids, offsets, np.zeros((size, 0)), np.zeros((size, 1)))


@pytest.mark.parametrize("pooling", ["sum", "mean", "sequence"])
def test_a_stacked_id_is_the_sum_of_its_rows(pooling):
    stack = HashStack(rounds=3, rows_per_round=5)
    field = Field(name="a", pooling=pooling, max_length=2)
    store, pool = make([field], optimizer=SGD, hash_stack=stack)
    ids = tag(0, np.array([4, 9, 9, 77, 5], np.uint64))
    batch = bags(ids, [2, 0, 3], 3)
    handle = look_up(store, batch)
    assert len(store) <= 15
    rows = dict(zip(*store.export()["rows"][:2], strict=True))
    vector = {int(i): sum(rows[r] for r in stacked(np.array([i]), stack)) for i in ids}
    out = pool.forward(batch, handle.plans, handle.values)
    gradients = FieldVectors(
        np.ones_like(out.pooled), {n: np.ones_like(a) for n, a in out.sequences.items()}, {}
    )
    if pooling == "sequence":
        found, kept = out.sequences["a"], [2, 0, 2]
        expected = np.zeros((3, 2, 4))
        expected[0] = [vector[int(ids[0])], vector[int(ids[1])]]
        expected[2] = [vector[int(ids[2])], vector[int(ids[3])]]
        weight = {0: 1.0, 2: 1.0}
    else:
        found, kept = out.pooled, [2, 0, 3]
        weight = {0: 0.5, 2: 1 / 3} if pooling == "mean" else {0: 1.0, 2: 1.0}
        expected = np.zeros((3, 4))
        for sample in (0, 2):
            start = int(batch.offsets[sample])
            parts = [vector[int(i)] for i in ids[start : start + kept[sample]]]
            expected[sample] = weight[sample] * sum(parts)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    total = pool.backward(batch, handle.plans, gradients)["rows"]
    assert total.sum() == pytest.approx(4 * 3 * sum(weight[s] * kept[s] for s in (0, 2)))


def test_rows_of_different_rounds_and_fields_are_apart():
    stack = HashStack(rounds=2, rows_per_round=8)
    ids = np.arange(1000, dtype=np.uint64)
    first, second = (stacked(tag(f, ids), stack).reshape(-1, 2) for f in (0, 1))
    assert set(np.unique(first)) == set(range(16))
    assert (first[:, 0] < 8).all()
    assert (first[:, 1] >= 8).all()
    assert not set(first.ravel()) & set(second.ravel())


@pytest.mark.parametrize("share", [True, False])
def test_a_feature_group_shares_rows_between_fields(share):
    fields = [Field(name="seen"), Field(name="bought")]
    store, pool = make(fields, optimizer=SGD, share_rows=share)
    ids = np.array([int(tag(f, np.array([7], np.uint64))[0]) for f in (0, 1)], np.uint64)
    batch = Batch(ids, None, np.zeros((1, 0)), np.zeros((1, 1)))
    handle = look_up(store, batch)
    assert len(store) == (1 if share else 2)
    out = pool.forward(batch, handle.plans, handle.values)
    assert (out.pooled[0, :4] == out.pooled[0, 4:]).all() == share
    totals = pool.backward(batch, handle.plans, FieldVectors(np.ones((1, 8), np.float32), {}, {}))
    assert totals["rows"].max() == (2 if share else 1)
