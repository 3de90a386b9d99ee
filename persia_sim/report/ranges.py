"""A simulated rate, or the ratio of two, as a range over what nobody knows.

A constant that was fitted or measured may be as far off as its spread says, one that was assumed
by twice or half. Constants of one class move together, and both sides of a ratio are simulated with
one draw, so that what they share cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, hypot, log
from statistics import NormalDist
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster, Role
from persia_sim.cluster.costs import Costs, Launching, Law
from persia_sim.cluster.demand import demand
from persia_sim.cluster.machine import Host, Reach
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.presets.costs import FITS
from persia_sim.presets.fitted import FITTED, REACH
from persia_sim.report.measure import first_steps, throughput

END = NormalDist().inv_cdf(0.95)
"""Standard deviations of a normal law that leave 5 % on either side."""
ASSUMED_LN = log(2) / END
"""Standard deviation of the logarithm of a constant that nobody fitted: in nine of ten draws it is
between half and twice of what is assumed."""
MEASURED_LN = 0.05
"""Of a dense network's rate that a profile measured on the machine itself."""
MODEL_LN = 0.14
MODE_LN = 0.12
"""Of a rate, by what no constant explains: whatever the mode, which a ratio of two modes does not
see, and in one mode. With them ranges hold what was measured in eight of ten cases of
`persia-experiments validate`, of rates and of their ratios."""
DRAWS = 32
_WIDE = 3.0
"""A range whose ends differ by more than this factor is printed by its lower end alone."""
_MATTERS = 1e-3

Draw = Mapping[str, float]
"""Input -> by how many standard deviations it is faster than the presets say; 0 where not named."""

WORKERS = "an embedding worker's time for ids and bytes"
SERVERS = "a server's time for ids and bytes"
LOADERS = "a loader's time for a sample"
COPIES = "copies to the GPU and back"
GPUS = "what kernels reach of a GPU"
LAUNCHING = "launching a step's kernels"
LINKS = "what an all-reduce reaches of its links"
NICS = "what messages with rows reach of their NICs"
MEMORY = "memory of worker and server hosts"
LATENCY = "latency of a message"
MODEL = "errors of the model"
HOSTS = "the number of CPU hosts"

LAWS = {
    WORKERS: ("worker_forward", "worker_rpc", "worker_pool", "worker_scatter"),
    SERVERS: ("server_lookup", "server_update", "server_create"),
    LOADERS: ("load",),
    COPIES: ("copy_in", "copy_out"),
}
"""Class -> the laws of `Costs` that move together in it."""
SHARES = {
    GPUS: ("fp32", "tf32", "fp16", "hbm"),
    LINKS: ("switch", "mesh", "pairs", "pcie", "nic"),
    COPIES: ("host",),
}
"""Class -> the fields of `Reach` that move together in it."""


class Side(Protocol):
    """What is predicted with a draw: one side of a ratio, or a rate by itself."""

    @property
    def inputs(self) -> Sequence[str]:
        """What it depends on and nobody knows."""

    def bound(self, draw: Draw) -> float:
        """Samples per second by the closed form."""

    def rate(self, draw: Draw) -> float:
        """Simulated samples per second."""


@dataclass(frozen=True, slots=True)
class Input:
    """One thing that is not known, and what it alone does to a figure."""

    name: str
    low: float
    """The figure where it is slow: 5 % of its draws are slower."""
    high: float
    """The figure where it is fast."""


@dataclass(frozen=True, slots=True)
class Range:
    """A figure, and the 5 and 95 % points of what it may be.

    >>> r = Range(3.6, 4.7, 7.3)
    >>> f"{r:.1f}", f"{Range(3.6, 4.7, 12.6):.1f}", f"{r.under(94):.0f}"
    ('4.7 (3.6 to 7.3)', 'at least 3.6', '20 (13 to 26)')
    """

    low: float
    value: float
    high: float
    inputs: tuple[Input, ...] = field(default=())
    """Those that move the figure, the one that moves it most first."""

    def __format__(self, spec: str) -> str:
        if self.is_wide:
            return f"at least {self.low:{spec}}"
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    @property
    def is_wide(self) -> bool:
        """Whether its ends differ by more than a factor of 3: it has no middle worth printing."""
        return self.high > _WIDE * self.low

    @property
    def width(self) -> float:
        """The upper end over the lower one."""
        return self.high / self.low

    @property
    def decisive(self) -> str:
        """The two inputs that matter most, in words."""
        return ", and then ".join(each.name for each in self.inputs[:2]) or "nothing"

    def under(self, numerator: float) -> Range:
        """A figure over this one: dollars an hour over samples an hour."""
        turned = tuple(Input(i.name, numerator / i.low, numerator / i.high) for i in self.inputs)
        return Range(numerator / self.high, numerator / self.value, numerator / self.low, turned)

    def times(self, factor: float) -> Range:
        """The figure in other units."""
        scaled = tuple(Input(i.name, factor * i.low, factor * i.high) for i in self.inputs)
        return Range(factor * self.low, factor * self.value, factor * self.high, scaled)


@dataclass(frozen=True, kw_only=True)
class OnServers:
    """A scenario as a `Side`: rows on embedding servers."""

    scenario: Scenario
    hosts: Callable[[float], Cluster] | None = None
    """The cluster with other numbers of workers and servers, by a factor from half to twice
    (`sizing.unknown_hosts`); None: they are known."""
    miss_rate: float = 0.0
    """Share of lookups whose row was evicted."""
    spreads: Mapping[str, float] = field(
        default_factory=lambda: {name: fit.spread for name, fit in FITS.items()}
    )
    """How uncertain the logarithms of constants are that were fitted to whole runs."""

    @property
    def inputs(self) -> Sequence[str]:
        """Every class of constants, the model itself, and perhaps the numbers of hosts."""
        classes = *LAWS, GPUS, LAUNCHING, LINKS, NICS, MEMORY, LATENCY
        return *classes, MODEL, self._mode, *[HOSTS] * (self.hosts is not None)

    @property
    def _mode(self) -> str:
        tau = f", tau {self.scenario.tau}" if self.scenario.mode.reads_late_rows else ""
        return f"{MODEL} in {self.scenario.mode}{tau}"

    def _unexplained(self, draw: Draw) -> float:
        return exp(MODEL_LN * draw.get(MODEL, 0.0) + MODE_LN * draw.get(self._mode, 0.0))

    def bound(self, draw: Draw) -> float:
        """Samples per second by the closed form."""
        scenario = self.drawn(draw)
        found = answer(scenario, demand(scenario, self.miss_rate))
        return found.samples_per_s * self._unexplained(draw)

    def rate(self, draw: Draw) -> float:
        """Simulated samples per second, of few steps."""
        scenario = self.drawn(draw)
        mode = scenario.mode
        if not (scenario.disturbances or mode.averages_replicas):
            scenario = replace(scenario, steps=first_steps(scenario))
        run = simulate(scenario, need=demand(scenario, self.miss_rate))
        return throughput(run).mean * self._unexplained(draw)

    def drawn(self, draw: Draw) -> Scenario:
        """The scenario with a draw of what is not known."""
        cluster = self.scenario.cluster
        if self.hosts is not None and HOSTS in draw:
            cluster = self.hosts(exp(ASSUMED_LN * draw[HOSTS]))
        return replace(
            self.scenario,
            cluster=_cluster(cluster, draw),
            costs=drawn_costs(self.scenario.costs, draw, self.spreads),
        )


def range_of(
    ours: Side, over: Side | None = None, *, value: float | None = None, simulated: bool = True
) -> Range:
    """The rate of one side, or its ratio to another's, as a range over what neither knows.

    Each input alone stands at both ends of its law, by the closed form; then all of them in 32
    joint draws, of which those at the 5 and 95 % points are simulated. ``value`` is the figure
    where it was simulated before. Not ``simulated``, the ends are the closed form's, in proportion
    to ``value``.
    """

    def figure(draw: Draw, way: str) -> float:
        rate: float = getattr(ours, way)(draw)
        return rate / getattr(over, way)(draw) if over is not None else rate

    # One at a time: what moves the figure, and how far.
    middle = figure({}, "bound")
    if value is None:
        value = figure({}, "rate") if simulated else middle
    names = dict.fromkeys([*ours.inputs, *(over.inputs if over is not None else ())])
    moved = {n: (figure({n: -END}, "bound"), figure({n: END}, "bound")) for n in names}
    reach = {n: log(max(*ends, middle) / min(*ends, middle)) for n, ends in moved.items()}
    matter = sorted((n for n in names if reach[n] > _MATTERS), key=lambda n: -reach[n])
    scale = value / middle
    inputs = tuple(Input(n, *(scale * end for end in moved[n])) for n in matter)

    # All at once: the draws in the order of the figure, and those at the 5 and 95 % points.
    ordered = sorted(joint_draws(matter), key=lambda draw: figure(draw, "bound"))
    place = round(0.05 * len(ordered) - 0.5)
    ends = ordered[place], ordered[-1 - place]
    low, high = (
        figure(draw, "rate") if simulated else scale * figure(draw, "bound") for draw in ends
    )
    return Range(min(low, high, value), value, max(low, high, value), inputs)


def joint_draws(names: Iterable[str], count: int = DRAWS) -> list[Draw]:
    """Draws of all inputs at once, a Latin hypercube: each input takes the middles of ``count``
    equally likely parts of its law once. An input's draws do not depend on which others there are.
    """
    normal = NormalDist()
    parts = [normal.inv_cdf((k + 0.5) / count) for k in range(count)]
    columns = {
        name: [parts[k] for k in np.random.default_rng(crc32(name.encode())).permutation(count)]
        for name in names
    }
    return [{name: column[k] for name, column in columns.items()} for k in range(count)]


def drawn_costs(costs: Costs, draw: Draw, spreads: Mapping[str, float]) -> Costs:
    """The laws of all stages with a draw of their constants; ``spreads`` are those of `FITS`."""
    spreads = spreads if costs.machines else {}  # others were not fitted to whole runs
    changes: dict[str, Any] = {}
    for which, laws in LAWS.items():
        for name in laws if which in draw else ():
            law: Law = getattr(costs, name)
            changes[name] = _faster(law, exp((law.spread or ASSUMED_LN) * draw[which]))

    # The GPU: what was fitted or measured of a whole step, or else shares of its peak.
    if GPUS in draw:
        network = spreads.get("kwai_flops", 0.0) if costs.network_of else 0.0
        times = exp(hypot(spreads.get("gpu_share", MEASURED_LN), network) * draw[GPUS])
        table = tuple((size, _share(share * times)) for size, share in costs.gpu_efficiency)
        fixed_ln = spreads.get("gpu_fixed_s", MEASURED_LN)
        changes["gpu_efficiency"] = table
        changes["gpu_fixed_s"] = costs.gpu_fixed_s / exp(fixed_ln * draw[GPUS])
        changes["gpu_half_batch"] = costs.gpu_half_batch / exp(ASSUMED_LN * draw[GPUS])
    if LAUNCHING in draw and costs.launching is not None:
        changes["launching"] = _launching(costs.launching, draw[LAUNCHING])

    # Links: of the all-reduce what is given, and shares of the nominal rates.
    if LINKS in draw:
        sync = costs.dense_sync
        fixed_ln = spreads.get("sync_fixed_s", ASSUMED_LN)
        rates = "intra_bytes_per_s", "inter_bytes_per_s"
        given = {name: getattr(sync, name) for name in rates}
        changes["dense_sync"] = replace(
            sync,
            overhead_s=sync.overhead_s / exp(fixed_ln * draw[LINKS]),
            **{n: rate * exp(MEASURED_LN * draw[LINKS]) for n, rate in given.items() if rate},
        )
    return replace(costs, reach=drawn_reach(costs.reach, draw, spreads), **changes)


def drawn_reach(reach: Reach, draw: Draw, spreads: Mapping[str, float]) -> Reach:
    """Shares of nominal rates with a draw of them: as uncertain as their fit, to whole runs
    (``spreads``) or to published steps; twice or half where assumed."""
    shares: dict[str, Any] = {}
    for which, names in SHARES.items():
        for name in names if which in draw else ():
            spread = ASSUMED_LN
            if f"reach.{name}" in FITTED and getattr(reach, name) == getattr(REACH, name):
                spread = FITTED[f"reach.{name}"].spread
            spread = spreads.get(f"{name}_share", spread)
            shares[name] = _share(getattr(reach, name) * exp(spread * draw[which]))

    # How often activations cross the memory, and what a box without NVLinks gives.
    if GPUS in draw:
        spread = FITTED["reach.activation_passes"].spread
        shares["activation_passes"] = reach.activation_passes / exp(spread * draw[GPUS])
    if LINKS in draw:
        shares["sockets_bytes_per_s"] = reach.sockets_bytes_per_s * exp(ASSUMED_LN * draw[LINKS])
    return replace(reach, **shares)


def _launching(launching: Launching, deviations: float) -> Launching:
    spreads = {"step_s": "host_s", "layer_s": "launch_s", "sync_s": "host_multi_s"}
    changes = {
        mine: getattr(launching, mine) / exp(FITTED[f"eager.{theirs}"].spread * deviations)
        for mine, theirs in spreads.items()
    }
    return replace(launching, **changes)


def _faster(law: Law, times: float) -> Law:
    parts = "fixed_s", "per_item_s", "per_byte_s"
    return replace(law, **{part: getattr(law, part) / times for part in parts})


def _share(share: float) -> float:
    return min(1.0, max(1e-9, share))


def _cluster(cluster: Cluster, draw: Draw) -> Cluster:
    """The cluster with a draw of what messages reach of NICs: at most all, and seldom less than
    TCP's share; of the memory of CPU hosts; and of the latency."""
    nics = exp(min(0.0, -log(REACH.tcp) / END * draw.get(NICS, 0.0)))
    memory = exp(ASSUMED_LN * draw.get(MEMORY, 0.0))

    def host(host: Host) -> Host:
        return replace(
            host,
            nic_bytes_per_s=host.nic_bytes_per_s * nics,
            memory_bytes_per_s=host.memory_bytes_per_s * memory,
        )

    def role(role: Role) -> Role:
        return replace(role, host=host(role.host))

    link = cluster.link
    latency_s = link.latency_s / exp(ASSUMED_LN * draw.get(LATENCY, 0.0))
    return replace(
        cluster,
        embedding_workers=role(cluster.embedding_workers),
        servers=role(cluster.servers),
        link=replace(link, latency_s=latency_s),
    )
