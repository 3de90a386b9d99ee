"""Any number of threads gives the same bytes, and no row is lost, doubled or torn between them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import VALUE_BITS
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.plan import Pooling
from runtime.embedding.native.store import NativeStore

FIELDS = (Field(name="a"), Field(name="b", pooling="mean"), Field(name="c", table="other"))


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    native.set_threads(1)


def train(threads: int, capacity: Capacity, tagged: bool = False) -> bytes:
    native.set_threads(threads)
    rng = np.random.default_rng(0)
    tables = [TableConfig(name=n, dim=8, capacity=capacity) for n in ("rows", "other")]
    store = NativeStore(Layout(fields=FIELDS), tables, seed=1)
    pooling = Pooling(FIELDS, {"rows": 8, "other": 8})
    seen = []
    for step in range(4):
        pushes = []
        for rank in range(1 + step % 2):
            lengths = rng.integers(0, 5, 3 * 5000)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            ids = rng.integers(0, 40_000, offsets[-1]).astype(np.uint64)
            if tagged:  # as data have them: threads share fields
                fields = np.repeat(np.tile(np.arange(3, dtype=np.uint64), 5000), lengths)
                ids |= fields << np.uint64(VALUE_BITS)
            batch = Batch(ids, offsets, np.zeros((5000, 0)), np.zeros((5000, 1)))
            handle = store.begin(rank, step, batch)
            store.servers[0].read(handle)
            out = pooling.forward(batch, handle.plans, handle.values)
            noise = FieldVectors(rng.standard_normal(out.pooled.shape).astype(np.float32), {}, {})
            pushes.append((handle, pooling.backward(batch, handle.plans, noise)))
            seen.append(out.pooled.tobytes())
        store.servers[0].apply(pushes, merged=True)
    seen += [a.tobytes() for columns in store.export().values() for a in columns]
    return b"".join([*seen, store.row_staleness.tobytes()])


@pytest.mark.parametrize("capacity", [Capacity(), Capacity(rows=9000)])
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.law6
def test_any_number_of_threads_gives_the_same_bytes(capacity, tagged):
    alone = train(1, capacity, tagged)
    assert train(2, capacity, tagged) == alone
    assert train(5, capacity, tagged) == alone


@pytest.mark.parametrize("rows", [None, 6000])
@pytest.mark.law9
def test_concurrent_training_conserves_every_push(one_table, rows):
    """Each push adds 1 to its rows, so all that is found or dropped adds up to what was pushed."""
    native.set_threads(2)
    capacity = Capacity(rows=rows)
    sgd = RowOptimizer(kind="sgd", lr=1.0)
    table = one_table(
        dim=4, shards=3, optimizer=sgd, initial="constant", initial_scale=0.0, capacity=capacity
    )
    pushed, torn, errors = [0] * 4, [0], []

    def worker(number):
        rng = np.random.default_rng(number)
        try:
            for step in range(25):
                handle = table.look_up(rng.choice(20_000, 5000, replace=False), step)
                read = handle.values["rows"]
                torn[0] += int((read != read[:, :1]).any(axis=1).sum())
                table.push(handle, -1.0)
                pushed[number] += 5000
                table.values(rng.choice(20_000, 100))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=worker, args=(n,)) for n in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not errors
    assert torn[0] == 0
    ids, values, _ = table.store.export()["rows"]
    assert len(ids) == len(set(ids.tolist())) == len(table.store)
    dropped = table.store.counters["gradients_evicted"]
    if rows is None:
        assert values[:, 0].sum() == sum(pushed)
        assert dropped == 0
    else:
        assert values[:, 0].sum() <= sum(pushed) - dropped
        assert dropped > 0


def test_freed_arrays_are_used_again(one_table):
    table = one_table(dim=64)
    for step in range(3):
        table.look_up(np.arange(20_000), step)
    idle = native.idle_buffer_bytes()
    for step in range(20):
        table.look_up(np.arange(20_000), step)
    assert native.idle_buffer_bytes() == idle


TEAM_THAT_CHANGES = """
import os, threading, time
import numpy as np
from runtime.embedding.native.extension import native

gives_up_s = time.monotonic() + 100.0
wrong, calls, sizes = [0], [0, 0], [0]
no_offsets, no_inverse = np.empty(0, np.int64), np.empty(0, np.int32)
layout = native.PoolLayout([], [1])
spans, starts = np.array([[0, 8192, 0]]), np.zeros(2, np.int64)

def enough():
    return min(calls) > 400_000 and sizes[0] > 8_000

def goes_on():
    return not enough() and time.monotonic() < gives_up_s

def scatter(number):  # the shortest call that is shared: sums of no samples are zeros
    rows, pooled = np.empty((8192, 1), np.float32), np.empty((0, 1), np.float32)
    while goes_on():
        native.scatter(layout, 0, no_offsets, spans, starts, no_inverse, rows, pooled, [])
        calls[number] += 1
    wrong[0] += int(rows.any())

def change():
    while goes_on():
        for count in (4, 1):
            native.set_threads(count)
            sizes[0] += 1

workers = [threading.Thread(target=scatter, args=(n,), daemon=True) for n in range(2)]
workers.append(threading.Thread(target=change, daemon=True))
for one in workers:
    one.start()
for one in workers:
    one.join(max(0.1, gives_up_s + 20 - time.monotonic()))
alive = sum(one.is_alive() for one in workers)
print(alive, wrong[0], enough(), flush=True)
os._exit(0)  # a caller that hangs would hold up the end
"""

FORKED_CHILD = """
import os, signal, sys
import numpy as np
from runtime.embedding.native.extension import native

def look_up():
    options = native.Options()
    options.dim = 8
    table = native.Table(options)
    ids = np.arange(50_000, dtype=np.uint64)
    handles, writes = np.full(len(ids), -1), np.zeros(len(ids), np.int64)
    values, span = np.empty((len(ids), 8), np.float32), np.array([[0, len(ids), 0]])
    for _ in range(3):
        native.read([table], ids, span, handles, writes, values, True, 0)
    return len(table)

native.set_threads(4)
assert look_up() == 50_000
child = os.fork()
if child == 0:
    signal.alarm(100)  # a child that hangs ends by this
    same = look_up() == 50_000 and native.threads() == 4
    native.set_threads(2)
    os._exit(0 if same and look_up() == 50_000 else 1)
_, status = os.waitpid(child, 0)
print(status, look_up())
"""


@pytest.mark.long
@pytest.mark.multiproc
def test_a_team_may_change_its_size_while_calls_enter():
    """Two runs in one process, as in a notebook; a caller once waited for threads that had gone."""
    found = subprocess.run(
        [sys.executable, "-c", TEAM_THAT_CHANGES], capture_output=True, text=True, timeout=150
    )
    assert found.stdout.split() == ["0", "0", "True"], found.stderr


@pytest.mark.multiproc
def test_a_child_forked_after_the_team_was_made_has_a_team_of_its_own():
    found = subprocess.run(
        [sys.executable, "-c", FORKED_CHILD], capture_output=True, text=True, timeout=150
    )
    assert found.stdout.split() == ["0", "50000"], found.stderr
