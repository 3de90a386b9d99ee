"""Interleaved windows: every candidate in turn, round after round, loaded windows refused.

And what else the machine did meanwhile, which makes a window a loaded one.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from experiments.options import StudyOptions
from experiments.result_cache import children_of, cpu_s_of
from experiments.statistics import Ratio, paired_ratio
from persia_sim.base.schema import Within

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


ForeignCores = Annotated[float, Within(0, 1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(StudyOptions):
    """Options of a bench whose candidates take turns."""

    most_foreign_cores: ForeignCores = 0.15
    """A window in which other processes used more cores than this is measured once more; then it is
    left out where others suffice."""


@dataclass(frozen=True, slots=True)
class Window:
    """One measurement of one candidate."""

    round: int
    name: str
    value: float
    """The result, in the candidate's own unit."""
    foreign_cores: float
    """Cores that other processes used meanwhile."""
    quiet: bool
    """Whether that was little enough for the window to count."""
    faults: int = 0
    """Pages of memory that this process touched for the first time."""
    system_s: float = 0.0
    """CPU seconds that the kernel worked for this process."""


def interleave(
    candidates: Mapping[str, Callable[[], float]],
    rounds: int,
    most_foreign_cores: float,
    title: str = "windows",
    *,
    warm_up: bool = False,
    on_window: Callable[[Window], object] = lambda window: None,
) -> list[Window]:
    """Measure all candidates once a round; a loaded window is repeated once, then kept as such.

    ``title``: that of the progress bar. ``warm_up``: each is measured once before, which does not
    count: what is loaded and allocated once is no part of a comparison. ``on_window`` is given each
    window as soon as it is there.
    """
    from persia_sim.base.progress import Progress

    windows = []
    for measure in candidates.values() if warm_up else ():
        measure()
    with Progress(total=rounds * len(candidates), desc=title) as bar:
        for number in range(rounds):
            for name, measure in candidates.items():
                # Once more where other processes took too much meanwhile.
                for _ in range(2):
                    before = resource.getrusage(resource.RUSAGE_SELF)
                    with ForeignLoad() as load:
                        value = measure()
                    after = resource.getrusage(resource.RUSAGE_SELF)
                    quiet = load.cores <= most_foreign_cores
                    if quiet:
                        break
                faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
                system_s = after.ru_stime - before.ru_stime
                windows.append(
                    Window(number, name, value, load.cores, quiet, faults, round(system_s, 3))
                )
                on_window(windows[-1])
                bar.update()
    return windows


@dataclass(frozen=True, slots=True)
class Summary:
    """Windows of one candidate summarized: over quiet ones where there are at least three, else
    over all."""

    name: str
    median: float
    low: float
    high: float
    quiet: int
    windows: int
    foreign_cores: float
    """Median over the windows used."""

    @property
    def clean(self) -> bool:
        """Whether only quiet windows were used."""
        return self.quiet >= 3


def summarize(windows: Sequence[Window], name: str) -> Summary:
    """Median and extremes of one candidate."""
    of_name = [w for w in windows if w.name == name]
    quiet = [w for w in of_name if w.quiet]
    used = quiet if len(quiet) >= 3 else of_name
    values = [w.value for w in used]
    return Summary(
        name=name,
        median=float(np.median(values)),
        low=min(values),
        high=max(values),
        quiet=len(quiet),
        windows=len(of_name),
        foreign_cores=float(np.median([w.foreign_cores for w in used])),
    )


MOST_DRIFT = 0.1
"""Share by which the last third of a candidate's windows may differ from the first."""


def drift(windows: Sequence[Window], name: str) -> str:
    """A sentence where a candidate became slower or faster over the rounds, and its windows do not
    measure one thing; else "". By medians of thirds, of six windows at least."""
    values = [w.value for w in sorted(windows, key=lambda w: w.round) if w.name == name]
    third = len(values) // 3
    if third < 2:
        return ""
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    if abs(last / first - 1) <= MOST_DRIFT:
        return ""
    return f"drifts: its last third is {last / first:.2f} of its first, so its ratios mean nothing"


def verdict(ratio: Ratio, goal: float) -> str:
    """Whether a ratio reaches its goal: its whole interval does, or none of it, or neither.

    A loaded machine decides nothing.
    """
    word = "not decided"
    if ratio.low >= goal:
        word = "met"
    elif ratio.high < goal:
        word = "MISSED"
    return word if ratio.clean else f"not decided, the machine was loaded (would be {word})"


def ratio_of(windows: Sequence[Window], name: str, base: str) -> Ratio:
    """``name / base`` over the rounds; loaded pairs count only when quiet ones are too few."""
    by_key = {(w.round, w.name): w for w in windows}
    rounds = sorted({w.round for w in windows})
    pairs = [(by_key[r, name], by_key[r, base]) for r in rounds]
    quiet = [(a, b) for a, b in pairs if a.quiet and b.quiet]
    clean = len(quiet) >= 3
    used = quiet if clean else pairs
    return paired_ratio([a.value for a, _ in used], [b.value for _, b in used], clean)


class ForeignLoad:
    """Cores that other processes used while the body ran (Linux; elsewhere the load average).

    >>> with ForeignLoad() as load: pass
    >>> load.cores >= 0
    True
    """

    def __enter__(self) -> ForeignLoad:
        self.cores = 0.0
        self._start = time.perf_counter(), _busy_s(), cpu_s_of_this()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s = max(time.perf_counter() - self._start[0], 1e-3)
        busy_s = _busy_s()
        if busy_s is None or self._start[1] is None:
            self.cores = max(0.0, os.getloadavg()[0] - 1)
            return
        foreign_s = (busy_s - self._start[1]) - (cpu_s_of_this() - self._start[2])
        self.cores = max(0.0, foreign_s / wall_s)


def _busy_s() -> float | None:
    """CPU seconds of all processes since boot."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, *_ = (int(f) for f in fields)
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def cpu_s_of_this() -> float:
    """CPU seconds of this process and its descendants, those that still run too (servers)."""
    used = os.times()
    ended = used.children_user + used.children_system
    return time.process_time() + ended + sum(map(cpu_s_of, children_of()))
