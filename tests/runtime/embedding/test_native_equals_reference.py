"""The native engine gives the bytes of the reference, whatever the batches, tables and shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.plan import Pooling as NativePooling
from runtime.embedding.native.store import NativeStore
from tests.oracles.reference.pooling import Pooling
from tests.oracles.reference.store import ReferenceStore

ENGINES: dict[str, Any] = {
    "native": (NativeStore, NativePooling),
    "reference": (ReferenceStore, Pooling),
}

OPTIMIZERS = [
    RowOptimizer(kind="sgd"),
    RowOptimizer(kind="adagrad", initial_accumulator=0.01),
    RowOptimizer(kind="rowwise_adagrad"),
    RowOptimizer(kind="adam"),
]
LAYOUTS = {
    "one_table": Layout(fields=(Field(name="a"), Field(name="b", pooling="mean"))),
    "weights": Layout(
        fields=(Field(name="a", pooling="sqrtn"), Field(name="b"), Field(name="c", pooling="mean"))
    ),
    "two_tables": Layout(
        fields=(Field(name="a", table="x"), Field(name="b", table="y"), Field(name="c", table="x"))
    ),
    "sequence": Layout(
        fields=(
            Field(name="a"),
            Field(name="s", pooling="sequence", max_length=3),
            Field(name="b", table="y", pooling="mean"),
        )
    ),
}


def make_batch(rng: np.random.Generator, layout: Layout, size: int, one_id: bool) -> Batch:
    fields = len(layout.fields)
    lengths = np.ones(size * fields, int) if one_id else rng.integers(0, 5, size * fields)
    field = np.repeat(np.tile(np.arange(fields), size), lengths).astype(np.uint64)
    ids = (field << np.uint64(56)) | rng.integers(0, 30, lengths.sum()).astype(np.uint64)
    offsets = None if one_id else np.concatenate([[0], np.cumsum(lengths)])
    return Batch(ids, offsets, np.zeros((size, 0), np.float32), np.zeros((size, 1), np.float32))


def random_like(rng: np.random.Generator, vectors: FieldVectors) -> FieldVectors:
    def noise(array: np.ndarray) -> np.ndarray:
        return rng.standard_normal(array.shape).astype(array.dtype)

    return FieldVectors(
        noise(vectors.pooled), {n: noise(a) for n, a in vectors.sequences.items()}, {}
    )


def train(engine: Any, layout: Layout, config: dict[str, Any], seed: int, one_id: bool) -> bytes:
    """Merged steps of two ranks, single pushes, a stale push, a prefetch and an evaluation."""
    rng = np.random.default_rng(seed)
    tables = [TableConfig(name=n, **config) for n in sorted({f.table for f in layout.fields})]
    open_rows, pooling_of = ENGINES[engine]
    store = open_rows(layout, tables, shards=3, seed=seed)
    pooling = pooling_of(layout.fields, {t.name: t.dim for t in tables})
    seen: list[np.ndarray] = []

    def look_up(rank: int, step: int, create: bool = True) -> Any:
        handle = store.begin(rank, step, make_batch(rng, layout, 7, one_id))
        for shard in range(store.shards):
            store.servers[shard].read(handle, create=create)
        return handle

    def gradients(handle: Any) -> Any:
        vectors = pooling.forward(handle.batch, handle.plans, handle.values)
        seen.extend([vectors.pooled, *vectors.sequences.values(), *vectors.masks.values()])
        noise = random_like(rng, vectors)
        return pooling.backward(handle.batch, handle.plans, noise)

    old = look_up(0, 0)
    for step in range(3):
        handles = [look_up(rank, step) for rank in range(2)]
        ahead = look_up(0, step + 1, create=False)
        pushes = [(h, gradients(h)) for h in handles]
        for shard in range(store.shards):
            store.servers[shard].apply(pushes, merged=True)
            store.servers[shard].refresh(ahead)
        single = gradients(ahead)
        for shard in range(store.shards):
            store.servers[shard].apply([(ahead, single)])
    stale = gradients(old)
    for shard in range(store.shards):
        store.servers[shard].apply([(old, stale)])
    size = len(store)
    peeked = store.peek(make_batch(rng, layout, 5, one_id))
    seen.append(pooling.forward(peeked.batch, peeked.plans, peeked.values).pooled)
    assert len(store) == size
    seen += [a for columns in store.export().values() for a in columns]
    seen += [
        store.row_staleness,
        np.array([sum(s["rows_replaced"] for s in store.statuses()), len(store)]),
    ]
    return b"".join(f"{a.dtype.kind}{a.shape}".encode() + a.tobytes() for a in seen)


@settings(max_examples=100, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    optimizer=st.sampled_from(OPTIMIZERS),
    dim=st.sampled_from([1, 3, 4, 8, 16, 24, 32, 64, 128, 130]),
    dtype=st.sampled_from(["float32", "float64"]),
    scale=st.sampled_from([0.0, 0.01, 0.5]),
    one_id=st.booleans(),
    kernels=st.sampled_from(["scalar", "avx2", "avx512"]),
    seed=st.integers(0, 2**32),
)
@pytest.mark.law6
def test_native_engine_gives_the_bytes_of_the_reference(
    layout, optimizer, dim, dtype, scale, one_id, kernels, seed
):
    widest = native.kernel_set()
    config = {"dim": dim, "dtype": dtype, "optimizer": optimizer, "initial_scale": scale}
    try:
        native.choose_kernel_set(kernels)
    except ValueError:
        pytest.skip(f"no {kernels} here")
    try:
        found = train("native", LAYOUTS[layout], config, seed, one_id)
    finally:
        native.choose_kernel_set(widest)
    assert found == train("reference", LAYOUTS[layout], config, seed, one_id)
