"""The two threads that copy between a rank's host and its GPU."""

from __future__ import annotations

import numpy as np

from persia_sim.engine.clock import Process
from persia_sim.engine.lookups import fetch, hand_on
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.demand import Forward
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.trace import Kind


def copy_in(world: World, r: int) -> Process:
    """Copy pooled rows to the GPU."""
    rank, need = world.ranks[r], world.needs[r]
    room = world.scenario.queues.on_gpu
    for s in range(world.scenario.steps):
        while s >= rank.handed_on:
            yield rank.wait(Waiter.COPY_IN, f"the rows of step {s}")
        rank.copied_in += 1
        hand_on(world, r)
        world.stamp(Mark.COPY_IN, r, s)
        yield world.env.timeout(need.fetch.copy_in_s)
        world.stamp(Mark.ON_GPU, r, s)
        while s >= rank.trained + room:
            yield rank.wait(Waiter.COPY_IN, f"room on the GPU for step {s}")
        rank.on_gpu += 1
        rank.wake(Waiter.TRAIN)


def hand_back(world: World, r: int, s: int) -> Process:
    """The training loop leaves the gradient for the copying thread."""
    rank, room = world.ranks[r], world.scenario.queues.backward
    while len(rank.backward) >= room:
        yield rank.wait(Waiter.TRAIN, f"room among {room} gradients for step {s}")
    rank.backward.append(s)
    rank.wake(Waiter.COPY_OUT)


def copy_out(world: World, r: int) -> Process:
    """Copy row gradients to the host."""
    rank, room = world.ranks[r], world.scenario.queues.copied_back
    for s in range(world.scenario.steps):
        while not rank.backward:
            yield rank.wait(Waiter.COPY_OUT, f"the gradient of step {s}")
        rank.backward.popleft()
        rank.wake(Waiter.TRAIN)
        world.stamp(Mark.COPY_OUT, r, s)
        yield world.env.timeout(world.needs[r].copy_out_s)
        world.stamp(Mark.COPIED_OUT, r, s)
        while len(rank.to_push) >= room:
            why = f"room among {room} copied gradients for step {s}"
            yield rank.wait(Waiter.COPY_OUT, why)
        rank.to_push.append(s)
        rank.wake(Waiter.PUSH)


def take(world: World, r: int, s: int) -> Process:
    """Wait until the batch is on the GPU; lookahead brings its rows up to date."""
    rank, refresh = world.ranks[r], world.needs[r].refresh
    while s >= rank.on_gpu:
        yield rank.wait(Waiter.TRAIN, f"step {s} on the GPU")
    rank.trained += 1
    rank.wake(Waiter.COPY_IN)
    forward = world.needs[r].forward
    if forward is not None:
        yield from _bring_up_to_date(world, r, s, forward)
    elif refresh is not None:
        while not world.window.all_closed(s):
            rank.reasons[Waiter.TRAIN] = f"all ranks' pushes of steps < {s}, to refresh step {s}"
            yield world.window.all_close(s)
        yield from fetch(world, r, s, refresh, Kind.REFRESH, Mark.REFRESHED)
        yield world.env.timeout(refresh.copy_in_s)
    world.stamp(Mark.REFRESHED, r, s)


def _bring_up_to_date(world: World, r: int, s: int, need: Forward) -> Process:
    """The worker applies what has come since the prefetch to its rows on lease, and pools them."""
    env, platform, given = world.env, world.platform, world.forwarded
    while not given.all_closed(s):
        world.ranks[r].reasons[Waiter.TRAIN] = f"all ranks' gradients of steps < {s}, for step {s}"
        yield given.all_close(s)
    legs, worker = world.legs[:, r, s], world.worker_of(r, s)
    legs[Leg.ASKED_AGAIN] = env.now
    world.order.rows(Kind.REFRESH, r, s, np.full(len(world.need.server_shares), env.now))
    yield platform.travel(world.worker_delay(worker, need.worker_s, need.memory_bytes))
    legs[Leg.POOLED_AGAIN] = env.now
    yield platform.to_rank(worker, r, need.activation_bytes)
    legs[Leg.ROWS_AGAIN] = env.now
    yield world.env.timeout(need.copy_in_s)
