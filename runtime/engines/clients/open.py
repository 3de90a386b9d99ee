"""From a run's config to a store whose rows live in server processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from persia_sim.words.trace import TraceRecorder
from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.verbs import EmbeddingStore
from runtime.engines.clients.links import Links
from runtime.engines.clients.remote_store import RemoteStore
from runtime.engines.servers.hosts import HostedServers, read_secret
from runtime.engines.servers.launch import Address, ServerProcesses
from runtime.engines.servers.server_config import ServerConfig
from runtime.rank.parts import server_rules
from runtime.stop import Stop


def rows_in_servers(
    config: TrainConfig,
    layout: Layout,
    tables: list[TableConfig],
    recorder: TraceRecorder,
    stop: Stop,
) -> EmbeddingStore:
    """Start the servers of a run whose ranks are threads of this process, and connect to them.

    They end with the store. ``recorder`` is not used: servers write down their own events.
    """
    processes = launch(config, tables)
    try:
        ranks = range(config.sync.ranks)
        return store_of(config, layout, tables, stop, processes.address, ranks, processes)
    except BaseException:
        processes.close()
        raise


def store_of(
    config: TrainConfig,
    layout: Layout,
    tables: list[TableConfig],
    stop: Stop,
    address: Address,
    ranks: Sequence[int],
    processes: ServerProcesses | HostedServers | None,
) -> RemoteStore:
    """The rows of the servers at an address, for these ranks; ``processes``: that end with them."""
    how = processes.how_it_ended if processes else lambda shard: "has died"
    return RemoteStore(
        layout, tables, Links(address, ranks, how), seed=config.seed, segments=_segments(config),
        stop=stop, close=processes.close if processes else lambda: None,
        restart=partial(processes.restart, awaits_rows=True) if processes else None,
    )  # fmt: skip


def launch(config: TrainConfig, tables: list[TableConfig]) -> ServerProcesses | HostedServers:
    """The servers of a run, ready to be connected to."""
    alone = config.sync.ranks == 1 and config.sync.mode is Mode.SYNC
    engine = config.engine
    configs = [
        ServerConfig(
            shard=shard,
            shards=engine.servers,
            seed=config.seed,
            tables=tuple(tables),
            rules=server_rules(config, tables),
            threads=engine.threads if alone else 1,
            records=engine.trace_order and config.sync.lookahead != "forwarded",
        )
        for shard in range(engine.servers)
    ]
    if engine.servers_at:
        assert engine.servers_secret is not None  # as the config checks
        secret = read_secret(engine.servers_secret)
        return HostedServers(configs, engine.servers_at, secret, tls=engine.tls)
    return ServerProcesses(configs)


def _segments(config: TrainConfig) -> int:
    """Batches of a rank between their beginning and the end of their push, at most.

    Those that its two queues hold, or its window lets in, and one in each of its threads and in
    each thread's hands.
    """
    held = 2 * max(config.queue_capacity, config.sync.ahead + 1)
    return held + (config.sync.window or 0) + 4
