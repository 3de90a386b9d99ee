"""Slow processes, and servers that stand still, as they act on a run."""

from __future__ import annotations

import numpy as np

from persia_sim.cluster.incidents import Outage, SlowDown, Target
from persia_sim.engine.clock import Clock, Process
from persia_sim.engine.hardware import Platform


class Disturbed:
    """Answers, at the present simulated time, how slow a process is."""

    def __init__(
        self, env: Clock, disturbances: tuple[SlowDown | Outage, ...], platform: Platform
    ) -> None:
        self._env = env
        self._slow: dict[Target, list[SlowDown]] = {target: [] for target in Target}
        for event in disturbances:
            if isinstance(event, SlowDown):
                self._slow[event.target].append(event)
            else:
                env.process(self._stand_still(event, platform))

    def _stand_still(self, outage: Outage, platform: Platform) -> Process:
        yield outage.at_s
        platform.close_server_until(outage.index, outage.at_s + outage.for_s)

    def factor(self, target: Target, index: int) -> float:
        """How many times as long a rank or worker takes as without its slow-downs."""
        now = self._env.now
        factor = 1.0
        for slow in self._slow[target]:
            if slow.index == index and slow.start_s <= now < slow.end_s:
                factor *= slow.factor
        return factor

    def at_servers(self, service_s: np.ndarray) -> np.ndarray:
        """The service times of all servers, with their slow-downs."""
        now = self._env.now
        live = [s for s in self._slow[Target.SERVER] if s.start_s <= now < s.end_s]
        if live:
            service_s = service_s.copy()
            for slow in live:
                service_s[slow.index] *= slow.factor
        return service_s
