"""Build a run, let it happen, hand it back, and check what must hold for every run.

`start` lists the processes: loaders, lookups and pushes (`requests`), and the threads of each rank
(`training`). What they share is the `World`, with the window that holds lookups back; on what they
wait and how long that takes is hardware (`hardware`, and links in `persia_sim.network`). How much a
batch asks for is counted before (`persia_sim.cluster.demand`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import KNOWN_MODES, refuse_unless_carried
from persia_sim.bounds.closed_form import cycles
from persia_sim.cluster.demand import Demand, demand
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.clock import Clock, NothingLeftError
from persia_sim.engine.rank import Waiter
from persia_sim.engine.requests import Pushes, load, start_lookups
from persia_sim.engine.training import Barrier, FreeRunning, average, copy_in, copy_out
from persia_sim.engine.world import EachShard, OneShard, OrderLog, World

_TINY = 1e-300  # of what takes no time

CARRIES = KNOWN_MODES
"""The modes that the processes here carry out."""


@dataclass(frozen=True, slots=True)
class Run:
    """What happened."""

    scenario: Scenario
    need: Demand
    stamps: np.ndarray
    """float64 [marks, ranks, steps]: simulated seconds of each `Mark`."""
    legs: np.ndarray
    """float64 [legs, ranks, steps]: simulated seconds of each `Leg`; nan where there is none."""
    trace: Trace | None
    """The order of events, all shards as one unless `Scenario.trace_shards`; None when it was not
    asked for."""
    computed_s: np.ndarray
    """float64 [ranks, steps]: seconds of forward and backward as drawn, without what stopped it."""
    served_s: np.ndarray
    """float64 [2, ranks, steps]: longest service of each lookup and push at a server, as drawn;
    0 where nothing is drawn."""
    events: int
    """Events that the engine handled."""
    makespan_s: float
    """Simulated time from start to the last push."""
    busy_s: dict[str, float]
    """Busy seconds of each kind of resource, divided by its number of units."""
    link_bytes: dict[str, float]
    """Payload bytes of each direction of each NIC."""
    link_capacity: dict[str, float]
    """Payload bytes per second of the same."""
    max_in_flight: int
    """Most batches between the start of their lookup and the end of their push, all ranks."""

    def drawn(self, first: int, end: int) -> Demand:
        """The demand with the service times that the steps in [first, end) have drawn.

        With them the closed form of the constraints bounds those steps as it does without noise:
        without a barrier ranks' rates add up, and at one all wait for the slowest. No request was
        quicker than the quickest. A step waits for pushes of earlier ones, not its own.
        """
        need = self.need
        computed_s = self.computed_s[:, first:end]

        # The compute time as drawn: of the slowest rank of each step where ranks meet.
        if self.scenario.mode.has_barrier:
            mean = float(computed_s.max(0).mean())
        else:
            mean = float(1 / (1 / np.maximum(computed_s.mean(1), _TINY)).mean())
        more = mean / need.compute_s if need.compute_s else 1.0
        drawn = replace(need, forward_s=need.forward_s * more, backward_s=need.backward_s * more)

        # Requests at servers: the quickest of each step, as no bound may ask for more.
        before = min(first, 1)
        lookup_s = float(self.served_s[0, :, first:end].min(0).mean())
        update_s = float(self.served_s[1, :, first - before : end - before].min(0).mean())
        return self._served(drawn, lookup_s, update_s) if lookup_s or update_s else drawn

    def _served(self, need: Demand, lookup_s: float, update_s: float) -> Demand:
        """The demand where the slowest server takes so long for a lookup and for an update."""
        fetch = need.fetch
        refresh = need.refresh
        asked_s = fetch.server_s
        push_s = need.push.server_update_s  # a law may cost nothing
        if refresh is not None:
            refresh = replace(refresh, server_s=np.zeros_like(push_s), join_s=0.0)
        fresh = need.fresh
        if fresh is not None:
            fresh = replace(
                fresh, server_update_s=np.zeros_like(fresh.server_update_s), update_join_s=0.0
            )
        return replace(
            need,
            fresh=fresh,
            fetch=replace(fetch, server_s=asked_s * (lookup_s / max(asked_s.max(), _TINY))),
            refresh=refresh,
            push=replace(need.push, server_update_s=push_s * (update_s / max(push_s.max(), _TINY))),
        )


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

    >>> from persia_sim.presets.point import Point, scenario_of
    >>> point = Point(cluster="h100-host", workload="kwai-video", mode="sync", steps=4)
    >>> run = simulate(scenario_of(point))
    >>> run.scenario.batch, run.stamps.shape[1:]  # the instants of each rank's steps
    (16384, (8, 4))

    A rate needs more steps; `throughput` leaves the start of the run out:

    >>> from dataclasses import replace
    >>> from persia_sim.report.measure import throughput
    >>> rates = {
    ...     mode: throughput(simulate(scenario_of(replace(point, mode=mode, steps=40)))).mean
    ...     for mode in ("sync", "hybrid")
    ... }
    >>> rates["hybrid"] > 2 * rates["sync"]
    True
    """
    # The scenario's requests and times, and the world in which they happen.
    need = need or demand(scenario)
    fresh = bool(scenario.fresh)
    refuse_unless_carried(scenario.mode, CARRIES, "the simulator's processes", fresh=fresh)
    env = Clock()
    order: OrderLog = OrderLog()
    if trace:
        servers = scenario.cluster.servers.processes
        order = EachShard(env, servers, fresh) if scenario.trace_shards else OneShard(fresh)

    # Start every process and let events happen until the last push is closed.
    world = World(env, scenario, need, order, on_push)
    start(world)
    try:
        env.run_until(world.ledger.finished)
    except NothingLeftError as error:
        raise DeadlockError(_who_waits(world)) from error

    # What the world has recorded becomes the run; it must obey the conservation laws.
    stamps = np.array(world.stamps)
    platform = world.platform
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
        link_bytes=dict(zip(platform.wiring.names, platform.network.link_bytes, strict=True)),
        link_capacity=dict(zip(platform.wiring.names, platform.wiring.capacities, strict=True)),
        max_in_flight=world.ledger.max_in_flight,
    )
    check(run)
    return run


def start(world: World) -> None:
    """Create every long-lived process."""
    # Who trains: all ranks at a barrier, or each by itself.
    env = world.env
    scenario = world.scenario
    ranks = len(world.ranks)
    pushes = Pushes(world)
    train = Barrier(world).train if scenario.mode.has_barrier else FreeRunning(world).train

    # No more loaders and tasks than there are batches for.
    for loader in range(min(scenario.cluster.loaders, ranks * scenario.steps)):
        env.process(load(world, loader))

    # Each rank is a pipeline: lookups, a copy to the GPU, training, a copy back, pushes.
    for r in range(ranks):
        env.process(start_lookups(world, r))
        env.process(copy_in(world, r))
        env.process(train(r))
        env.process(copy_out(world, r, pushes.begin_fresh))
        for _ in range(min(scenario.queues.push_tasks, scenario.steps)):
            env.process(pushes.task(r))

    # Beside them averaging.
    if scenario.mode.averages_replicas and ranks > 1:
        env.process(average(world))


def _meta(scenario: Scenario) -> dict[str, object]:
    return {
        "mode": str(scenario.mode),
        "ranks": scenario.cluster.ranks,
        "steps": scenario.steps,
        "tau": scenario.window,
        "permits": scenario.permits,
        "merge_pushes": scenario.merges,
        **({"fresh": list(scenario.fresh)} if scenario.fresh else {}),
        "seed": scenario.seed,
        "order": "simulated",
        "cluster": scenario.cluster.name,
        "workload": scenario.workload.name,
        "batch_per_rank": scenario.workload.batch_per_rank,
    }


def _busy(world: World, stamps: np.ndarray) -> dict[str, float]:
    cluster = world.scenario.cluster
    platform = world.platform
    ranks = cluster.ranks

    # Seconds between two instants of a batch, summed over batches: those of a copy.
    def spent(end: Mark, start: Mark) -> float:
        return float((stamps[end] - stamps[start]).sum()) / ranks

    # Busy seconds of a resource are divided by its units: cores, ranks, hosts.
    workers = cluster.embedding_workers
    server_cores = cluster.servers.cores_per_process
    work = sum(worker.busy_s for worker in platform.workers)
    bank = platform.bank
    return {
        "GPU": float(world.computed_s.sum()) / ranks,
        "copy to the GPU": spent(Mark.ON_GPU, Mark.COPY_IN),
        "copy from the GPU": spent(Mark.COPIED_OUT, Mark.COPY_OUT),
        "worker cores": work / (workers.processes * workers.cores_per_process),
        "worker memory": max(memory.busy_s for memory in platform.worker_memory),
        "server cores": float((bank.busy_s / server_cores).max()),
        "server memory": float(bank.memory_busy_s.max()),
        "dense server": platform.dense_server.busy_s,
    }


def _who_waits(world: World) -> str:
    """Each rank's blocked process and what it waits for."""
    lines = []
    for r, rank in enumerate(world.ranks):
        for who in (Waiter.LOOKUP, Waiter.TRAIN, Waiter.COPY_IN, Waiter.COPY_OUT):
            blocked = rank.is_waiting(who) or world.window.waiting or who is Waiter.TRAIN
            if who in rank.reasons and blocked:
                stage = who.name.lower().replace("_", " ")
                lines.append(f"rank {r}: {stage} waits for {rank.reasons[who]}")
    shown = "; ".join(lines[:8]) + ("; ..." if len(lines) > 8 else "")
    missing = world.ledger.missing
    return f"deadlock at {world.env.now:.6g} s with {missing} pushes not applied: {shown}"


def check(run: Run) -> None:
    """Conservation and bounds, on every run: nothing is busier than time allows."""
    # Every batch has been through all of it.
    stamps = run.stamps
    scenario = run.scenario
    if not np.isfinite(stamps).all():
        raise AssertionError("a batch has not passed every stage")

    # Every batch has passed its stages in order.
    order = np.diff(stamps, axis=0)
    if (order < -1e-9 * run.makespan_s).any():
        mark = Mark(int(np.argwhere((order < -1e-9 * run.makespan_s).any((1, 2)))[0, 0]))
        raise AssertionError(f"a batch reached the stage after {mark.name} before {mark.name}")

    # No resource was busy for longer than the run.
    slack = run.makespan_s * (1 + 1e-9)
    for name, busy in run.busy_s.items():
        if busy > slack and not (scenario.infinite_cpus and not name.startswith(("GPU", "copy"))):
            raise AssertionError(f"{name} was busy {busy:.6g} s of {run.makespan_s:.6g} s")

    # No NIC carried more than its capacity.
    if scenario.discipline != "unshared":
        for name, sent in run.link_bytes.items():
            if sent > slack * run.link_capacity[name]:
                raise AssertionError(f"NIC {name} carried more than its capacity")

    # No cycle of constraints was passed faster than its closed form allows.
    for name, seconds in cycles(scenario, run.need).items():
        lag = _LAGS.get(name, 0)
        if name == "window":
            lag = (scenario.steps_ahead or 0) + 1
        elif name == "permits":
            lag = scenario.permits or 1
        rounds = scenario.steps // lag if lag else 0
        if rounds:
            seconds = cycles(scenario, run.drawn(0, rounds * lag))[name]
        if slack < rounds * lag * seconds:
            raise AssertionError(f"{run.makespan_s:.6g} s is faster than the {name} allows")


_LAGS = {"training loop": 1, "copy to the GPU": 1, "copy from the GPU": 1, "refresh": 1}
"""Steps between the two ends of a cycle of constraints, where it does not depend on a knob."""
