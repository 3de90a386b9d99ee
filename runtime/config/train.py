"""Every option of a training run: what it may be, and who reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from persia_sim.base.command_line import FLAT, OF_GROUP, AsGroup
from persia_sim.base.rules import Refused
from persia_sim.base.schema import (
    Checked,
    Unread,
    Within,
    check_fields,
    in_group,
    unread,
    with_values,
)
from persia_sim.base.vocabulary import DEFAULT_LOOKUPS_IN_FLIGHT, ENDLESS, Dense
from runtime.config.checkpoints import CheckpointConfig
from runtime.config.sync import (
    CONCURRENT,
    FETCHES_CONCURRENT,
    LATE_CONCURRENT,
    SyncConfig,
    of_executor,
)
from runtime.embedding.config import TableConfig

DENSE_OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")
OF_TORCH = "torch.optim:"
"""What the name of another class of torch.optim begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Checked):
    """Which samples, in which order."""

    name: Annotated[str, OF_GROUP] = "kuairand-pure-14d"
    """A data set of `persia-runtime data list`, `synthetic`, `synthetic:PRESET`, or the path of
    a schema file (.toml)."""
    dir: Path | None = None
    """Folder with the real data sets, as ~/data; else PERSIA_DATA_DIR, else where `data get` put
    them."""
    rows: Annotated[int | None, Within(1, ENDLESS)] = None
    """Read only the first rows of the training part (its validation samples among them)."""
    skip_rows: Annotated[int, Within(0, ENDLESS)] = 0
    """Train behind so many first samples of what is read: with all but the last it is a window, the
    newest of a log. They count as having trained, wherever that is asked."""
    validation_fraction: Annotated[float | None, Within(0, 1, without="most")] = None
    """Share of the training samples, the last of them, that validate instead of training, 0 to
    below 1; None: as the data set's schema says. The synthetic stream has them anyway."""
    epochs: Annotated[int, Within(1, ENDLESS)] = 1
    """Times the training part is read, >= 1. Click logs overfit their ids from the second on."""
    shuffle: bool = False
    """Shuffle the training samples with the seed, up to 1,048,576 at a time; else they come in the
    source's own order (time)."""
    shuffle_buffer: Annotated[int | None, Within(2, 1 << 24)] = None
    """Shuffle the training samples within a buffer of so many, >= 2, as tf.data does: each sample
    is drawn from the buffer and the next one of the stream takes its place. None: no buffer."""
    skip_bad_rows: bool = False
    """Count and leave out rows that break the schema; else the first one ends the run."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shuffle and self.shuffle_buffer is not None:
            raise Refused(
                "shuffle_buffer",
                "shuffles within a buffer, and --data.shuffle the whole training part; remove one",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The dense network and its optimiser."""

    name: Annotated[str, OF_GROUP] = "mlp"
    """mlp, dlrm, deepfm, dcn; mmoe (of several tasks); or package.module:Class for your own."""
    hidden: tuple[Annotated[int, Within(1, 2**20)], ...] = (256, 128)
    """Widths of the hidden layers; the paper's are 4096 2048 1024 512 256."""
    optimizer: str = "adam"
    """adam, adamw, sgd, adagrad with torch's defaults; or another class of torch.optim with its
    own, as torch.optim:NAdam (not in async, whose dense weights lie on servers)."""
    lr: Annotated[float, Within(0, 1e6, without="least")] = 1e-3
    """Learning rate of the dense weights, > 0."""
    dropout: Annotated[float, Within(0, 1, without="most")] = 0.0
    """Share of each hidden layer's outputs that training leaves out, drawn from (seed, rank, step);
    of built-in networks: a class of your own has its own nn.Dropout."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.optimizer not in DENSE_OPTIMIZERS and not self.optimizer.startswith(OF_TORCH):
            known = f"{', '.join(DENSE_OPTIMIZERS)}, or {OF_TORCH} and a class, as {OF_TORCH}NAdam"
            raise Refused("optimizer", f"must be {known}, got {self.optimizer!r}")
        if self.dropout and ":" in self.name:
            raise Refused(
                "dropout",
                f"is of built-in networks, got {self.dropout} with {self.name}; give your class an"
                " nn.Dropout of its own",
            )
        if not self.hidden:
            raise Refused("hidden", "must be one or more widths, got none")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When and on what the model is judged."""

    eval_split: Literal["test", "validation"] = "test"
    """test: what no choice may look at. validation: the last training samples, on which rates and
    other options are chosen; the test part is not read then. They train in neither case."""
    evaluate_every_steps: Annotated[int | None, Within(1, ENDLESS)] = None
    """Evaluate a snapshot on that split every so many times ``batch`` samples (for curves)."""
    stop_after: Annotated[int | None, Within(1, ENDLESS)] = None
    """End training when so many evaluations on the way, one after another, were no better than the
    best before them: AUC (of a regression MSE) of the first task, on the validation part alone."""
    test_rows: Annotated[int | None, Within(2, ENDLESS)] = None
    """Evaluate on the first rows of that split only, >= 2."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stop_after is not None and self.eval_split == "test":
            raise Refused(
                "stop_after",
                "would choose by the test part; add --eval-split validation, and test after",
            )
        if self.stop_after is not None and self.evaluate_every_steps is None:
            raise Refused("stop_after", "counts evaluations on the way; add --evaluate-every-steps")


_PORT = r"0*(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
HOST_PORT = re.compile(rf"(?:[\w.-]+|\[[\da-fA-F:.]+(?:%\w+)?\]):{_PORT}", re.ASCII)
HOST_PORT_RULE = "must be HOST:PORT, PORT from 0 to 65535, an IPv6 address in brackets"
"""What who is not of that form is told."""
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


Executor = Literal["constant_lag", "concurrent", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Who executes the order, on what."""

    executor: Executor = "constant_lag"
    """constant_lag: one thread, every lookup misses exactly tau steps, same bytes every time.
    concurrent: threads, measures speed. replay: the order of a recorded or simulated run."""
    trace: Annotated[Path | None, of_executor("replay")] = None
    """The order that replay executes. Example: order.npz."""
    shards: Annotated[int, Within(1, 4096)] = 1
    """Embedding servers, 1 to 4096; each has its own lock and version."""
    servers: Annotated[int, Within(0, 512), CONCURRENT] = 0
    """Embedding servers of the concurrent executor as processes of this host, 0 to 512, which
    hold the rows in place of ``shards`` in this process; 0: none. Linux."""
    servers_at: Annotated[tuple[str, ...], CONCURRENT] = ()
    """Hosts on which the ``servers`` start in turn, then ``workers`` and ``loaders``, as HOST:PORT
    of `persia-runtime serve` there; none: this host. Example: 10.0.0.5:7800 10.0.0.6:7800."""
    servers_secret: Annotated[Path | None, CONCURRENT] = None
    """The file with the secret of ``servers_at`` that `serve` was given, too, as secret.txt."""
    tls: Annotated[bool, CONCURRENT] = True
    """Encrypt what travels to ``servers_at``, by TLS 1.3; `serve` there must say the same."""
    workers: Annotated[int, Within(0, 64), CONCURRENT] = 0
    """Beside ``servers``: embedding workers as processes, 0 to 64, no more than ranks, which merge,
    pool and scatter for them (rank r has worker r mod ``workers``); 0: each rank does it."""
    loaders: Annotated[int, Within(0, 64), CONCURRENT] = 0
    """Processes that parse and hash the training data ahead of the ranks of the concurrent
    executor, 0 to 64; 0: the ranks do it. Linux."""
    threads: Annotated[int, Within(1, 1024)] = 1
    """Threads of one dense operation, and of a kernel of each of the ``servers``, 1 to 1024."""
    device: str = "cpu"
    """Device of the dense network: cpu, or cuda, cuda:1, ..."""
    precision: Literal["float32", "float64", "bfloat16", "tf32"] = "float32"
    """Precision of the dense network's arithmetic; bfloat16 by autocast. tf32: on a
    GPU, float32 whose matrix products round their factors to 10 bits. float64, for checking laws:
    rows, too; otherwise they are float32."""
    lookups_in_flight: Annotated[int, Within(1, 2**20), FETCHES_CONCURRENT] = (
        DEFAULT_LOOKUPS_IN_FLIGHT
    )
    """Lookups of a rank that are on their way at once, >= 1, in the modes whose lookups are not
    waited for; fewer where window, permits or queues let in no more (source: the original)."""
    queue_batches: Annotated[int | None, Within(1, 2**20), LATE_CONCURRENT] = None
    """Capacity of each queue of a rank of the concurrent executor, >= 1. None: what window or
    permits let in, at least ``lookups_in_flight``."""
    latency_s: Annotated[float, Within(0, 60), CONCURRENT] = 0.0
    """Seconds, at most 60, that the concurrent executor holds every batch back behind its lookup,
    and every push before it is sent: a delay inside the rank, without a network."""
    trace_order: bool = True
    """Keep the order of events, 20 bytes each, for trace.npz and a replay; else staleness alone is
    counted, in memory that does not grow with the run (with ``servers`` not even that)."""
    fuse_ranks: Annotated[bool, of_executor("constant_lag")] = True
    """Have the executor constant_lag compute the ranks of a step as one batch where they read
    the same rows and nothing but the order of float sums changes; order and trace stay those of
    the ranks. Else, and in every other case, one by one."""
    timeline: Annotated[bool, CONCURRENT] = False
    """Keep how long each stage of all ranks of the concurrent executor took: timeline.json, for
    Perfetto."""

    def __post_init__(self) -> None:
        check_fields(self)

        # The device and its arithmetic.
        if not _DEVICE.fullmatch(self.device):
            rule = "must be cpu, cuda, or cuda:1 and so on"
            raise Refused("device", f"{rule}, got {self.device!r}")
        if self.precision == "tf32" and self.device == "cpu":
            raise Refused(
                "precision", "tf32 is arithmetic of a GPU, got device cpu; use float32 or a GPU"
            )

        # A replay needs its order.
        if self.executor == "replay" and self.trace is None:
            raise Refused("executor", "replay needs the order to execute; add --trace FILE")

        # Servers on other hosts: where, how many, and the secret.
        if self.servers_at and not self.servers:
            raise Refused("servers_at", "is read with servers alone; say --servers, how many")
        for at in self.servers_at:
            if not HOST_PORT.fullmatch(at):
                raise Refused("servers_at", f"{HOST_PORT_RULE}, got {at!r}")
            if not int(at.rpartition(":")[2]):
                raise Refused("servers_at", f"names port 0 of {at!r}, where nobody listens")
        if bool(self.servers_at) != (self.servers_secret is not None):
            raise Refused("servers_at", "and --servers-secret go together; give both, or none")

        # Who stands beside the servers, and who in their place.
        if self.workers and not self.servers:
            raise Refused("workers", "stand between ranks and servers; add --servers, how many")
        if self.servers and self.shards != 1:
            raise Refused(
                "shards",
                f"{self.shards} is not used with servers {self.servers}, which are processes of one"
                " shard each; remove one of the two",
            )

    @property
    def shard_count(self) -> int:
        """Embedding servers, wherever they are."""
        return self.servers or self.shards


_NOTHING = 2.0**-150
"""Half of float32's least number: this and less is rounded to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run.

    >>> config = TrainConfig(sync=SyncConfig(mode="hybrid", tau=16, ranks=4), batch=256)
    >>> config.sync.tau, config.batch // config.sync.ranks
    (16, 64)

    A value that breaks a rule is refused by its name, and so is an option that nothing would read:

    >>> TrainConfig(batch=0)
    Traceback (most recent call last):
    ...
    persia_sim.base.rules.Refused: batch must be >= 1, got 0
    """

    sync: Annotated[SyncConfig, FLAT] = field(default_factory=SyncConfig)
    batch: Annotated[int, Within(1, 2**31)] = 128
    """Samples per dense update, over all ranks, >= 1."""
    steps: Annotated[int | None, Within(1, ENDLESS)] = None
    """Stop after this many times ``batch`` samples; else at the end of the data."""
    engine: Annotated[EngineConfig, FLAT] = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    """Every table of the data's schema."""
    tables: Annotated[dict[str, dict[str, Any]], AsGroup("rows")] = field(default_factory=dict)
    """What is different in single tables of the schema: ``[tables.NAME]`` in a file."""
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    """Seed of initial weights, initial rows, and shuffling."""
    warm_start: Path | None = None
    """Folder of a run, as runs/mine, or of a checkpoint: begin with its rows and dense weights. The
    optimisers and the age of rows begin anew."""
    evaluation: Annotated[EvaluationConfig, FLAT] = field(default_factory=EvaluationConfig)
    checkpoint: Annotated[CheckpointConfig, FLAT] = field(default_factory=CheckpointConfig)
    nonfinite: Literal["stop", "skip"] = "stop"
    """Non-finite loss or gradients end the run, or skip that batch for rows and weights alike."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.engine.precision == "float64":
            with in_group("rows"):
                object.__setattr__(self, "rows", replace(self.rows, dtype="float64"))
        self.tables_apart()
        defaults = type(self.sync)(), type(self.engine)()
        for path, where in self.unread().items():
            group, name = path.split(".")
            value = getattr(getattr(self, group), name)
            if value != getattr(defaults[group == "engine"], name):
                raise Unread(path, self.why_unread(where))
        self._check_pairs()

    def _check_pairs(self) -> None:
        sync = self.sync
        engine = self.engine

        # A rate that the arithmetic would round to nothing.
        rate = self.model.lr
        if rate <= _NOTHING and engine.precision != "float64":
            rule = f"is {rate}, which float32 rounds to 0: it would change nothing"
            raise Refused("model.lr", f"{rule}; give more, or --precision float64")

        # Dense weights on servers are updated by one push at a time, of one rank.
        if sync.mode.rules.dense is Dense.ON_SERVERS and self.model.optimizer.startswith(OF_TORCH):
            raise Refused(
                "model.optimizer",
                f"{self.model.optimizer} is of modes whose ranks keep the dense weights;"
                f" mode {sync.mode} has {', '.join(DENSE_OPTIMIZERS)}",
            )

        # Every rank gets a sample of each step.
        shared = sync.mode.has_barrier or sync.match == "global"
        if shared and self.batch < sync.ranks:
            raise Refused(
                "batch",
                f"{self.batch} gives {sync.ranks} ranks less than a sample each; use batch >="
                f" {sync.ranks} or fewer ranks",
            )

        # What an executor or an engine cannot do.
        if engine.executor == "constant_lag" and sync.window is None:
            raise Refused(
                "sync.tau",
                "is unbounded, and the executor constant_lag reaches its bound; give a number",
            )
        if sync.delay_compensation and engine.servers:
            raise Refused(
                "sync.delay_compensation",
                f"{sync.delay_compensation:g} needs rows in the ranks' process, where what a lookup"
                " read is kept; use --servers 0, without torchrun",
            )
        if engine.workers and sync.lookahead == "forwarded":
            raise Refused(
                "engine.workers",
                "hold no rows on lease, as --lookahead forwarded needs; use --lookahead reread",
            )
        if engine.executor == "replay" and self.checkpoint.checkpoint_every is not None:
            raise Refused(
                "checkpoint.checkpoint_every",
                "is not of a replay, whose order has no cuts; remove it",
            )

        # The test part decides nothing.
        if self.checkpoint.keep_best is not None and self.evaluation.eval_split == "test":
            raise Refused(
                "checkpoint.keep_best",
                "would choose by the test part; add --eval-split validation, and test after",
            )

        # Rows of each table, against the network's arithmetic.
        apart = {f"tables.{name}": table for name, table in self.tables_apart().items()}
        for group, rows in {"rows": self.rows, **apart}.items():
            if rows.name != "rows":
                raise Refused(f"{group}.name", "is given by the data's schema; remove it")
            if (rows.dtype == "float64") != (engine.precision == "float64"):
                raise Refused(
                    f"{group}.dtype",
                    f"is {rows.dtype} with --precision {engine.precision}, which says how wide rows"
                    " are; remove it",
                )

    def tables_apart(self) -> dict[str, TableConfig]:
        """The tables that are not as ``rows``, by name; raises `Refused` for what no table has."""
        result = {}
        for name, changes in self.tables.items():
            with in_group(f"tables.{name}"):
                result[name] = with_values(self.rows, changes)
        return result

    def unread(self) -> dict[str, str]:
        """The options of sync and engine that this run would not read, each with its place."""
        groups = {"sync": self.sync, "engine": self.engine}
        return {
            f"{group}.{name}": where
            for group, record in groups.items()
            for name, where in unread(record, self).items()
        }

    def why_unread(self, where: str) -> str:
        """Why an option is refused that nothing would read."""
        return (
            f"is not used by mode {self.sync.mode} with executor {self.engine.executor}: it belongs"
            f" to {where}; remove it"
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
        return max(self.engine.lookups_in_flight, window, self.sync.permits or 0)

    @property
    def batch_per_push(self) -> int:
        """Samples of one batch of the stream: of a dense update."""
        if self.shares_steps:
            return max(1, self.batch // self.sync.ranks)
        return self.batch

    @property
    def shares_steps(self) -> bool:
        """Whether each update takes a rank's share of a step (``match=global``): how many a step
        has is then a matter of the ranks, and their sum over a resume with others is of no step."""
        return not self.sync.mode.has_barrier and self.sync.match == "global"

    @property
    def dense_updates_per_step(self) -> int:
        """Dense updates that take ``batch`` samples: with ``match=global`` one of every rank."""
        return self.sync.ranks if self.shares_steps else 1
