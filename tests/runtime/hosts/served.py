"""A store whose rows live in server processes, for the time of a test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.checkpoint.shard import write_rows
from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import ServerProcesses
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.remote_control import RemoteControl
from runtime.hosts.rows.remote_store import RemoteStore

LAYOUT = Layout(fields=(Field(name="a"),))
SGD = TableConfig(dim=2, optimizer=RowOptimizer(kind="sgd", lr=1.0), initial_scale=0.0)
"""With gradients of one, minus the value of a row is the number of pushes that it took."""


@dataclass
class Served:
    """Servers and one client process."""

    processes: ServerProcesses
    client: ServerClient
    store: RemoteStore


@contextmanager
def served(
    rules: ServerRules | None = None,
    tables: Sequence[TableConfig] = (SGD,),
    *,
    servers: int = 1,
    ranks: Sequence[int] | None = None,
    layout: Layout = LAYOUT,
    segments: int = 8,
    patience_s: float | None = None,
    run_folder: Path | None = None,
) -> Iterator[Served]:
    rules = rules or ServerRules()
    processes = ServerProcesses(
        [
            ServerConfig(
                shard=k,
                shards=servers,
                seed=0,
                tables=tuple(tables),
                rules=rules,
                **({"patience_s": patience_s} if patience_s else {}),
            )
            for k in range(servers)
        ]
    )
    chosen = range(rules.ranks) if ranks is None else ranks
    client = ServerClient(processes.address, chosen, processes.how_it_ended)
    store = RemoteStore(
        layout,
        tables,
        client,
        seed=0,
        segments=segments,
        fresh=rules.fresh,
        close=processes.close,
    )
    store.run_folder = run_folder
    try:
        yield Served(processes, client, store)
    finally:
        store.close()


def kill_as_it_writes(patch, shard: int, kill: Callable[[], None], nth: int = 1) -> None:
    """In the nth save from now on this server finds a pipe where its file should be, and waits
    there for a reader until it is killed."""
    at_each_server, calls = RemoteControl.at_each_server, []

    def kill_when_asked(waits) -> None:
        while f"waits for write_rows from embedding server {shard}" not in waits.summary():
            time.sleep(0.01)
        kill()

    def spied(store, verb, **said):
        calls.append(verb)
        if verb is write_rows and calls.count(write_rows) == nth:
            os.mkfifo(f"{said['folder']}/{said['save']}-shard-{shard:04d}.rows.tmp")
            threading.Thread(target=kill_when_asked, args=(store._client.waits,)).start()
        return at_each_server(store, verb, **said)

    patch.setattr(RemoteControl, "at_each_server", spied)


def batch_of(*ids: int) -> Batch:
    size = len(ids)
    empty, labels = np.zeros((size, 0), np.float32), np.zeros((size, 1), np.float32)
    return Batch(np.array(ids, np.uint64), None, empty, labels)


def one_step(store, rank: int, step: int, *ids: int) -> None:
    """A batch is read, and gradients of one are on their way back."""
    handle = store.begin(rank, step, batch_of(*ids))
    store.look_up(handle)
    store.give((handle, ones(handle)))


def ones(handle) -> dict[str, np.ndarray]:
    return {name: np.ones_like(values) for name, values in handle.values.items()}
