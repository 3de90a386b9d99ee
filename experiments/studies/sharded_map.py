"""Hybrid training against tables on the GPUs: who wins at which model size and network, and price.

Both systems have the same fields, rows, dims, dense network and global batch, the same seconds for
the dense network, its launching and its all-reduce, and pay for loading nothing. One law says what
of launching the GPU's work hides, on both sides; what launching tables and their exchanges takes is
the sharded side's alone. On both sides the all-reduce has the NICs that rows and vectors have.
Hybrid has 64 GPUs and as many CPU hosts as it gains from, chosen by the closed form, then
simulated; the sharded system has 64 GPUs, or as many more as its rows need memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil
from statistics import median
from typing import Annotated, Any

from experiments.options import OneOf, Planned, SimulatedSteps, Some
from experiments.result_cache import ResultCache
from experiments.studies.predict_published import seconds_by_part
from experiments.tables import aligned, leave
from persia_sim.base.rules import require
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import DEFAULT_TAU
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster, Role
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.machine import Host, Precision, System
from persia_sim.cluster.memory import FORMATS
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import MACHINES, gcp_100t
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.fitted import REACH
from persia_sim.report.critical_path import blame_of_resources
from persia_sim.report.measure import throughput
from persia_sim.report.ranges import OnServers, Range, range_of
from persia_sim.sharded.compare import OnGpus, alike
from persia_sim.sharded.plan import HostTime, Software, Strategy
from persia_sim.sharded.presets import ranker_of
from persia_sim.sharded.software import SOFTWARE
from persia_sim.sharded.stages import Job, Stages, fits, stages, step_of

MACHINE_OF = {"v100": "p3.16xlarge", "a100": "nd96amsr-a100-v4", "h100": "p5.48xlarge"}
"""GPU -> the machine of eight that is rented; a machine's price is the same with any NIC."""
DIM, FIELDS, DENSE_FEATURES = 128, 26, 13  # Criteo's columns, as the 100T run
GPUS_OF_HYBRID = 64
ROWS = "f32-sgd"  # a number of 4 bytes, and row-wise Adagrad's one number a row, on both sides
HBM_SHARE = 0.8
"""Share of a GPU's memory for rows, on average. Assumed."""
WORKERS = (4, 8, 16, 32, 64, 128, 256)
LEAST_SERVERS = (2, 8, 32)
MOST_SERVER_PROCESSES = 1024
NEAR, SLACK = 0.95, 0.7
"""Hybrid rents the cheapest hosts with which it is at least so fast as with any, where NICs gave
only this share of their rate: the closed form knows no queues."""
_GBIT = 1e9 / 8


def price_date(host: Host) -> str:
    """The month of a machine's list price, which its source ends with.

    >>> price_date(MACHINES["p3.16xlarge"])
    '2020-06'
    """
    return host.source.rpartition(";")[0].rpartition(", ")[2]


def host_of(gpu: str, nic_gbit_per_s: float) -> Host:
    """The rented machine with other NICs, which read and write GPU memory (RDMA)."""
    return replace(MACHINES[MACHINE_OF[gpu]], nic_bytes_per_s=nic_gbit_per_s * _GBIT, rdma=True)


@cache
def workload_of(parameters: float, batch: int) -> Workload:
    """Criteo's columns with tables of so many parameters."""
    return Workload(
        name=f"criteo-{parameters:g}",
        fields=FIELDS,
        dense_features=DENSE_FEATURES,
        dim=DIM,
        rows=parameters / DIM,
        batch_per_rank=batch // GPUS_OF_HYBRID,
        precision=Precision.FP16,
        source="Criteo's columns, dim 128, ids as popular as assumed for the 100T run",
    )


@dataclass(frozen=True, slots=True)
class Sharded:
    """The sharded side at one place: its GPUs, and its step under the fastest plan with room."""

    job: Job
    parts: Stages
    step_s: float
    plan: str
    gpus_for_memory: int


OF_SOFTWARE = "own"


def software_of(name: str, host_time: str = OF_SOFTWARE) -> Software:
    """A system, with its own or another law of what becomes of its host's time."""
    soft = SOFTWARE[name]
    if host_time == OF_SOFTWARE:
        return soft
    return replace(soft, host_time=HostTime(host_time), host_time_across=None)


@cache
def sharded_of(
    gpu: str, software: str, nic: float, parameters: float, batch: int, host_time: str = OF_SOFTWARE
) -> Sharded:
    """Under the fastest strategy that has room for the rows, on as few machines of 64 GPUs or more
    as have memory for them."""
    host = host_of(gpu, nic)
    ranker = ranker_of(workload_of(parameters, batch))
    needed = ceil(ranker.table_bytes / (HBM_SHARE * host.chip.hbm_bytes))
    gpus = host.gpus * ceil(max(needed, GPUS_OF_HYBRID) / host.gpus)
    soft = software_of(software, host_time)
    ways = []
    for strategy in strategies_on(gpus):
        job = Job(
            ranker=ranker,
            system=System(host=host, gpus=gpus),
            software=replace(soft, strategy=strategy),
            reach=REACH,
            batch=batch,
        )
        if fits(job):
            parts = stages(job)
            ways.append(Sharded(job, parts, step_of(parts, job), str(strategy), needed))
    return min(ways, key=lambda side: side.step_s)


def strategies_on(gpus: int) -> tuple[Strategy, ...]:
    """How tables may be dealt out: a column is the least part of one, so more GPUs than columns
    have no part of each."""
    dealt = Strategy.TABLE, Strategy.ROW, Strategy.PLANNED
    return (*dealt, Strategy.COLUMN) if gpus <= DIM else dealt


@cache
def hybrid_of(
    gpu: str, software: str, nic: float, parameters: float, batch: int, host_time: str = OF_SOFTWARE
) -> Scenario:
    """Hybrid on the hosts that it rents."""
    # Every number of workers and servers by the closed form, at links that are busier than planned.
    work = workload_of(parameters, batch)
    costs = costs_of(gpu, software, nic, parameters, batch, host_time)
    options = []
    for workers, servers in product(WORKERS, server_roles(work, nic)):
        scenario = Scenario(
            cluster=cluster_of(gpu, nic, workers, servers),
            workload=work,
            costs=costs,
            tau=DEFAULT_TAU,
            dense_on_nics=True,
            steps=1,
        )
        link = scenario.cluster.link
        busy = replace(link, header_efficiency=SLACK * link.header_efficiency)
        planned = replace(scenario, cluster=replace(scenario.cluster, link=busy))
        rate = answer(planned).samples_per_s
        options.append((rate, scenario.cluster.usd_per_hour, scenario))

    # The cheapest of those that are nearly the fastest.
    most = max(rate for rate, *_ in options)
    near = [option for option in options if option[0] >= NEAR * most]
    return min(near, key=lambda option: option[1])[2]


def costs_of(
    gpu: str, software: str, nic: float, parameters: float, batch: int, host_time: str = OF_SOFTWARE
) -> Costs:
    """CPU stages as in the catalogue; the dense network, its launching and its all-reduce as on the
    sharded side's GPUs."""
    system = System(host=host_of(gpu, nic), gpus=GPUS_OF_HYBRID)
    ranker = ranker_of(workload_of(parameters, batch))
    soft = software_of(software, host_time)
    job = Job(ranker=ranker, system=system, software=soft, reach=REACH, batch=batch)
    return alike(CATALOGUE, job)


def server_roles(work: Workload, nic: float) -> list[Role]:
    """Hosts that hold all rows: small ones or large ones, as few as that takes or more."""
    base = gcp_100t()
    small = base.embedding_workers
    large = base.servers
    each = FORMATS[ROWS].row_bytes(work.dim)
    roles = []
    for role in (small, large):
        held = role.processes_per_host * (role.ram_bytes_per_process // each)
        for least in LEAST_SERVERS:
            hosts = max(least, ceil(work.rows / held))
            if hosts * role.processes_per_host <= MOST_SERVER_PROCESSES:
                host = replace(role.host, nic_bytes_per_s=nic * _GBIT)
                made = replace(role, hosts=hosts, host=host)
                roles += [made] if made not in roles else []
    return roles


def cluster_of(gpu: str, nic: float, workers: int, servers: Role) -> Cluster:
    """64 GPUs with these CPU hosts; every NIC alike, CPU hosts speak TCP."""
    base = gcp_100t()
    machine = host_of(gpu, nic)
    each = base.nn.processes_per_host
    rate = nic * _GBIT
    role = base.embedding_workers
    # The GPU hosts are of the machine; workers and servers keep theirs, with its NIC.
    return replace(
        base,
        nn=replace(
            base.nn,
            host=machine,
            cores_per_process=machine.cores // each,
            ram_bytes_per_process=machine.ram_bytes / each,
        ),
        embedding_workers=replace(
            role, hosts=workers, host=replace(role.host, nic_bytes_per_s=rate)
        ),
        servers=servers,
        link=replace(base.link, header_efficiency=REACH.nic * REACH.tcp),
    )


Rate = Annotated[float, Within(0.1, 1e4)]
Size = Annotated[float, Within(1e7, 1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Every GPU at every NIC and model size: samples/s and dollars of hybrid over sharded."""

    gpus: Some[Annotated[str, OneOf(MACHINE_OF)]] = tuple(MACHINE_OF)
    """v100, a100, h100, in machines of eight."""
    software: Some[Annotated[str, OneOf(SOFTWARE)]] = ("torchrec", "hugectr")
    """What the sharded side runs; hybrid launches its dense network as quickly."""
    host_time: Some[Annotated[str, OneOf((OF_SOFTWARE, *HostTime))]] = (OF_SOFTWARE,)
    """What becomes of the host's launching beside the GPU's work, on both sides: exposed, partly or
    hidden; own: as published steps of the software have it."""
    nic_gbit_per_s: Some[Rate] = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
    """NICs of every host, of both systems."""
    parameters: Some[Size] = (1e10, 1e11, 1e12, 6.25e12, 2.5e13, 1e14)
    """Numbers in all tables."""
    batch: Annotated[int, Within(GPUS_OF_HYBRID, 65_535 * GPUS_OF_HYBRID)] = 55_296
    """Samples of a dense update, both systems; a multiple of 64."""
    steps: SimulatedSteps = 24
    """Steps of hybrid's simulations."""

    def _check(self) -> None:
        whole = self.batch // GPUS_OF_HYBRID * GPUS_OF_HYBRID
        rule = f"must be a multiple of the {GPUS_OF_HYBRID} GPUs"
        require(self.batch == whole, "batch", self.batch, rule, f"use {whole}")


Cell = dict[str, Any]
"""One place on the map: both systems, and what one has over the other."""


def run(options: Options) -> None:
    """Fill the map, write the table, print where hybrid wins."""
    places = product(options.gpus, options.software, options.nic_gbit_per_s, options.parameters)
    calls = [
        (*place, options.batch, options.steps, host_time)
        for place in places
        for host_time in options.host_time
    ]
    results = ResultCache(options.out / "cells.jsonl")
    missing = results.missing(calls)
    print(f"{len(calls)} cells ({missing} to run)")

    # A dry run ends with the minutes of what is missing.
    if options.dry_run:
        factors = "gpus", "software", "host_time", "nic_gbit_per_s", "parameters", "steps"
        print(f"  {options.duration(*factors, share=missing / len(calls))}")
        return
    cells: list[Cell] = results.of(cell_of, calls, "cells")
    print(table(cells))
    print(summary(cells))
    leave(options, {"": cells})


def cell_of(
    gpu: str,
    software: str,
    nic: float,
    parameters: float,
    batch: int,
    steps: int,
    host_time: str = OF_SOFTWARE,
) -> Cell:
    """Both systems at one place; hybrid is simulated for so many steps."""
    # The tables on GPUs: a step is a sum, so its rate needs no simulation.
    sharded = sharded_of(gpu, software, nic, parameters, batch, host_time)
    sharded_rate = batch / sharded.step_s
    sharded_usd = sharded.job.system.usd_per_hour
    # Hybrid is simulated, and the closed form stands beside it.
    hybrid = hybrid_of(gpu, software, nic, parameters, batch, host_time)
    scenario = replace(hybrid, steps=steps)
    run = simulate(scenario)
    rate = throughput(run).mean
    bound = answer(scenario).samples_per_s
    blame = blame_of_resources(run)
    cluster = scenario.cluster
    usd = cluster.usd_per_hour
    parts = seconds_by_part(sharded.parts)
    hybrid_price = usd_per_million(usd, rate)
    sharded_price = usd_per_million(sharded_usd, sharded_rate)
    times = times_of(scenario, sharded, rate / sharded_rate)
    return {
        "gpu": gpu,
        "software": software,
        "host_time": str(sharded.job.host_time),
        "nic_gbit_per_s": nic,
        "parameters": parameters,
        "table_bytes": ranker_of(workload_of(parameters, batch)).table_bytes,
        "hybrid_samples_per_s": rate,
        "hybrid_bound_samples_per_s": bound,  # by the closed form
        "hybrid_binds": max(blame, key=lambda name: blame[name]),
        "hybrid_gpus": cluster.ranks,
        "hybrid_workers": cluster.embedding_workers.hosts,
        "hybrid_servers": cluster.servers.hosts,
        "hybrid_server_host": cluster.servers.host.name,
        "hybrid_usd_per_hour": usd,
        "hybrid_usd_per_million_samples": hybrid_price,
        "sharded_samples_per_s": sharded_rate,
        "sharded_binds": max(parts, key=lambda name: parts[name]),
        "sharded_gpus": sharded.job.system.gpus,
        "sharded_gpus_for_memory": sharded.gpus_for_memory,
        "sharded_plan": sharded.plan,
        "sharded_usd_per_hour": sharded_usd,
        "sharded_usd_per_million_samples": sharded_price,
        "throughput_ratio": times.value,  # above 1 hybrid is faster
        "throughput_ratio_low": times.low,  # nine in ten draws of what is not known lie between
        "throughput_ratio_high": times.high,
        "throughput_ratio_inputs": times.decisive,
        "dollar_ratio": sharded_price / hybrid_price,  # above 1 hybrid is cheaper; as wide
        "prices": f"{price_date(sharded.job.system.host)}; CPU hosts 2021-11",
    }


def times_of(hybrid: Scenario, sharded: Sharded, value: float) -> Range:
    """How many times as fast hybrid is as tables on GPUs, simulated as ``value``, over one draw of
    what both share."""
    job = sharded.job
    rival = OnGpus(job=job, samples_per_s=job.batch / sharded.step_s)
    return range_of(OnServers(scenario=hybrid), rival, value=value, simulated=False)


def usd_per_million(usd_per_hour: float, samples_per_s: float) -> float:
    """Dollars for a million samples.

    >>> usd_per_million(36.0, 1e4)
    1.0
    """
    return usd_per_hour / 3600 / samples_per_s * 1e6


def ranges_of(cell: Mapping[str, Any]) -> tuple[Range, Range]:
    """Samples/s of hybrid over sharded, and dollars of sharded over hybrid. Prices are known, so
    that both are as wide.

    >>> row = {"throughput_ratio_low": 1, "throughput_ratio": 2, "throughput_ratio_high": 3}
    >>> [format(each, "g") for each in ranges_of(row | {"dollar_ratio": 4})]
    ['2 (1 to 3)', '4 (2 to 6)']
    """
    names = (f"throughput_ratio{end}" for end in ("_low", "", "_high"))
    times = Range(*(float(cell[name]) for name in names))
    return times, times.times(float(cell["dollar_ratio"]) / times.value)


def table(cells: Sequence[Cell]) -> str:
    """A line for each GPU, software and size: ratios at every NIC."""
    nics = list(dict.fromkeys(cell["nic_gbit_per_s"] for cell in cells))
    groups: dict[tuple[str, str, str, float], list[Cell]] = {}
    for cell in cells:
        place = cell["gpu"], cell["software"], cell["host_time"], cell["parameters"]
        groups.setdefault(place, []).append(cell)
    lines = []
    for (gpu, software, host_time, parameters), of_group in groups.items():
        ratios = [" / ".join(f"{each:.2f}" for each in ranges_of(c)) for c in of_group]
        many = f"{of_group[0]['sharded_gpus']:,}"
        lines.append([gpu, software, host_time, f"{parameters:.3g}", many, *ratios])
    header = ["GPU", "against", "host", "parameters", "its GPUs", *(f"{n:g} Gbit/s" for n in nics)]
    return aligned(header, lines)


def summary(cells: Sequence[Cell]) -> str:
    """In how many cells hybrid is faster, cheaper, by each law of what hides the host's time; how
    far the closed form is off."""
    text = "samples/s hybrid over sharded / dollars sharded over hybrid"
    for host_time in dict.fromkeys(cell["host_time"] for cell in cells):
        of_law = [cell for cell in cells if cell["host_time"] == host_time]
        faster = sum(cell["throughput_ratio"] > 1 for cell in of_law)
        cheaper = sum(cell["dollar_ratio"] > 1 for cell in of_law)
        text += f"\nthe host's launching {host_time}: hybrid is faster in {faster} and cheaper in"
        text += f" {cheaper} of {len(of_law)} cells"
        both = zip(*map(ranges_of, of_law), strict=True)
        sure = [sum(each.low > 1 for each in ranges) for ranges in both]
        text += f"; at the lower end of its range, too, in {sure[0]} and {sure[1]}"
    off = [cell["hybrid_bound_samples_per_s"] / cell["hybrid_samples_per_s"] - 1 for cell in cells]
    text += f"\nclosed form over simulation: median {median(off):+.1%}, largest {max(off):+.1%}"
    return text
