"""Lookups: rows from the servers through an embedding worker to the rank's host.

They start in step order; finished ones are handed on in step order, so a rank trains its steps in
order.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import simpy

from persia_sim.engine.clock import Process
from persia_sim.engine.hardware import Platform
from persia_sim.engine.rank import Waiter
from persia_sim.engine.servers import Bank
from persia_sim.engine.world import World
from persia_sim.model.demand import Fetch, loader_start_s
from persia_sim.model.incidents import Purpose
from persia_sim.model.placement import ServerGroup
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.trace import Kind


def start_lookups(world: World, r: int) -> Process:
    """Start this rank's lookups, each inside the window and with a permit."""
    rank, scenario, window = world.ranks[r], world.scenario, world.window
    queues, permits = scenario.queues, scenario.permits
    tasks, room = queues.lookup_tasks, queues.dataset
    for s in range(scenario.steps):
        while s >= rank.loaded:
            yield rank.wait(Waiter.LOOKUP, f"a loader to deliver step {s}")
        while not window.admits(r, s):
            opens, rank.reasons[Waiter.LOOKUP] = window.opens(r, s)
            yield opens
        while s >= rank.handed_on + tasks:
            yield rank.wait(Waiter.LOOKUP, f"one of {tasks} lookup tasks for step {s}")
        while permits is not None and s >= rank.returned + permits:
            yield rank.wait(Waiter.LOOKUP, f"one of {permits} permits for step {s}")
        rank.reasons.pop(Waiter.LOOKUP, None)
        rank.looked_up += 1
        rank.wake_loader(s + room)
        world.stamp(Mark.LOOKUP, r, s)
        world.ledger.lookup_started()
        world.env.process(look_up(world, r, s))


def look_up(world: World, r: int, s: int) -> Process:
    """One lookup, from the request to pooled rows on the rank's host."""
    yield from fetch(world, r, s, world.need.fetch, Kind.LOOKUP, Mark.READ)
    world.stamp(Mark.ROWS, r, s)
    world.ranks[r].rows_here.add(s)
    hand_on(world, r)


def fetch(world: World, r: int, s: int, asked: Fetch, kind: Kind, mark: Mark) -> Process:
    """Rank, worker, all servers, worker, rank; the rows are read when the last server answers."""
    platform, disturbed = world.platform, world.disturbed
    worker = world.worker_of(r, s)

    legs, first = world.legs[:, r, s], Leg.ASKED if kind is Kind.LOOKUP else Leg.ASKED_AGAIN

    def rows_read(arrived_s: float, each: tuple[np.ndarray, np.ndarray] | None) -> None:
        legs[first + 1], legs[first + 2] = arrived_s, world.env.now
        world.stamp(mark, r, s)
        world.order.rows(kind, r, s, each and each[1])

    yield platform.travel()
    yield from disturbed.worker_back(worker)
    read_s = world.worker_delay(worker, asked.worker_forward_s, asked.forward_memory_bytes)
    yield platform.travel(read_s)
    legs[first] = world.env.now
    yield from fan_out(
        platform,
        worker,
        asked.request_bytes,
        world.at_servers(asked.server_s, Purpose.SERVER_LOOKUP, r, s),
        asked.server_memory_bytes,
        asked.rows_bytes,
        rows_read,
        asked.join_s,
    )
    legs[first + 3] = world.env.now
    pooled_s = world.worker_delay(worker, asked.worker_pool_s, asked.pool_memory_bytes)
    yield platform.travel(pooled_s)
    legs[first + 4] = world.env.now
    yield platform.send(platform.of_worker[worker], platform.of_rank[r], asked.activation_bytes)
    legs[first + 5] = world.env.now


def hand_on(world: World, r: int) -> None:
    """Move finished lookups, in step order, to the copying thread while there is room."""
    rank, room = world.ranks[r], world.scenario.queues.forwarded
    moved = False
    while rank.handed_on in rank.rows_here and rank.handed_on < rank.copied_in + room:
        rank.rows_here.remove(rank.handed_on)
        rank.handed_on += 1
        moved = True
    if moved:
        rank.wake(Waiter.COPY_IN)
        rank.wake(Waiter.LOOKUP)


def load(world: World, loader: int) -> Process:
    """Build every L-th batch; hold it back while the rank's data set buffer is full.

    Loaders start spread over the time of one batch: in step they would send bursts.
    """
    need, scenario, platform = world.need, world.scenario, world.platform
    ranks, steps, loaders = len(world.ranks), scenario.steps, scenario.cluster.loaders
    room = scenario.queues.dataset
    if loader:
        yield loader_start_s(loader, scenario, need.load_s)
    for batch in range(loader, ranks * steps, loaders):
        s, r = divmod(batch, ranks)
        rank = world.ranks[r]
        while s >= rank.looked_up + room:
            why = f"room for step {s} among {room} loaded batches"
            yield rank.wait(Waiter.LOADER, why, s)
        yield world.needs[r].load_s
        yield platform.receive(platform.of_worker[world.worker_of(r, s)], need.loader_bytes)
        if need.input_bytes:
            yield platform.receive(platform.of_rank[r], need.input_bytes)
        world.stamp(Mark.LOADED, r, s)
        rank.early.add(s)
        while rank.loaded in rank.early:
            rank.early.remove(rank.loaded)
            rank.loaded += 1
        rank.wake(Waiter.LOOKUP)


AtServers = Callable[[float, tuple[np.ndarray, np.ndarray] | None], None]


def fan_out(
    platform: Platform,
    worker: int,
    request_bytes: float,
    service_s: np.ndarray,
    memory_bytes: float,
    answer_bytes: float | None,
    at_servers: AtServers,
    join_s: float = 0.0,
) -> Process:
    """Ask every server and join; ``at_servers`` runs when the last one has done its work, with
    the instant at which the last request arrived and, where `tells_each`, those at which each
    server got its request and had done it. The request's latency is behind it (`travel`): what
    is lost or slow at the servers is known only when it has arrived. The busiest server of a
    batch is later than that of the mean batch by ``join_s``. ``answer_bytes`` None: nobody
    waits for an answer; 0 is an answer without rows."""
    env, nic = platform.env, platform.of_worker[worker]
    groups = platform.fan
    arrived, done = np.zeros((2, len(service_s))) if platform.tells_each else (service_s, service_s)
    last_s, left = 0.0, len(groups)

    def ask(server: int, group: ServerGroup, bank: Bank) -> Process:
        nonlocal last_s, left
        part, share = group.processes, group.share
        yield platform.send(nic, server, request_bytes * share, group.streams)
        last_s = now = env.now
        if platform.tells_each:
            delays = bank.visit(now, service_s[part], memory_bytes * share)
            arrived[part], done[part] = now, now + delays
            done[group.first + int(delays.argmax())] += join_s
            delay = float(delays.max()) + join_s
        else:
            delay = bank.longest(now, service_s[part], memory_bytes * share) + join_s
        if delay == inf:
            yield env.event()  # a server that never comes back
        yield delay
        left -= 1
        if not left:
            at_servers(last_s, (arrived, done) if platform.tells_each else None)
        if answer_bytes is not None:
            if platform.latency_s:
                yield platform.travel()
            yield platform.send(server, nic, answer_bytes * share, group.streams)

    if len(groups) == 1:
        yield from ask(*groups[0])
    else:
        yield simpy.AllOf(env, [env.process(ask(*group)).ended for group in groups])
