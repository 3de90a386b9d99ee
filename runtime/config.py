"""Everything that decides a training run, in one frozen record that the command line mirrors.

Free of torch, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from persia_sim.words.vocabulary import Mode
from runtime.embedding.config import TableConfig

Executor = Literal["lag", "concurrent", "replay"]
DenseOptimizer = Literal["adam", "sgd", "adagrad"]
Tau = int | Literal["unbounded"]
DEFAULT_TAU = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which samples, in which order."""

    name: str = "kuairand-pure-14d"
    """A data set of `python -m runtime data list`, `synthetic`, `synthetic:PRESET`, or the path of
    a schema file (.toml)."""
    dir: Path | None = None
    """Folder with the real data sets; else PERSIA_DATA_DIR, else where `data get` put them."""
    rows: int | None = None
    """Read only the first rows of the training part."""
    passes: int = 1
    """Times the training part is read, >= 1. Click logs overfit their ids from the second on."""
    shuffle: bool = False
    """Permute the training samples with the seed; else the source's own order (time)."""
    skip_bad_rows: bool = False
    """Count and leave out rows that break the schema; else the first one ends the run."""

    def __post_init__(self) -> None:
        for name in ("rows", "passes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be >= 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The dense network and its optimiser."""

    name: str = "ffnn"
    """ffnn, dlrm, deepfm, dcn, or package.module:Class for your own."""
    hidden: tuple[int, ...] = (256, 128)
    """Widths of the tower's layers; the paper's are 4096 2048 1024 512 256."""
    optimizer: DenseOptimizer = "adam"
    """torch's, without decay or momentum."""
    lr: float = 1e-3
    """Learning rate of the dense weights, > 0."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"model.lr must be > 0, got {self.lr}")
        if not self.hidden or any(width < 1 for width in self.hidden):
            raise ValueError(f"model.hidden must be one or more widths >= 1, got {self.hidden}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run."""

    mode: Mode = Mode.SYNC
    """How rows and dense weights are kept up to date; see the README's table."""
    ranks: int = 1
    """NN workers W, >= 1."""
    tau: Tau | None = None
    """Bound: a lookup may miss the pushes of at most tau steps. 0 is synchronous; `unbounded`
    leaves it to the queues. Not for sync and lookahead. Default 4."""
    permits: int | None = None
    """Another bound, the original's: batches in flight per rank, from lookup to applied push."""
    ahead: int | None = None
    """Of lookahead: steps that are prefetched, >= 1. Default 4."""
    lookahead: Literal["reread", "forwarded"] | None = None
    """Of lookahead with the concurrent executor: stale rows are read again before they are used
    (reread, the default), or the worker has the rows of its window on lease and applies every
    step's gradients to them itself (forwarded). Both give the bytes of sync."""
    merge_pushes: bool | None = None
    """One optimiser step per row and step from all ranks' gradients; else one per rank, on arrival.
    Only a choice for raw_hybrid and hybrid. Default true."""
    match: Literal["update", "global"] | None = None
    """Of async: a batch holds as many samples as a dense update of the other modes (update), or a
    rank's share of it (global). Default update."""
    row_gradients: Literal["mean", "sum"] = "mean"
    """Of the global mean loss, or W times that (the original's)."""
    average_every_steps: int | None = None
    """Of async_averaging with the lag executor: steps of a rank between averagings. Default 32."""
    average_every_s: float | None = None
    """Of async_averaging with the concurrent executor. Default 0.5 (source: the original)."""
    batch: int = 128
    """Samples per dense update, over all ranks, >= 1."""
    steps: int | None = None
    """Stop after this many times ``batch`` samples; else at the end of the data."""
    executor: Executor = "lag"
    """lag: one thread, every lookup misses exactly tau steps, same bytes every time. concurrent:
    threads, measures speed. replay: the order of a recorded or simulated run."""
    trace: Path | None = None
    """Of replay: the order to execute."""
    engine: Literal["native", "reference"] = "native"
    """The store's kernels: C++, or numpy (the oracle; same bytes, slower)."""
    shards: int = 1
    """Embedding servers, >= 1; each has its own lock and version."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    """Every table of the data's schema; in Python, `train(tables=...)` sets single ones apart."""
    seed: int = 0
    """Of initial weights, initial rows, and shuffling."""
    evaluate_every_steps: int | None = None
    """Evaluate a snapshot on the test part every so many times ``batch`` samples (for curves)."""
    test_rows: int | None = None
    """Evaluate on the first rows of the test part only."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Non-finite loss or gradients end the run, or skip that batch for rows and weights alike."""
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of the dense network's arithmetic; the two short ones by autocast."""
    loss_scale: float | None = None
    """First factor on the loss of float16; halved on overflow. Default 65536 with float16."""
    device: str = "cpu"
    """Of the dense network: cpu, or cuda, cuda:1, ..."""
    threads: int = 1
    """Threads of one dense operation, >= 1."""
    queue_batches: int | None = None
    """Of concurrent: capacity of each queue of a rank, >= 1. Default: what window or permits let
    in, at least 10 (source: the original)."""
    timeline: bool = False
    """Of concurrent: keep how long each stage took, as timeline.json for Perfetto."""
    latency_s: float = 0.0
    """Of concurrent: seconds added to every lookup and every push, as a network would."""

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise ValueError(f"mode must be one of {', '.join(Mode)}, got {self.mode!r}")
        object.__setattr__(self, "mode", Mode(self.mode))  # a notebook may say mode="hybrid"
        mode = self.mode
        for name in ("ranks", "batch", "shards", "threads"):
            _at_least(name, getattr(self, name), 1)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        for name in (
            "queue_batches",
            "permits",
            "ahead",
            "steps",
            "average_every_steps",
            "evaluate_every_steps",
        ):
            _at_least(name, getattr(self, name), 1)
        _at_least("test_rows", self.test_rows, 2)
        if isinstance(self.tau, int):
            _at_least("tau", self.tau, 0)
        used_by = {
            "tau": (mode.reads_late_rows, "modes that read late rows (hybrid, async, ...)"),
            "permits": (mode.reads_late_rows, "modes that read late rows (hybrid, async, ...)"),
            "ahead": (mode is Mode.LOOKAHEAD, "mode lookahead"),
            "lookahead": (
                mode is Mode.LOOKAHEAD and self.executor == "concurrent",
                "mode lookahead with the concurrent executor",
            ),
            "merge_pushes": (
                mode in (Mode.HYBRID, Mode.RAW_HYBRID),
                "modes raw_hybrid and hybrid; sync always merges, async never",
            ),
            "match": (not mode.has_barrier, "modes async and async_averaging"),
            "average_every_steps": (
                mode is Mode.ASYNC_AVERAGING and self.executor == "lag",
                "mode async_averaging with the lag executor",
            ),
            "average_every_s": (
                mode is Mode.ASYNC_AVERAGING and self.executor == "concurrent",
                "mode async_averaging with the concurrent executor",
            ),
            "queue_batches": (
                mode.reads_late_rows and self.executor == "concurrent",
                "modes that read late rows, with the concurrent executor",
            ),
            "trace": (self.executor == "replay", "the replay executor"),
            "loss_scale": (self.precision == "float16", "precision float16"),
        }
        for name, (used, where) in used_by.items():
            if getattr(self, name) is not None and not used:
                raise ValueError(
                    f"{name} is not used by mode {mode} with executor {self.executor}:"
                    f" it belongs to {where}; remove it"
                )
        if self.executor == "replay" and self.trace is None:
            raise ValueError("replay needs the order to execute; add --trace FILE")
        if self.executor == "lag" and self.tau == "unbounded":
            raise ValueError("the lag executor reaches its bound exactly; give tau a number")
        if self.timeline and self.executor != "concurrent":
            raise ValueError("timeline is only kept by the concurrent executor; remove it")
        for name in ("average_every_s", "loss_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be > 0, got {value}")
        if self.row_gradients == "sum" and not mode.has_barrier:
            raise ValueError(
                "row_gradients sum adds up the ranks of a step; async has none: remove it"
            )
        if self.rows.name != "rows":
            raise ValueError("rows.name is given by the data's schema; remove it")
        if self.rows.dtype == "float64" and self.precision != "float64":
            raise ValueError("rows.dtype float64 needs --precision float64; add it")
        if self.latency_s < 0:
            raise ValueError(f"latency_s must be >= 0, got {self.latency_s}")
        if self.latency_s and self.executor != "concurrent":
            raise ValueError("latency_s is only used by the concurrent executor; remove it")
        if self.precision == "float64" and self.rows.dtype != "float64":
            raise ValueError("precision float64 needs rows of float64; add --rows.dtype float64")

    @property
    def window(self) -> int | None:
        """The bound tau in force; None is unbounded."""
        if not self.mode.reads_late_rows:
            return 0
        if self.tau == "unbounded":
            return None
        return DEFAULT_TAU if self.tau is None else self.tau

    @property
    def implied_tau(self) -> int | None:
        """What bounds the window of the concurrent executor when tau does not: its queues.

        While rank r fetches step s, up to q - 1 fetched steps wait and one trains, so all ranks
        have trained step s - q - 1 and handed on the push before it; of those, q may wait and one
        be on its way. Async has no such bound between ranks.
        """
        if self.window is not None or not self.mode.has_barrier:
            return self.window
        return 2 * self.queue_capacity + 2

    @property
    def queue_capacity(self) -> int:
        """Batches that each queue of a rank holds."""
        if self.queue_batches is not None:
            return self.queue_batches
        window = 0 if self.window is None else self.window + 1
        return max(10, window, self.permits or 0)

    @property
    def updates(self) -> int | None:
        """Dense updates after which to stop; a batch of ``match=global`` is a rank's share."""
        return None if self.steps is None else self.steps * self._updates_per_step

    @property
    def evaluate_every_updates(self) -> int | None:
        """Dense updates between two snapshots."""
        every = self.evaluate_every_steps
        return None if every is None else every * self._updates_per_step

    @property
    def _updates_per_step(self) -> int:
        return max(1, self.batch // self.batch_per_push)

    @property
    def lag(self) -> int:
        """Steps that every lookup misses in the lag executor: tau, or less for want of permits."""
        tau = self.window if self.window is not None else 0
        return tau if self.permits is None else min(tau, self.permits - 1)

    @property
    def merges(self) -> bool:
        """Whether a row takes one optimiser step per step of all ranks."""
        if self.mode in (Mode.HYBRID, Mode.RAW_HYBRID):
            return self.merge_pushes is not False
        return self.mode.has_barrier

    @property
    def prefetched_steps(self) -> int:
        """Steps that lookahead fetches ahead."""
        return 4 if self.ahead is None else self.ahead

    @property
    def batch_per_push(self) -> int:
        """Samples of one batch of the stream: of a dense update."""
        if not self.mode.has_barrier and self.match == "global":
            return max(1, self.batch // self.ranks)
        return self.batch


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
