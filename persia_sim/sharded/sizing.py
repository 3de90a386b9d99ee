"""The cheapest machines for a rate: hybrid with rented CPU hosts, or tables on the GPUs.

The closed form chooses numbers of hosts, since it takes milliseconds; what it chose is simulated,
and chosen again for more where queues take some of the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import exp, inf

from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster, Role
from persia_sim.cluster.machine import Host
from persia_sim.cluster.scenario import Noise, Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import gcp_100t
from persia_sim.presets.costs import CATALOGUE
from persia_sim.report.hosts import MOST_HOSTS, fewest, hosts_for_rows
from persia_sim.report.measure import Estimate, throughput
from persia_sim.report.ranges import OnServers, Range, range_of
from persia_sim.sharded.compare import COMPARED, dense_as, fitting_gpus, job_of, on_gpus
from persia_sim.sharded.plan import Software
from persia_sim.sharded.software import band_ln
from persia_sim.sharded.stages import step_s

MOST_GPUS = 2048
"""GPUs of a choice, at most."""
_ROOM = 0.9
"""Share of a host's memory that its processes may have."""
_CORES = 100
"""About so many cores a server process, as on the hosts of the 100T run."""
_STEPS = 48
"""Steps of the first simulation; each further one has twice as many and the next seed."""
_MOST_STEPS = 768
_MOST_BATCHES = 25_600
"""Steps of all ranks together in a simulation after the first."""
_FAR = 2.0
"""Half widths from the rate that is asked for at which one simulation decides."""
_GPU_CV = 0.05
_TRIES = 4
_LOADERS = 4  # a rank, as the 100T run has


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is wanted of the machines."""

    workload: Workload
    samples_per_s: float
    tau: int | None
    fresh: tuple[str, ...] = ()
    """Tables whose rows are exact in hybrid, as `Knobs.fresh` names them."""
    rows: str
    """How servers keep rows: a name of `FORMATS`."""
    software: Software
    """What runs on the GPUs that hold tables; from a trace, the dense network of hybrid is its,
    too."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Machines that reach a rate."""

    software: Software | None
    """What runs on GPUs that hold tables; None: it is hybrid."""
    scenario: Scenario
    """The scenario of hybrid; of the other its cluster's GPU hosts count alone."""
    machines: tuple[tuple[str, int, Host], ...]
    """Role, number and type of its hosts."""
    samples_per_s: float
    """By the closed form, or simulated."""
    half_width: float | None = None
    """Half of the 95 % interval of the simulated rate; None by the closed form."""
    undecided: bool = False
    """Whether the longest simulation leaves open if the rate is reached."""
    binds: str = ""
    """What bounds the rate."""
    parts: tuple[Host, ...] = ()
    """The types among which it was chosen: GPU, worker and server host."""

    @property
    def system(self) -> str:
        """Hybrid, or the software's name."""
        return "hybrid" if self.software is None else self.software.name

    @property
    def usd_per_hour(self) -> float:
        """List price of all hosts."""
        return sum(number * host.usd_per_hour for _, number, host in self.machines)

    @property
    def usd_per_million(self) -> float:
        """Dollars for a million samples."""
        return self.usd_per_hour / 3600 / self.samples_per_s * 1e6

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.scenario.cluster.ranks

    @cached_property
    def may_be(self) -> Range:
        """What the rate of hybrid may be, over what is not known of its CPU hosts, its GPUs and its
        model."""
        return range_of(
            OnServers(scenario=self.scenario), value=self.samples_per_s, simulated=False
        )

    @property
    def band(self) -> tuple[float, float]:
        """The 90 % band of the rate."""
        if self.software is None:
            return self.may_be.low, self.may_be.high
        half = band_ln(job_of(self.scenario, self.software))
        return self.samples_per_s * exp(-half), self.samples_per_s * exp(half)


def role_on(host: Host, hosts: int) -> Role:
    """So many hosts with servers or workers."""
    processes = max(1, round(host.cores / _CORES))
    return Role(
        host=host,
        hosts=hosts,
        processes_per_host=processes,
        cores_per_process=max(1, host.cores // processes),
        ram_bytes_per_process=_ROOM * host.ram_bytes / processes,
    )


def cluster_on(gpu: Host, hosts: int, workers: Role, servers: Role) -> Cluster:
    """GPU hosts with all their GPUs, and CPU hosts beside them."""
    # A process a GPU, with its share of the host.
    nn = Role(
        host=gpu,
        hosts=hosts,
        processes_per_host=gpu.gpus,
        cores_per_process=max(1, gpu.cores // gpu.gpus),
        ram_bytes_per_process=_ROOM * gpu.ram_bytes / gpu.gpus,
    )

    # Loaders are plentiful: they are not what is sized.
    ranks = hosts * gpu.gpus
    return Cluster(
        name="sized",
        ranks=ranks,
        nn=nn,
        embedding_workers=workers,
        servers=servers,
        loaders=_LOADERS * ranks,
        link=gcp_100t().link,
        source="chosen by `persia-sim size`",
    )


def server_hosts_for_rows(asked: Asked, host: Host) -> int:
    """The fewest hosts of a type that hold all rows."""
    return hosts_for_rows(asked.workload, role_on(host, 1), asked.rows)


def hybrid_on(asked: Asked, gpu: Host, worker: Host, server: Host) -> Choice | None:
    """The fewest GPU hosts of a type with which hybrid reaches the rate, and then the fewest CPU
    hosts; None where no number of them does."""
    least = server_hosts_for_rows(asked, server)
    if least > MOST_HOSTS:
        return None

    def scenario(gpus: int, workers: int, servers: int) -> Scenario:
        roles = role_on(worker, workers), role_on(server, servers)
        chosen = Scenario(
            cluster=cluster_on(gpu, gpus, *roles),
            workload=asked.workload,
            costs=CATALOGUE,
            tau=asked.tau,
            fresh=asked.fresh,
            noise=Noise(gpu_cv=_GPU_CV),
            steps=_STEPS,
        )
        if asked.software.traced is None:
            return chosen
        return replace(chosen, costs=dense_as(CATALOGUE, job_of(chosen, asked.software)))

    def reaches(gpus: int, workers: int, servers: int) -> bool:
        return answer(scenario(gpus, workers, servers)).samples_per_s >= asked.samples_per_s

    def servers_for(gpus: int, workers: int) -> int | None:
        # From few to many: each server more is a call more, and late calls may bind in their turn.
        most = max(least, MOST_HOSTS // 4)
        return fewest(least, most, lambda n: reaches(gpus, workers, n))

    # With plenty of workers the GPUs bind, and servers; then the workers are made as few as may be.
    plenty = MOST_HOSTS // 4
    gpus = fewest(1, MOST_GPUS // gpu.gpus, lambda n: servers_for(n, plenty) is not None)
    if gpus is None:
        return None
    servers = servers_for(gpus, plenty) or least
    workers = fewest(1, plenty, lambda n: reaches(gpus, n, servers)) or plenty
    chosen = scenario(gpus, workers, servers)
    by_closed_form = answer(chosen)
    machines = ("GPU", gpus, gpu), ("worker", workers, worker), ("server", servers, server)
    return Choice(
        software=None,
        scenario=chosen,
        machines=machines,
        samples_per_s=by_closed_form.samples_per_s,
        binds=by_closed_form.binds,
        parts=(gpu, worker, server),
    )


def sharded_on(asked: Asked, gpu: Host) -> Choice | None:
    """The fewest machines of a type whose GPUs have room for the tables and reach the rate."""
    idle = role_on(replace(gpu, gpu=None, gpus=0), 1)  # it has none: the job reads GPU hosts alone

    # A scenario of so many hosts; a rival has no workers and no servers.
    def scenario(hosts: int) -> Scenario:
        return Scenario(
            cluster=cluster_on(gpu, hosts, idle, idle),
            workload=asked.workload,
            costs=CATALOGUE,
            tau=0,
            noise=Noise(gpu_cv=_GPU_CV),
            steps=_STEPS,
        )

    def rate(hosts: int) -> float:
        job = job_of(scenario(hosts), asked.software)
        return job.batch / step_s(job)

    # Memory first: the tables must fit. Then as many hosts as reach the rate.
    room = fitting_gpus(job_of(scenario(1), asked.software), COMPARED)
    if room is None:
        return None
    least = room // gpu.gpus
    most = MOST_GPUS // gpu.gpus if gpu.nic_bytes_per_s else 1
    hosts = fewest(least, most, lambda n: rate(n) >= asked.samples_per_s)
    if hosts is None:
        return None

    # Whether memory or the rate has decided.
    return Choice(
        software=asked.software,
        scenario=scenario(hosts),
        machines=(("GPU", hosts, gpu),),
        samples_per_s=rate(hosts),
        binds="memory" if hosts == least else "rate",
        parts=(gpu,),
    )


def chosen_among(asked: Asked, parts: Sequence[Host]) -> Choice | None:
    """The cheapest choice of these hosts: one type has tables on its GPUs, three are hybrid's."""
    gpu, *others = parts
    return hybrid_on(asked, gpu, *others) if others else sharded_on(asked, gpu)


def choices(asked: Asked, machines: Sequence[Host]) -> list[Choice]:
    """The cheapest choice of either system for each GPU host, cheapest first, by the closed form
    and the laws of sharded steps."""
    cheapest: dict[tuple[str, str], Choice] = {}
    for parts in _types(machines):
        choice = chosen_among(asked, parts)
        if choice is None:
            continue
        place = choice.system, parts[0].name
        if place not in cheapest or choice.usd_per_hour < cheapest[place].usd_per_hour:
            cheapest[place] = choice
    return sorted(cheapest.values(), key=lambda choice: choice.usd_per_hour)


def _types(machines: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
    """Each GPU host alone, and with each pair of CPU hosts."""
    cpus = [host for host in machines if host.gpu is None]
    for gpu in machines:
        if gpu.gpu is not None:
            yield (gpu,)
            yield from ((gpu, *pair) for pair in product(cpus, cpus))


def simulated(asked: Asked, choice: Choice) -> Choice | None:
    """The choice with its simulated rate; with more hosts where that is below what is asked.

    Where the longest simulation does not tell, the choice is handed back as undecided.
    """
    candidate: Choice | None = choice
    target = asked.samples_per_s
    for _ in range(_TRIES):
        if candidate is None:
            return None
        rate, clear = simulated_rate(candidate, asked.samples_per_s)
        if not clear or rate.mean >= asked.samples_per_s:
            return replace(
                candidate,
                samples_per_s=rate.mean,
                half_width=rate.half_width,
                undecided=not clear,
            )
        target *= 1.01 * asked.samples_per_s / rate.mean
        candidate = chosen_among(replace(asked, samples_per_s=target), candidate.parts)
    return None


def simulated_rate(choice: Choice, asked_samples_per_s: float) -> tuple[Estimate, bool]:
    """Samples per second with the noise of GPUs and the queues of hosts, and whether they are clear
    of what is asked for.

    They are where the 95 % interval lies on one side of it, in two simulations after another of
    different lengths and seeds, in one by far, or in the longest: of many short ones some are clear
    by chance, and queues that still fill let more in than they will let out.
    """
    before = 0  # the side on which the simulation before was clear: 1 above, -1 below
    steps = _STEPS
    seed = choice.scenario.seed
    while True:
        rate = _simulated_rate(choice, steps, seed)
        off = rate.mean - asked_samples_per_s
        side = 0 if abs(off) < rate.half_width else 1 if off >= 0 else -1
        if side and (side == before or abs(off) >= _FAR * rate.half_width):
            return rate, True
        steps *= 2
        if steps > _MOST_STEPS or steps * choice.gpus > _MOST_BATCHES:
            return rate, side != 0
        seed += 1
        before = side


def _simulated_rate(choice: Choice, steps: int, seed: int) -> Estimate:
    scenario = replace(choice.scenario, steps=steps, seed=seed)
    if choice.software is None:
        return throughput(simulate(scenario))
    other, need = on_gpus(scenario, choice.gpus, choice.software)
    return throughput(simulate(other, need=need))


def front(every: Sequence[Choice]) -> list[Choice]:
    """Choices that no other beats in rate and price at once, cheapest first."""
    best = -inf
    on_front = []
    for choice in sorted(every, key=lambda each: (each.usd_per_hour, -each.samples_per_s)):
        if choice.samples_per_s > best:
            best = choice.samples_per_s
            on_front.append(choice)
    return on_front


def what_ifs(asked: Asked, choice: Choice) -> dict[str, float]:
    """What would have to be otherwise -> the price of the same rate over that of the choice."""
    prices: dict[str, float] = {}
    for name, change in _CHANGES.items():
        parts = tuple(change(host) for host in choice.parts)
        prices |= _price(name, asked, parts, choice)
    work = asked.workload
    if 2 * work.batch_per_rank <= 65_535:
        twice = replace(asked, workload=replace(work, batch_per_rank=2 * work.batch_per_rank))
        prices |= _price("a batch of twice the samples", twice, choice.parts, choice)
    return dict(sorted(prices.items(), key=lambda item: item[1]))


def _price(name: str, asked: Asked, parts: Sequence[Host], choice: Choice) -> dict[str, float]:
    changed = chosen_among(asked, parts)
    return {name: changed.usd_per_hour / choice.usd_per_hour} if changed else {}


def _faster_gpu(host: Host) -> Host:
    if host.gpu is None:
        return host
    rates = "fp32_flops", "tf32_flops", "fp16_flops", "hbm_bytes_per_s"
    return host.with_gpu(**{name: 2 * (getattr(host.gpu, name) or 0) or None for name in rates})


_CHANGES: dict[str, Callable[[Host], Host]] = {
    "GPUs twice as fast": _faster_gpu,
    "GPUs with twice the memory": lambda host: (
        host if host.gpu is None else host.with_gpu(hbm_bytes=2 * host.gpu.hbm_bytes)
    ),
    "NICs twice as fast": lambda host: replace(host, nic_bytes_per_s=2 * host.nic_bytes_per_s),
    "cores twice as fast": lambda host: replace(host, core_speed=2 * host.core_speed),
    "CPU hosts with twice the memory": lambda host: (
        replace(host, ram_bytes=2 * host.ram_bytes) if host.gpu is None else host
    ),
    "CPU hosts at half the price": lambda host: (
        replace(host, usd_per_hour=host.usd_per_hour / 2) if host.gpu is None else host
    ),
    "GPU hosts at half the price": lambda host: (
        host if host.gpu is None else replace(host, usd_per_hour=host.usd_per_hour / 2)
    ),
}
