"""One training run: the groups together, and what only makes sense across them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import tyro

from persia_sim.words.fields import check_fields
from persia_sim.words.vocabulary import Mode
from runtime.config.bounds import within
from runtime.config.checkpoint import CheckpointConfig
from runtime.config.engine import EngineConfig
from runtime.config.sync import SyncConfig
from runtime.config.what import MOST, DataConfig, EvaluationConfig, ModelConfig
from runtime.embedding.config import TableConfig

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
