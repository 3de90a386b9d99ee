"""Lookups: rows from the servers through an embedding worker to the rank's host.

They start in step order; finished ones are handed on in step order, so a rank trains its steps in
order.
"""

from __future__ import annotations

import numpy as np

from persia_sim.engine.clock import Process
from persia_sim.engine.fan_outs import fan_out
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.demand import Fetch
from persia_sim.model.noise import Purpose
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
    yield platform.to_rank(worker, r, asked.activation_bytes)
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
