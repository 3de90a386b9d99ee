"""Pushes: row gradients from a rank through an embedding worker to the servers."""

from __future__ import annotations

from functools import partial

import numpy as np

from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import Process, World
from persia_sim.model.noise import Purpose
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import ALL, Kind


class Pushes:
    """The push tasks of all ranks; merged pushes of a step take effect together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._arrivals: dict[int, np.ndarray] = {}  # merged: instants of a step's last, by server

    def task(self, r: int) -> Process:
        """One push task: rank to worker to all servers, and the answer back."""
        world, rank = self._world, self._world.ranks[r]
        while True:
            while not rank.to_push:
                yield rank.wait(Waiter.PUSH, "a copied gradient")
            s = rank.to_push.popleft()
            rank.wake(Waiter.COPY_OUT)
            world.stamp(Mark.PUSH, r, s)
            written = np.zeros(len(world.need.server_shares))
            yield from self._send(r, s, written)
            self._close(r, s, written)
            yield world.platform.travel(messages=2)  # server to worker, worker to rank
            world.stamp(Mark.RETURNED, r, s)
            rank.returned += 1
            rank.wake(Waiter.LOOKUP)
            world.ledger.returned()

    def _send(self, r: int, s: int, written: np.ndarray) -> Process:
        """Fills in when each server has written its rows, unless a crash on the way loses them."""
        world, env = self._world, self._world.env
        need, platform, disturbed = world.need, world.platform, world.disturbed
        worker = world.worker_of(r, s)
        started = env.now
        yield from platform.from_rank(worker, r, need.gradient_bytes)
        yield platform.travel(world.worker_delay(worker, need.worker_scatter_s))
        if disturbed.worker_lost(worker, started):
            world.ledger.lost.add((r, s))
            yield from disturbed.worker_back(worker)
            return
        at_servers = env.now
        factor = world.server_noise(Purpose.SERVER_UPDATE, r, s)
        yield from platform.fan_out(
            worker,
            need.push_bytes,
            disturbed.at_servers(need.server_update_s) * factor,
            need.update_memory_bytes,
            0.0,
            partial(np.copyto, written),
        )
        if disturbed.server_lost(at_servers):
            world.ledger.lost.add((r, s))

    def _close(self, r: int, s: int, instants: np.ndarray) -> None:
        """The push of (r, s) is closed; merged ones take effect with the last rank's, at each
        server when it has them all (or knows that one is lost)."""
        world, ranks = self._world, len(self._world.ranks)
        world.stamp(Mark.APPLIED, r, s)
        lost = world.ledger.closed(r, s)
        if lost:
            instants = np.full(len(instants), world.env.now)
            world.order.rows(Kind.LOST_PUSH, r, s, instants)
        if not world.scenario.merges:
            if not lost:
                world.order.rows(Kind.PUSH, r, s, instants, pushes=1)
            world.window.close([(r, s)])
            return
        self._arrivals[s] = np.maximum(self._arrivals.get(s, instants), instants)
        if world.ledger.closed_of_step[s] == ranks:
            last = self._arrivals.pop(s)
            batches = [(q, s) for q in range(ranks)]
            merged = sum(batch not in world.ledger.lost for batch in batches)
            if merged:
                world.order.rows(Kind.PUSH, ALL, s, last, pushes=merged)
            world.window.close(batches)
