"""Training without a barrier: a rank computes on weights of its own and waits for nobody; the
replicas of async_averaging are averaged behind it."""

from __future__ import annotations

from math import inf

from persia_sim.engine.clock import Process
from persia_sim.engine.copies import hand_back, take
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.trace import Kind
from persia_sim.words.vocabulary import Mode


class FreeRunning:
    """The training loops of all ranks, and in async the server of the dense weights."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._has_server = world.scenario.mode is Mode.ASYNC
        self._version = 0  # dense updates applied at the server

    def train(self, r: int) -> Process:
        """Pull, compute, push, and again; async_averaging trains a replica instead."""
        world, env, rank = self._world, self._world.env, self._world.ranks[r]
        for s in range(world.scenario.steps):
            yield from take(world, r, s)
            if self._has_server:
                yield from self._pull(r, s)
            world.stamp(Mark.START, r, s)
            forward, backward = world.compute_s(r, s)
            rank.stall_s, rank.computes = max(0.0, rank.locked_until_s - env.now), True
            yield env.timeout(forward + backward)
            while rank.stall_s > 0:
                stall, rank.stall_s = rank.stall_s, 0.0
                yield env.timeout(stall)
            rank.computes = False
            stopped = world.recovery.real_end_s(r, env.now) - env.now
            if stopped:
                rank.reasons[Waiter.TRAIN] = f"rank {r} to come back"
                yield env.timeout(stopped) if stopped < inf else env.event()
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
        yield platform.env.timeout(platform.dense_served())
        self._world.legs[Leg.DENSE_SERVED, r, s] = self._world.env.now
        self._world.order.dense(Kind.DENSE_PULL, r, s, self._version)
        yield platform.travel()
        yield from platform.dense_to_rank(r)

    def _push(self, r: int, s: int) -> Process:
        """Send the dense gradient to where it is applied; the rank goes on meanwhile."""
        platform = self._world.platform
        yield from platform.dense_from_rank(r)
        yield platform.env.timeout(platform.dense_served())
        self._world.order.dense(Kind.DENSE_PUSH, r, s, self._version)
        self._version += 1
        self._world.ledger.returned()


def average(world: World) -> Process:
    """Rounds at their period, or one after the other where a round takes longer: every replica
    enters, and leaves one all-reduce later."""
    env, rounds, duration = world.env, world.scenario.rounds, world.need.averaging_s
    number = 0
    while number == 0 or env.peek() < inf:  # else nobody will do anything any more
        yield env.timeout(max(0.0, rounds.period_s - (duration if number else 0.0)))
        for kind, wait in ((Kind.AVERAGE_READ, duration), (Kind.AVERAGE_WRITE, 0.0)):
            for r, rank in enumerate(world.ranks):
                world.order.dense(kind, r, max(0, rank.trained - 1), number)
                if kind is Kind.AVERAGE_READ and rank.computes:
                    rank.stall_s += rounds.stall_share * duration
                elif kind is Kind.AVERAGE_READ:  # it waits for a batch meanwhile
                    rank.locked_until_s = env.now + rounds.stall_share * duration
            if wait and world.scenario.dense_on_nics:
                yield world.platform.ring(world.need.averaging_nic_bytes, wait)
            else:
                yield env.timeout(wait)
        number += 1
