"""What else the machine was doing while something was measured."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Cores that other processes used while the body ran (Linux; elsewhere the load average).

    >>> with ForeignLoad() as load: pass
    >>> load.cores >= 0
    True
    """

    def __enter__(self) -> ForeignLoad:
        self.cores = 0.0
        self._start = time.perf_counter(), _busy_s(), own_cpu_s()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wall_s = max(time.perf_counter() - self._start[0], 1e-3)
        busy_s = _busy_s()
        if busy_s is None or self._start[1] is None:
            self.cores = max(0.0, os.getloadavg()[0] - 1)
            return
        foreign_s = (busy_s - self._start[1]) - (own_cpu_s() - self._start[2])
        self.cores = max(0.0, foreign_s / wall_s)


def _busy_s() -> float | None:
    """CPU seconds of all processes since boot."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, *_ = (int(f) for f in fields)
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def own_cpu_s() -> float:
    """CPU seconds of this process and its children, those that still run too (servers)."""
    used = os.times()
    ended = used.user + used.system + used.children_user + used.children_system
    return ended + sum(map(_used_s, _living_children()))


def _living_children() -> list[str]:
    found: list[str] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += file.read_text().split()
    return found


def _used_s(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # user and system ticks
