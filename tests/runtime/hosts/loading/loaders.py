"""Data and loaders that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.drilling.trial import processes_of
from runtime.config import DataConfig, TrainConfig
from runtime.data.open import open_source
from runtime.data.table import ROWS_PER_BATCH
from runtime.hosts.launch.hosts import HostedProcesses, read_secret
from runtime.hosts.launch.processes import ServerProcesses
from runtime.hosts.loading.loaded_source import LoadedSource
from runtime.hosts.row_processes import loader_configs
from runtime.hosts.wire.tls import TLS
from runtime.rank.feed import Feed, stream_from
from runtime.stop import Stop
from tests.runtime.worlds import host_of_servers

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


def written(folder: Path, bad: int = 3, unplaced: int = 0) -> str:
    """Four chunks and a bit, in the second one ``bad`` labels of 7, in the last some of test, and
    in the first so many rows of no part."""
    rows = 4 * ROWS_PER_BATCH + 100
    place = np.arange(rows)
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, rows)
    labels[ROWS_PER_BATCH + 5 : ROWS_PER_BATCH + 5 + bad] = 7
    table = {
        "user": draw.integers(0, 500, rows),
        "tags": np.array(["", "a", "a|b", "c|a|b"])[draw.integers(0, 4, rows)],
        "day": pa.array(
            np.where(place < rows - 50, 1, 9), mask=(place > 9) & (place < 10 + unplaced)
        ),
        "label": labels,
    }
    pq.write_table(pa.table(table), folder / "data.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    return str(folder / "schema.toml")


def started(data: DataConfig, loaders: int, consumers: int) -> ServerProcesses:
    return ServerProcesses(loader_configs(data, loaders, consumers))


def chunks(source: LoadedSource):
    """The samples of its stream's chunks."""
    for names in source.chunks("train"):
        asked = source.ask(names)
        source.passed(names)
        yield asked()


def batches(
    config: TrainConfig, source, own=None, skipped: int = 0
) -> dict[tuple[int, int], list[bytes]]:
    """What each (rank, step) trains, in bytes."""
    ranks, barrier = config.sync.ranks, config.sync.mode.has_barrier
    asks, (first, stream) = getattr(source, "ask", None), stream_from(config, source, skipped)
    fed = Feed(stream, ranks, barrier, Stop(), first, local_ranks=own, asks=asks)
    found = {}
    step = first if barrier else first // ranks
    own = range(ranks) if own is None else own
    while works := [(rank, work) for rank in own if (work := fed.take(rank, step))]:
        for rank, work in works:
            batch = work.batch
            arrays = [batch.ids, batch.offsets, batch.dense, batch.labels]
            found[rank, step] = [a.tobytes() for a in arrays if a is not None]
        step += 1
    return found


def opened(data: DataConfig):
    return open_source(data.name, data.dir, data.rows, skip_bad_rows=data.skip_bad_rows)


def elsewhere(data: DataConfig, loaders: int, consumers: int) -> HostedProcesses:
    """Loaders that are reached over TCP."""
    (at,), secret = host_of_servers()
    configs = loader_configs(data, loaders, consumers)
    return HostedProcesses(configs, [at], read_secret(secret))


def encrypted(data: DataConfig, loaders: int, consumers: int) -> ServerProcesses:
    return ServerProcesses(loader_configs(data, loaders, consumers), f"{TLS}127.0.0.1")


def pids_now() -> list[int]:
    """Of the loaders that this process has started, here or as a host, the latest last."""
    return sorted(processes_of(os.getpid()).get("loader", []))
