"""Opening a store: it answers as the reference, and what is missing is said clearly."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.batch_rows import FieldVectors, VectorGradients
from runtime.embedding.config import Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import NativeStore, use_threads
from runtime.embedding.worker import EmbeddingWorker
from tests.oracles.reference.pooling import Pooling
from tests.oracles.reference.store import ReferenceStore

LAYOUT = Layout(fields=(Field(name="a"), Field(name="b", pooling="mean")))


def test_two_calls_make_a_step_as_in_the_reference(monkeypatch):
    results = []
    for store in (
        NativeStore(LAYOUT, [TableConfig(dim=4)], shards=2),
        ReferenceStore(LAYOUT, [TableConfig(dim=4)], shards=2),
    ):
        worker = EmbeddingWorker(store)
        monkeypatch.setattr("runtime.embedding.worker.Pooling", Pooling)  # of the second
        for step in range(3):
            ids = np.arange(step, step + 6, dtype=np.uint64)
            offsets = np.array([0, 1, 3, 3, 6])
            batch = Batch(ids, offsets, np.zeros((2, 0)), np.zeros((2, 1)))
            handle = worker.store.begin(0, step, batch)
            store.look_up(handle)
            vectors = worker.pool(handle)
            slopes = FieldVectors(np.ones_like(vectors.pooled), {}, {})
            worker.give_back(handle, VectorGradients(slopes))
            results.append(vectors.pooled.tobytes())
        results += [a.tobytes() for a in store.export()["rows"]]
    half = len(results) // 2
    assert results[:half] == results[half:]


@pytest.mark.parametrize(
    "config",
    [
        {"capacity": Capacity(rows=5)},
        {"initial": "normal"},
        {"optimizer": RowOptimizer(kind="ftrl")},
    ],
)
def test_reference_refuses_what_it_would_ignore(config):
    with pytest.raises(ValueError, match="features that the reference does not have"):
        ReferenceStore(LAYOUT, [TableConfig(**config)])


def test_missing_extension_is_one_sentence_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "runtime.embedding.native._kernels", None)
    monkeypatch.delattr("runtime.embedding.native._kernels", raising=False)
    monkeypatch.delitem(sys.modules, "runtime.embedding.native.extension")
    with pytest.raises(ImportError, match=r"not built for this Python .*pip install -e"):
        importlib.import_module("runtime.embedding.native.extension")


def test_wrong_number_of_threads_is_refused():
    for count in (0, 10_000):
        with pytest.raises(ValueError, match=f"native kernels must be [<>]= .*, got {count}"):
            use_threads(count)


def test_seed_beyond_64_bits_and_tables_named_twice_are_refused():
    for seed in (-1, 2**64):
        with pytest.raises(
            ValueError, match=f"seed is {seed}: must be a whole number >= 0 that fits 64"
        ):
            NativeStore(LAYOUT, [TableConfig()], seed=seed)
    with pytest.raises(ValueError, match=r"tables is .*: rows may stand only once"):
        NativeStore(LAYOUT, [TableConfig(), TableConfig(dim=4)])


@pytest.mark.parametrize("capacity", [Capacity(), Capacity(rows=9), Capacity(expire_after_steps=2)])
def test_the_id_of_an_empty_slot_is_refused_and_its_neighbours_are_rows(one_table, capacity):
    """As -1 becomes, which a source of one's own may give: it would be in no checkpoint."""
    table = one_table(dim=2, shards=2, capacity=capacity)
    table.look_up([0, 2**64 - 2])
    table.look_up([2**64 - 1], create=False)
    with pytest.raises(ValueError, match=r"id 2\*\*64 - 1 can have no row"):
        table.look_up([7, 2**64 - 1])
    table.look_up([8])
    assert {0, 2**64 - 2, 8} <= table.resident() and 2**64 - 1 not in table.resident()
    assert len(table.store) == len(table.resident())


def test_tables_of_a_store_have_one_dtype():
    fields = (Field(name="a", table="one"), Field(name="b", table="other"))
    tables = [TableConfig(name="one"), TableConfig(name="other", dtype="float64")]
    with pytest.raises(ValueError, match="have one dtype, got one float32, other float64"):
        NativeStore(Layout(fields=fields), tables)


@pytest.mark.parametrize(
    ("spans", "rule"),
    [
        ([[0, 2, 0], [2, 1, 8]], "spans must be"),
        ([[-1, 1, 0]], "inside ids"),
        ([[1, 2, 0]], "inside ids"),
        ([[0, 2, -4]], "inside values"),
        ([[0, 2, 1]], "inside values"),
    ],
)
def test_kernels_touch_nothing_outside_of_their_arrays(spans, rule):
    (server,) = NativeStore(LAYOUT, [TableConfig(dim=4)]).servers
    found = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=rule):
        native.read(
            list(server.rows.tables.values()), np.arange(2, dtype=np.uint64), np.array(spans),
            *found, True, 0,
        )  # fmt: skip
