"""As many servers as the paper's cluster had: the bytes of one, and the open files they need."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import Address
from runtime.hosts.rows import connections
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.rows.server_process import Service
from runtime.hosts.wire import listener
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.peers import listen
from runtime.stop import PeerError
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, on_engine, run

PAPERS_SERVERS = 120
LAYOUT = Layout(fields=(Field(name="user", table="user"), Field(name="item", table="item")))
TABLES = tuple(
    TableConfig(name=name, dim=4, optimizer=RowOptimizer(kind="adagrad", lr=0.1))
    for name in ("user", "item")
)
STEPS = 6
SERVERS_OF_A_PROCESS = 40


def serve_shards(shards: list[int], count: int, names: list[str], is_up: Event) -> None:
    """Serve these of ``count`` shards, each in a few threads here, until this process is killed."""
    listener.WORKERS = 1
    for shard in shards:
        config = ServerConfig(shard=shard, shards=count, seed=3, tables=TABLES, rules=ServerRules())
        service = Service(config)
        sock, _ = listen(names[shard])
        one = Listener(sock, "", service.serve, f"server {shard}", condition=service.condition)
        threading.Thread(target=one.serve_all, daemon=True).start()
    is_up.set()
    threading.Event().wait()


@contextmanager
def light_servers(count: int) -> Iterator[RemoteStore]:
    """Servers that listen as processes do, forty in a process: a process may have 1,024 open
    files, and a server has eleven."""
    names = [f"\0test-many-servers-{os.getpid()}-{count}-{shard}" for shard in range(count)]
    context = multiprocessing.get_context("spawn")
    hosts = []
    for first in range(0, count, SERVERS_OF_A_PROCESS):
        shards = list(range(first, min(first + SERVERS_OF_A_PROCESS, count)))
        is_up = context.Event()
        host = context.Process(target=serve_shards, args=(shards, count, names, is_up), daemon=True)
        host.start()
        hosts.append((host, is_up))
    try:
        for _, is_up in hosts:
            assert is_up.wait(120)
        client = ServerClient(Address(tuple(names), ("",) * count), [0])
        store = RemoteStore(LAYOUT, TABLES, client, seed=3, segments=4)
        try:
            yield store
        finally:
            store.close()
    finally:
        for host, _ in hosts:
            host.kill()
            host.join()


def trained(count: int) -> dict[str, tuple[np.ndarray, ...]]:
    """Rows after some steps whose gradients follow from the rows that were read."""
    random = np.random.default_rng(5)
    with light_servers(count) as store:
        for step in range(STEPS):
            ids = random.integers(0, 1000, (400, 2)).astype(np.uint64).ravel()
            nothing = np.zeros((400, 0), np.float32)
            handle = store.begin(0, step, Batch(ids, None, nothing, nothing))
            store.look_up(handle)
            store.give((handle, {name: rows + 1 for name, rows in handle.values.items()}))
            store.drain()
        return store.export()


@pytest.mark.long
def test_as_many_servers_as_the_papers_cluster_had_end_with_the_bytes_of_one():
    # In a process of its own: others' files may be open in this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        one = pool.submit(trained, 1).result()
        many = pool.submit(trained, PAPERS_SERVERS).result()
    assert one.keys() == many.keys()
    for name in one:
        assert len(one[name][0]) > 500
        for column, other in zip(one[name], many[name], strict=True):
            assert column.tobytes() == other.tobytes()


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.law1
@pytest.mark.law12
def test_eight_ranks_on_many_server_processes_end_with_the_bytes_of_one_server():
    """200 steps of hybrid at tau 0, in which each rank asks each of 24 servers, and sync by one
    thread on one shard."""
    source = ArraySource(200 * 32, ids_per_field=300)
    settings = {"ranks": 8, "batch": 32}
    late = {"mode": "hybrid", "tau": 0, "merge_pushes": True}
    many = run(config(**settings, **late, **on_engine("processes", 24)), source)
    try:
        assert many.meter.updates == 200
        assert [status["version"] for status in many.store.statuses()] == [200 * 8] * 24
        one = run(config(**settings, mode="sync", **on_engine("constant_lag")), source)
        assert_same_bytes(one, many)
    finally:
        many.store.close()


@pytest.fixture
def limits(monkeypatch):
    """Those of this process, as the kernel would have them."""
    found = {"limits": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: found["limits"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.update(limits=limits))
    return found


def test_open_files_are_allowed_as_far_as_the_hard_limit_goes(limits):
    connections.allow_descriptors(700)
    assert limits["limits"] == (1024, 4096)
    connections.allow_descriptors(2560)
    assert limits["limits"] == (2816, 4096)
    with pytest.raises(PeerError, match="5,120 connections to servers need 5,376 open files"):
        connections.allow_descriptors(5120)
    limits["limits"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    connections.allow_descriptors(10**6)
