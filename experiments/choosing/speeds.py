"""How fast each mode is on a cluster, for how many dollars, and how late its rows are: simulated.

A mode is asked about where it is cheapest and where it is fastest: of its windows, and of the
numbers of embedding workers and servers beside the GPU hosts that the cluster has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, nan
from pathlib import Path
from typing import Any

from experiments.choosing.batch import Cell
from experiments.options import REFERENCE
from experiments.result_cache import ResultCache
from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.memory import capacity
from persia_sim.cluster.scenario import Scenario
from persia_sim.presets.catalogue import MACHINES, rows_of
from persia_sim.presets.from_file import find_rows
from persia_sim.report import sweep
from persia_sim.report.hosts import MOST_HOSTS, cheapest, hosts_for_rows, sized, unknown_hosts
from persia_sim.report.ranges import OnServers, Range, range_of

TAUS: Mapping[Mode, tuple[int | None, ...]] = {
    Mode.SYNC: (None,),
    Mode.LOOKAHEAD: (None,),
    Mode.HYBRID: (1, 2, 4, 8, 16),
    Mode.ASYNC: (0, 1, 2, 4),
}
"""The modes that are compared, and the windows of each."""
HALF_WIDTH = 0.03
"""Relative 95 % half width of a rate at which a simulation ends."""
MOST_STEPS = 192
"""Steps of the longest simulation; of async, some hundred ranks take minutes for them."""
PAYS = 0.9
"""Hybrid's smallest window that is asked about beside the cheapest and the fastest: the first with
which a sample costs (or takes) so much of what it does in the best exact mode."""
RENTED = {
    "v100-100gbit": MACHINES["p3.16xlarge"].usd_per_hour,
    "2 x E5-2680 v4": MACHINES["c2-standard-30"].usd_per_hour * 52 / 30,
}
"""Dollars an hour of the paper's machines, which have no list price: those of the nearest machine
that was for rent, by the GPU and by the core."""


def priced(cluster: Cluster) -> Cluster:
    """The cluster with the prices of the nearest machines where one has none."""
    roles = {}
    for name in ("nn", "embedding_workers", "servers"):
        role = getattr(cluster, name)
        usd = role.host.usd_per_hour or RENTED.get(role.host.name, 0.0)
        roles[name] = replace(role, host=replace(role.host, usd_per_hour=usd))
    return replace(cluster, **roles)


def label_of(point: sweep.Point, rows: str, half_width: float) -> str:
    """The label of a point's row: with what decides it beside the point itself."""
    files = [name for name in (point.cluster, point.workload, rows) if name.endswith(".toml")]
    text = "".join(Path(name).read_text() for name in files)  # an edited file is another point
    checksum = f", {hashlib.sha256(text.encode()).hexdigest()[:12]}" if files else ""
    return f"{point.label}, {rows}, half width {half_width:g}{checksum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mode with its window and its hosts."""

    point: sweep.Point
    why: str
    """Where it stands among its mode's: "cheapest", "fastest", both, or "least late"."""

    @property
    def name(self) -> str:
        """Mode and window: "hybrid, tau 8"."""
        late = self.point.mode.reads_late_rows
        return f"{self.point.mode}, tau {self.point.tau}" if late else str(self.point.mode)

    @property
    def label(self) -> str:
        """One of its kind in a table."""
        return f"{self.name}, {self.why}" if self.why else self.name


@dataclass(frozen=True, slots=True)
class _Tried:
    point: sweep.Point
    rate: float
    usd: float
    """Dollars an hour; NaN where a price is not known."""

    @property
    def cost(self) -> float:
        """Dollars a sample; seconds, where a price is not known."""
        return (self.usd if self.usd == self.usd else 1.0) / self.rate


def candidates(cluster: str, workload: str, rows: str, keep_hosts: bool) -> list[Candidate]:
    """The modes of `TAUS`, each where it is cheapest and where it is fastest by the closed form.

    ``keep_hosts``: with as many workers and servers as the cluster has. ValueError where its
    servers cannot hold the rows.
    """
    result: list[Candidate] = []
    exact_cost = inf
    for mode, taus in TAUS.items():
        tried = []
        for tau in taus:
            point = sweep.Point(cluster=cluster, workload=workload, mode=mode, tau=tau)
            tried += [_tried(point, hosts) for hosts in _layouts(point, rows, keep_hosts)]
        dear = _first(tried, lambda one: one.cost)
        fast = _first(tried, lambda one: 1 / one.rate)
        chosen = {"cheapest": dear, "fastest": fast}
        if not mode.reads_late_rows:
            exact_cost = min(exact_cost, dear.cost)
        elif mode.has_barrier:
            pays = [one for one in tried if one.cost < PAYS * exact_cost]
            least = _first(pays or tried, lambda one: one.point.tau or 0)
            chosen = {"least late": least} | chosen

        # One line for what is chosen twice; as many words as tell them apart.
        by_point: dict[sweep.Point, list[str]] = {}
        for why, one in chosen.items():
            by_point.setdefault(one.point, []).append(why)
        for point, words in by_point.items():
            why = " and ".join(words) if len(by_point) > 1 else ""
            result.append(Candidate(point=point, why=why))
    return result


def every_window(cluster: str, workload: str, rows: str, keep_hosts: bool) -> list[Candidate]:
    """Each mode at each window of `TAUS`, on the hosts with which it is cheapest by the closed
    form; ``keep_hosts`` as in `candidates`."""
    result = []
    for mode, taus in TAUS.items():
        for tau in taus:
            point = sweep.Point(cluster=cluster, workload=workload, mode=mode, tau=tau)
            tried = [_tried(point, hosts) for hosts in _layouts(point, rows, keep_hosts)]
            result.append(Candidate(point=_first(tried, lambda one: one.cost).point, why=""))
    return result


def _layouts(point: sweep.Point, rows: str, keep_hosts: bool) -> list[Scenario]:
    """The scenario of a point with the hosts that it may have."""
    scenario = sweep.scenario_of(point, 1)
    cluster = priced(scenario.cluster)
    scenario = replace(scenario, cluster=cluster)
    if keep_hosts:
        _refuse_no_room(scenario, rows)
        return [scenario]
    least = hosts_for_rows(scenario.workload, cluster.servers, rows)
    if least > MOST_HOSTS:
        _refuse_no_room(scenario, rows)
    layouts = [sized(scenario, inf, rows)]
    if cluster.usd_per_hour:
        layouts.append(cheapest(scenario, rows))
    return layouts


def _refuse_no_room(scenario: Scenario, rows: str) -> None:
    """Raise ValueError where the servers cannot hold the rows, naming the largest table."""
    workload = scenario.workload
    try:
        capacity(scenario.cluster, workload, find_rows(rows)).refuse(scenario.cluster)
    except ValueError as error:
        if not workload.tables:
            raise
        largest = max(workload.tables, key=lambda table: table.rows * table.dim)
        which = f"{largest.name}, has {largest.rows:.3g} rows of {largest.dim} numbers"
        raise ValueError(f"{error}; the largest table, {which}") from None


def _tried(point: sweep.Point, scenario: Scenario) -> _Tried:
    """The point with the hosts of a scenario, by the closed form."""
    cluster = scenario.cluster
    point = replace(point, workers=cluster.embedding_workers.hosts, servers=cluster.servers.hosts)
    usd = cluster.usd_per_hour or nan
    return _Tried(point, answer(scenario).samples_per_s, usd)


def _first(tried: Sequence[_Tried], key: Callable[[_Tried], float]) -> _Tried:
    """The least by a key; of those within 1 %, the least late one, and then the cheapest."""
    best = min(key(one) for one in tried)
    ties = [one for one in tried if key(one) <= best * (1 + sweep.TIE)]
    return min(ties, key=lambda one: (one.point.tau or 0, one.cost, key(one)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A candidate as it was simulated."""

    candidate: Candidate
    row: Mapping[str, Any]
    """What `sweep.evaluate` says of it."""
    rate: Range
    """Samples per second."""
    times_sync: Range
    """Over sync's, at sync's own hosts where it is cheapest."""
    usd_per_hour: float
    """NaN where a price is not known."""
    gain: Range
    """Sync's dollars a sample over its own; its seconds, where a price is not known."""

    @property
    def rows_late(self) -> float:
        """Updates that a mean lookup misses."""
        return sweep.updates_missed(self.row)

    @property
    def cell(self) -> Cell:
        """What is trained for it: its mean lateness, rounded up."""
        mode = self.candidate.point.mode
        dense = 0 if mode.has_barrier else int(self.row["ranks"]) - 1
        return Cell(rows_late=ceil(self.rows_late - 1e-9), dense_late=dense)

    @property
    def usd_per_billion(self) -> Range:
        """Dollars for 10^9 samples."""
        return self.rate.under(self.usd_per_hour / 3600 * 1e9)


def simulate_all(options: Any, chosen: Sequence[Candidate]) -> list[Simulated]:
    """The candidates simulated, as many at a time as the options say; points that are stored in
    the folder of results are not simulated again."""
    work = {
        label_of(one.point, rows_of(one.point.workload), HALF_WIDTH): partial(
            sweep.evaluate, one.point, half_width=HALF_WIDTH, most_steps=MOST_STEPS
        )
        for one in chosen
    }
    rows = ResultCache(options.out / "points.jsonl").fill(work, "simulations", options.jobs)
    return simulated(chosen, rows)


def simulated(chosen: Sequence[Candidate], rows: Sequence[Mapping[str, Any]]) -> list[Simulated]:
    """The candidates with their simulated rows, and each figure as a range over what the simulator
    does not know. Both sides of a ratio have one draw of that."""
    scenarios = [sweep.scenario_of(one.point, 1) for one in chosen]
    sides = [OnServers(scenario=each) for each in scenarios]

    # A rate and its price are those of the hosts that are there; a ratio holds for any draw's.
    hosts = _hosts_of_a_draw(chosen, scenarios)
    compared = [replace(side, hosts=hosts) for side in sides]
    hourly = [priced(each.cluster).usd_per_hour or nan for each in scenarios]
    syncs = [k for k, one in enumerate(chosen) if one.point.mode is REFERENCE]

    # Sync where it is cheapest is what others are held against.
    def cost(k: int) -> float:
        usd = hourly[k] if hourly[k] == hourly[k] else 1.0
        return float(usd / rows[k]["samples_per_s"])

    base = min(syncs, key=cost)
    result = []
    for k, (one, row, side) in enumerate(zip(chosen, rows, sides, strict=True)):
        rate = float(row["samples_per_s"])
        times = rate / float(rows[base]["samples_per_s"])
        of_rate = range_of(side, value=rate, simulated=False)
        ratio = Range(1.0, 1.0, 1.0)
        if k != base:
            ratio = range_of(compared[k], compared[base], value=times, simulated=False)
        dearer = hourly[k] / hourly[base]
        gain = ratio.times(1 / dearer) if dearer == dearer else ratio
        result.append(
            Simulated(
                candidate=one,
                row=row,
                rate=of_rate,
                times_sync=ratio,
                usd_per_hour=hourly[k],
                gain=gain,
            )
        )
    return result


def _hosts_of_a_draw(
    chosen: Sequence[Candidate], scenarios: Sequence[Scenario]
) -> Callable[[float], Cluster] | None:
    """The same for every mode of a preset whose numbers of hosts nobody knows, as that of the
    widest window has them; None where they are known, or chosen here."""
    point, widest = max(
        ((one.point, each) for one, each in zip(chosen, scenarios, strict=True)),
        key=lambda pair: (pair[0].mode.has_barrier, pair[0].tau or 0),
    )
    of_preset = sweep.scenario_of(replace(point, workers=None, servers=None), 1)
    here = {_cpu_hosts(each.cluster) for each in scenarios}
    if here != {_cpu_hosts(of_preset.cluster)}:
        return None
    return unknown_hosts(point.cluster, widest)


def _cpu_hosts(cluster: Cluster) -> tuple[int, int]:
    return cluster.embedding_workers.hosts, cluster.servers.hosts


def on_front(every: Sequence[Simulated]) -> list[bool]:
    """Which no other beats in rate, dollars and lateness at once; sync's cheapest stays always."""
    known = all(one.usd_per_hour == one.usd_per_hour for one in every)
    usd = [one.usd_per_billion.value / 1e3 if known else None for one in every]
    rows = zip(every, usd, strict=True)
    keep = sweep.pareto([dict(one.row) | {"usd_per_million_samples": each} for one, each in rows])
    bases = [one.times_sync == Range(1.0, 1.0, 1.0) for one in every]
    return [on or base for on, base in zip(keep, bases, strict=True)]
