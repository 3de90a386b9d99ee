"""Requests of rows, through an embedding worker: lookups to the rank's host, pushes to the servers.

Lookups start in step order; finished ones are handed on in step order, so a rank trains its steps
in order. They wait for their window before they start, or at the servers (`Queues.at_servers`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import simpy

from persia_sim.base.trace import ALL, Kind
from persia_sim.cluster.demand import Fetch, Push, loader_start_s
from persia_sim.cluster.incidents import Purpose
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.clock import Process
from persia_sim.engine.hardware import Platform
from persia_sim.engine.rank import Waiter
from persia_sim.engine.world import World
from persia_sim.network.flows import Role


def start_lookups(world: World, r: int) -> Process:
    """Start this rank's lookups, each inside the window and with a permit."""
    rank = world.ranks[r]
    scenario = world.scenario
    window = world.window
    queues = scenario.queues
    permits = scenario.permits
    most = queues.lookups_in_flight
    room = queues.dataset
    for s in range(scenario.steps):
        # In step order: the batch must be loaded, ...
        while s >= rank.loaded:
            yield rank.wait(Waiter.LOOKUP, f"a loader to deliver step {s}")

        # ... no further ahead than tau allows, or behind the last push, ...
        while not scenario.waits_at_servers and not window.admits(r, s):
            opens, rank.reasons[Waiter.LOOKUP] = window.opens(r, s)
            yield opens
        while scenario.asks_in_turn and s > rank.pushed:
            yield rank.wait(Waiter.LOOKUP, f"the push of step {s - 1} to set off")

        # ... and be one of those in flight, with a permit.
        while s >= rank.handed_on + most:
            yield rank.wait(Waiter.LOOKUP, f"one of {most} places in flight for step {s}")
        while permits is not None and s >= rank.returned + permits:
            yield rank.wait(Waiter.LOOKUP, f"one of {permits} permits for step {s}")

        # A runtime that reserves reads no rows that would wait for room on the GPU.
        while queues.reserve and s >= rank.trained + queues.on_gpu:
            yield rank.wait(Waiter.LOOKUP, f"room on the GPU, reserved for step {s}")

        # Nothing holds it back: the buffer has room again, and the lookup runs by itself.
        rank.reasons.pop(Waiter.LOOKUP, None)
        rank.looked_up += 1
        rank.wake_loader(s + room)
        world.stamp(Mark.LOOKUP, r, s)
        world.ledger.lookup_started()
        world.env.process(look_up(world, r, s))


def look_up(world: World, r: int, s: int) -> Process:
    """One lookup, from the request to pooled rows on the rank's host."""
    yield from fetch(world, r, s, world.need.fetch, Kind.LOOKUP, Mark.READ)
    world.stamp(Mark.ROWS, r, s)
    world.ranks[r].rows_here.add(s)
    hand_on(world, r)


def fetch(world: World, r: int, s: int, request: Fetch, kind: Kind, mark: Mark) -> Process:
    """Rank, worker, all servers, worker, rank; the rows are read when the last server answers."""
    platform = world.platform
    worker = world.worker_of(r, s)

    # Its instants are noted: a lookup and the second read of lookahead have legs of their own.
    legs = world.legs[:, r, s]
    first = Leg.ASKED if kind is Kind.LOOKUP else Leg.ASKED_AGAIN

    # Whether the window lets it in, or what it waits for at the servers.
    def opens() -> simpy.Event | None:
        if kind is not Kind.LOOKUP or world.window.admits(r, s):
            return None
        return world.window.opens(r, s)[0]

    # Called when the last server has read its rows: what staleness is counted from.
    def rows_read(asked: Asked) -> None:
        legs[first + 1], legs[first + 2] = asked.arrived_s, asked.admitted_s
        legs[first + 3] = world.env.now
        world.stamp(mark, r, s)
        world.order.rows(kind, r, s, asked.done)

    # The request reaches the embedding worker, which finds out whom to ask.
    yield platform.travel()
    read_s = world.worker_delay(worker, request.worker_forward_s, request.forward_memory_bytes)
    yield platform.travel(read_s)
    legs[first] = world.env.now

    # All servers are asked; the rows are read when the last one has answered.
    yield from fan_out(
        platform,
        worker,
        request.request_bytes,
        world.at_servers(request.server_s, Purpose.SERVER_LOOKUP, r, s),
        request.server_memory_bytes,
        request.rows_bytes,
        rows_read,
        (r, kind),
        request.join_s,
        opens,
    )
    legs[first + 4] = world.env.now

    # The worker pools the rows and sends the result to the rank.
    pooled_s = world.worker_delay(worker, request.worker_pool_s, request.pool_memory_bytes)
    yield platform.travel(pooled_s)
    legs[first + 5] = world.env.now
    nics = platform.of_worker[worker], platform.of_rank[r]
    yield platform.send(*nics, request.activation_bytes, role=(r, kind))
    legs[first + 6] = world.env.now


def hand_on(world: World, r: int) -> None:
    """Move finished lookups, in step order, to the copying thread while there is room."""
    rank = world.ranks[r]
    room = world.scenario.queues.forwarded
    moved = False
    while rank.handed_on in rank.rows_here and rank.handed_on < rank.copied_in + room:
        rank.rows_here.remove(rank.handed_on)
        rank.handed_on += 1
        moved = True
    if moved:
        rank.wake(Waiter.COPY_IN)
        rank.wake(Waiter.LOOKUP)


def load(world: World, loader: int) -> Process:
    """Build every L-th batch; hold it back while the rank's data set buffer is full.

    Loaders start spread over the time of one batch: in step they would send bursts.
    """
    # What it loads, for whom, and how many batches the buffer of a rank takes.
    need = world.need
    scenario = world.scenario
    platform = world.platform
    ranks = len(world.ranks)
    steps = scenario.steps
    loaders = scenario.cluster.loaders
    room = scenario.queues.dataset
    if loader:
        yield loader_start_s(loader, scenario, need.load_s)

    # Batches are dealt to loaders in turn.
    for batch in range(loader, ranks * steps, loaders):
        s, r = divmod(batch, ranks)
        rank = world.ranks[r]

        # Back pressure: wait until the rank's buffer has room.
        while s >= rank.looked_up + room:
            why = f"room for step {s} among {room} loaded batches"
            yield rank.wait(Waiter.LOADER, why, s)

        # Parse the batch, then send ids to the worker and dense inputs to the rank.
        yield world.need.load_s
        yield platform.receive(platform.of_worker[world.worker_of(r, s)], need.loader_bytes)
        if need.input_bytes:
            yield platform.receive(platform.of_rank[r], need.input_bytes)
        world.stamp(Mark.LOADED, r, s)

        # A batch may be here before an earlier one: what counts is the leading run.
        rank.early.add(s)
        while rank.loaded in rank.early:
            rank.early.remove(rank.loaded)
            rank.loaded += 1
        rank.wake(Waiter.LOOKUP)


class Asked(NamedTuple):
    """What servers did with a request: when the last of them got it and was let do it; and, where
    `tells_each`, when each server had done it."""

    arrived_s: float
    admitted_s: float
    done: np.ndarray | None


def fan_out(
    platform: Platform,
    worker: int,
    request_bytes: float,
    service_s: np.ndarray,
    memory_bytes: float,
    answer_bytes: float | None,
    at_servers: Callable[[Asked], None],
    role: Role,
    join_s: float = 0.0,
    opens: Callable[[], simpy.Event | None] = lambda: None,
) -> Process:
    """Ask every server and join; ``at_servers`` runs when the last one has done its work. The
    request's latency is behind it (`travel`): what is lost or slow at the servers is known only
    when it has arrived. There it waits for what ``opens`` gives, until that is None. The busiest
    server of a batch is later than that of the mean batch by ``join_s``. ``answer_bytes`` None:
    nobody waits for an answer; 0 is an answer without rows."""
    # The request arrives, and waits where it may not be served yet.
    env = platform.env
    nic = platform.of_worker[worker]
    servers = platform.wiring.of_servers
    streams = platform.wiring.fan_out.streams
    yield platform.send(nic, servers, request_bytes, streams, role)
    last_s = env.now
    while (event := opens()) is not None:
        yield event
    admitted_s = env.now

    # The servers work in their own time.
    done = None
    if platform.tells_each:
        delays = platform.bank.visit(admitted_s, service_s, memory_bytes)
        done = admitted_s + delays
        done[int(delays.argmax())] += join_s
        delay = float(delays.max()) + join_s
    else:
        delay = platform.bank.longest(admitted_s, service_s, memory_bytes) + join_s

    # When the last one is done, the request has taken effect.
    yield delay
    at_servers(Asked(last_s, admitted_s, done))

    # The answer goes back.
    if answer_bytes is not None:
        if platform.latency_s:
            yield platform.travel()
        yield platform.send(servers, nic, answer_bytes, streams, role)


class Pushes:
    """The push tasks of all ranks; merged pushes of a step take effect together."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Merged: instants of a step's last push, by server, where anybody asks for them.
        self._arrivals: dict[int, np.ndarray] = {}
        self._forwarded = [0] * world.scenario.steps  # ranks whose gradients are at the workers
        self._fresh_arrivals: dict[int, np.ndarray] = {}
        self._fresh_ended: dict[tuple[int, int], simpy.Event] = {}
        self._fresh_of_step = [0] * world.scenario.steps

    def task(self, r: int) -> Process:
        """One push task: rank to worker to all servers, and the answer back."""
        world = self._world
        rank = self._world.ranks[r]
        while True:
            while not rank.to_push:
                yield rank.wait(Waiter.PUSH, "a copied gradient")
            s = rank.to_push.popleft()
            rank.wake(Waiter.COPY_OUT)
            world.stamp(Mark.PUSH, r, s)
            rank.pushed += 1
            rank.wake(Waiter.LOOKUP)
            rank.wake(Waiter.TRAIN)
            written = yield from self._send(r, s)
            self._close(r, s, written)
            if world.need.fresh is not None:
                yield self._fresh_ended.pop((r, s))
            world.stamp(Mark.APPLIED, r, s)
            yield world.platform.travel(messages=2)  # server to worker, worker to rank
            world.stamp(Mark.RETURNED, r, s)
            rank.returned += 1
            rank.wake(Waiter.LOOKUP)
            world.ledger.returned()

    def _send(self, r: int, s: int) -> Generator[simpy.Event | float, Any, np.ndarray | None]:
        """Returns when each server has written its rows, where anybody asks (`tells_each`)."""
        world = self._world
        env = self._world.env
        need = world.need
        push = need.push
        platform = world.platform
        worker = world.worker_of(r, s)
        legs = world.legs[:, r, s]
        yield from self._scatter(r, s, push, Kind.PUSH, (Leg.AT_WORKER, Leg.SCATTERED))

        # Lookahead `forwarded`: the next holder of the rows gets the gradients at once.
        if need.forward is not None:
            env.process(self._forward(r, s, need.forward.exchange_bytes))

        # Called when the last server has applied its part.
        written: np.ndarray | None = None

        def applied(asked: Asked) -> None:
            nonlocal written
            legs[Leg.AT_SERVERS] = asked.arrived_s
            *_, written = asked

        # Send each server its part, and apply it there.
        service_s = world.at_servers(push.server_update_s, Purpose.SERVER_UPDATE, r, s)
        yield from fan_out(
            platform,
            worker,
            push.push_bytes,
            service_s,
            push.update_memory_bytes,
            None,
            applied,
            (r, Kind.PUSH),
            push.update_join_s,
        )
        return written

    def _scatter(self, r: int, s: int, push: Push, kind: Kind, ends: tuple[Leg, Leg]) -> Process:
        """The gradients of pooled rows go to the embedding worker, which scatters them to the rows
        that they belong to; ``ends``: of the way, and of the scattering."""
        world = self._world
        platform = world.platform
        worker = world.worker_of(r, s)
        legs = world.legs[:, r, s]
        yield platform.travel()
        nics = platform.of_rank[r], platform.of_worker[worker]
        yield platform.send(*nics, push.gradient_bytes, role=(r, kind))
        legs[ends[0]] = world.env.now
        scatter_s = world.worker_delay(worker, push.worker_scatter_s, push.scatter_memory_bytes)
        yield platform.travel(scatter_s)
        legs[ends[1]] = world.env.now

    def begin_fresh(self, r: int, s: int) -> None:
        """The push of fresh tables: their gradients are copied and sent before all others."""
        self._fresh_ended[r, s] = self._world.env.process(self._push_fresh(r, s)).ended

    def _push_fresh(self, r: int, s: int) -> Process:
        """Rank to worker to all servers; merged over ranks, the last of which closes the step."""
        world = self._world
        env = self._world.env
        platform = world.platform
        fresh = world.need.fresh
        assert fresh is not None, "of tables that have a push of their own"
        legs = world.legs[:, r, s]
        worker = world.worker_of(r, s)
        written: np.ndarray | None = None

        def applied(asked: Asked) -> None:
            nonlocal written
            legs[Leg.FRESH_AT_SERVERS] = asked.arrived_s
            *_, written = asked

        ends = Leg.FRESH_AT_WORKER, Leg.FRESH_SCATTERED
        yield from self._scatter(r, s, fresh, Kind.FRESH_PUSH, ends)
        service_s = world.at_servers(fresh.server_update_s, Purpose.SERVER_UPDATE, r, s)
        yield from fan_out(
            platform,
            worker,
            fresh.push_bytes,
            service_s,
            fresh.update_memory_bytes,
            None,
            applied,
            (r, Kind.FRESH_PUSH),
            fresh.update_join_s,
        )
        legs[Leg.FRESH_APPLIED] = env.now

        # Merged over ranks, as those of sync are.
        if written is not None:
            before = self._fresh_arrivals.get(s, written)
            self._fresh_arrivals[s] = np.maximum(before, written)
        self._fresh_of_step[s] += 1
        ranks = len(world.ranks)
        if self._fresh_of_step[s] == ranks:
            last = self._fresh_arrivals.pop(s, None)
            world.order.rows(Kind.FRESH_PUSH, ALL, s, last, pushes=ranks)
            world.of_fresh.close([(q, s) for q in range(ranks)])

    def _forward(self, r: int, s: int, size_bytes: float) -> Process:
        """Beside the push: gradients go to the worker that reads the rows next."""
        world = self._world
        if size_bytes:
            here = world.worker_of(r, s)
            there = world.worker_of(r, (s + 1) % world.scenario.steps)
            nics = world.platform.of_worker
            yield world.platform.send(nics[here], nics[there], size_bytes, role=(r, Kind.PUSH))
        world.legs[Leg.FORWARDED, r, s] = world.env.now

        # The last rank's have the step applied at the workers: later steps see it then. What the
        # servers get later is not in the order.
        ranks = len(self._world.ranks)
        self._forwarded[s] += 1
        world.ledger.returned()
        if self._forwarded[s] == ranks:
            now = np.full(len(world.need.server_shares), world.env.now)
            world.order.rows(Kind.PUSH, ALL, s, now, pushes=ranks)
            world.forwarded.close([(q, s) for q in range(ranks)])

    def _close(self, r: int, s: int, instants: np.ndarray | None) -> None:
        """The push of (r, s) is closed; merged ones take effect with the last rank's, at each
        server when it has them all."""
        world = self._world
        ranks = len(self._world.ranks)
        world.ledger.closed(s)

        # Unmerged: this push alone takes effect.
        if not world.scenario.merges:
            world.order.rows(Kind.PUSH, r, s, instants, pushes=1)
            world.window.close([(r, s)])
            return

        # Merged: the step takes effect when its last push is here, at each server.
        if instants is not None:
            self._arrivals[s] = np.maximum(self._arrivals.get(s, instants), instants)
        if world.ledger.closed_of_step[s] == ranks:
            last = self._arrivals.pop(s, None)
            if world.need.forward is None:  # else the step has taken effect at the workers
                if world.scenario.fresh and world.need.fresh is None:  # no table is late
                    world.order.rows(Kind.FRESH_PUSH, ALL, s, last, pushes=ranks)
                world.order.rows(Kind.PUSH, ALL, s, last, pushes=ranks)
            world.window.close([(q, s) for q in range(ranks)])
