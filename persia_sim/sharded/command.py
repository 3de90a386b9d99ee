"""`persia-sim sharded`: tables on the GPUs, trained in step; one screen about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from typing import Annotated

from persia_sim.base.command_line import Unset
from persia_sim.base.rules import SECONDS, price, require
from persia_sim.base.schema import hold_choices
from persia_sim.cluster.machine import Precision, System
from persia_sim.cluster.workload import Workload
from persia_sim.presets.catalogue import MACHINES, workloads
from persia_sim.presets.fitted import REACH
from persia_sim.presets.from_file import find, read_host
from persia_sim.sharded.compare import MOST_GPUS, fitting_gpus
from persia_sim.sharded.plan import HostTime, Pipeline, Strategy
from persia_sim.sharded.presets import find_software, ranker_of, rankers, read_model
from persia_sim.sharded.ranker import Ranker
from persia_sim.sharded.software import band_ln, strange
from persia_sim.sharded.stages import (
    WORKSPACE_BYTES,
    Job,
    collectives_s,
    device_step_s,
    fits,
    schedule,
    stages,
    step_s,
)

MOST_BATCH_PER_GPU = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedOptions:
    """Simulate tables on the GPUs, trained in step; names are of presets, or TOML files."""

    model: str = "dlrm-dcnv2"
    """dlrm, dlrm-dcnv2, any workload of the simulator, or a .toml file."""
    system: str = "dgx-h100"
    """A machine with GPUs (dgx-a100, p4d.24xlarge and so on), or a .toml file."""
    software: str = "torchrec"
    """hugectr, torchrec, tf2, torch and so on, or a .toml file."""
    gpus: int = 8
    """All of them; as many machines as they fill."""
    batch_per_gpu: Annotated[int | None, Unset("the workload's; of other models 8192")] = None
    """Samples of a GPU in a step."""
    precision: Annotated[Precision | None, Unset("the workload's; of other models fp16")] = None
    """Arithmetic of the dense network."""
    pipeline: Annotated[Pipeline | None, Unset("the software's")] = None
    """base, sparse_dist, prefetch or semi_sync."""
    strategy: Annotated[Strategy | None, Unset("the software's")] = None
    """How tables are split."""
    anyway: bool = False
    """Answer as if the rows had room where they have none; the answer says so."""
    print_stages: bool = False
    """Also print when each stage of two batches starts and ends."""

    def __post_init__(self) -> None:
        hold_choices(self)


def job_of(options: ShardedOptions) -> Job:
    """Apply the options to presets and files. Raises ValueError naming what is unknown."""
    presets: dict[str, Ranker | Workload] = {**rankers(), **workloads()}

    # A model of the catalogue, or a workload of the simulator with its tables on GPUs.
    model = find(options.model, "--model", presets, read_model)
    batch = 8192
    precision = Precision.FP16
    if isinstance(model, Workload):
        batch = model.batch_per_rank
        precision = model.precision
        model = ranker_of(model)
    batch = batch if options.batch_per_gpu is None else options.batch_per_gpu
    for name, value, most in (
        ("--gpus", options.gpus, MOST_GPUS),
        ("--batch-per-gpu", batch, MOST_BATCH_PER_GPU),
    ):
        require(1 <= value <= most, name, value, f"must lie in [1, {most:,}]")

    # The system and what is chosen otherwise in it.
    software = find_software(options.software)
    hosts = {name: host for name, host in MACHINES.items() if host.gpus}
    if options.pipeline is not None:
        software = replace(software, pipeline=options.pipeline)
    if options.strategy is not None:
        software = replace(software, strategy=options.strategy)
    return Job(
        ranker=model,
        system=System(host=find(options.system, "--system", hosts, read_host), gpus=options.gpus),
        software=software,
        reach=REACH,
        batch=options.gpus * batch,
        precision=options.precision or precision,
    )


def _refuse_too_large(job: Job) -> None:
    """Raise ValueError with the number of GPUs that the rows would need."""
    if fits(job):
        return
    enough = fitting_gpus(job)
    remedy = f"use --gpus {enough}" if enough else f"no number up to {MOST_GPUS:,} has room: use "
    remedy += "" if enough else "another --system or --strategy (row cuts every table)"
    rule = f"{_needed(job)}; the plan ({job.software.strategy}) does not fit"
    require(False, "--gpus", job.system.gpus, rule, f"{remedy}, or --anyway to answer as if it did")


def _needed(job: Job) -> str:
    rows = job.plan.bytes
    beside = job.beside_rows_bytes
    host = job.system.host
    more = f", {job.host_rows_bytes / 1e9:,.1f} GB of a machine's {host.ram_bytes / 1e9:,.0f}"
    return (
        f"{rows / 1e9:,.1f} GB of rows and {beside / 1e9:,.1f} GB beside them (dense network, "
        f"activations, {WORKSPACE_BYTES / 1e9:g} GB of workspace) on the fullest of GPUs with "
        f"{host.chip.hbm_bytes / 1e9:,.0f}{more * (job.host_rows_bytes > 0)}"
    )


JOINED = {
    HostTime.HIDDEN: "the longer",
    HostTime.PARTLY: "root of the squares' sum",
    HostTime.EXPOSED: "their sum",
}
"""What becomes of the host's time beside the GPU's, as the screen says it."""


def _bars(job: Job) -> dict[str, float]:
    """Seconds of each stage of one batch, and of the host."""
    # In the order of a batch; what overlaps stands beside what it hides behind.
    parts = stages(job)
    collectives = collectives_s(job)
    return {
        "input to the GPUs": parts.input_s - parts.keys_s,
        "keys, all to all": parts.keys_s,
        "rows over the bus": parts.miss_s,
        "lookup": parts.lookup_s,
        "exchange": parts.exchange_s,
        "forward": parts.forward_s,
        "backward": parts.backward_s,
        "exchange back": parts.exchange_s,
        "copied gradients": parts.copied_s,
        "update": parts.update_s,
        "all-reduce": parts.allreduce_s - parts.copied_s,
        "small kernels": parts.gpu_s,
        "host: key sizes and collectives": collectives,
        "host: launching and else": parts.host_s - collectives,
    }


def _stages_of(job: Job, step: float) -> list[str]:
    """A line for each stage; of several machines beside one with as many samples a GPU, which says
    why they are slower."""
    bars = _bars(job)
    host = job.system.host
    title = "stages of a batch, ms (pipelined ones run beside others)"
    if job.system.nodes == 1:
        lines = [f"  {name:31} {1e3 * bar:9.3f}" for name, bar in bars.items() if bar]
        return [title, *lines]

    # One machine alone, as if the rows had room.
    gpus = host.gpus
    alone = replace(job, system=System(host=host, gpus=gpus), batch=round(job.per_gpu * gpus))
    beside = _bars(alone)
    bars |= {"step": step}
    beside |= {"step": step_s(alone)}
    lines = [
        f"  {name:31} {1e3 * bar:9.3f} {1e3 * beside[name]:9.3f} {1e3 * (bar - beside[name]):+9.3f}"
        for name, bar in bars.items()
        if bar or beside[name]
    ]
    head = f"{f'  of {job.system.nodes} machines; of one; more':33}"
    return [title, head.rstrip(), *lines]


def run_sharded(options: ShardedOptions) -> str:
    """Simulate, and say it on one screen."""
    job = job_of(options)
    if not options.anyway:
        _refuse_too_large(job)

    # Simulate; numbers that are each possible may together describe no step.
    parts = stages(job)
    plan = job.plan
    system = job.system
    step = step_s(job)
    value = f"{step:.3g} s"
    rule = f"must lie in (0, {SECONDS[1]:g}]"
    require(0 < step <= SECONDS[1], "a step", value, rule, "look at the model's and rates' sizes")
    rate = job.batch / step
    device = device_step_s(parts, job.software)
    low, high = (rate * exp(way * band_ln(job)) for way in (-1, 1))

    # One screen, in the order in which one decides.
    doubts = {name: f"\n{'':14}{doubt}" for name, doubt in system.host.doubts.items()}
    lines = [
        f"{job.ranker.name} on {system.gpus} GPUs of {system.host.name}, {job.software.name}, "
        f"{job.software.pipeline}, {job.precision}, {job.batch:,} samples a step",
        f"throughput    {rate:,.0f} samples/s, 90 % band {low:,.0f} to {high:,.0f}",
        f"step          {step * 1e3:.3f} ms; GPU {device * 1e3:.3f}, host {parts.host_s * 1e3:.3f}"
        f": {JOINED[job.host_time]}{doubts.get('step', '')}",
        f"memory        {_needed(job)}"
        + ("" if fits(job) else ": THEY DO NOT FIT")
        + doubts.get("memory", ""),
        f"plan          {job.software.strategy}: the busiest GPU reads "
        f"{plan.imbalance:.2f} times the mean",
        "loading       free: batches are taken to lie in the hosts' memory in time",
        "staleness     " + ("1 step" if job.software.pipeline is Pipeline.SEMI_SYNC else "none"),
    ]
    if new := strange(job):
        lines.append(f"borrowed      {'; '.join(new.values())}: the band is wider")
    if usd := system.usd_per_hour:
        a_million = price(usd / rate / 3600 * 1e6)
        lines.append(f"price         ${usd:,.2f} an hour, {a_million} a million samples")
    lines += _stages_of(job, step)
    if options.print_stages:
        lines.append("two batches, ms")
        for span in schedule(parts, job.software):
            if span.batch in (2, 3):
                name = f"{span.stream:5} {span.stage:16} of {span.batch}"
                lines.append(f"  {name:30} {span.start_s * 1e3:9.3f} to {span.end_s * 1e3:9.3f}")
    return "\n".join(lines)
