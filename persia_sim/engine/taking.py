"""How a training loop gets its next batch, in every mode."""

from __future__ import annotations

from persia_sim.engine.lookups import fetch
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import Process, World
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import Kind


def take(world: World, r: int, s: int) -> Process:
    """Wait until the batch is on the GPU; lookahead brings its rows up to date."""
    rank, refresh = world.ranks[r], world.need.refresh
    while s >= rank.on_gpu:
        yield rank.wait(Waiter.TRAIN, f"step {s} on the GPU")
    rank.trained += 1
    rank.wake(Waiter.COPY_IN)
    if refresh is not None:
        while not world.window.all_closed(s):
            rank.reasons[Waiter.TRAIN] = f"all ranks' pushes of steps < {s}, to refresh step {s}"
            yield world.window.all_close(s)
        yield from fetch(world, r, s, refresh, Kind.REFRESH, Mark.REFRESHED)
        yield world.env.timeout(refresh.copy_in_s)
    world.stamp(Mark.REFRESHED, r, s)
