"""The simulator's schedule of a run on this host, and what threads that run side by side cost.

Each rank has a thread that fetches (an embedding worker of one core; of two in lookahead, whose
training thread pools, and in sync, whose push is on its way when the next batch is loaded), one
that trains (the GPU) and one that scatters and pushes (the copy back, then the server, whose lock
one thread holds at a time for each shard). Nothing is on a wire but an injected latency: rows that
were read, and gradients before they are scattered, are as many bytes as the link, which nobody
shares, takes that long for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from experiments.validating.cases import Case, Travels, travels
from experiments.validating.contention import Host, burdened, burdens, threads
from experiments.validating.link import HEADER_EFFICIENCY, bucket_bytes
from experiments.validating.stages import Costs, shares_of
from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import Read
from persia_sim.cluster.demand import Demand, Fetch, Push, demand
from persia_sim.cluster.incidents import Outage
from persia_sim.cluster.scenario import DenseHome, Discipline, Noise, Queues, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets.catalogue import this_host
from persia_sim.presets.costs import CATALOGUE
from persia_sim.report.measure import rank_durations, steady_steps, throughput
from persia_sim.report.row_staleness import staleness
from runtime.profiling.stage_times import Stages

_AN_ANSWER = 1e-6  # bytes: the simulator takes none at all for a push, which is not answered
_BUFFERS = ("forwarded", "on_gpu", "backward", "copied_back")  # between a rank's threads
_BUFFER = 10  # lookups and pushes under way at once, where a latency lets them run side by side
_ROUNDS = 12
_AGREES = 1e-3
_LEAST_SLOPE = 0.5


@dataclass(frozen=True, slots=True)
class Schedule:
    """Throughput and staleness that follow from the stages."""

    samples_per_s: float
    stale_steps: float
    """Mean over lookups: earlier steps with a push that the rows missed."""
    step_p95_s: float = 0.0
    """Seconds below which 95 of 100 steps of a rank stay."""
    stale_shares: tuple[float, ...] = ()
    """Shares of the lookups whose rows missed 0, 1, 2, ... earlier steps."""


def schedule(
    case: Case, stages: Stages, steps: int, dense_cv: float = 0.0, latency_s: float | None = None
) -> Schedule:
    """The schedule of stages as a clock sees them; ``latency_s`` as it is slept (None: as the case
    has it)."""
    run = _simulated(case, stages, steps, dense_cv, latency_s, trace=True)
    if case.dead_s:
        outage = _outage(case, run, stages["read"])
        run = _simulated(case, stages, steps, dense_cv, latency_s, True, outage)

    # What stands still once is met in the same steps as in the run: behind the first third.
    first = steps // 3 if case.dead_s else steady_steps(run).start
    seconds = rank_durations(run, first)
    rate = float((1 / seconds.mean(1)).mean()) if case.dead_s else _steps_per_s(run)
    late = staleness_in_steps(run.trace) if run.trace is not None else None
    return Schedule(
        rate * case.updates_per_step * case.batch,
        staleness(run).steps_mean,
        float(np.quantile(seconds, 0.95)),
        shares_of(late.missing_steps[late.step >= first]) if late is not None else (),
    )


def _outage(case: Case, run: Run, read_s: float) -> Outage:
    """The server is away from just before it is asked for the rows of two thirds of the steps."""
    step = 2 * run.scenario.steps // 3
    at_s = (float(run.stamps[Mark.READ][0, step]) - read_s) * (1 - 1e-9)
    return Outage(index=0, at_s=at_s, for_s=case.dead_s)


def contended(
    case: Case, costs: Costs, host: Host, steps: int, latency_s: float | None = None
) -> tuple[Schedule, Stages]:
    """The schedule of threads that share a host, and their stages as they are then."""
    longer, most = shared_stages(replace(case, dead_s=0.0), costs, host, steps, latency_s)
    alone = schedule(case, longer, steps, host.dense_cv, latency_s)
    if case.dead_s:  # the cores rest meanwhile: they are no bound
        return alone, longer
    return replace(alone, samples_per_s=min(most, alone.samples_per_s)), longer


def shared_stages(
    case: Case, costs: Costs, host: Host, steps: int, latency_s: float | None = None
) -> tuple[Stages, float]:
    """The stages as a clock sees them, and the samples a second that the cores can do at most.

    How long the stages take follows from the steps a second, and these from the stages: the answer
    is where both agree, sought by secants.
    """
    of_rank = threads(case.mode, case.ranks, costs.stages, costs.python)
    most = host.cores / max(1e-12, case.ranks * sum(thread.work_s for thread in of_rank))

    def longer(rate: float) -> Stages:
        by = burdens(of_rank, case.ranks, rate, host)
        return burdened(costs.stages, of_rank, by, host, costs.python)

    def off(rate: float) -> float:
        """Log of the steps a second that follow from these over these; falls as they grow."""
        run = _simulated(case, longer(rate), steps, host.dense_cv, latency_s)
        return log(min(most, _steps_per_s(run)) / rate)

    # Begin at the rate without contention; a secant needs two points.
    run = _simulated(case, costs.stages, steps, host.dense_cv, latency_s)
    last = log(min(most, _steps_per_s(run)))
    off_last = off(exp(last))
    now = last + off_last / 2

    # Secants, none of them too flat, until what follows agrees with what was put in.
    for _ in range(_ROUNDS):
        if abs(off_last) < _AGREES:
            break
        off_now = off(exp(now))
        slope = (off_now - off_last) / (now - last) if now != last else -1.0
        last = now
        off_last = off_now
        now = last - off_now / min(slope, -_LEAST_SLOPE)
    return longer(exp(last)), most * case.updates_per_step * case.batch


def _simulated(
    case: Case,
    stages: Stages,
    steps: int,
    dense_cv: float,
    latency_s: float | None,
    trace: bool = False,
    outage: Outage | None = None,
) -> Run:
    slept = replace(case, latency_s=case.latency_s if latency_s is None else latency_s)
    scenario = replace(
        scenario_of(slept, steps),
        noise=Noise(gpu_cv=min(dense_cv, 1.0)),
        disturbances=() if outage is None else (outage,),
    )
    return simulate(scenario, trace=trace, need=need_of(slept, stages))


def _steps_per_s(run: Run) -> float:
    return throughput(run).mean / run.scenario.batch


def scenario_of(case: Case, steps: int) -> Scenario:
    """The case in the simulator's words, still without service times (see `need_of`)."""
    # This host, whose cores and memory bind nothing: they have a law of their own, `contended`.
    cluster = this_host()
    host = replace(cluster.nn.host, cores=10**6, memory_bytes_per_s=1e18)
    role = replace(cluster.nn, host=host, ram_bytes_per_process=host.ram_bytes / 10**4)
    side_by_side = max(_BUFFER, case.window + 1) if case.latency_s else 1
    # The runtime's queues grow with the window; the simulator's own default would let fewer wait.
    config = case.config(steps)
    buffers = dict.fromkeys(_BUFFERS, config.queue_capacity)

    # Servers that are processes: several lookups of a rank are on their way, pushes follow.
    apart = case.servers > 0
    travels_far = apart or case.latency_s > 0
    if apart:
        rate = case.gbit_per_s / 8 * 1e9 if case.gbit_per_s else 1e18
        role = replace(role, host=replace(host, nic_bytes_per_s=rate))

    return Scenario(
        cluster=replace(
            cluster,
            ranks=case.ranks,
            nn=replace(role, processes_per_host=case.ranks),
            embedding_workers=replace(
                role,
                processes_per_host=case.ranks,
                cores_per_process=1 if case.mode.reads_late_rows else 2,
            ),
            servers=replace(role, cores_per_process=1 if case.slow_s else case.shards),
            link=replace(
                cluster.link,
                latency_s=case.round_trip_s / 4,
                header_efficiency=HEADER_EFFICIENCY if apart else 1.0,
            ),
        ),
        workload=Workload(
            name=case.name,
            fields=26,
            dim=case.dim,
            rows=10**6,
            mlp=(*case.hidden, 1),
            batch_per_rank=case.batch_per_rank,
            source="the case",
        ),
        costs=CATALOGUE,
        mode=case.mode,
        discipline=Discipline.FLUID if apart else Discipline.UNSHARED,
        queues=Queues(
            lookups_in_flight=config.engine.lookups_in_flight if travels_far else 1,
            push_tasks=_BUFFER if apart else side_by_side,
            reserve=True,
            at_servers=True,
            **buffers,
        ),
        permits=case.permits,
        dense_home=DenseHome.APART if case.mode.has_dense_server else None,
        steps=steps,
        **case.bound,  # type: ignore[arg-type]
    )


def need_of(case: Case, stages: Stages) -> Demand:
    """The stages as service times; nothing travels but to servers of another host. With the worker
    in the rank's process the four messages of a lookup are the two of a round trip."""
    # What travels: an injected latency as bytes, or what the link's bucket leaves of each burst.
    scenario = scenario_of(case, 2)
    base = demand(scenario)
    late_bytes = case.latency_s * scenario.cluster.servers.host.nic_bytes_per_s
    moved = Travels(0.0, max(late_bytes, _AN_ANSWER), 0.0)
    if case.servers:
        moved = _shaped(case, stages, travels(case))

    # Of servers in this process one may hold its requests longer: the calling thread does the
    # others' part of the work itself.
    others = 1 - 1 / case.shards if case.slow_s else 0.0

    def fetch(first_s: float, read: str, served: str, pool_s: float, asks: float = 0.0) -> Fetch:
        """A call to a server process: the rank's own work first. Else all of it is the server's."""
        # Where the server is a process, the rank and it share the stage.
        before_s = 0.0
        behind_s = others * stages[read]
        read_s = (1 - others) * stages[read] + case.slow_s
        if stages.get(served):
            before_s = stages[read]
            behind_s = 0.0
            read_s = stages[served]
        return Fetch(
            worker_forward_s=first_s + before_s,
            request_bytes=asks,
            server_s=np.array([read_s]),
            join_s=behind_s,
            server_memory_bytes=0.0,
            rows_bytes=moved.rows_bytes,
            worker_pool_s=pool_s,
            activation_bytes=0.0,
            copy_in_s=0.0,
        )

    # Lookahead pools after its refresh; a common dense update is the barrier's, not a rank's.
    ahead = case.mode.prefetches_rows
    pooled_s = 0.0 if ahead else stages["pool"]
    # The one thread of sync pushes before it loads: side by side only with a server that is a
    # process.
    in_turn = case.mode.reads_fresh_rows and not case.servers
    load_s = 0.0 if in_turn else stages["load"]
    shared = case.ranks > 1 and case.mode.has_barrier
    return replace(
        base,
        load_s=0.0,
        loader_bytes=0.0,
        fetch=fetch(load_s, "read", "served", pooled_s, moved.request_bytes),
        refresh=fetch(0.0, "refresh", "renewed", stages["pool"]) if ahead else None,
        forward_s=stages["pull"] + stages["forward"],
        backward_s=stages["backward"] + stages["check"] + (0.0 if shared else stages["update"]),
        buckets=(),
        sync_overhead_s=stages["update"] if shared else 0.0,
        push=Push(
            copy_out_s=stages["scatter"] + others * stages["push"] + stages["load"] - load_s,
            gradient_bytes=late_bytes,
            worker_scatter_s=0.0,
            push_bytes=moved.push_bytes,
            server_update_s=np.array([(1 - others) * stages["push"] + case.slow_s]),
            update_join_s=0.0,
            update_memory_bytes=0.0,
        ),
        dense_copy_s=0.0,
        averaging_s=0.0,
    )


def _shaped(case: Case, stages: Stages, moved: Travels) -> Travels:
    """What is left of each burst when the link's bucket has let through what it gathered in the
    pauses of its direction; ranks send at the same time, and share it."""
    if not case.gbit_per_s:
        return moved

    # A rank's share of the link, and of its bucket.
    per_s = HEADER_EFFICIENCY * case.gbit_per_s / 8 * 1e9 / case.ranks
    bucket = HEADER_EFFICIENCY * bucket_bytes(case.gbit_per_s) / case.ranks

    # What the bucket gathers in a step, and while the rank waits for an answer.
    there = moved.request_bytes + moved.push_bytes
    back = moved.rows_bytes
    again = 2 if case.mode.prefetches_rows else 1  # read ahead, and once more
    waited = {Read.FRESH: there + back, Read.AHEAD: back + moved.push_bytes, Read.LATE: 0.0}
    period_s = max(thread.work_s for thread in threads(case.mode, case.ranks, stages, stages))
    gathered = per_s * period_s + waited[case.mode.rules.read]

    def rest(of: float, sent: float, bursts: int) -> float:
        return max(_AN_ANSWER, of - min(bucket, max(0.0, gathered - sent) / bursts))

    return replace(
        moved,
        request_bytes=rest(moved.request_bytes, there, 2),
        rows_bytes=rest(back, again * back, again),
        push_bytes=rest(moved.push_bytes, there, 2),
    )
