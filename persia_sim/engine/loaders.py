"""Loaders: they build batches and hold some ready for each rank."""

from __future__ import annotations

from persia_sim.engine.clock import Process
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.demand import loader_start_s
from persia_sim.model.stamps import Mark


def load(world: World, loader: int) -> Process:
    """Build every L-th batch; hold it back while the rank's data set buffer is full.

    Loaders start spread over the time of one batch: in step they would send bursts.
    """
    need, scenario = world.need, world.scenario
    ranks, steps, loaders = len(world.ranks), scenario.steps, scenario.cluster.loaders
    room = scenario.queues.dataset
    if loader:
        yield world.env.timeout(loader_start_s(loader, scenario, need.load_s))
    for batch in range(loader, ranks * steps, loaders):
        s, r = divmod(batch, ranks)
        rank = world.ranks[r]
        while s >= rank.looked_up + room:
            why = f"room for step {s} among {room} loaded batches"
            yield rank.wait(Waiter.LOADER, why, s)
        yield world.env.timeout(world.needs[r].load_s)
        yield world.platform.to_worker_from_loader(world.worker_of(r, s))
        if need.input_bytes:
            yield world.platform.to_rank_from_loader(r)
        world.stamp(Mark.LOADED, r, s)
        rank.early.add(s)
        while rank.loaded in rank.early:
            rank.early.remove(rank.loaded)
            rank.loaded += 1
        rank.wake(Waiter.LOOKUP)
