"""Pushes: row gradients from a rank through an embedding worker to the servers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from persia_sim.engine.clock import Process
from persia_sim.engine.lookups import fan_out
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.model.incidents import Purpose
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.trace import ALL, Kind


class Pushes:
    """The push tasks of all ranks; merged pushes of a step take effect together."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Merged: instants of a step's last push, by server, where anybody asks for them.
        self._arrivals: dict[int, np.ndarray] = {}
        self._forwarded: dict[int, list[int]] = {}  # by step: the ranks whose gradients came

    def task(self, r: int) -> Process:
        """One push task: rank to worker to all servers, and the answer back."""
        world, rank = self._world, self._world.ranks[r]
        while True:
            while not rank.to_push:
                yield rank.wait(Waiter.PUSH, "a copied gradient")
            s = rank.to_push.popleft()
            rank.wake(Waiter.COPY_OUT)
            world.stamp(Mark.PUSH, r, s)
            written = yield from self._send(r, s)
            self._close(r, s, written)
            yield world.platform.travel(messages=2)  # server to worker, worker to rank
            world.stamp(Mark.RETURNED, r, s)
            rank.returned += 1
            rank.wake(Waiter.LOOKUP)
            world.ledger.returned()

    def _send(self, r: int, s: int) -> Generator[simpy.Event | float, Any, np.ndarray | None]:
        """Returns when each server has written its rows, where anybody asks (`tells_each`); what a
        crash loses is in the ledger."""
        world, env = self._world, self._world.env
        need, platform, disturbed = world.need, world.platform, world.disturbed
        worker = world.worker_of(r, s)
        started = env.now
        legs = world.legs[:, r, s]
        yield platform.travel()
        yield platform.send(platform.of_rank[r], platform.of_worker[worker], need.gradient_bytes)
        legs[Leg.AT_WORKER] = env.now
        scatter_s = world.worker_delay(worker, need.worker_scatter_s, need.scatter_memory_bytes)
        yield platform.travel(scatter_s)
        legs[Leg.SCATTERED] = env.now
        if disturbed.worker_lost(worker, started):
            servers = len(need.server_shares)
            world.ledger.lost[r, s] = np.ones(servers, bool)
            if need.forward is not None:
                self._hand_over(r, s)
            yield from disturbed.worker_back(worker)
            return np.zeros(servers)

        if need.forward is not None:
            env.process(self._forward(r, s, need.forward.exchange_bytes))

        written: np.ndarray | None = None

        def applied(arrived_s: float, each: tuple[np.ndarray, np.ndarray] | None) -> None:
            nonlocal written
            legs[Leg.AT_SERVERS] = arrived_s
            if each is None:
                return
            written = each[1]
            lost = disturbed.servers_lost(*each)
            if lost is not None:
                world.ledger.lost[r, s] = lost

        yield from fan_out(
            platform,
            worker,
            need.push_bytes,
            world.at_servers(need.server_update_s, Purpose.SERVER_UPDATE, r, s),
            need.update_memory_bytes,
            None,
            applied,
            need.update_join_s,
        )
        return written

    def _forward(self, r: int, s: int, size_bytes: float) -> Process:
        """Beside the push: gradients go to the worker that reads the rows next."""
        world = self._world
        if size_bytes:
            here, there = world.worker_of(r, s), world.worker_of(r, (s + 1) % world.scenario.steps)
            nics = world.platform.of_worker
            yield world.platform.send(nics[here], nics[there], size_bytes)
        world.legs[Leg.FORWARDED, r, s] = world.env.now
        self._hand_over(r, s)

    def _hand_over(self, r: int, s: int) -> None:
        """The workers have the gradients of (r, s); the last rank's have the step applied there,
        which is when later steps see it. What the servers get later is not in the order."""
        world, ranks = self._world, len(self._world.ranks)
        came = self._forwarded.setdefault(s, [])
        came.append(r)
        if len(came) < ranks:
            return
        batches = [(q, s) for q in range(ranks)]
        lost = [q for q, _ in batches if (q, s) in world.ledger.lost]
        now = np.full(len(world.need.server_shares), world.env.now)
        for q in lost:
            world.order.rows(Kind.LOST_PUSH, q, s, now)
        if len(lost) < ranks:
            world.order.rows(Kind.PUSH, ALL, s, now, pushes=ranks - len(lost))
        del self._forwarded[s]
        world.forwarded.close(batches)

    def _close(self, r: int, s: int, instants: np.ndarray | None) -> None:
        """The push of (r, s) is closed; merged ones take effect with the last rank's, at each
        server when it has them all (or knows that one is lost)."""
        world, ranks = self._world, len(self._world.ranks)
        world.stamp(Mark.APPLIED, r, s)
        lost = world.ledger.closed(r, s)
        if lost is not None and world.need.forward is None:
            instants = np.where(lost, world.env.now, instants)  # type: ignore[arg-type]  # a crash
            world.order.rows(Kind.LOST_PUSH, r, s, instants, where=lost)
        if not world.scenario.merges:
            kept = None if lost is None else ~lost
            world.order.rows(Kind.PUSH, r, s, instants, pushes=1, where=kept)
            world.window.close([(r, s)])
            return
        if instants is not None:
            self._arrivals[s] = np.maximum(self._arrivals.get(s, instants), instants)
        if world.ledger.closed_of_step[s] == ranks:
            last = self._arrivals.pop(s, None)
            batches = [(q, s) for q in range(ranks)]
            missing = [world.ledger.lost[b] for b in batches if b in world.ledger.lost]
            if world.need.forward is not None:
                pass  # the step has taken effect at the workers
            elif missing:
                merged = ranks - np.sum(missing, axis=0)
                world.order.rows(Kind.PUSH, ALL, s, last, pushes=merged, where=merged > 0)
            else:
                world.order.rows(Kind.PUSH, ALL, s, last, pushes=ranks)
            world.window.close(batches)
