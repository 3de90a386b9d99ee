"""The cheapest machines for a rate: hybrid with rented CPU hosts, or tables on the GPUs.

The closed form chooses numbers of hosts, since it takes milliseconds; what it chose is simulated,
and chosen again for more where queues take some of the rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import ceil, exp, inf

from persia_sim.base.rules import require
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster, Role
from persia_sim.cluster.machine import Host
from persia_sim.cluster.memory import FORMATS
from persia_sim.cluster.scenario import Noise, Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import SIZED_FOR, SPLIT_ASSUMED, gcp_100t, rows_of
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.software import band_ln
from persia_sim.report.compare import COMPARED, fitting_gpus, job_of, on_gpus
from persia_sim.report.measure import Estimate, throughput
from persia_sim.report.ranges import OnServers, Range, range_of
from persia_sim.sharded.stages import step_s

MOST_GPUS, MOST_HOSTS = 2048, 1024
"""GPUs of a choice, and CPU hosts of each role, at most."""
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
    software: str
    """Software of the GPUs that hold tables."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Machines that reach a rate."""

    system: str
    """hybrid, or the software of the GPUs with tables."""
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
        if self.system == "hybrid":
            return self.may_be.low, self.may_be.high
        half = band_ln(job_of(self.scenario, self.system))
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


def hosts_for_rows(workload: Workload, servers: Role, rows: str) -> int:
    """The fewest hosts of a role that hold all rows, kept as a name of `FORMATS` says."""
    row_bytes = FORMATS[rows].row_bytes(workload.kept_dim)
    of_host = servers.processes_per_host * (servers.ram_bytes_per_process // row_bytes)
    return ceil(workload.rows / of_host) if of_host else MOST_HOSTS + 1


def fewest(least: int, most: int, enough: Callable[[int], bool]) -> int | None:
    """The fewest from ``least`` to ``most`` that are enough, where more are never too few.

    >>> fewest(3, 1000, lambda n: n >= 17), fewest(3, 10, lambda n: n >= 17)
    (17, None)
    """
    high = least
    while high < most and not enough(high):
        high *= 2
    left = range(max(least, high // 2), min(high, most) + 1)
    place = bisect_left(left, True, key=enough)
    return left[place] if place < len(left) else None


def hybrid_on(asked: Asked, gpu: Host, worker: Host, server: Host) -> Choice | None:
    """The fewest GPU hosts of a type with which hybrid reaches the rate, and then the fewest CPU
    hosts; None where no number of them does."""
    least = server_hosts_for_rows(asked, server)
    if least > MOST_HOSTS:
        return None

    def scenario(gpus: int, workers: int, servers: int) -> Scenario:
        roles = role_on(worker, workers), role_on(server, servers)
        return Scenario(
            cluster=cluster_on(gpu, gpus, *roles),
            workload=asked.workload,
            costs=CATALOGUE,
            tau=asked.tau,
            fresh=asked.fresh,
            noise=Noise(gpu_cv=_GPU_CV),
            steps=_STEPS,
        )

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
        system="hybrid",
        scenario=chosen,
        machines=machines,
        samples_per_s=by_closed_form.samples_per_s,
        binds=by_closed_form.binds,
        parts=(gpu, worker, server),
    )


def sized(scenario: Scenario, samples_per_s: float, rows: str) -> Scenario:
    """The scenario on its own GPU hosts with the fewest hosts of servers, and then of workers, that
    reach a rate by the closed form; with those behind which more are of no use where none do."""
    least = hosts_for_rows(scenario.workload, scenario.cluster.servers, rows)
    plenty = max(least, MOST_HOSTS // 4)

    def rate(workers: int, servers: int) -> float:
        return answer(with_hosts(scenario, workers, servers)).samples_per_s

    most = max(rate(plenty, servers) for servers in (least, 2 * least, 4 * least, plenty))
    wanted = min(samples_per_s, 0.99 * most)
    servers = fewest(least, plenty, lambda n: rate(plenty, n) >= wanted) or plenty
    workers = fewest(1, plenty, lambda n: rate(n, servers) >= wanted) or plenty
    return with_hosts(scenario, workers, servers)


def unknown_hosts(preset: str, scenario: Scenario) -> Callable[[float], Cluster] | None:
    """The scenario's cluster with the numbers of worker and server hosts of a draw, where those of
    the named preset are not known: as many as so many times the rate takes for which it was sized,
    or so many times as many workers a server, of as many hosts. None where they are known."""
    workers = scenario.cluster.embedding_workers.hosts
    servers = scenario.cluster.servers.hosts
    if preset in SIZED_FOR:
        rate = SIZED_FOR[preset]
        kept = rows_of(scenario.workload.name)
        # Every mode and both sides of a ratio have the same draws.
        return cache(lambda times: sized(scenario, times * rate, kept).cluster)

    def split(times: float) -> Cluster:
        more = round((workers + servers) * times / (times + servers / workers))
        return with_hosts(scenario, more, workers + servers - more).cluster

    return split if preset in SPLIT_ASSUMED else None


def cheapest(scenario: Scenario, rows: str) -> Scenario:
    """The scenario on its own GPU hosts with the hosts of workers and servers with which a sample
    costs least, by the closed form. Raises ValueError where a host has no price."""
    unpriced = scenario.cluster.unpriced
    remedy = "write usd_per_hour into the file of the cluster"
    require(not unpriced, "price of", ", ".join(unpriced), "it is needed", remedy)
    least = hosts_for_rows(scenario.workload, scenario.cluster.servers, rows)

    def usd(workers: int, servers: int) -> float:
        tried = with_hosts(scenario, workers, servers)
        return tried.cluster.usd_per_hour / answer(tried).samples_per_s

    # One role after the other, a host more or fewer, until neither is cheaper.
    here = 1, least
    while True:
        workers, servers = here
        near = [(w, s) for w in _near(workers, 1) for s in _near(servers, least)]
        best = min(near, key=lambda counts: usd(*counts))
        if usd(*best) >= usd(*here):
            return with_hosts(scenario, *here)
        here = best


def _near(count: int, least: int) -> list[int]:
    """Counts to go on to: one more and one fewer, twice and half."""
    return sorted({max(least, n) for n in (count // 2, count - 1, count, count + 1, 2 * count)})


def with_hosts(scenario: Scenario, workers: int, servers: int) -> Scenario:
    """The scenario with so many hosts of workers and of servers."""
    return replace(scenario, cluster=scenario.cluster.resized(workers=workers, servers=servers))


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
        system=asked.software,
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
    if choice.system == "hybrid":
        return throughput(simulate(scenario))
    other, need = on_gpus(scenario, choice.gpus, choice.system)
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
