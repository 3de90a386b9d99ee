"""What the processes of a run share: clock, description, hardware, buffers, instants, and the order
of events: all shards as one, or one row of the trace for each server."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import simpy

from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import OF_FRESH
from persia_sim.base.window import Watermarks, steps_to_close
from persia_sim.cluster.demand import Demand
from persia_sim.cluster.incidents import Purpose, Target, lognormal_factors, stream
from persia_sim.cluster.placement import workers_of
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.clock import Clock
from persia_sim.engine.faults import Disturbed
from persia_sim.engine.hardware import Platform
from persia_sim.engine.rank import Ledger, Rank

Each = np.ndarray | None
"""A figure of every server, if it is asked for."""


class OrderLog:
    """Where the processes of a run write what took effect; this one keeps nothing.

    ``fresh``: whether tables are fresh, which have versions of their own.
    """

    by_server = False
    """Whether the instant at which each single server read or wrote is asked for."""

    def __init__(self, fresh: bool = False) -> None:
        self._fresh = fresh

    def group_of(self, kind: int) -> int:
        """0 of what is read or written of late tables, 1 of fresh ones."""
        return int(self._fresh and kind in OF_FRESH)

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Something happened now that no server has a part in."""

    def rows(self, kind: Kind, rank: int, step: int, instants: Each, pushes: int = 0) -> None:
        """Every server read or wrote its rows at its own instant, the last of them now; None where
        nobody asks for them (`by_server`).

        ``pushes`` is the number of batches whose gradients were applied: versions grow by it.
        """

    def finish(self, **meta: Any) -> Trace:
        """The trace so far. Raises ValueError where none is kept."""
        raise ValueError("the run kept no order: simulate with trace=True")


class OneShard(OrderLog):
    """All servers as one: rows count as read or written when the last server has done it."""

    def __init__(self, fresh: bool = False) -> None:
        super().__init__(fresh)
        self._events: list[Event] = []
        self._versions = [0, 0]  # of late tables, and of fresh ones

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """Append an event."""
        self._events.append(Event(int(kind), rank, step, ALL, version))

    def rows(self, kind: Kind, rank: int, step: int, instants: Each, pushes: int = 0) -> None:
        """Append one event with the version before it."""
        group = self.group_of(kind)
        self._events.append(Event(int(kind), rank, step, ALL, self._versions[group]))
        self._versions[group] += pushes

    def finish(self, **meta: Any) -> Trace:
        """The events in the order in which they happened."""
        return Trace.of(self._events, **meta)


class EachShard(OrderLog):
    """One row for each server, in the order of the servers' own instants.

    Rows are logged when the last server is done, so an effect is always logged after its cause;
    sorting by instant with ties in the order of logging therefore keeps causes before effects.
    """

    by_server = True

    def __init__(self, env: simpy.Environment, shards: int, fresh: bool = False) -> None:
        super().__init__(fresh)
        self._env = env
        self._shards = np.arange(shards)
        self._whole = np.array([ALL])
        self._instants: list[np.ndarray] = []
        self._facts: list[tuple[int, int, int, int]] = []  # kind, rank, step, version
        self._concerned: list[np.ndarray] = []  # shards
        self._pushes: list[int] = []  # at each of them

    def dense(self, kind: Kind, rank: int, step: int, version: int = ALL) -> None:
        """One row for all shards."""
        self._instants.append(np.array([self._env.now]))
        self._facts.append((int(kind), rank, step, version))
        self._concerned.append(self._whole)
        self._pushes.append(0)

    def rows(self, kind: Kind, rank: int, step: int, instants: Each, pushes: int = 0) -> None:
        """A row for each shard."""
        if instants is None:
            raise ValueError("the order of each server needs the instants of each")
        self._instants.append(instants)
        self._facts.append((int(kind), rank, step, ALL))
        self._concerned.append(self._shards)
        self._pushes.append(pushes)

    def finish(self, **meta: Any) -> Trace:
        """Sort, and count each shard's versions."""
        # An event at several shards is several rows of the trace.
        sizes = [len(instants) for instants in self._instants]
        if not sizes:
            return Trace.of([], **meta)
        facts = np.repeat(np.array(self._facts, np.int64), sizes, axis=0)
        shard = np.concatenate(self._concerned)
        pushes = np.repeat(self._pushes, sizes)

        # In the order of their instants; what came first stays first.
        order = np.argsort(np.concatenate(self._instants), kind="stable")
        facts = facts[order]
        shard = shard[order]
        pushes = pushes[order]

        # The version of a shard counts the pushes that it has applied before.
        kind, rank, step, version = facts.T.copy()
        group = np.array([self.group_of(each) for each in kind.tolist()])
        for k, own in product(self._shards, np.unique(group)):
            here = np.flatnonzero((shard == k) & (group == own))
            version[here] = np.cumsum(pushes[here]) - pushes[here]
        table = np.column_stack([kind, rank, step, shard, version])
        return Trace(table, meta | {"shards": len(self._shards)})


class LookupWindow:
    """The rule of `Watermarks`, and who waits for it to hold."""

    def __init__(self, env: simpy.Environment, scenario: Scenario) -> None:
        self._env = env
        self._tau = scenario.steps_ahead
        self._per_rank = not scenario.mode.has_barrier
        self._marks = Watermarks(scenario.cluster.ranks)
        self.waiting: dict[tuple[int, int], list[simpy.Event]] = {}

    def admits(self, r: int, s: int) -> bool:
        """Whether the lookup of (r, s) may start."""
        return self._marks.may_start(r, s, self._tau, self._per_rank)

    def opens(self, r: int, s: int) -> tuple[simpy.Event, str]:
        """An event that fires when the lookup of (r, s) may start, and what it waits for."""
        steps = steps_to_close(s, self._tau or 0)
        whose = f"rank {r}'s own" if self._per_rank else "all ranks'"
        event = self.closes(r if self._per_rank else ALL, steps)
        return event, f"{whose} pushes of steps < {steps}, to start step {s}"

    def all_closed(self, steps: int) -> bool:
        """Whether all ranks' pushes of so many leading steps are closed."""
        return self._marks.closed_steps() >= steps

    def closes(self, owner: int, steps: int) -> simpy.Event:
        """An event that fires when so many leading steps of a rank, or of all, are closed."""
        event = self._env.event()
        self.waiting.setdefault((owner, steps), []).append(event)
        return event

    def close(self, batches: list[tuple[int, int]]) -> None:
        """Close pushes together; lookups whose window opens may start."""
        owner = batches[0][0] if self._per_rank else ALL
        rank = None if owner == ALL else owner
        before = self._marks.closed_steps(rank)
        for r, s in batches:
            self._marks.close(r, s)
        for steps in range(before + 1, self._marks.closed_steps(rank) + 1):
            for event in self.waiting.pop((owner, steps), []):
                event.succeed()


class World:
    """A run's state. It knows no process; processes are functions of it."""

    def __init__(
        self,
        env: Clock,
        scenario: Scenario,
        need: Demand,
        order: OrderLog,
        on_push: Callable[[], object] = lambda: None,
    ) -> None:
        ranks = scenario.cluster.ranks
        steps = scenario.steps
        self.env = env
        self.scenario = scenario
        self.need = need
        self.order = order
        self.platform = Platform(env, scenario, need)
        self.platform.tells_each = order.by_server
        # Asked at every visit: None where nothing is slow or stands still.
        disturbed = Disturbed(env, scenario.disturbances, self.platform)
        self.disturbed = disturbed if scenario.disturbances else None
        self.ranks = [Rank(env) for _ in range(ranks)]
        self.window = LookupWindow(env, scenario)
        self.forwarded = LookupWindow(env, scenario)  # gradients that are at the workers
        # What a second look at rows waits for: fresh tables have pushes of their own.
        self.of_fresh = self.window if need.fresh is None else LookupWindow(env, scenario)
        self.ledger = Ledger(env, scenario, on_push)
        # By each GPU in each step, without the rounds that stop it.
        self.computed_s = np.zeros((ranks, steps))
        # Of each batch's lookup and push: the longest service at a server, with its noise.
        self.served_s = np.zeros((2, ranks, steps))
        self.stamps = [[[np.nan] * steps for _ in range(ranks)] for _ in Mark]
        self.legs = np.full((len(Leg), ranks, steps), np.nan)
        noise = scenario.noise
        seed = scenario.seed
        self._gpu_factor = [
            lognormal_factors(stream(seed, Purpose.GPU, r), noise.gpu_cv, steps).tolist()
            for r in range(ranks)
        ]
        self._worker = [workers_of(scenario, r) for r in range(ranks)]

    def stamp(self, mark: Mark, r: int, s: int) -> None:
        """This batch reached this instant now."""
        self.stamps[mark][r][s] = self.env.now

    def worker_of(self, r: int, s: int) -> int:
        """The embedding worker that serves a batch."""
        return self._worker[r][s]

    def worker_delay(self, worker: int, service_s: float, memory_bytes: float) -> float:
        """Delay until a core of a worker, and the memory of its host, have done a piece of work."""
        now = self.env.now
        platform = self.platform
        if self.disturbed is not None:
            service_s *= self.disturbed.factor(Target.WORKER, worker)
        memory = platform.worker_memory[platform.host_of_worker[worker]]
        return max(platform.workers[worker].visit(now, service_s), memory.visit(now, memory_bytes))

    def at_servers(self, service_s: np.ndarray, purpose: Purpose, r: int, s: int) -> np.ndarray:
        """The service times of a batch's requests, with noise and slow-downs."""
        scenario = self.scenario
        service = service_s
        if self.disturbed is not None:
            service = self.disturbed.at_servers(service)
        if scenario.noise.server_cv:
            draws = stream(scenario.seed, purpose, r, s)
            service = service * lognormal_factors(draws, scenario.noise.server_cv, len(service_s))
            self.served_s[int(purpose is Purpose.SERVER_UPDATE), r, s] = service.max()
        return service

    def compute_s(self, r: int, s: int) -> tuple[float, float]:
        """Forward and backward of this batch, with noise and slow-downs."""
        factor = self._gpu_factor[r][s]
        if self.disturbed is not None:
            factor *= self.disturbed.factor(Target.RANK, r)
        need = self.need
        self.computed_s[r, s] = need.compute_s * factor
        return need.forward_s * factor, need.backward_s * factor
