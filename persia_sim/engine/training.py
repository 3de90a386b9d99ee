"""A rank's three threads: copies to the GPU, the training loop, copies back.

With a barrier all ranks compute and then have the step's dense update; else a rank computes on
weights of its own, waits for nobody, and replicas are averaged behind it.

The all-reduce has a network of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import simpy

from persia_sim.base.trace import ALL, Kind
from persia_sim.cluster.allreduce import sync_delay
from persia_sim.cluster.demand import Forward
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.clock import Process
from persia_sim.engine.rank import Waiter
from persia_sim.engine.requests import fetch, hand_on
from persia_sim.engine.world import World


def copy_in(world: World, r: int) -> Process:
    """Copy pooled rows to the GPU."""
    rank = world.ranks[r]
    need = world.need
    room = world.scenario.queues.on_gpu
    for s in range(world.scenario.steps):
        while s >= rank.handed_on:
            yield rank.wait(Waiter.COPY_IN, f"the rows of step {s}")
        rank.copied_in += 1
        hand_on(world, r)
        world.stamp(Mark.COPY_IN, r, s)
        yield need.fetch.copy_in_s
        world.stamp(Mark.ON_GPU, r, s)
        while s >= rank.trained + room:
            yield rank.wait(Waiter.COPY_IN, f"room on the GPU for step {s}")
        rank.on_gpu += 1
        rank.wake(Waiter.TRAIN)


def hand_back(world: World, r: int, s: int) -> Process:
    """The training loop leaves the gradient for the copying thread."""
    rank = world.ranks[r]
    room = world.scenario.queues.backward
    while len(rank.backward) >= room:
        yield rank.wait(Waiter.TRAIN, f"room among {room} gradients for step {s}")
    rank.backward.append(s)
    rank.wake(Waiter.COPY_OUT)


def copy_out(world: World, r: int, begin_fresh: Callable[[int, int], object]) -> Process:
    """Copy row gradients to the host; ``begin_fresh`` takes those of fresh tables, which come
    first."""
    rank = world.ranks[r]
    room = world.scenario.queues.copied_back
    for s in range(world.scenario.steps):
        while not rank.backward:
            yield rank.wait(Waiter.COPY_OUT, f"the gradient of step {s}")
        rank.backward.popleft()
        rank.wake(Waiter.TRAIN)
        world.stamp(Mark.COPY_OUT, r, s)
        fresh = world.need.fresh
        if fresh is not None:
            yield fresh.copy_out_s
            begin_fresh(r, s)
        yield world.need.push.copy_out_s
        world.stamp(Mark.COPIED_OUT, r, s)
        while len(rank.to_push) >= room:
            yield rank.wait(Waiter.COPY_OUT, f"room among {room} copied gradients for step {s}")
        rank.to_push.append(s)
        rank.wake(Waiter.PUSH)


def take(world: World, r: int, s: int) -> Process:
    """Wait until the batch is on the GPU; rows that are to be exact are brought up to date."""
    rank = world.ranks[r]
    refresh = world.need.refresh

    # Wait for the batch; taking it makes room for the next copy.
    while s >= rank.on_gpu:
        yield rank.wait(Waiter.TRAIN, f"step {s} on the GPU")
    rank.reasons[Waiter.TRAIN] = f"the newest rows or dense weights for step {s}"
    rank.trained += 1
    rank.wake(Waiter.COPY_IN)
    if world.scenario.queues.reserve:
        rank.wake(Waiter.LOOKUP)

    # Lookahead, fresh tables: rows with pending pushes are replaced before the forward pass.
    forward = world.need.forward
    if forward is not None:
        yield from _bring_up_to_date(world, r, s, forward)
    elif refresh is not None:
        while not world.of_fresh.all_closed(s):
            rank.reasons[Waiter.TRAIN] = f"all ranks' pushes of steps < {s}, to refresh step {s}"
            yield world.of_fresh.closes(ALL, s)
        yield from fetch(world, r, s, refresh, Kind.REFRESH, Mark.REFRESHED)
        yield refresh.copy_in_s
    world.stamp(Mark.REFRESHED, r, s)


def _bring_up_to_date(world: World, r: int, s: int, need: Forward) -> Process:
    """The worker applies what has come since the prefetch to its rows on lease, and pools them."""
    env = world.env
    platform = world.platform
    given = world.forwarded
    while not given.all_closed(s):
        world.ranks[r].reasons[Waiter.TRAIN] = f"all ranks' gradients of steps < {s}, for step {s}"
        yield given.closes(ALL, s)
    legs = world.legs[:, r, s]
    worker = world.worker_of(r, s)
    legs[Leg.ASKED_AGAIN] = env.now
    world.order.rows(Kind.REFRESH, r, s, np.full(len(world.need.server_shares), env.now))
    yield platform.travel(world.worker_delay(worker, need.worker_s, need.memory_bytes))
    legs[Leg.POOLED_AGAIN] = env.now
    nics = platform.of_worker[worker], platform.of_rank[r]
    yield platform.send(*nics, need.activation_bytes, role=(r, Kind.REFRESH))
    legs[Leg.ROWS_AGAIN] = env.now
    yield need.copy_in_s


class Barrier:
    """The training loops of all ranks, which meet once a step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks = len(world.ranks)
        self._arrived: list[tuple[int, float, float]] = []
        self._met = world.env.event()

    def train(self, r: int) -> Process:
        """Compute, wait until the gradient of all ranks is summed, and again."""
        world = self._world
        env = self._world.env
        rank = self._world.ranks[r]

        # Each step: take the batch, ...
        for s in range(world.scenario.steps):
            yield from take(world, r, s)
            world.stamp(Mark.START, r, s)

            # ... compute forward and backward; buckets are summed inside the backward pass if that
            # overlaps, ...
            forward, backward = world.compute_s(r, s)
            forward_end = env.now + forward
            yield forward + backward
            world.stamp(Mark.BACKWARD_END, r, s)

            # ... wait for the sum over all ranks, and hand the gradients of rows back.
            rank.reasons[Waiter.TRAIN] = f"the other ranks' gradients of step {s}"
            yield self._meet(s, r, forward_end, backward)
            world.stamp(Mark.UPDATED, r, s)
            yield from hand_back(world, r, s)

    def _meet(self, s: int, r: int, forward_end_s: float, backward_s: float) -> simpy.Event:
        """Fires for everyone when the dense weights are updated."""
        # All but the last rank wait.
        env = self._world.env
        met = self._met
        self._arrived.append((r, forward_end_s, backward_s))
        if len(self._arrived) < self._ranks:
            return met

        # The last one starts the sum, and the next step begins with nobody there.
        _, ends, backwards = np.array(sorted(self._arrived)).T
        self._arrived = []
        self._met = env.event()

        delay = self._sync_s(ends, backwards)
        env.timeout(delay).callbacks.append(lambda _: self._update(s, met))
        return met

    def _sync_s(self, forward_ends_s: np.ndarray, backwards_s: np.ndarray) -> float:
        """Seconds from now until the update, by the closed form of the all-reduce."""
        now = self._world.env.now
        need = self._world.need
        overlaps = self._world.scenario.mode.overlaps_dense_sync
        return sync_delay(
            now, forward_ends_s, backwards_s, need.buckets, overlaps, need.sync_overhead_s
        )

    def _update(self, s: int, met: simpy.Event) -> None:
        self._world.order.dense(Kind.DENSE_UPDATE, ALL, s)
        met.succeed()


class FreeRunning:
    """The training loops of all ranks, and in async the server of the dense weights."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._has_server = world.scenario.mode.has_dense_server
        self._version = 0  # dense updates applied at the server

    def train(self, r: int) -> Process:
        """Pull, compute, push, and again; async_averaging trains a replica instead."""
        world = self._world
        env = self._world.env
        rank = self._world.ranks[r]
        for s in range(world.scenario.steps):
            # Take the batch and the newest dense weights.
            yield from take(world, r, s)

            # Hand the dense gradient on; nobody waits for it.
            if self._has_server:
                yield from self._pull(r, s)
            world.stamp(Mark.START, r, s)

            # Compute; a round of averaging that locks the replica makes it longer.
            forward, backward = world.compute_s(r, s)
            rank.stall_s = max(0.0, rank.locked_until_s - env.now)
            rank.computes = True
            yield forward + backward
            while rank.stall_s > 0:
                stall = rank.stall_s
                rank.stall_s = 0.0
                yield stall
            rank.computes = False

            world.stamp(Mark.BACKWARD_END, r, s)
            if self._has_server:
                env.process(self._push(r, s))
            else:
                world.order.dense(Kind.DENSE_PUSH, r, s)
            world.stamp(Mark.UPDATED, r, s)
            yield from hand_back(world, r, s)

    def _pull(self, r: int, s: int) -> Process:
        """Ask for the dense weights and get them."""
        platform = self._world.platform
        yield platform.travel()
        yield platform.dense_served()
        self._world.legs[Leg.DENSE_SERVED, r, s] = self._world.env.now
        self._world.order.dense(Kind.DENSE_PULL, r, s, self._version)
        yield platform.travel()
        yield from platform.dense_copy(r, to_rank=True)

    def _push(self, r: int, s: int) -> Process:
        """Send the dense gradient to where it is applied; the rank goes on meanwhile."""
        platform = self._world.platform
        legs = self._world.legs[:, r, s]
        env = self._world.env
        yield platform.travel()
        yield from platform.dense_copy(r, to_rank=False)
        legs[Leg.DENSE_SENT] = env.now
        yield platform.dense_served()
        legs[Leg.DENSE_APPLIED] = env.now
        self._world.order.dense(Kind.DENSE_PUSH, r, s, self._version)
        self._version += 1
        self._world.ledger.returned()


def average(world: World) -> Process:
    """Rounds at their period: every replica enters, and leaves one all-reduce later."""
    env = world.env
    period_s = world.scenario.rounds.period_s
    duration = world.need.averaging_s
    number = 0

    # A round every period.
    while number == 0 or env.peek() < inf:  # else nobody will do anything any more
        yield period_s - (duration if number else 0.0)

        # All replicas enter at one instant and leave at another.
        for kind, wait in ((Kind.AVERAGE_READ, duration), (Kind.AVERAGE_WRITE, 0.0)):
            for r, rank in enumerate(world.ranks):
                world.order.dense(kind, r, max(0, rank.trained - 1), number)
                if kind is Kind.AVERAGE_READ and rank.computes:
                    rank.stall_s += duration
                elif kind is Kind.AVERAGE_READ:  # it waits for a batch meanwhile
                    rank.locked_until_s = env.now + duration

            yield wait
        number += 1
