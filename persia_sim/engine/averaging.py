"""Background averaging of the dense replicas (async_averaging)."""

from __future__ import annotations

from persia_sim.engine.world import Process, World
from persia_sim.words.trace import Kind

_IDLE_ROUNDS = 1000  # without a trained batch: nothing will happen any more, so stop


def average(world: World) -> Process:
    """Rounds at their period: every replica enters, and leaves one all-reduce later."""
    env, rounds, duration = world.env, world.scenario.rounds, world.need.averaging_s
    number = idle = seen = 0
    while idle < _IDLE_ROUNDS:
        trained = sum(rank.trained for rank in world.ranks)
        idle, seen = (idle + 1, seen) if trained == seen else (0, trained)
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
