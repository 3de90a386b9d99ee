"""Loaders as processes: whatever their number, every rank trains the same batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime.config import DataConfig, SyncConfig, TrainConfig
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.data.table import ROWS_PER_BATCH
from runtime.engines.processes.loaders import LoadedSource, LoaderProcesses
from runtime.rank.feed import Feed, training_stream
from runtime.stop import PeerError, Stop

SCHEMA = """name = "made"
file = "data.parquet"
labels = ["label"]
[split]
column = "day"
test_from = 9
[[columns]]
name = "user"
[[columns]]
name = "tags"
kind = "multi"
separator = "|"
"""


def written(folder: Path, bad: int = 3) -> str:
    """Four chunks and a bit, in the second one ``bad`` labels of 7, in the last some of test."""
    rows = 4 * ROWS_PER_BATCH + 100
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, rows)
    labels[ROWS_PER_BATCH + 5 : ROWS_PER_BATCH + 5 + bad] = 7
    table = {
        "user": draw.integers(0, 500, rows),
        "tags": np.array(["", "a", "a|b", "c|a|b"])[draw.integers(0, 4, rows)],
        "day": np.where(np.arange(rows) < rows - 50, 1, 9),
        "label": labels,
    }
    pq.write_table(pa.table(table), folder / "data.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    return str(folder / "schema.toml")


def batches(config: TrainConfig, source) -> dict[tuple[int, int], list[bytes]]:
    """What each (rank, step) trains, in bytes."""
    ranks, barrier = config.sync.ranks, config.sync.mode.has_barrier
    feed = Feed(training_stream(config, source), ranks, barrier, Stop())
    found = {}
    step = 0
    while works := [(rank, work) for rank in range(ranks) if (work := feed.take(rank, step))]:
        for rank, work in works:
            batch = work.batch
            arrays = [batch.ids, batch.offsets, batch.dense, batch.labels]
            found[rank, step] = [a.tobytes() for a in arrays if a is not None]
        step += 1
    return found


def opened(data: DataConfig):
    return open_source(data.name, data.dir, data.rows, skip_bad_rows=data.skip_bad_rows)


@pytest.mark.parametrize(
    "case", ["file", "file, shuffled, two passes", "file, limited", "synthetic"]
)
def test_the_batches_of_a_rank_and_step_do_not_depend_on_the_loaders(case, tmp_path):
    if case == "synthetic":
        data = DataConfig(name="synthetic", rows=50_000)
    else:
        data = DataConfig(
            name=written(tmp_path),
            skip_bad_rows=True,
            shuffle="shuffled" in case,
            passes=2 if "two passes" in case else 1,
            rows=ROWS_PER_BATCH + 4000 if "limited" in case else None,
        )
    config = TrainConfig(
        data=data,
        batch=9000,
        sync=SyncConfig(ranks=3, mode="async" if "limited" in case else "sync"),
    )
    alone = opened(data)
    expected = batches(config, alone)
    for loaders in (1, 3) if case == "file" else (2,):
        processes = LoaderProcesses(data, loaders, takers=1)
        source = LoadedSource(opened(data), processes.address, processes.how_it_ended)
        assert batches(config, source) == expected
        if "limited" not in case:  # else how far a reader has read ahead is its own matter
            assert source.provenance() == alone.provenance()
        source.close()
        processes.close()
    assert len(expected) > 3


def test_every_taker_gets_every_chunk(tmp_path):
    data = DataConfig(name=written(tmp_path), skip_bad_rows=True)
    processes = LoaderProcesses(data, 2, takers=2)
    sources = [LoadedSource(opened(data), processes.address) for _ in range(2)]
    streams = [source.chunks("train") for source in sources]
    sizes = [[b.size for b in pair] for pair in zip(*streams, strict=True)]
    assert [a for a, _ in sizes] == [b for _, b in sizes]
    assert sum(a for a, _ in sizes) == 4 * ROWS_PER_BATCH + 100 - 50 - 3
    processes.close()


def test_a_loader_that_dies_is_named(tmp_path):
    data = DataConfig(name="synthetic")
    processes = LoaderProcesses(data, 2, takers=1)
    source = LoadedSource(opened(data), processes.address, processes.how_it_ended)
    stream = source.chunks("train")
    next(stream)
    pid = processes.address.pids[1]
    os.kill(pid, signal.SIGKILL)
    expected = rf"loader 1 \(pid {pid}\) was killed by SIGKILL; its data is missing"
    with pytest.raises(PeerError, match=expected):
        for _ in range(20):
            next(stream)
    processes.close()


def test_what_is_wrong_with_the_data_is_told_by_the_rank(tmp_path):
    data = DataConfig(name=written(tmp_path))
    processes = LoaderProcesses(data, 2, takers=1)
    source = LoadedSource(opened(data), processes.address)
    with pytest.raises(DataError, match=f"row {ROWS_PER_BATCH + 6}, column label: 7"):
        list(source.chunks("train"))
    processes.close()
