"""Hybrid, or tables on the GPUs? Both on the GPU hosts of one cluster, with one workload."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp, sqrt
from typing import Any

import numpy as np

from persia_sim.base.rules import counted, price
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.demand import Demand, demand
from persia_sim.cluster.incidents import Target, slow_downs
from persia_sim.cluster.machine import System
from persia_sim.cluster.scenario import Discipline, Scenario
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets.fitted import FITTED, REACH
from persia_sim.report.measure import Estimate, throughput
from persia_sim.report.ranges import (
    COPIES,
    GPUS,
    LAUNCHING,
    LINKS,
    Draw,
    OnServers,
    Range,
    drawn_reach,
    range_of,
)
from persia_sim.sharded.plan import Software
from persia_sim.sharded.presets import ranker_of
from persia_sim.sharded.software import (
    SOFTWARE,
    band_ln,
    band_of,
    spreads_of,
    strange,
)
from persia_sim.sharded.stages import (
    Job,
    chain_s,
    device_step_s,
    fits,
    host_s,
    launched_s,
    stages,
    step_of,
    step_s,
)

MOST_GPUS = 16_384
COMPARED = 2_048  # a plan for more takes minutes
_USUAL = SOFTWARE["torchrec"]
_LEAST_STEPS = 60
_MOST_BATCHES = 30_000  # of a run with more GPUs than the other side has


def job_of(scenario: Scenario, software: Software) -> Job:
    """The scenario's data, network, GPUs and global batch with its tables on the GPUs."""
    return Job(
        ranker=ranker_of(scenario.workload),
        system=scenario.cluster.system,
        software=software,
        reach=REACH,
        batch=scenario.batch,
        precision=scenario.workload.precision,
    )


def launching_s(job: Job) -> float:
    """What launching the dense network adds to a GPU's step, by the sharded side's law and
    software: without its tables and their exchanges."""
    parts = stages(job)
    dense = replace(
        parts,
        input_s=0.0,
        miss_s=0.0,
        lookup_s=0.0,
        exchange_s=0.0,
        update_s=0.0,
        copied_s=0.0,
        allreduce_s=parts.allreduce_s - parts.copied_s,
        gpu_s=chain_s(job, tables=False),
    )
    device_s = device_step_s(dense, job.software)
    took_s = launched_s(device_s, host_s(job, tables=False), job.host_time)
    return took_s - device_s + dense.gpu_s


def dense_as(costs: Costs, job: Job) -> Costs:
    """Costs in which the dense network, its launching and its all-reduce take as long as in a job
    with tables on the GPUs; all other stages stay."""
    # Passes over activations that the rival's kernels do not fuse.
    soft = job.software
    reach = job.reach
    share: dict[str, Any] = {job.arithmetic.value: job.gemm_share}
    passes = reach.activation_passes + 4.0 / job.precision.value_bytes * soft.unfused_passes

    # The dense part is the rival's, so that only the embedding layer differs.
    return replace(
        costs,
        gpu_efficiency=(),
        gpu_half_batch=0.0,
        gpu_fixed_s=launching_s(job),
        launching=None,
        machines=(),
        dense_sync=replace(costs.dense_sync, overhead_s=0.0),
        reach=replace(reach, activation_passes=passes, **share),
        source=f"{costs.source}; dense network, launching and all-reduce as {job.software.name}'s",
    )


def fitting_gpus(job: Job, at_most: int = MOST_GPUS) -> int | None:
    """The fewest whole machines whose GPUs have room, each with the batch that it has now, as their
    GPUs; None: no number of them."""
    host = job.system.host

    def room(machines: int) -> bool:
        gpus = machines * host.gpus
        if job.ranker.table_bytes - job.ranker.host_bytes > gpus * host.chip.hbm_bytes:
            return False  # not even the sum: no plan is made
        batch = max(1, round(job.per_gpu)) * gpus
        return fits(replace(job, system=System(host=host, gpus=gpus), batch=batch))

    most = at_most // host.gpus if host.nic_bytes_per_s else 1
    high = 1
    while high < most and not room(high):
        high *= 2
    left = range(high // 2 + 1, min(high, most) + 1)  # fewer have no room
    place = bisect_left(left, True, key=room)
    return left[place] * host.gpus if place < len(left) else None


def room_on_gpus(scenario: Scenario, software: Software = _USUAL) -> str:
    """Whether GPUs like those of the cluster have room for the tables, and how many, in words.
    Raises ValueError where the GPU hosts differ."""
    job = job_of(scenario, software)
    host = job.system.host
    gpus = fitting_gpus(job, COMPARED)
    if gpus is None:
        most = COMPARED if host.nic_bytes_per_s else host.gpus
        return f"tables on the GPUs have no room either, on no number of them up to {most:,}"
    here = f"this cluster has {scenario.cluster.ranks:,}"
    return f"tables on the GPUs have room from {gpus:,} GPUs of {host.name} on, and {here}"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    gpus: int
    batch: int
    """Samples of a dense update."""
    samples_per_s: Estimate
    usd_per_hour: float
    """0: not known."""

    @property
    def usd(self) -> float:
        """A million samples."""
        return self.usd_per_hour / 3600 / self.samples_per_s.mean * 1e6

    def __str__(self) -> str:
        priced = f", ${self.usd_per_hour:,.0f} an hour, {price(self.usd)} a million samples"
        rate = self.samples_per_s
        width = f" +-{rate.relative:.2%}" * (rate.relative < 1)
        throughput = f"{rate.mean:,.0f} samples/s{width} on {counted(self.gpus, 'GPU')}"
        return f"{throughput}, {self.batch:,} a step{priced * bool(self.usd_per_hour)}"


def on_gpus(scenario: Scenario, gpus: int, software: Software) -> tuple[Scenario, Demand]:
    """The scenario with its tables on so many of its GPUs: a step takes what `persia-sim sharded`
    says; loading, noise and slow ranks are the scenario's. Nothing crosses a NIC but inside that
    step."""
    slow = tuple(one for one in slow_downs(scenario.disturbances) if one.target is Target.RANK)
    cluster = _on(scenario, gpus).cluster
    many = max(_LEAST_STEPS, _MOST_BATCHES // gpus)

    # The scenario without servers: synchronous, nothing shared.
    same = Scenario(
        cluster=replace(cluster, link=replace(cluster.link, latency_s=0.0)),
        workload=scenario.workload,
        costs=scenario.costs,
        noise=scenario.noise,
        tau=0,
        discipline=Discipline.UNSHARED,
        infinite_cpus=True,
        seed=scenario.seed,
        steps=scenario.steps if slow else min(scenario.steps, many),
        disturbances=slow,
    )

    # A step takes what the stages of the sharded system add up to.
    need = demand(same)
    job = job_of(same, software)
    parts = stages(job)
    beside_s = step_of(parts, job) - parts.dense_s
    none = {"fetch": _nothing(need.fetch), "push": _nothing(need.push)}
    free = replace(_nothing(need, "load_s", "server_shares"), **none)
    computed = replace(free, forward_s=parts.forward_s, backward_s=parts.backward_s, buckets=())
    return same, replace(computed, sync_overhead_s=beside_s)


def _on(scenario: Scenario, gpus: int) -> Scenario:
    """The scenario on so many of its GPUs, each with the batch that it has."""
    return replace(scenario, cluster=scenario.cluster.resized(gpus))


def _nothing(record: Any, *but: str) -> Any:
    """The record with 0 in place of all its numbers but those that are kept."""
    given = {each.name: getattr(record, each.name) for each in fields(record)}
    zero = {n: 0 * x for n, x in given.items() if isinstance(x, float | np.ndarray)}
    return replace(record, **{name: x for name, x in zero.items() if name not in but})


def sides(run: Run, software: Software = _USUAL) -> list[Side]:
    """What was simulated; then its tables on as many of the same GPUs as have room for the rows, if
    any. Raises ValueError where the GPU hosts differ."""
    scenario = run.scenario
    job = job_of(scenario, software)
    usd_per_hour = scenario.cluster.usd_per_hour
    compared = [Side(job.system.gpus, job.batch, throughput(run), usd_per_hour)]
    many = job.ranker.table_bytes > job.system.gpus * job.system.host.chip.hbm_bytes
    gpus = fitting_gpus(job, COMPARED) if many or not fits(job) else job.system.gpus
    if gpus:
        other, need = on_gpus(scenario, gpus, software)
        rate = throughput(simulate(other, need=need))
        compared.append(Side(gpus, other.batch, rate, other.cluster.system.usd_per_hour))
    return compared


_LAUNCHED = "launch_s", "replay_s", "host_s", "host_multi_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnGpus:
    """Tables on GPUs as a side of a ratio (`ranges.Side`): its step is a law, so that a draw
    changes its simulated rate as much as the law's."""

    job: Job
    samples_per_s: float
    """Simulated, without a draw."""

    @property
    def inputs(self) -> Sequence[str]:
        """What is shared with the other side, and what only the software's tables take."""
        return GPUS, LINKS, COPIES, LAUNCHING, self._tables, self._model

    @property
    def _tables(self) -> str:
        return f"what {self.job.software.name} takes for ids and exchanges"

    @property
    def _model(self) -> str:
        return f"errors of the model of {self.job.software.name}"

    def bound(self, draw: Draw) -> float:
        """Samples per second by the law of its step, and by how far off that is elsewhere."""
        band = band_of(self.job)
        unexplained = [band.known, *(getattr(band, new) for new in strange(self.job))]
        off_ln = sqrt(sum(each**2 for each in unexplained)) * draw.get(self._model, 0.0)
        return self.job.batch / step_s(self._drawn(draw)) * exp(off_ln)

    def rate(self, draw: Draw) -> float:
        """Simulated samples per second."""
        return self.samples_per_s * self.bound(draw) / self.bound({})

    def _drawn(self, draw: Draw) -> Job:
        soft = self.job.software
        spreads = spreads_of(soft, {name: each.spread for name, each in FITTED.items()})
        changed: dict[str, Any] = {}
        for name, spread in spreads.items():
            faster = exp(spread * draw.get(LAUNCHING if name in _LAUNCHED else self._tables, 0.0))
            value = getattr(soft, name)
            changed[name] = value * faster if name == "tuned" else value / faster
        changed = {n: min(1.0, x) if n == "exposed" else x for n, x in changed.items()}
        reach = drawn_reach(self.job.reach, draw, {})
        return replace(self.job, software=replace(soft, **changed), reach=reach)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both answers."""

    lines: tuple[str, ...]
    times: Range | None
    """How many times the rate of the tables on GPUs; None where no number of GPUs has room."""


def comparison(run: Run, software: Software = _USUAL, miss_rate: float = 0.0) -> Comparison:
    """What was simulated beside its tables on the GPUs, each rate with what it may be, and their
    ratio over one draw of what both share. Raises ValueError where the GPU hosts differ."""
    ours, *others = sides(run, software)
    mode = run.scenario.mode
    here = OnServers(scenario=run.scenario, miss_rate=miss_rate)
    may_be = range_of(here, value=ours.samples_per_s.mean, simulated=False)
    lines = [f"{mode}: {ours}; 90 % band {may_be.low:,.0f} to {may_be.high:,.0f}"]

    # What stands against it, if the rows have room anywhere.
    if not others:
        lines.append(f"tables on the GPUs: no number up to {COMPARED:,} has room for the rows")
        return Comparison(tuple(lines), None)

    # The other side: its rate with its band, and how the two compare.
    (theirs,) = others
    few = "" if theirs.gpus == ours.gpus else " (fewer have no room for the rows)"
    sharded = job_of(_on(run.scenario, theirs.gpus), software)
    rate = theirs.samples_per_s.mean
    half = band_ln(sharded)
    low, high = (rate * exp(way * half) for way in (-1, 1))
    times = range_of(
        here,
        OnGpus(job=sharded, samples_per_s=rate),
        value=ours.samples_per_s.mean / rate,
    )
    a_gpu = times.times(theirs.gpus / ours.gpus)
    priced = ""
    if ours.usd_per_hour and theirs.usd_per_hour:
        price_of_both = times.under(ours.usd_per_hour / theirs.usd_per_hour)
        priced = f" and {price_of_both:.3g} times the price of a sample"
    lines += [
        f"tables on the GPUs: {theirs}{few}; 90 % band {low:,.0f} to {high:,.0f}",
        f"their step is that of `persia-sim sharded --software {software.name}`; loading, noise and"
        " slow ranks as above",
        f"{mode} has {times:.3g} times the rate (a GPU: {a_gpu:.3g}){priced}",
        f"what moves this most: {times.decisive}",
    ]
    return Comparison(tuple(lines), times)
