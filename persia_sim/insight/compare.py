"""Hybrid, or tables on the GPUs? Both on the GPU hosts of one cluster, with one workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, hypot

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.model.costs import Costs, Law
from persia_sim.model.demand import demand
from persia_sim.model.machine import System
from persia_sim.model.scenario import Noise, Scenario
from persia_sim.presets.catalogue import ranker_of
from persia_sim.presets.software import REACH, SOFTWARE, band_ln
from persia_sim.sharded.plan import Pipeline
from persia_sim.sharded.stages import Job, fits, stages, step_s
from persia_sim.words.rules import counted, price

MOST_GPUS, COMPARED = 16_384, 2_048  # a plan for more takes minutes


def job_of(scenario: Scenario, software: str) -> Job:
    """The scenario's data, network, GPUs and global batch with its tables on the GPUs."""
    return Job(
        ranker=ranker_of(scenario.workload),
        system=scenario.cluster.system,
        software=SOFTWARE[software],
        reach=REACH,
        batch=scenario.batch,
        precision=scenario.workload.precision,
    )


def launching_s(job: Job) -> float:
    """What launching the dense network adds to a GPU's step: as the sharded side's software."""
    parts, soft = stages(job), job.software
    if soft.graphs:
        return parts.gpu_s
    if soft.pipeline is Pipeline.BASE:
        return parts.host_s + parts.gpu_s
    return hypot(parts.dense_s, parts.host_s) - parts.dense_s + parts.gpu_s


def alike(costs: Costs, job: Job) -> Costs:
    """Costs in which the dense network, its launching and its all-reduce take as long as on the
    sharded side's GPUs, and loading nothing; the other stages on CPUs stay."""
    return replace(
        costs,
        load=Law(source="left out"),
        gpu_efficiency=(),
        gpu_half_batch=0.0,
        gpu_fixed_s=launching_s(job),
        dense_sync=replace(costs.dense_sync, overhead_s=0.0),
        reach=job.reach,
        machines=(),
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
        return fits(
            replace(
                job, system=System(host=host, gpus=gpus), batch=max(1, round(job.per_gpu)) * gpus
            )
        )

    most = at_most // host.gpus if host.nic_bytes_per_s else 1
    low, high = 0, 1  # low has no room
    while high < most and not room(high):
        low, high = high, min(2 * high, most)
    if not room(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if room(middle) else (middle, high)
    return high * host.gpus


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    gpus: int
    batch: int
    """Samples of a dense update."""
    samples_per_s: float
    usd_per_hour: float
    """0: not known."""

    @property
    def usd(self) -> float:
        """A million samples."""
        return self.usd_per_hour / 3600 / self.samples_per_s * 1e6

    def __str__(self) -> str:
        priced = f", ${self.usd_per_hour:,.0f} an hour, {price(self.usd)} a million samples"
        rate = f"{self.samples_per_s:,.0f} samples/s on {counted(self.gpus, 'GPU')}"
        return f"{rate}, {self.batch:,} a step{priced * bool(self.usd_per_hour)}"


def sides(scenario: Scenario, miss_rate: float = 0.0, software: str = "torchrec") -> list[Side]:
    """The scenario's mode, its dense network as fast as the other side's; then tables on as many of
    the same GPUs as have room for the rows, if any. Neither pays for loading, noise or faults.

    ``miss_rate`` is the share of looked-up rows that a server has to create, as in `demand`.
    Raises ValueError where the GPU hosts differ.
    """
    job = job_of(scenario, software)
    calm = replace(scenario, noise=Noise(), disturbances=(), checkpoints=None)  # as `step_s`
    same = replace(calm, costs=alike(scenario.costs, job))
    rate = throughput(simulate(same, need=demand(same, miss_rate))).mean
    found = [Side(job.system.gpus, job.batch, rate, scenario.cluster.usd_per_hour)]
    many = job.ranker.table_bytes > job.system.gpus * job.system.host.chip.hbm_bytes
    gpus = fitting_gpus(job, COMPARED) if many or not fits(job) else job.system.gpus
    if gpus:
        system, batch = replace(job.system, gpus=gpus), round(job.per_gpu * gpus)
        step = step_s(replace(job, system=system, batch=batch))
        found.append(Side(gpus, batch, batch / step, system.usd_per_hour))
    return found


def compared(scenario: Scenario, miss_rate: float = 0.0, software: str = "torchrec") -> str:
    """Both answers as text."""
    ours, *others = sides(scenario, miss_rate, software)
    left = "loading, noise and faults left out of both"
    lines = [f"dense network as {software}'s, {left}", f"{scenario.mode}: {ours}"]
    if not others:
        lines.append(f"tables on the GPUs: no number up to {COMPARED:,} has room for the rows")
    for theirs in others:
        few = "" if theirs.gpus == ours.gpus else " (fewer have no room for the rows)"
        half = band_ln(job_of(scenario, software))
        low, high = (theirs.samples_per_s * exp(way * half) for way in (-1, 1))
        lines.append(f"tables on the GPUs: {theirs}{few}; 90 % band {low:,.0f} to {high:,.0f}")
        lines.append(
            f"{scenario.mode} has {ours.samples_per_s / theirs.samples_per_s:.2f} times the rate"
            + (f" and {ours.usd / theirs.usd:.2f} times the price of a sample"
               if ours.usd_per_hour and theirs.usd_per_hour else "")
        )  # fmt: skip
    return "\n".join(lines)
