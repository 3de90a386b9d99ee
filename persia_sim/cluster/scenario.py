"""One question to the simulator: a cluster, a workload, costs, a mode and its knobs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from persia_sim.base.rules import require
from persia_sim.base.schema import hold_choices
from persia_sim.base.vocabulary import (
    DEFAULT_AHEAD,
    DEFAULT_AVERAGE_EVERY_S,
    DEFAULT_LOOKUPS_IN_FLIGHT,
    DEFAULT_TAU,
    Mode,
)
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.incidents import MOST_S, Outage, SlowDown, Target
from persia_sim.cluster.workload import Workload

DEFAULT_STEPS = 100
MOST_CV = 10
"""Beyond, a lognormal factor is so rarely near its mean that a run says nothing."""


class Discipline(StrEnum):
    """How messages share a NIC. Worth 20-35 % where a NIC binds: choose, and say so."""

    FLUID = "fluid"
    """Weighted max-min fair share of connections, one for each pair of hosts, rank and kind of
    message, which carry their messages in order; a fan-out is a coflow with as many streams as
    receivers."""
    FLUID_EACH = "fluid-each"
    """The same, where every message has a connection of its own."""
    FIFO = "fifo"
    """One message at a time, those sent first before others, in pieces where a NIC of its path is
    busy between. Where NICs bind a fan-out that passes whole was up to 2 % off the length of a run
    with single messages at 6 to 8 GPUs; fluid 5 %, fluid-each 9 %."""
    UNSHARED = "unshared"
    """Every message has the NICs to itself: no contention (what the closed forms assume)."""


class DenseHome(StrEnum):
    """Where async keeps the dense weights that its ranks pull and push."""

    SERVERS = "servers"
    """Parts on all embedding servers (as XDL), spread over them as the rows are: copies share
    the NICs, cores and memory of servers and the NICs of GPU hosts with the rows."""
    APART = "apart"
    """Whole, behind a network of its own, so that only its rate binds (`dense_server_bytes_per_s`,
    as high as one likes): what a simulator that forgets dense traffic says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Queues:
    """Capacities of a rank's buffers; the defaults are the original's."""

    dataset: int = 10
    """Batches that loaders may hold ready for a rank, >= 1."""
    lookups_in_flight: int = DEFAULT_LOOKUPS_IN_FLIGHT
    """Lookups of a rank that are on their way at once, >= 1."""
    forwarded: int = 10
    """Looked-up batches that wait for the copy to the GPU, >= 1."""
    on_gpu: int = 10
    """Copied batches that wait for the training loop, >= 1."""
    backward: int = 10
    """Trained batches that wait for the copy back, >= 1."""
    copied_back: int = 10
    """Copied gradients that wait for a push task, >= 1."""
    push_tasks: int = 8
    """Pushes of a rank at once, >= 1."""
    reserve: bool = False
    """A lookup starts once the buffer on the GPU has room for its batch, so that its rows do not
    age while they wait for it: as in `runtime/`. Else, as in the original, it starts sooner and its
    batch waits where there is room."""

    at_servers: bool = False
    """A lookup is sent off before its window opens, in sync behind its rank's last push, and waits
    at the servers, so that a push is not waited for at a rank: as in `runtime/`. Else, as in the
    original, it starts when the window lets it."""

    def __post_init__(self) -> None:
        for field in (name for name in self.__slots__ if name not in ("reserve", "at_servers")):
            require(getattr(self, field) >= 1, f"queues.{field}", getattr(self, field), ">= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Random factors with mean 1; every draw is a function of (seed, purpose, rank, step)."""

    gpu_cv: float = 0.0
    """Coefficient of variation of a rank's compute time (lognormal), >= 0."""
    server_cv: float = 0.0
    """Coefficient of variation of one request at one server (lognormal), >= 0."""

    def __post_init__(self) -> None:
        for field in ("gpu_cv", "server_cv"):
            value = getattr(self, field)
            require(0 <= value <= MOST_CV, f"noise.{field}", value, f"must lie in [0, {MOST_CV}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """Background averaging of the dense replicas (async_averaging). A replica is locked for a whole
    round, and its rank's compute stands still."""

    period_s: float = DEFAULT_AVERAGE_EVERY_S
    """Simulated seconds between the starts of two rounds, > 0."""

    def __post_init__(self) -> None:
        ok = 0 < self.period_s <= MOST_S
        require(ok, "average_every_s", self.period_s, f"must be > 0 and <= {MOST_S:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """How a run is done, whatever it runs on: one description and one default of each, for the
    command, for sweeps and for callers. A knob that its mode does not read is an error."""

    mode: Mode = Mode.HYBRID
    """How rows and dense weights are kept up to date."""
    tau: int | None = DEFAULT_TAU
    """Window in steps, >= 0; None is unbounded. Read where rows may be late (raw_hybrid, hybrid,
    async, async_averaging)."""
    permits: int | None = None
    """Batches of a rank in flight, >= 1; None is unlimited. Only where rows may be late."""
    ahead: int | None = None
    """Steps that a prefetch may run ahead, >= 1. Lookahead only; None means 4 there."""
    lookahead: Literal["reread", "forwarded"] = "reread"
    """How prefetched rows with pending pushes are brought up to date: read again from the servers
    (reread), or the embedding workers have the rows of the window on lease, with their optimiser
    state, and apply every step's gradients to them before the servers do (forwarded). Lookahead
    only."""
    merge_pushes: bool | None = None
    """Rows get one update a step from all ranks. A choice in raw_hybrid and hybrid only; None means
    yes there."""
    fresh: tuple[str, ...] = ()
    """Tables whose rows are exact while those of all others are late: read ahead, brought up to
    date before forward, with a push of their own that is sent first. Names of tables or of fields;
    a number, of that many fields without a name; or all. Only where rows may be late and ranks
    share a step."""
    discipline: Discipline = Discipline.FLUID
    """How NICs are shared."""
    dense_home: DenseHome | None = None
    """Where the dense weights are. Async only; None means on the embedding servers there."""
    trace_shards: bool = False
    """A trace has one row for each server process, at the instant at which that server's own queue
    served it, and a replay needs that number of shards; otherwise all servers count as one that is
    as late as the last of them. (A fan-out is sent as one coflow, so its requests reach all servers
    of a rack together.)"""
    steps: int = DEFAULT_STEPS
    """Batches that each rank trains, >= 1."""
    seed: int = 0
    """Root of all random draws, in [0, 2**63)."""

    def __post_init__(self) -> None:
        hold_choices(self)

    def is_default(self, knob: str) -> bool:
        """Whether nobody has chosen this field: it is not given, or at its default."""
        value = getattr(self, knob)
        return value is None or bool(value == type(self).__dataclass_fields__[knob].default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(Knobs):
    """Everything a run depends on."""

    cluster: Cluster
    """Hosts and links."""
    workload: Workload
    """Data and model."""
    costs: Costs
    """Service times."""
    averaging: Averaging | None = None
    """Rounds of async_averaging; None means every 0.5 s, with a locked replica."""
    infinite_cpus: bool = False
    """Embedding workers and servers never queue (the closed forms assume it)."""
    queues: Queues = Queues()
    """Buffers of a rank."""
    noise: Noise = Noise()
    """Random factors."""
    disturbances: tuple[SlowDown | Outage, ...] = ()
    """Stragglers, and servers that stand still."""

    def __post_init__(self) -> None:
        Knobs.__post_init__(self)
        mode = self.mode
        require(self.steps >= 1, "steps", self.steps, "must be >= 1")
        require(0 <= self.seed < 2**63, "seed", self.seed, "must lie in [0, 2**63)")

        # Bounds of single knobs.
        for field, least in (("tau", 0), ("permits", 1), ("ahead", 1)):
            value = getattr(self, field)
            require(value is None or value >= least, field, value, f"must be >= {least}")
        possible = self.lookahead in ("reread", "forwarded")
        require(possible, "lookahead", self.lookahead, "must be reread or forwarded")

        # A knob that the mode does not read was not meant.
        late = mode.reads_late_rows
        prefetches = mode.prefetches_rows
        read_by = {
            "tau": late,
            "permits": late,
            "ahead": prefetches,
            "lookahead": prefetches,
            "fresh": mode.may_merge,
            "dense_home": mode.has_dense_server,
            "averaging": mode.averages_replicas,
        }
        for field, read in read_by.items():
            value = getattr(self, field)
            is_true = field == "tau" and value == 0  # of modes without late rows
            ok = read or is_true or self.is_default(field)
            require(ok, field, value, f"{mode} does not read it", "drop it")
        if not late:
            object.__setattr__(self, "tau", None)  # a default that nobody has chosen

        # Combinations that contradict each other.
        if self.merge_pushes is not None and not mode.may_merge:
            why = "always merges" if mode.has_barrier else "has no step to merge over"
            require(False, "merge_pushes", self.merge_pushes, f"{mode} {why}", "drop it")
        if self.fresh:
            self.workload.parted(self.fresh)  # every name is one of its tables

        # Disturbances hit processes that exist.
        counts = {
            Target.RANK: self.cluster.ranks,
            Target.WORKER: self.cluster.embedding_workers.processes,
            Target.SERVER: self.cluster.servers.processes,
        }
        for event in self.disturbances:
            count = counts[event.target]
            ok = 0 <= event.index < count
            require(ok, f"index of {event.target}", event.index, f"the cluster has {count}")

    @property
    def batch(self) -> int:
        """Samples of one dense update over all ranks; in async, of one batch of every rank."""
        return self.cluster.ranks * self.workload.batch_per_rank

    @property
    def window(self) -> int | None:
        """The bound tau in force; None is unbounded."""
        return self.mode.window(self.tau)

    @property
    def steps_ahead(self) -> int | None:
        """How many steps a lookup may start before the pushes of the step before it are applied:
        the window, and ``ahead`` in lookahead, whose rows are brought up to date."""
        return (self.ahead or DEFAULT_AHEAD) if self.mode.prefetches_rows else self.window

    @property
    def waits_at_servers(self) -> bool:
        """Whether a lookup waits for the window at the servers, where its request is by then; a
        prefetch that is read again waits at its rank."""
        kept = not self.mode.prefetches_rows or self.lookahead == "forwarded"
        return self.queues.at_servers and kept

    @property
    def asks_in_turn(self) -> bool:
        """Whether fresh rows are asked for behind the rank's last push, to wait at the servers."""
        return self.queues.at_servers and self.mode.reads_fresh_rows

    @property
    def merges(self) -> bool:
        """Whether a step's pushes are applied at once; those of fresh tables always are."""
        _, late = self.workload.parted(self.fresh)
        return late is None or self.mode.merges(self.merge_pushes)

    @property
    def brings_up_to_date(self) -> bool:
        """Whether rows that were read ahead are replaced before forward: all, or fresh tables'."""
        return self.mode.prefetches_rows or bool(self.fresh)

    @property
    def home(self) -> DenseHome | None:
        """Where the dense weights are in async; None in other modes."""
        return (self.dense_home or DenseHome.SERVERS) if self.mode.has_dense_server else None

    @property
    def rounds(self) -> Averaging:
        """The averaging in force."""
        return self.averaging or Averaging()
