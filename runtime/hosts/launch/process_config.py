"""What the process of an embedding server, worker or loader must be told before it listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from runtime.config import DataConfig
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.wire.peers import STUCK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What every such process is told by who starts it."""

    tls: bool | Path = False
    """Whether clients come by encrypted connections; a file: with the certificate in it."""
    secret: str = ""
    """What a client must know, hexadecimal."""
    dies_with_parent: bool = True
    """Killed by the kernel when the thread that started it ends; needs one that lives as long."""
    incarnation: int = 0
    """Its incarnation: how many in its place were started before it in this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Launched):
    """One shard of a store; the same rows as that shard inside a process would have."""

    shard: int
    shards: int
    seed: int
    tables: tuple[TableConfig, ...]
    rules: ServerRules = field(default_factory=ServerRules)
    threads: int = 1
    """Threads of one call of the kernels."""
    records: bool = True
    """Whether it writes down when its reads and writes took effect."""
    patience_s: float = STUCK_S
    """A client without a sign of life for so long is stuck; all waiting for so long is a deadlock;
    longer where the cores are crowded."""
    processes: int = 1
    """Servers and ranks of the run, which may share this host's cores."""
    awaits_rows: bool = False
    """Ranks are let in when the rows of a checkpoint are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(Launched):
    """An embedding worker apart from its ranks."""

    worker: int
    workers: int
    ranks: tuple[int, ...]
    """Ranks that it serves."""
    may_return: bool
    """As `SyncConfig.workers_may_return`."""
    servers_may_return: bool
    """Whether the rows are late, so that who leads starts servers again."""
    names: tuple[str, ...]
    """Names of the embedding servers, as those of an `Address`."""
    secrets: tuple[str, ...]
    layout: Layout
    tables: tuple[TableConfig, ...]
    seed: int
    segments: int
    """Batches of a rank in flight."""
    half: bool = False
    """Whether rows and gradients travel as 16 bits, as in `ServerRules`."""
    fresh: tuple[str, ...] = ()
    """Tables that are exact while others are late, as there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig(Launched):
    """One of the processes that parse the training data."""

    loader: int
    loaders: int
    consumers: int
    """Processes that train; nothing is loaded before all are there."""
    data: DataConfig


AnyConfig = ServerConfig | WorkerConfig | LoaderConfig
CONFIGS: dict[str, type[AnyConfig]] = {
    "server": ServerConfig,
    "worker": WorkerConfig,
    "loader": LoaderConfig,
}
"""By role."""
