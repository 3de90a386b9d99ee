"""Build a run, let it happen, and check what must hold for every run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from persia_sim.engine.clock import Clock, NothingLeftError
from persia_sim.engine.copies import copy_in, copy_out
from persia_sim.engine.lookups import load, start_lookups
from persia_sim.engine.order_log import EachShard, OneShard, OrderLog
from persia_sim.engine.pushes import Pushes
from persia_sim.engine.rank import Waiter
from persia_sim.engine.run import Run, check
from persia_sim.engine.training import Barrier, FreeRunning, average
from persia_sim.engine.world import World
from persia_sim.model.demand import Demand, demand
from persia_sim.model.incidents import Crash
from persia_sim.model.scenario import Scenario
from persia_sim.model.stamps import Mark
from persia_sim.words.vocabulary import Mode


class DeadlockError(RuntimeError):
    """Nothing can happen any more and the run is not finished."""


def simulate(
    scenario: Scenario,
    trace: bool = False,
    need: Demand | None = None,
    on_push: Callable[[], object] = lambda: None,
) -> Run:
    """Run the SimPy model until every push of every rank is closed.

    ``on_push`` is called at each of the `ledger.pushes_of` pushes, for a progress bar.
    """
    need = need or demand(scenario)
    env = Clock()
    order: OrderLog = OrderLog()
    if trace:
        servers = scenario.cluster.servers.processes
        order = EachShard(env, servers) if scenario.trace_shards else OneShard()
    world = World(env, scenario, need, order, on_push)
    start(world)
    try:
        env.run_until(world.ledger.finished)
    except NothingLeftError as error:
        raise DeadlockError(_who_waits(world)) from error
    stamps = np.array(world.stamps)
    platform = world.platform
    crashes = [e for e in scenario.disturbances if isinstance(e, Crash)]
    run = Run(
        scenario=scenario,
        need=need,
        stamps=stamps,
        legs=world.legs,
        trace=order.finish(**_meta(scenario)) if trace else None,
        computed_s=world.computed_s,
        served_s=world.served_s,
        events=env.events,
        makespan_s=float(env.now),
        busy_s=_busy(world, stamps),
        link_bytes=dict(zip(platform.names, platform.network.link_bytes, strict=True)),
        link_capacity=dict(zip(platform.names, platform.capacities, strict=True)),
        losses=world.recovery.losses(crashes),
        max_in_flight=world.ledger.max_in_flight,
    )
    check(run)
    return run


def start(world: World) -> None:
    """Create every long-lived process."""
    env, scenario = world.env, world.scenario
    ranks, pushes = len(world.ranks), Pushes(world)
    train = Barrier(world).train if scenario.mode.has_barrier else FreeRunning(world).train
    for loader in range(min(scenario.cluster.loaders, ranks * scenario.steps)):
        env.process(load(world, loader))
    for r in range(ranks):
        env.process(start_lookups(world, r))
        env.process(copy_in(world, r))
        env.process(train(r))
        env.process(copy_out(world, r))
        for _ in range(min(scenario.queues.push_tasks, scenario.steps)):
            env.process(pushes.task(r))
    world.recovery.start()
    if scenario.mode is Mode.ASYNC_AVERAGING and ranks > 1:
        env.process(average(world))


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
        "batch_per_rank": scenario.workload.batch_per_rank,
    }


def _busy(world: World, stamps: np.ndarray) -> dict[str, float]:
    cluster, platform = world.scenario.cluster, world.platform
    ranks = cluster.ranks

    def spent(end: Mark, start: Mark) -> float:
        return float((stamps[end] - stamps[start]).sum()) / ranks

    workers = cluster.embedding_workers
    server_cores = np.array(cluster.servers.of_processes(lambda kind: kind.cores_per_process))
    work = sum(worker.busy_s for worker in platform.workers)
    return {
        "GPU": float(world.computed_s.sum()) / ranks,
        "copy to the GPU": spent(Mark.ON_GPU, Mark.COPY_IN),
        "copy from the GPU": spent(Mark.COPIED_OUT, Mark.COPY_OUT),
        "worker cores": work / workers.cores,
        "worker memory": max(memory.busy_s for memory in platform.worker_memory),
        "server cores": float((platform.servers.busy_s / server_cores).max()),
        "server memory": float(platform.servers.memory_busy_s.max()),
        "dense server": platform.dense_server.busy_s,
    }


def _who_waits(world: World) -> str:
    """Each rank's blocked process and what it waits for."""
    lines = []
    for r, rank in enumerate(world.ranks):
        for who in (Waiter.LOOKUP, Waiter.TRAIN, Waiter.COPY_IN, Waiter.COPY_OUT):
            blocked = rank.is_waiting(who) or world.window.holds_back or who is Waiter.TRAIN
            if who in rank.reasons and blocked:
                lines.append(f"rank {r}: {who.told} waits for {rank.reasons[who]}")
    shown = "; ".join(lines[:8]) + ("; ..." if len(lines) > 8 else "")
    missing = world.ledger.missing
    return f"deadlock at {world.env.now:.6g} s with {missing} pushes not applied: {shown}"
