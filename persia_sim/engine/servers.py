"""Busy-until servers: first come, first served, in one event a visit.

Each core keeps the time at which it falls free. A visit costs one timeout instead of the request,
the hold and the release of a resource; completion times of a single server are the same bits.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np


class FifoServer:
    """One process with some cores; a request takes one core."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._busy: list[float] = []
        self.busy_s = 0.0
        self.visits = 0

    def visit(self, now_s: float, service_s: float) -> float:
        """Delay from now until the request is done."""
        busy = self._busy
        while busy and busy[0] <= now_s:
            heappop(busy)
        wait = heappop(busy) - now_s if len(busy) >= self._cores else 0.0
        delay = wait + service_s
        heappush(busy, now_s + delay)
        self.busy_s += service_s
        self.visits += 1
        return delay

    def close_until(self, time_s: float) -> None:
        """No request starts before this time (a crash)."""
        while len(self._busy) < self._cores:
            self._busy.append(0.0)
        self._busy = sorted(max(free, time_s) for free in self._busy)


class Unlimited:
    """A server that never queues."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.visits = 0
        self._back_s = 0.0

    def visit(self, now_s: float, service_s: float) -> float:
        """The service alone, after a crash's end."""
        self.busy_s += service_s
        self.visits += 1
        return max(self._back_s - now_s, 0.0) + service_s

    def close_until(self, time_s: float) -> None:
        """No request starts before this time (a crash)."""
        self._back_s = max(self._back_s, time_s)


class HostMemory:
    """The memory of a host, which serves one access after the other at its bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self.busy_s = 0.0

    def visit(self, now_s: float, size_bytes: float) -> float:
        """Delay from now until so many bytes have been read or written."""
        took_s = size_bytes / self._bytes_per_s
        if not took_s:
            return 0.0
        self.busy_s += took_s
        self._free_s = max(self._free_s, now_s) + took_s
        return self._free_s - now_s


class Bank:
    """All server processes at once: a fork-join visits every one of them."""

    def __init__(self, processes: int, cores: int | None, hosts: int, memory_rate: float) -> None:
        self._free = None if cores is None else np.zeros((processes, cores))
        self._back = np.zeros(processes)  # without a limit of cores: when a crash is over
        self._rows = np.arange(processes)
        self._memory_free = np.zeros(hosts)
        self._memory_rate = memory_rate if cores is not None else np.inf
        self._host_of = np.arange(processes) // -(-processes // hosts)
        self.busy_s = np.zeros(processes)
        self.memory_busy_s = np.zeros(hosts)
        self.visits = 0

    def visit_each(self, now_s: float, service_s: np.ndarray) -> np.ndarray:
        """Delay of a request to every server, float64 [processes]."""
        self.visits += 1
        self.busy_s += service_s
        if self._free is None:
            crashed: np.ndarray = np.maximum(self._back - now_s, 0.0) + service_s
            return crashed
        core = self._free.argmin(1)
        wait = np.maximum(self._free[self._rows, core] - now_s, 0.0)
        delays: np.ndarray = wait + service_s
        self._free[self._rows, core] = now_s + delays
        return delays

    def visit(self, now_s: float, service_s: np.ndarray, memory_bytes: np.ndarray) -> np.ndarray:
        """Delay until each server has answered; ``memory_bytes`` is per host, and so is the wait
        for memory."""
        delays = self.visit_each(now_s, service_s)
        if np.isfinite(self._memory_rate):
            took_s = memory_bytes / self._memory_rate
            self.memory_busy_s += took_s
            self._memory_free = np.maximum(self._memory_free, now_s) + took_s
            delays = np.maximum(delays, self._memory_free[self._host_of] - now_s)
        return delays

    def visit_one(
        self, now_s: float, process: int, service_s: float, memory_bytes: float = 0.0
    ) -> float:
        """Delay of a request to one server (messages resolved), whose memory is its host's."""
        self.busy_s[process] += service_s
        if self._free is None:
            return max(float(self._back[process]) - now_s, 0.0) + service_s
        cores = self._free[process]
        core = int(cores.argmin())
        delay = max(float(cores[core]) - now_s, 0.0) + service_s
        cores[core] = now_s + delay
        if np.isfinite(self._memory_rate):
            host, took_s = self._host_of[process], memory_bytes / self._memory_rate
            self.memory_busy_s[host] += took_s
            self._memory_free[host] = max(self._memory_free[host], now_s) + took_s
            delay = max(delay, self._memory_free[host] - now_s)
        return float(delay)

    def close_until(self, process: int, time_s: float) -> None:
        """No request of this server starts before this time (a crash)."""
        held = self._back if self._free is None else self._free
        held[process] = np.maximum(held[process], time_s)
