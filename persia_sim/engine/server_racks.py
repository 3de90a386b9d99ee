"""The servers of several racks: a bank each, since a request reaches one rack before another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from persia_sim.engine.servers import Bank
from persia_sim.model.placement import ServerGroup


class RackBanks:
    """All servers, as `Bank` has them, in banks that are visited apart from each other."""

    def __init__(self, groups: Sequence[ServerGroup], banks: Sequence[Bank]) -> None:
        self.of_group = list(zip(groups, banks, strict=True))

    @property
    def busy_s(self) -> np.ndarray:
        """Of every server, float64 [servers]."""
        return np.concatenate([bank.busy_s for _, bank in self.of_group])

    @property
    def memory_busy_s(self) -> np.ndarray:
        """Of the memory of every server host, float64 [hosts]."""
        return np.concatenate([bank.memory_busy_s for _, bank in self.of_group])

    def longest(self, now_s: float, service_s: np.ndarray, memory_bytes: float) -> float:
        """The longest delay, where requests reach all of them at once."""
        return max(
            bank.longest(now_s, service_s[group.processes], memory_bytes * group.share)
            for group, bank in self.of_group
        )

    def close_until(self, process: int, time_s: float) -> None:
        """No request of this server starts before this time (a crash)."""
        for group, bank in self.of_group:
            if group.first <= process < group.end:
                bank.close_until(process - group.first, time_s)
