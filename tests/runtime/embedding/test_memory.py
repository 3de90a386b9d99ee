"""How much memory the tables may take, and that many small tables take little."""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.data.batch import Field, Layout
from runtime.embedding.config import Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.memory import allowed_bytes
from runtime.embedding.native.store import NativeStore

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def groups(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "5000\n"}, 5000),
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
        ("0::/unseen\n", {"memory.max": "7000\n"}, 7000),
        (
            "9:cpu,cpuacct:/\n4:memory:/pod/box\n0::/\n",
            {
                "memory/pod/box/memory.limit_in_bytes": "3000",
                "memory/memory.limit_in_bytes": "9000",
            },
            3000,
        ),
        ("4:memory:/pod\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:cpu:/pod\n", {"memory/pod/memory.limit_in_bytes": "3000"}, None),
    ],
)
def test_the_least_limit_of_the_control_groups_counts(tmp_path, cgroup, limits, expected):
    found = allowed_bytes(groups(tmp_path, cgroup, limits))
    assert found == (expected or min(MACHINE, address_limit()))


def test_without_control_groups_it_is_the_machine(tmp_path):
    assert allowed_bytes(tmp_path) == min(MACHINE, address_limit())


def address_limit() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


MANY_TABLES = """
import numpy as np
from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.native.store import NativeStore

def address_space():
    text = open("/proc/self/status").read()
    return int(text.split("VmSize:")[1].split()[0]) * 1024

names = [f"t{n}" for n in range(26)]
fields = tuple(Field(name=n, table=n) for n in names)
before = address_space()
store = NativeStore(Layout(fields=fields), [TableConfig(name=n, dim=16) for n in names], shards=200)
ids = np.concatenate([np.arange(100, dtype=np.uint64) + (n << 56) for n in range(26)])
batch = Batch(ids.reshape(26, 100).T.ravel(), None, np.zeros((100, 0)), np.zeros((100, 1)))
handle = store.begin(0, 0, batch)
for shard in range(200):
    store.servers[shard].read(handle)
print(len(store), address_space() - before, len(open("/proc/self/maps").readlines()))
"""


@pytest.mark.multiproc
def test_5200_tables_and_shards_take_little_address_space():
    """26 tables on 200 shards once reserved the machine's memory each, beyond 47 bits in all."""
    found = subprocess.run(
        [sys.executable, "-c", MANY_TABLES], capture_output=True, text=True, timeout=120, check=True
    )
    rows, space, mappings = map(int, found.stdout.split())
    assert rows == 2600
    assert space < 4 << 30
    assert mappings < 20_000  # the kernel's own limit is 65530


def test_rows_keep_their_bytes_while_the_table_moves_and_grows(one_table):
    """From a few kilobytes to beyond several steps of growth, each with pages of both kinds."""
    table = one_table(dim=64, optimizer=RowOptimizer(kind="adagrad"))
    fresh = one_table(dim=64)
    made = 0
    for count in (10, 100, 1000, 5000, 20_000, 60_000):
        table.push(table.look_up(np.arange(made, count)), 0.5)
        made = count
    ids, values, state = table.store.export()["rows"]
    np.testing.assert_array_equal(ids, np.arange(made))
    assert (state == 0.25).all()
    expected = fresh.values(np.arange(made)) - np.float32(0.05) * np.float32(0.5) / np.float32(0.5)
    np.testing.assert_allclose(values, expected, atol=1e-7)


def test_a_table_beyond_the_memory_names_both_figures_and_goes_on(one_table):
    """The limit is for all tables of the process, so what others hold stays below it, too."""
    table = one_table(dim=64)
    table.look_up(np.arange(1000))
    kept = table.values(np.arange(1000))
    native.set_memory_limit(20_000_000)
    try:
        with pytest.raises(MemoryError, match=r"need .* GB beside .* may use 0\.02 GB of"):
            table.look_up(np.arange(1000, 100_000))
    finally:
        native.set_memory_limit(0)
    np.testing.assert_array_equal(table.values(np.arange(1000)), kept)
    table.look_up(np.arange(1000, 100_000))
    assert len(table.store) == 100_000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"capacity": Capacity(rows=10**15)},
            "capacity.rows is 10{15}: needs .* GB, and",
        ),
    ],
)
def test_limits_beyond_the_memory_say_what_would_be_needed(config, message):
    with pytest.raises(ValueError, match="table rows: .*" + message) as refused:
        NativeStore(Layout(fields=(Field(name="a"),)), [TableConfig(**config)], shards=2)
    assert re.search(r"\d", str(refused.value))


def test_memory_of_tables_that_are_gone_may_be_used_again(one_table):
    """Five times what is allowed at once; each table holds about 30 MB."""
    try:
        for _ in range(5):
            table = one_table(dim=64)  # opening one reads the machine's own limit
            native.set_memory_limit(120_000_000)
            table.look_up(np.arange(100_000))
            assert len(table.store) == 100_000
            del table
            gc.collect()  # a store refers to itself
    finally:
        native.set_memory_limit(0)
