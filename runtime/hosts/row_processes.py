"""From a run's config to an embedding worker whose rows live in server processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from persia_sim.base.trace import TraceRecorder
from persia_sim.base.vocabulary import KNOWN_MODES, refuse_unless_carried
from runtime.config import DataConfig, TrainConfig
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.worker import EmbeddingWorker
from runtime.hosts.launch.hosts import HostedProcesses, read_secret
from runtime.hosts.launch.process_config import (
    AnyConfig,
    LoaderConfig,
    ServerConfig,
    WorkerConfig,
)
from runtime.hosts.launch.processes import Address, ServerProcesses
from runtime.hosts.pooling.remote_worker import RemoteWorker, RemoteWorkerStore, WorkerClient
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.connections import named_ranks
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.rank.components import fresh_tables, server_rules
from runtime.stop import Stop

CARRIES = KNOWN_MODES
"""The modes whose lookups and pushes travel, to servers and to workers."""


class RowProcesses:
    """The processes of a run that hold its rows, and those of its workers, ready to be connected
    to."""

    def __init__(self, config: TrainConfig, layout: Layout, tables: list[TableConfig]) -> None:
        """Start them, on this host or those that the config names. Raises ValueError for a mode
        that they do not carry."""
        sync = config.sync
        refuse_unless_carried(sync.mode, CARRIES, "servers as processes", fresh=bool(sync.fresh))
        self.servers = _start(config, _server_configs(config, layout, tables))
        self.every = [self.servers]
        try:
            if config.engine.workers:
                address = self.servers.address
                workers = _worker_configs(config, layout, tables, address)
                self.every.append(_start(config, workers, config.engine.servers))
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[Address]:
        """The address of the servers, and that of the workers where there are some."""
        return [processes.address for processes in self.every]

    def close(self) -> None:
        """End them all."""
        for processes in reversed(self.every):
            processes.close()


def rows_in_servers(
    config: TrainConfig,
    layout: Layout,
    tables: list[TableConfig],
    recorder: TraceRecorder,
    stop: Stop,
) -> EmbeddingWorker:
    """Start the servers of a run whose ranks are threads of this process, and connect to them.

    They end with the store. ``recorder`` is not used: servers write down their own events.
    """
    processes = RowProcesses(config, layout, tables)
    try:
        ranks = range(config.sync.ranks)
        return worker_of(config, layout, tables, stop, processes.addresses, ranks, processes)
    except BaseException:
        processes.close()
        raise


def worker_of(
    config: TrainConfig,
    layout: Layout,
    tables: list[TableConfig],
    stop: Stop,
    addresses: Sequence[Address],
    ranks: Sequence[int],
    processes: RowProcesses | None,
) -> EmbeddingWorker:
    """The embedding worker of these ranks, here or behind its address, before the rows of the
    servers at theirs; ``processes`` end with it."""
    # What can be done for processes that die, where this process has started them.
    servers, *workers = addresses
    how: list[Callable[[int], str]] = [lambda number: "has died"] * 2
    restart = restart_worker = None
    if processes:
        how = [started.how_it_ended for started in processes.every]
        restart = partial(processes.servers.restart, awaits_rows=True)
        restart_worker = processes.every[-1].restart
    close = processes.close if processes else lambda: None

    # Pooled here: the ranks' requests go to the servers.
    if not workers:
        store = RemoteStore(
            layout,
            tables,
            ServerClient(servers, ranks, how[0]),
            seed=config.seed,
            segments=_segments(config),
            half=config.sync.half,
            fresh=fresh_tables(config.sync.fresh, layout),
            stop=stop,
            close=close,
            restart=restart,
        )
        return EmbeddingWorker(store)

    # Pooled by workers: only rare calls go to the servers from here.
    client = ServerClient(servers, (), how[0], named_ranks(ranks))
    try:
        worker_client = WorkerClient(workers[0], ranks, how[1], waits=client.waits)
    except BaseException:
        client.close()
        raise
    remote_store = RemoteWorkerStore(
        client,
        worker_client,
        close,
        restart_worker,
        config.sync.workers_may_return,
        layout=layout,
        tables=tables,
        seed=config.seed,
        fresh=fresh_tables(config.sync.fresh, layout),
        stop=stop,
        restart=restart,
    )
    return RemoteWorker(remote_store)


def start_loaders(config: TrainConfig, consumers: int) -> ServerProcesses | HostedProcesses:
    """Start the loaders of all processes that train, on the hosts behind servers and workers."""
    engine = config.engine
    data = config.data
    if engine.servers_at:  # their working folders are others
        name = os.path.abspath(data.name) if data.name.endswith(".toml") else data.name
        data = replace(data, name=name, dir=data.dir and data.dir.absolute())
    configs = loader_configs(data, engine.loaders, consumers)
    return _start(config, configs, engine.servers + engine.workers)


def _start(
    config: TrainConfig, configs: Sequence[AnyConfig], before: int = 0
) -> ServerProcesses | HostedProcesses:
    """Start processes on the hosts of the run, in turn behind those that were started before."""
    engine = config.engine
    if not engine.servers_at:
        return ServerProcesses(configs)
    assert engine.servers_secret is not None  # as the config checks
    first = before % len(engine.servers_at)
    at = engine.servers_at[first:] + engine.servers_at[:first]
    return HostedProcesses(configs, at, read_secret(engine.servers_secret), tls=engine.tls)


def _server_configs(
    config: TrainConfig, layout: Layout, tables: list[TableConfig]
) -> list[ServerConfig]:
    engine = config.engine
    return [
        ServerConfig(
            shard=shard,
            shards=engine.servers,
            seed=config.seed,
            tables=tuple(tables),
            rules=server_rules(config, layout, tables),
            threads=engine.threads,
            records=engine.trace_order and config.sync.lookahead != "forwarded",
            processes=engine.servers + config.sync.ranks,
        )
        for shard in range(engine.servers)
    ]


def _worker_configs(
    config: TrainConfig, layout: Layout, tables: list[TableConfig], servers: Address
) -> list[WorkerConfig]:
    # Rank r has worker r mod workers; a worker without ranks would do nothing.
    workers = min(config.engine.workers, config.sync.ranks)
    return [
        WorkerConfig(
            worker=worker,
            workers=workers,
            ranks=tuple(range(worker, config.sync.ranks, workers)),
            names=servers.names,
            secrets=servers.secrets,
            layout=layout,
            tables=tuple(tables),
            seed=config.seed,
            segments=_segments(config),
            may_return=config.sync.workers_may_return,
            servers_may_return=config.sync.mode.reads_late_rows,
            half=config.sync.half,
            fresh=fresh_tables(config.sync.fresh, layout),
        )
        for worker in range(workers)
    ]


def loader_configs(data: DataConfig, loaders: int, consumers: int) -> list[LoaderConfig]:
    """The config of each loader, for so many processes that train."""
    return [
        LoaderConfig(loader=loader, loaders=loaders, consumers=consumers, data=data)
        for loader in range(loaders)
    ]


def _segments(config: TrainConfig) -> int:
    """Batches of a rank between their beginning and the end of their push, at most.

    Those that its two queues hold (in the place that the first has for it a batch is on its way to
    the rank), or its window lets in, and one in each of its threads and in each thread's hands.
    """
    held = 2 * max(config.queue_capacity, config.sync.ahead + 1)
    return held + (config.sync.window or 0) + 6
