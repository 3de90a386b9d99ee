"""Stragglers and crashes as they act on a run's processes."""

from __future__ import annotations

import numpy as np

from persia_sim.engine.clock import Clock, Process
from persia_sim.engine.hardware import Platform
from persia_sim.model.incidents import Crash, SlowDown, Target


class Disturbed:
    """Answers, at the present simulated time, how slow a process is and when it is back."""

    def __init__(
        self,
        env: Clock,
        disturbances: tuple[SlowDown | Crash, ...],
        platform: Platform,
    ) -> None:
        self._env = env
        self._slow: dict[Target, list[SlowDown]] = {target: [] for target in Target}
        self._crashes: dict[Target, list[Crash]] = {target: [] for target in Target}
        for event in disturbances:
            if isinstance(event, SlowDown):
                self._slow[event.target].append(event)
            else:
                self._crashes[event.target].append(event)
                if event.target is not Target.RANK:
                    env.process(self._strike(event, platform))

    def _strike(self, crash: Crash, platform: Platform) -> Process:
        yield self._env.timeout(crash.at_s)
        if crash.target is Target.SERVER:
            platform.servers.close_until(crash.index, crash.back_s)
        else:
            platform.workers[crash.index].close_until(crash.back_s)

    def _factor(self, target: Target, index: int) -> float:
        now, factor = self._env.now, 1.0
        for slow in self._slow[target]:
            if slow.index == index and slow.start_s <= now < slow.end_s:
                factor *= slow.factor
        return factor

    def at_rank(self, r: int, factor: float) -> float:
        """The compute factor of a rank, with its slow-downs."""
        return factor * self._factor(Target.RANK, r) if self._slow[Target.RANK] else factor

    def at_worker(self, worker: int, service_s: float) -> float:
        """The service time of a worker, with its slow-downs."""
        if not self._slow[Target.WORKER]:
            return service_s
        return service_s * self._factor(Target.WORKER, worker)

    def at_servers(self, service_s: np.ndarray) -> np.ndarray:
        """The service times of all servers, with their slow-downs."""
        now = self._env.now
        live = [s for s in self._slow[Target.SERVER] if s.start_s <= now < s.end_s]
        if live:
            service_s = service_s.copy()
            for slow in live:
                service_s[slow.index] *= slow.factor
        return service_s

    def worker_back(self, worker: int) -> Process:
        """Wait until a crashed worker serves again (its batch is fetched anew)."""
        for crash in self._crashes[Target.WORKER]:
            if crash.index == worker and crash.at_s <= self._env.now < crash.back_s:
                if crash.back_s == np.inf:
                    yield self._env.event()
                yield self._env.timeout(crash.back_s - self._env.now)

    def worker_lost(self, worker: int, since_s: float) -> bool:
        """Whether the worker crashed while it held a push since then."""
        return any(
            c.index == worker and since_s <= c.at_s <= self._env.now
            for c in self._crashes[Target.WORKER]
        )

    def servers_lost(self, arrived_s: np.ndarray, done_s: np.ndarray) -> np.ndarray | None:
        """Which servers crashed while they held their part of a push (and nobody does it again):
        bool [servers], or None where none did. ``arrived_s`` and ``done_s`` are per server."""
        lost = None
        for c in self._crashes[Target.SERVER]:
            if arrived_s[c.index] <= c.at_s <= done_s[c.index] and not c.full:
                lost = np.zeros(len(done_s), bool) if lost is None else lost
                lost[c.index] = True
        return lost

    def strikes_loop(self, r: int, barrier: bool) -> list[Crash]:
        """The crashes that throw the training loop of a rank back."""
        ranks = [c for c in self._crashes[Target.RANK] if barrier or c.index == r]
        return ranks + [c for c in self._crashes[Target.SERVER] if c.full]

    @property
    def forgetful(self) -> list[Crash]:
        """The crashes in which a server alone goes back to its checkpoint."""
        return [c for c in self._crashes[Target.SERVER] if not c.full]
