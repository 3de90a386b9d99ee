"""How a training loop gets its next batch, in every mode."""

from __future__ import annotations

import numpy as np

from persia_sim.engine.clock import Process
from persia_sim.engine.lookups import fetch
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.demand import Forward
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.trace import Kind


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
