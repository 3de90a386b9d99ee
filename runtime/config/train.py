"""One training run: its checkpoints, its engine, and what makes sense across groups only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from persia_sim.words.documents import read_document
from persia_sim.words.fields import check_fields
from persia_sim.words.records import parse
from persia_sim.words.vocabulary import Mode
from runtime.config.options import above_zero, within
from runtime.config.sync import SyncConfig
from runtime.config.what import MOST, DataConfig, EvaluationConfig, ModelConfig
from runtime.embedding.config import TableConfig

_UNITS_S = {"s": 1, "min": 60, "h": 3600}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_MOST_S = 365 * 86_400
END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole run, in its folder; `train --resume RUN` goes on from the newest."""

    checkpoint_every: int | str | None = None
    """Steps (times ``batch`` samples) from one to the next, or a time: 30s, 10min, 2h; end: only
    when training ends. None: only when a signal ends the run."""
    keep: int = 2
    """Checkpoints that stay, the newest ones, >= 1."""
    checkpoint_incremental: bool = False
    """Write only rows that changed since the checkpoint before (native kernels); each still holds
    all rows, by links to files that it shares with others."""

    def __post_init__(self) -> None:
        check_fields(self)
        within(self, 1, 1_000_000, "keep")
        every = self.checkpoint_every
        if isinstance(every, str) and every.isdecimal():
            object.__setattr__(self, "checkpoint_every", int(every))
            every = int(every)
        if isinstance(every, str) and every != END:
            found = _TIME.fullmatch(every)
            if found is None or not 0 < self._seconds(found) <= _MOST_S:
                raise ValueError(
                    f"checkpoint_every must be steps (500), a time (30s, 10min, 2h; above 0, a year"
                    f" at most) or end, got {every!r}"
                )
        if isinstance(every, int) and not 1 <= every <= 2**62:
            raise ValueError(f"checkpoint_every must be >= 1 step, got {every}")
        if self.checkpoint_incremental and every is None:
            raise ValueError("checkpoint_incremental is used with checkpoint_every; add it")

    @property
    def every_steps(self) -> int | None:
        """Steps between two checkpoints; None where they do not go by steps."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def every_s(self) -> float | None:
        """Seconds between two checkpoints; None where they do not go by time."""
        every = self.checkpoint_every
        found = _TIME.fullmatch(every) if isinstance(every, str) else None
        return None if found is None else self._seconds(found)

    @property
    def at_end(self) -> bool:
        """Whether the state at the end of training is a checkpoint."""
        return self.checkpoint_every is not None

    @staticmethod
    def _seconds(found: re.Match[str]) -> float:
        return float(found[1]) * _UNITS_S[found[2]]


MOST_LATENCY_S = 60
MOST_SERVERS = 64
HOST_PORT = re.compile(r"[\w.-]+:\d{1,5}", re.ASCII)
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
    servers_at: tuple[str, ...] = ()
    """Hosts on which the ``servers`` start in turn, as HOST:PORT of `python -m runtime serve`
    there; none: this host."""
    servers_secret: Path | None = None
    """Of ``servers_at``: the file with the secret that `serve` was given, too."""
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
        if self.servers_at and not self.servers:
            raise ValueError("servers_at is read with servers alone; say --servers, how many")
        if self.servers:
            self._check_servers()

    @property
    def server_count(self) -> int:
        """Embedding servers, wherever they are."""
        return self.servers or self.shards

    def _check_servers(self) -> None:
        for at in self.servers_at:
            if not HOST_PORT.fullmatch(at):
                raise ValueError(f"servers_at must be HOST:PORT, got {at!r}")
        if bool(self.servers_at) != (self.servers_secret is not None):
            raise ValueError("servers_at and servers_secret go together; give both, or none")
        if self.shards != 1:
            raise ValueError(
                f"shards {self.shards} is not used with servers {self.servers}, which are processes"
                " of one shard each; remove one of the two"
            )


_FLAT = tyro.conf.arg(name="")  # its options stand on the command line without a prefix


class UnreadOptionError(ValueError):
    """An option that the run would not read."""

    def __init__(self, option: str, sentence: str) -> None:
        super().__init__(sentence)
        self.option = option


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run."""

    sync: Annotated[SyncConfig, _FLAT] = field(default_factory=SyncConfig)
    batch: int = 128
    """Samples per dense update, over all ranks, >= 1."""
    steps: int | None = None
    """Stop after this many times ``batch`` samples; else at the end of the data."""
    engine: Annotated[EngineConfig, _FLAT] = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    """Every table of the data's schema; in Python, `train(tables=...)` sets single ones apart."""
    seed: int = 0
    """Of initial weights, initial rows, and shuffling."""
    evaluation: Annotated[EvaluationConfig, _FLAT] = field(default_factory=EvaluationConfig)
    checkpoint: Annotated[CheckpointConfig, _FLAT] = field(default_factory=CheckpointConfig)
    nonfinite: Literal["stop", "skip"] = "stop"
    """Non-finite loss or gradients end the run, or skip that batch for rows and weights alike."""

    def __post_init__(self) -> None:
        check_fields(self)
        within(self, 1, 2**31, "batch")
        within(self, 1, MOST, "steps")
        within(self, 0, 2**63 - 1, "seed")
        for name, (value, default) in _choices(self.sync, self.engine).items():
            where = self.unread().get(name)
            if where and value != default:
                raise UnreadOptionError(name, self.not_used(name, where))
        self._check_pairs()

    def _check_pairs(self) -> None:
        sync, engine = self.sync, self.engine
        shared = sync.mode.has_barrier or sync.match == "global"
        if shared and self.batch < sync.ranks:
            raise ValueError(
                f"batch {self.batch} gives {sync.ranks} ranks less than a sample each;"
                f" use batch >= {sync.ranks} or fewer ranks"
            )
        if engine.executor == "lag" and sync.window is None:
            raise ValueError("the lag executor reaches its bound exactly; give tau a number")
        if sync.delay_compensation and engine.servers:
            raise ValueError(
                f"delay_compensation {sync.delay_compensation:g} needs rows in the ranks' process,"
                f" where what a lookup read is kept; use --servers 0, without torchrun"
            )
        if engine.executor == "replay" and self.checkpoint.checkpoint_every is not None:
            raise ValueError(
                "checkpoint_every is not of a replay, whose order has no cuts; remove it"
            )
        if self.rows.name != "rows":
            raise ValueError("rows.name is given by the data's schema; remove it")
        if self.rows.dtype == "float64" and engine.precision != "float64":
            raise ValueError("rows.dtype float64 needs --precision float64; add it")
        if engine.precision == "float64" and self.rows.dtype != "float64":
            raise ValueError("precision float64 needs rows of float64; add --rows.dtype float64")

    def unread(self) -> dict[str, str]:
        """The options of sync and engine that this run would not read, each with its place."""
        mode, executor = self.sync.mode, self.engine.executor
        concurrent = executor == "concurrent"
        late = mode.reads_late_rows
        averages = mode is Mode.ASYNC_AVERAGING
        late_modes = "modes that read late rows (hybrid, async, ...)"
        used = {
            "tau": (late, late_modes),
            "permits": (
                late and concurrent,
                f"{late_modes}, with the concurrent executor; the others take tau",
            ),
            "ahead": (mode is Mode.LOOKAHEAD, "mode lookahead"),
            "lookahead": (
                mode is Mode.LOOKAHEAD and concurrent,
                "mode lookahead with the concurrent executor",
            ),
            "merge_pushes": (
                mode.may_merge,
                "modes raw_hybrid and hybrid; sync always merges, async never",
            ),
            "sync_steps": (
                mode.may_merge and executor != "replay",
                "modes raw_hybrid and hybrid, where tau 0 is synchronous; a replay has its order",
            ),
            "dense_lag": (
                mode.has_barrier,
                "modes with a common step; in async dense weights are late by themselves",
            ),
            "delay_compensation": (late, late_modes),
            "lr_by_staleness": (late, late_modes),
            "match": (not mode.has_barrier, "modes async and async_averaging"),
            "row_gradients": (
                mode.has_barrier,
                "modes with a common step, whose ranks' gradients add up",
            ),
            "average_every_steps": (
                averages and executor == "lag",
                "mode async_averaging with the lag executor",
            ),
            "average_every_s": (
                averages and concurrent,
                "mode async_averaging with the concurrent executor",
            ),
            "queue_batches": (
                late and concurrent,
                "modes that read late rows, with the concurrent executor",
            ),
            "latency_s": (concurrent, "the concurrent executor"),
            "servers": (concurrent, "the concurrent executor"),
            "loaders": (concurrent, "the concurrent executor"),
            "dense_sum": (
                concurrent and mode.has_barrier,
                "modes with a common step, with the concurrent executor under torchrun",
            ),
            "timeline": (concurrent, "the concurrent executor"),
            "fuse_ranks": (executor == "lag", "the lag executor; a replay does as its trace says"),
            "trace": (executor == "replay", "the replay executor"),
            "loss_scale": (self.engine.precision == "float16", "precision float16"),
        }
        return {name: where for name, (read, where) in used.items() if not read}

    def not_used(self, name: str, where: str) -> str:
        """Why an option is refused that nothing would read."""
        return (
            f"{name} is not used by mode {self.sync.mode} with executor {self.engine.executor}:"
            f" it belongs to {where}; remove it"
        )

    @property
    def implied_tau(self) -> int | None:
        """What bounds the window of the concurrent executor when tau does not: its queues.

        While rank r fetches step s, up to q - 1 fetched steps wait and one trains, so all ranks
        have trained step s - q - 1 and handed on the push before it; of those, q may wait and one
        be on its way. Async has no such bound between ranks.
        """
        if self.sync.window is not None or not self.sync.mode.has_barrier:
            return self.sync.window
        return 2 * self.queue_capacity + 2

    @property
    def queue_capacity(self) -> int:
        """Batches that each queue of a rank holds."""
        if self.engine.queue_batches is not None:
            return self.engine.queue_batches
        window = 0 if self.sync.window is None else self.sync.window + 1
        return max(10, window, self.sync.permits or 0)

    @property
    def batch_per_push(self) -> int:
        """Samples of one batch of the stream: of a dense update."""
        if not self.sync.mode.has_barrier and self.sync.match == "global":
            return max(1, self.batch // self.sync.ranks)
        return self.batch

    @property
    def updates(self) -> int | None:
        """Dense updates after which to stop; a batch of ``match=global`` is a rank's share."""
        return None if self.steps is None else self.steps * self.dense_updates_per_step

    @property
    def evaluate_every_updates(self) -> int | None:
        """Dense updates between two snapshots."""
        every = self.evaluation.evaluate_every_steps
        return None if every is None else every * self.dense_updates_per_step

    @property
    def dense_updates_per_step(self) -> int:
        """Dense updates that take ``batch`` samples: with ``match=global`` one of every rank."""
        shares = not self.sync.mode.has_barrier and self.sync.match == "global"
        return self.sync.ranks if shares else 1


def _choices(*groups: Any) -> dict[str, tuple[Any, Any]]:
    """Every option of these groups: its value and its default."""
    return {f.name: (getattr(g, f.name), f.default) for g in groups for f in fields(g)}


def read_config(path: Path) -> TrainConfig:
    """The config in a .json or .toml file; groups and options that it leaves out have defaults.

    Raises ValueError naming the file, the option, its value and what it may be.
    """
    return parse(TrainConfig, read_document(path), str(path))
