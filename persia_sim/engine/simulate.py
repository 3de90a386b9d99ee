"""Build a run, let it happen, and check what must hold for every run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import simpy

from persia_sim.engine.disturbances import Disturbed
from persia_sim.engine.hardware import Platform
from persia_sim.engine.order_log import EachShard, NoOrder, OneShard, OrderLog
from persia_sim.engine.processes import Actors
from persia_sim.engine.rollback import Losses
from persia_sim.model.demand import Demand, demand
from persia_sim.model.incidents import Crash
from persia_sim.model.scenario import Scenario
from persia_sim.model.stamps import Mark
from persia_sim.oracle.closed_form import cycles
from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import Mode


class DeadlockError(RuntimeError):
    """Nothing can happen any more and the run is not finished."""


@dataclass(frozen=True, slots=True)
class Run:
    """What happened."""

    scenario: Scenario
    need: Demand
    stamps: np.ndarray
    """float64 [marks, ranks, steps]: simulated seconds of each `Mark`."""
    trace: Trace | None
    """The order of events, all shards as one unless `Scenario.trace_shards`; None when it was not
    asked for."""
    events: int
    """Events that the engine handled."""
    makespan_s: float
    """Simulated time from start to the last push."""
    busy_s: dict[str, float]
    """Busy seconds of each kind of resource, divided by its number of units."""
    link_bytes: dict[str, float]
    """Payload bytes of each direction of each card."""
    link_capacity: dict[str, float]
    """Payload bytes per second of the same."""
    losses: Losses
    """What crashes and checkpoints cost."""
    max_in_flight: int
    """Most batches between the start of their lookup and the end of their push, all ranks."""


def simulate(scenario: Scenario, trace: bool = False, need: Demand | None = None) -> Run:
    """Run the SimPy model until every push of every rank is closed."""
    need = need or demand(scenario)
    env = simpy.Environment()
    platform = Platform(env, scenario, need)
    disturbed = Disturbed(env, scenario.disturbances, platform)
    order: OrderLog = NoOrder()
    if trace:
        servers = scenario.cluster.servers.processes
        order = EachShard(env, servers) if scenario.trace_shards else OneShard()
    actors = Actors(env, scenario, need, platform, disturbed, order)
    actors.start()
    try:
        env.run(until=actors.finished)
    except RuntimeError as error:
        if actors.finished.triggered:
            raise
        raise DeadlockError(_who_waits(actors, env.now)) from error
    stamps = np.array(actors.stamps)
    makespan = float(env.now)
    run = Run(
        scenario,
        need,
        stamps,
        order.finish(**_meta(scenario)) if trace else None,
        next(env._eid),  # the engine numbers its events; there is no public count
        makespan,
        _busy(scenario, platform, stamps),
        dict(zip(platform.names, platform.network.link_bytes, strict=True)),
        dict(zip(platform.names, platform.capacities, strict=True)),
        _losses(actors),
        actors.max_in_flight,
    )
    check(run)
    return run


def _losses(actors: Actors) -> Losses:
    found = Losses(lost_pushes=len(actors.lost), forgotten_pushes=actors.forgotten_pushes)
    for clock in actors.clocks:
        found.down_s += clock.losses.down_s / len(actors.clocks)
        found.redone_s += clock.losses.redone_s / len(actors.clocks)
        found.writing_s += clock.losses.writing_s / len(actors.clocks)
        found.checkpoints = max(found.checkpoints, clock.losses.checkpoints)
    crashes = [e for e in actors.scenario.disturbances if isinstance(e, Crash)]
    found.crashes = sum(crash.at_s <= actors.env.now for crash in crashes)
    return found


def _meta(scenario: Scenario) -> dict[str, object]:
    return {
        "mode": str(scenario.mode),
        "ranks": scenario.cluster.ranks,
        "steps": scenario.steps,
        "tau": scenario.window,
        "permits": scenario.permits,
        "merge_pushes": scenario.merges,
        "seed": scenario.seed,
        "order": "simulated",
        "cluster": scenario.cluster.name,
        "workload": scenario.workload.name,
        "batch": scenario.workload.batch,
    }


def _busy(scenario: Scenario, platform: Platform, stamps: np.ndarray) -> dict[str, float]:
    cluster = scenario.cluster
    ranks = cluster.ranks

    def spent(end: Mark, start: Mark) -> float:
        return float((stamps[end] - stamps[start]).sum()) / ranks

    workers = cluster.embedding_workers
    work = sum(worker.busy_s for worker in platform.workers)
    return {
        "GPU": spent(Mark.BACKWARD_END, Mark.START),
        "copy to the GPU": spent(Mark.ON_GPU, Mark.COPY_IN),
        "copy from the GPU": spent(Mark.COPIED_OUT, Mark.COPY_OUT),
        "worker cores": work / (workers.processes * workers.cores_per_process),
        "server cores": float(platform.servers.busy_s.max()) / cluster.servers.cores_per_process,
        "dense server": platform.dense_server.busy_s,
    }


def check(run: Run) -> None:
    """Conservation and bounds, on every run: nothing is busier than time allows."""
    stamps, scenario = run.stamps, run.scenario
    if not np.isfinite(stamps).all():
        raise AssertionError("a batch has not passed every stage")
    order = np.diff(stamps, axis=0)
    if (order < -1e-9 * run.makespan_s).any():
        mark = Mark(int(np.argwhere((order < -1e-9 * run.makespan_s).any((1, 2)))[0, 0]))
        raise AssertionError(f"a batch reached the stage after {mark.name} before {mark.name}")
    slack = run.makespan_s * (1 + 1e-9)
    for name, busy in run.busy_s.items():
        if busy > slack and not (scenario.infinite_cpus and not name.startswith(("GPU", "copy"))):
            raise AssertionError(f"{name} was busy {busy:.6g} s of {run.makespan_s:.6g} s")
    if scenario.discipline != "unshared":
        averages = scenario.dense_on_cards and scenario.mode is Mode.ASYNC_AVERAGING
        open_bytes = run.need.averaging_card_bytes if averages else 0.0  # of the unfinished round
        for name, sent in run.link_bytes.items():
            if sent - open_bytes > slack * run.link_capacity[name]:
                raise AssertionError(f"card {name} carried more than its capacity")
    noise = scenario.noise
    if scenario.disturbances or noise.gpu_cv or noise.server_cv:
        return
    for name, seconds in cycles(scenario, run.need).items():
        lag = _LAGS.get(name, 0)
        if name == "window":
            lag = (scenario.window or 0) + 1
        elif name == "permits":
            lag = scenario.permits or 1
        elif name == "training loop" and scenario.mode is Mode.ASYNC_AVERAGING:
            continue  # rounds stall it now and then, not in every step
        rounds = scenario.steps // lag if lag else 0
        if slack < rounds * lag * seconds:
            raise AssertionError(f"{run.makespan_s:.6g} s is faster than the {name} allows")


_LAGS = {"training loop": 1, "copy to the GPU": 1, "copy from the GPU": 1, "refresh": 1}
"""Steps between the two ends of a cycle of constraints, where it does not depend on a knob."""


def _who_waits(actors: Actors, now_s: float) -> str:
    """Each rank's blocked process and what it waits for."""
    lines = []
    gated = {s for (_, s), events in actors.gate.items() if events}
    for r, rank in enumerate(actors.ranks):
        waiting = {who for who, events in rank.wakers.items() if events}
        for who in ("lookup", "train", "copy in", "copy out"):
            if who in rank.waits and (who in waiting or gated or who == "train"):
                lines.append(f"rank {r}: {who} waits for {rank.waits[who]}")
    shown = "; ".join(lines[:8]) + ("; ..." if len(lines) > 8 else "")
    missing = actors.missing
    return f"deadlock at {now_s:.6g} s with {missing} pushes not applied: {shown}"
