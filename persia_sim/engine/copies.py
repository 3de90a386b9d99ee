"""The two threads that copy between a rank's host and its GPU."""

from __future__ import annotations

from persia_sim.engine.clock import Process
from persia_sim.engine.lookups import hand_on
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.stamps import Mark


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
