"""What carries a run out, and on which hardware: the group `engine`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from persia_sim.words.fields import check_fields
from runtime.config.bounds import above_zero, within

MOST_LATENCY_S = 60
MOST_SERVERS = 64
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Who executes the order, on what."""

    executor: Literal["lag", "concurrent", "replay"] = "lag"
    """lag: one thread, every lookup misses exactly tau steps, same bytes every time. concurrent:
    threads, measures speed. replay: the order of a recorded or simulated run."""
    trace: Path | None = None
    """Of replay: the order to execute."""
    shards: int = 1
    """Embedding servers, 1 to 4096; each has its own lock and version."""
    servers: int = 0
    """Of concurrent: embedding servers as processes of this host, 0 to 64, which hold the rows in
    place of ``shards`` in this process; 0: none. Linux."""
    loaders: int = 0
    """Of concurrent: processes that parse and hash the training data ahead of the ranks, 0 to 64;
    0: the ranks do it. Linux."""
    threads: int = 1
    """Threads of one dense operation, 1 to 1024."""
    device: str = "cpu"
    """Of the dense network: cpu, or cuda, cuda:1, ..."""
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of the dense network's arithmetic; the two short ones by autocast."""
    dense_sum: Literal["ring", "gather"] = "ring"
    """Of ranks that are processes, in modes with a common step: how their dense gradients are added
    up. ring: the fastest way; gather: in rank order, which gives the bytes of ranks that are
    threads."""
    loss_scale: float = 65536.0
    """First factor on the loss of float16, > 0; halved on overflow (source: torch's GradScaler)."""
    queue_batches: int | None = None
    """Of concurrent: capacity of each queue of a rank, >= 1. None: what window or permits let in,
    at least 10 (source: the original)."""
    latency_s: float = 0.0
    """Of concurrent: seconds added to every lookup and every push, as a network would; at most
    60."""
    trace_order: bool = True
    """Keep the order of events, 20 bytes each, for trace.npz and a replay; else staleness alone is
    counted, in memory that does not grow with the run (with ``servers`` not even that)."""
    fuse_ranks: bool = True
    """Of lag: compute the ranks of a step as one batch where they read the same rows and nothing
    but the order of float sums changes; order and trace stay those of the ranks. Else, and in
    every other case, one by one."""
    timeline: bool = False
    """Of concurrent: keep how long each stage took, as timeline.json for Perfetto."""
    tensorboard: bool = False
    """Tell TensorBoard the scores as they come, in the run folder; `pip install tensorboard`."""

    def __post_init__(self) -> None:
        check_fields(self)
        within(self, 1, 4096, "shards")
        within(self, 0, MOST_SERVERS, "servers")
        within(self, 0, MOST_SERVERS, "loaders")
        within(self, 1, 1024, "threads")
        within(self, 1, 2**20, "queue_batches")
        within(self, 0, MOST_LATENCY_S, "latency_s")
        above_zero(self, 2.0**100, "loss_scale")
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device must be cpu, cuda, or cuda:1 and so on, got {self.device!r}")
        if self.executor == "replay" and self.trace is None:
            raise ValueError("replay needs the order to execute; add --trace FILE")
        if self.servers:
            self._check_servers()

    @property
    def server_count(self) -> int:
        """Embedding servers, wherever they are."""
        return self.servers or self.shards

    def _check_servers(self) -> None:
        if self.shards != 1:
            raise ValueError(
                f"shards {self.shards} is not used with servers {self.servers}, which are processes"
                " of one shard each; remove one of the two"
            )
