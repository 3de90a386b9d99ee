"""The configurations that are predicted and run, and what a batch of each holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from experiments.options import REFERENCE, STUDIED
from persia_sim.base.vocabulary import Mode, Read
from runtime.config import DataConfig, EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.source import rebatch
from runtime.data.synthetic import Recipe, recipe
from runtime.embedding.config import TableConfig

if TYPE_CHECKING:
    from runtime.data.synthetic import SyntheticSource

SHAPE = "criteo-ad"
SCALE = 0.01
DATA = f"synthetic:{SHAPE}:{SCALE:g}"
"""26 fields of one id, 13 dense features: what the profile is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of this host; the defaults are the one that the others depart from."""

    mode: Mode = STUDIED
    ranks: int = 1
    shards: int = 1
    """Embedding servers in the ranks' process."""
    servers: int = 0
    """Embedding servers of another host (`link`), in place of these; 0: none."""
    window: int = 4
    """tau of modes that read late rows, steps ahead of lookahead; sync has none."""
    batch: int = 512
    """Samples of one dense update, all ranks that have a part in it together."""
    dim: int = 16
    """Floats in a row."""
    bag: int = 1
    """Most ids of a field in a sample; each number from 1 is equally likely."""
    hidden: tuple[int, ...] = (256, 128)
    """Widths of the MLP."""
    latency_s: float = 0.0
    """Latency of each lookup and of each push."""
    gbit_per_s: float = 0.0
    """Rate of the link to them; 0: as fast as this machine can."""
    round_trip_s: float = 0.0
    """Of a message to them and its answer, beside what these take at that rate."""
    half: bool = False
    """Rows and their gradients travel as float16 with a scale for each row."""
    permits: int | None = None
    """Most batches of a rank between the start of their lookup and the end of their push."""
    queue: int | None = None
    """Batches that wait between two threads of a rank; None: as many as the window lets in."""
    slow_s: float = 0.0
    """Seconds for which the last server holds each request longer than the others do."""
    dead_s: float = 0.0
    """Seconds for which the last server stands still once, after two thirds of the steps."""
    copies: int = 1
    """Runs of this configuration side by side in one process, which share nothing but the host."""

    @property
    def name(self) -> str:
        """Everything that decides it, in words."""
        # Mode, window, and sizes; then what departs from a run of one process without faults.
        word = {
            Read.FRESH: "",
            Read.AHEAD: f" {self.window} ahead",
            Read.LATE: f" tau {self.window}",
        }
        parts = [f"{self.mode}{word[self.mode.rules.read]}"]
        parts += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        parts += [f"{self.copies} runs at once"] if self.copies > 1 else []
        parts += [f"{self.shards} shards"] if self.shards > 1 else []
        parts += [f"batch {self.batch}", f"dim {self.dim}"]
        parts += [f"1-{self.bag} ids"] if self.bag > 1 else []
        parts.append("-".join(map(str, self.hidden)))
        parts += [f"{1e3 * self.latency_s:g} ms"] if self.latency_s else []
        parts += [f"{self.permits} permits"] if self.permits else []
        parts += [f"queues of {self.queue}"] if self.queue else []
        parts += [f"a server {1e3 * self.slow_s:g} ms slower"] if self.slow_s else []
        parts += [f"a server dead for {self.dead_s:g} s"] if self.dead_s else []
        if self.servers:
            processes = "process" if self.servers == 1 else "processes"
            parts.append(f"{self.servers} server {processes}")
            parts.append(f"{self.gbit_per_s:g} Gbit/s" if self.gbit_per_s else "unshaped link")
        parts += [f"a round trip of {1e3 * self.round_trip_s:g} ms"] if self.round_trip_s else []
        parts += ["in half"] if self.half else []
        return ", ".join(parts)

    @property
    def batch_per_rank(self) -> int:
        """Samples of the largest share of a rank; without a barrier each rank has whole batches."""
        return -(-self.batch // self.ranks) if self.mode.has_barrier else self.batch

    @property
    def updates_per_step(self) -> int:
        """Dense updates while every rank does one step."""
        return 1 if self.mode.has_barrier else self.ranks

    @property
    def bound(self) -> dict[str, int]:
        """The window, as options and scenarios call it."""
        if self.mode.reads_fresh_rows:
            return {}
        return {"ahead" if self.mode.prefetches_rows else "tau": self.window}

    def config(self, steps: int, **apart: Any) -> TrainConfig:
        """The run of so many steps of each rank; ``apart``: where servers of another host are."""
        rows = {"servers": self.servers} if self.servers else {"shards": self.shards}

        # What the case does not say is the default of a run.
        return TrainConfig(
            sync=SyncConfig(
                mode=self.mode,
                ranks=self.ranks,
                wire="half" if self.half else "full",
                permits=self.permits,
                **self.bound,
            ),
            engine=EngineConfig(
                executor="concurrent",
                latency_s=self.latency_s,
                timeline=True,
                queue_batches=self.queue,
                **rows,
                **apart,
            ),
            data=DataConfig(name=DATA),
            batch=self.batch,
            steps=steps * self.updates_per_step,
            rows=TableConfig(dim=self.dim),
            model=ModelConfig(hidden=self.hidden),
        )

    def recipe(self) -> Recipe:
        """The stream: the profile's, with bags in place of single ids."""
        made = recipe(SHAPE, SCALE)
        if self.bag == 1:
            return made
        fields = tuple(replace(field, max_length=self.bag) for field in made.fields)
        return replace(made, name=f"{made.name}, 1-{self.bag} ids", fields=fields)

    def source(self) -> SyntheticSource:
        """Samples without end."""
        from runtime.data.synthetic import SyntheticSource  # late: loads the kernels

        return SyntheticSource(recipe=self.recipe())


def held_by(case: Case, steps: int) -> dict[str, float]:
    """What one rank's batch holds, which laws are linear in: counted in the case's own stream of so
    many steps, nothing is timed.

    ``occurrences`` of ids over all fields; ``distinct`` ones, each field's counted once, of which
    ``created`` are in no batch before, so that their rows are made (in steps after the first
    third); ``inputs``: numbers that the MLP is given; ``dense_params``: of its matrices, with six
    operations a weight and sample, forward and backward, as ``flops``.
    """
    # Ids are counted in the case's own stream: a formula would assume their popularity.
    made = case.recipe()
    samples = case.batch_per_rank
    inputs = len(made.fields) * case.dim + made.dense
    occurrences, distinct, created = _counted(case.bag, samples, case.ranks, steps)

    # Each name is what some law is linear in.
    weights = weights_of(inputs, case.hidden)
    return {
        "one": 1.0,
        "shards": case.servers or case.shards,
        "samples": samples,
        "inputs": samples * inputs,
        "occurrences": occurrences,
        "occurrence_floats": occurrences * case.dim,
        "distinct": distinct,
        "distinct_floats": distinct * case.dim,
        "created": distinct * created,
        "dense_params": weights,
        "flops": 6.0 * weights * samples,
        "dim": case.dim,
    }


MESSAGE_BYTES = 100.0
"""Header and body of a message that names where a batch of one table lies (runtime's protocol)."""


@dataclass(frozen=True, slots=True)
class Travels:
    """Bytes of one rank's batch between it and all servers, without headers of the network."""

    request_bytes: float
    rows_bytes: float
    push_bytes: float


def travels(case: Case) -> Travels:
    """Ids there, rows back, gradients there; floats of four bytes, or of two and a scale a row."""
    held = held_by(case, _FEW_STEPS)
    messages = MESSAGE_BYTES * case.servers
    row_bytes = 2.0 * (case.dim + 1) if case.half else 4.0 * case.dim
    floats = row_bytes * held["distinct"] + messages
    return Travels(8.0 * held["distinct"] + messages, floats, floats)


_FEW_STEPS = 60


@cache
def _counted(bag: int, size: int, ranks: int, steps: int) -> tuple[float, float, float]:
    """Ids and distinct ids of a batch, and the share of the latter whose rows are made."""
    from runtime.profiling.stage_times import count_ids  # late: loads the kernels

    batches = rebatch(Case(bag=bag).source().chunks("train"), size)
    counts = count_ids(islice(batches, steps * ranks))
    warm = steps // 3 * ranks
    new = counts.created[warm:].sum() / counts.distinct[warm:].sum()
    return float(counts.occurrences.mean()), float(counts.distinct.mean()), float(new)


def weights_of(inputs: int, hidden: tuple[int, ...]) -> int:
    """Numbers in the matrices of an MLP with one output.

    >>> weights_of(3, (4, 2))
    22
    """
    widths = (inputs, *hidden, 1)
    return sum(a * b for a, b in pairwise(widths))


def apart(quick: bool) -> list[Case]:
    """Modes at several rates of the link to one server of another host, and over a long way. A
    batch of 2,048 with rows of 64 numbers moves some 2 MB each way: at the lowest rate it binds
    every mode."""
    # Large batches, whose bytes bind, and small ones, whose messages do.
    base = Case(batch=2048, dim=64, servers=1)
    late = [replace(base, window=1), base]
    others = [mode for mode in Mode if not mode.reads_late_rows or mode.has_dense_server]
    modes = [replace(base, mode=mode) for mode in others]
    if quick:
        return [replace(case, gbit_per_s=2.5) for case in (modes[0], base)]

    # Each rate, then two ranks, two servers, and rows at half their bytes.
    small = [Case(servers=1, mode=mode) for mode in (REFERENCE, STUDIED)]
    return [
        *(replace(case, gbit_per_s=rate) for case in (*modes, *late) for rate in (1.0, 2.5, 10.0)),
        *(replace(case, gbit_per_s=rate) for case in small for rate in (0.1, 1.0)),
        *(replace(case, round_trip_s=0.03) for case in (*small, replace(small[1], window=16))),
        *(replace(case, gbit_per_s=1.0, ranks=2) for case in (modes[0], base)),
        *(replace(case, gbit_per_s=1.0, servers=2) for case in (modes[0], base)),
        *(replace(case, gbit_per_s=1.0, half=True) for case in (modes[0], base)),
    ]


KNEE_LATENCY_S = 0.01
KNEE_WINDOWS = (0, 1, 2, 4, 8, 16, 32, 64)
DEAD_S = 2.0


def knee_cases() -> list[Case]:
    """One case at growing windows: throughput grows with them until training is never held up."""
    return [Case(window=tau, latency_s=KNEE_LATENCY_S) for tau in KNEE_WINDOWS]


def deciding(quick: bool) -> list[Case]:
    """Every mode with one rank and two, and cases in which not the longest stage but the schedule
    decides: windows, permits, a server that holds its requests, short queues, a server that stands
    still. None is sync with one rank and nothing else, which the profile is fitted to."""
    late = Case(latency_s=KNEE_LATENCY_S, window=16)
    broken = [Case(slow_s=0.006, shards=2), Case(dead_s=DEAD_S)]
    alone = [mode for mode in Mode if not mode.reads_fresh_rows]
    if quick:
        return [Case(), *knee_cases()[1:6:2], broken[1]]
    return [
        *(Case(mode=mode) for mode in alone),
        *(Case(mode=mode, ranks=2) for mode in Mode),
        *knee_cases(),
        *(replace(late, permits=permits) for permits in (1, 3)),
        *(replace(case, mode=mode) for case in broken for mode in (REFERENCE, STUDIED)),
        replace(broken[0], window=1),
        replace(broken[1], window=64),
        *(Case(queue=1, window=window) for window in (4, 16)),
    ]
