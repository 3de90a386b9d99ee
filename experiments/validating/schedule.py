"""The simulator's schedule of a run on this host, from the seconds of its stages.

Each rank has a thread that fetches (an embedding worker of one core; of two in lookahead, whose
training thread pools), one that trains (the GPU) and one that scatters and pushes (the copy back,
then the server, whose lock one thread holds at a time for each shard). Nothing is on a wire; six
one-way trips of the simulator's round of a batch share the two latencies of the runtime's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from experiments.validating.cases import Case
from experiments.validating.stages import Stages
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.insight.report import staleness
from persia_sim.model.demand import Demand, Fetch, demand
from persia_sim.model.scenario import Discipline, Queues, Scenario
from persia_sim.model.workload import Workload
from persia_sim.presets.clusters import this_host
from persia_sim.presets.costs import CATALOGUE
from persia_sim.words.vocabulary import Mode

_TRIPS = 6  # of lookup (4) and push (2) in the simulator
_AN_ANSWER = 1e-6  # bytes: the simulator takes none at all for a push, which is not answered
_BUFFER = 10  # the runtime's pipes hold at least so many batches


@dataclass(frozen=True, slots=True)
class Schedule:
    """What follows from the stages."""

    samples_per_s: float
    stale_steps: float
    """Mean over lookups: earlier steps with a push that the rows missed."""
    stretch: float
    """How many times longer a stage takes because the threads want more cores than there are."""


def schedule(case: Case, stages: Stages, steps: int) -> Schedule:
    """Of stages that have, or had, the cores they want."""
    run = simulate(scenario_of(case, steps), trace=True, need=need_of(case, stages))
    rate = throughput(run).mean * case.batch / run.scenario.batch
    return Schedule(rate, staleness(run).steps_mean, 1.0)


def contended(case: Case, stages: Stages, steps: int, cores: int | None = None) -> Schedule:
    """Of stages measured alone on a core, on so many cores (None: this host's).

    Where the threads' work of a step exceeds what the cores can do in its time, every stage takes
    longer by the same factor. The interpreter's lock and the memory are not in it.
    """
    alone = schedule(case, stages, steps)
    factor = stretch(case, stages, alone, cores or cores_here())
    if factor == 1.0:
        return alone
    return replace(schedule(case, stages.times(factor), steps), stretch=factor)


def cores_here() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stretch(case: Case, stages: Stages, alone: Schedule, cores: int) -> float:
    """Cores that the threads keep busy on average, over those that there are; at least 1."""
    busy = stages.work_s(case.ranks) * alone.samples_per_s / case.batch
    return max(1.0, busy / cores)


def scenario_of(case: Case, steps: int) -> Scenario:
    """The case in the simulator's words, with service times yet to be told."""
    cluster = this_host()
    host = replace(cluster.nn.host, cores=10**6)  # `contended` is the law of the real ones
    role = replace(cluster.nn, host=host, ram_bytes_per_process=host.ram_bytes / 10**4)
    window: dict[str, int | None] = {}
    if case.mode is Mode.LOOKAHEAD:
        window["ahead"] = case.window
    elif case.mode is not Mode.SYNC:
        window["tau"] = case.window
    side_by_side = max(_BUFFER, case.window + 1) if case.latency_s else 1
    return Scenario(
        cluster=replace(
            cluster,
            ranks=case.ranks,
            nn=replace(role, processes_per_host=case.ranks),
            embedding_workers=replace(
                role,
                processes_per_host=case.ranks,
                cores_per_process=2 if case.mode is Mode.LOOKAHEAD else 1,
            ),
            servers=replace(role, cores_per_process=case.shards),
            link=replace(cluster.link, latency_s=2 * case.latency_s / _TRIPS),
        ),
        workload=Workload(
            name=case.name, fields=26, dim=case.dim, rows=10**6, mlp=(*case.hidden, 1),
            batch_per_rank=case.batch_per_rank, source="the case",
        ),
        costs=CATALOGUE,
        mode=case.mode,
        discipline=Discipline.UNSHARED,
        queues=Queues(lookup_tasks=side_by_side, push_tasks=side_by_side),
        steps=steps,
        **window,  # type: ignore[arg-type]
    )  # fmt: skip


def need_of(case: Case, stages: Stages) -> Demand:
    """The stages as service times; nothing travels."""
    base = demand(scenario_of(case, 2))

    def fetch(first_s: float, read_s: float, pool_s: float) -> Fetch:
        return Fetch(
            worker_forward_s=first_s, request_bytes=0.0, server_s=np.array([read_s]), join_s=0.0,
            server_memory_bytes=0.0, rows_bytes=_AN_ANSWER, worker_pool_s=pool_s,
            activation_bytes=0.0, copy_in_s=0.0,
        )  # fmt: skip

    ahead = case.mode is Mode.LOOKAHEAD
    shared = case.ranks > 1
    return replace(
        base,
        load_s=0.0,
        loader_bytes=0.0,
        fetch=fetch(stages.load_s, stages.read_s, 0.0 if ahead else stages.pool_s),
        refresh=fetch(0.0, stages.refresh_s, stages.pool_s) if ahead else None,
        forward_s=stages.forward_s,
        backward_s=stages.backward_s + (0.0 if shared else stages.update_s),
        buckets=(),
        sync_overhead_s=stages.update_s if shared else 0.0,
        copy_out_s=stages.scatter_s,
        gradient_bytes=0.0,
        worker_scatter_s=0.0,
        push_bytes=0.0,
        server_update_s=np.array([stages.push_s]),
        update_join_s=0.0,
        update_memory_bytes=0.0,
    )
