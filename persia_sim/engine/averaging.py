"""Background averaging of the dense replicas (async_averaging)."""

from __future__ import annotations

from math import inf

from persia_sim.engine.clock import Process
from persia_sim.engine.world import World
from persia_sim.words.trace import Kind


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
                if kind is Kind.AVERAGE_READ:
                    rank.stall_s += rounds.stall_share * duration
            if wait and world.scenario.dense_on_nics:
                yield world.platform.ring(world.need.averaging_nic_bytes, wait)
            else:
                yield env.timeout(wait)
        number += 1
