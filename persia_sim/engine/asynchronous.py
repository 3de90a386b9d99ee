"""Training without a barrier: a rank computes on weights of its own and waits for nobody."""

from __future__ import annotations

from math import inf

from persia_sim.engine.copies import hand_back
from persia_sim.engine.rank import Waiter
from persia_sim.engine.taking import take
from persia_sim.engine.world import Process, World
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import Kind
from persia_sim.words.vocabulary import Mode


class FreeRunning:
    """The training loops of all ranks, and in async the server of the dense weights."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._has_server = world.scenario.mode is Mode.ASYNC
        self._on_nics = world.scenario.dense_on_nics
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
            yield env.timeout(forward + backward)
            while rank.stall_s > 0:
                stall, rank.stall_s = rank.stall_s, 0.0
                yield env.timeout(stall)
            stopped = world.recovery.real_end_s(r, env.now) - env.now
            if stopped:
                rank.reasons[Waiter.TRAIN] = f"rank {r} to come back"
                yield env.timeout(stopped) if stopped < inf else env.event()
            world.stamp(Mark.BACKWARD_END, r, s)
            if self._has_server:
                self._push(r, s)
            else:
                world.order.dense(Kind.DENSE_PUSH, r, s)
            world.stamp(Mark.UPDATED, r, s)
            yield from hand_back(world, r, s)

    def _served_s(self) -> float:
        """Queue and serve one copy of the dense weights at their server."""
        world = self._world
        return world.platform.dense_server.visit(world.env.now, world.need.dense_copy_s)

    def _pull(self, r: int, s: int) -> Process:
        """Ask for the dense weights and get them."""
        platform = self._world.platform
        yield platform.travel(self._served_s(), messages=2)
        if self._on_nics:
            yield platform.dense_to_rank(r)
        self._world.order.dense(Kind.DENSE_PULL, r, s, self._version)

    def _push(self, r: int, s: int) -> None:
        """Send the dense gradient; the rank goes on at once."""
        if self._on_nics:
            self._world.env.process(self._push_on_nics(r, s))
        else:
            sent = self._world.platform.travel(self._served_s())
            sent.callbacks.append(lambda _: self._applied(r, s))

    def _push_on_nics(self, r: int, s: int) -> Process:
        """A dense gradient crosses both NICs before its server takes it."""
        yield from self._world.platform.dense_from_rank(r)
        sent = self._world.env.timeout(self._served_s())
        sent.callbacks.append(lambda _: self._applied(r, s))

    def _applied(self, r: int, s: int) -> None:
        self._world.order.dense(Kind.DENSE_PUSH, r, s, self._version)
        self._version += 1
        self._world.ledger.returned()
