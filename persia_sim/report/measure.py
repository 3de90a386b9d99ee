"""Throughput of a run without its start, with an interval."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np

from persia_sim.base.rules import require
from persia_sim.bounds.closed_form import Answer, answer
from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import SlowDown
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import Run, simulate

NARROW = 0.01
"""Half of the 95 % interval of a rate, over the rate: what a run goes on for."""
FIRST_BATCHES = 6_400
"""Batches of all ranks with which a run of open length begins, where its steps are not typed."""
_WINDOWS = 8
_BLOCKS = 600
_T_975_OF_BATCHES = 2.571  # of 5 degrees of freedom
_BATCHES = 6
_T_975 = 2.179  # Student's t for 1.5 x 8 = 12 degrees of freedom


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95 % interval."""

    mean: float
    half_width: float
    values: int
    """Steps (or other values) behind it."""

    @property
    def relative(self) -> float:
        """Half width over mean."""
        return self.half_width / self.mean if self.mean else inf


def mean_interval(values: np.ndarray) -> Estimate:
    """Mean of a stationary series with a 95 % interval that knows its autocorrelation.

    It is the wider of two. One has the variance of the mean from the spectrum at zero: from the
    autocovariances at lags below n / 8, whole up to n / 16 and fading from there; about 12 degrees
    of freedom. That misses what remembers longer, and a start that still fades, so the other has it
    from the means of six batches. A series whose deviations cancel gets the narrow interval that
    it deserves, a drifting one a wide one.
    """
    n = len(values)
    mean = float(values.mean())

    # Too few values, or so many that means of blocks do.
    if n < 2 * _WINDOWS:
        return Estimate(mean, inf, n)
    if n > 2 * _BLOCKS:  # block means keep the spectrum at zero
        size = n // _BLOCKS
        few = mean_interval(values[: size * _BLOCKS].reshape(_BLOCKS, size).mean(1))
        return Estimate(mean, few.half_width, n)

    # The spectrum at zero, from the autocovariances.
    window = n // _WINDOWS
    off = values - mean
    spectrum = float(off @ off)
    for lag in range(1, window):
        spectrum += 2 * min(1.0, 2 - 2 * lag / window) * float(off[lag:] @ off[:-lag])
    spectrum /= 1 - 1.5 * window / n  # the mean was taken from the same values
    least = float(off @ off) / n  # never below what one of n values is worth
    half_width = _T_975 * sqrt(max(spectrum, least)) / n

    # Means of batches, of the last values where they do not come out even.
    size = n // _BATCHES
    means = values[n - size * _BATCHES :].reshape(_BATCHES, size).mean(1)
    of_batches = _T_975_OF_BATCHES * float(means.std(ddof=1)) / sqrt(_BATCHES)
    return Estimate(mean, max(half_width, of_batches), n)


def warm_up(durations: np.ndarray) -> int:
    """Steps to drop by MSER-5: where the standard error of the rest's mean is least."""
    blocks = len(durations) // 5
    if blocks < 4:
        return len(durations) // 4
    means = durations[: blocks * 5].reshape(blocks, 5).mean(1)
    rest = [float(means[k:].var() / (blocks - k)) for k in range(max(1, blocks // 3))]
    return 5 * int(np.argmin(rest))


def rank_durations(run: Run, first: int) -> np.ndarray:
    """Seconds of each rank's steps from a first one on, float64 [ranks, steps - first].

    Without a barrier a step that begins behind the end of some rank meets a run that empties
    itself: where that are more than a quarter of some rank's, and ten are left, the steps before
    stand in their place, over again. Fewer are noise.
    """
    ended = run.stamps[Mark.UPDATED]
    durations = np.diff(ended, axis=1, prepend=0.0)
    begun = (ended[:, :-1] < ended[:, -1].min()).sum(1) + 1
    if run.scenario.mode.has_barrier or begun.min() >= 0.75 * len(durations[0]):
        rest: np.ndarray = durations[:, first:]
        return rest
    ends = np.where(begun - first >= 10, begun, len(durations[0])).tolist()
    full = [seconds[first:end] for seconds, end in zip(durations, ends, strict=True)]
    return np.array([np.resize(seconds, len(durations[0]) - first) for seconds in full])


def step_durations(run: Run, first: int = 1) -> np.ndarray:
    """Seconds from the end of the step before to the end of each step, float64 [steps - first].

    In async each rank has steps of its own. The ranks' rates add up, so the series is the ranks'
    durations weighted such that its mean is the step time of the sum of rates. Step 0 lasts from
    the start of the run. Raises ValueError for a run of one step.
    """
    steps = run.scenario.steps
    require(steps >= 2, "steps", steps, "a time between steps needs >= 2")
    durations = rank_durations(run, first)[: 1 if run.scenario.mode.has_barrier else None]
    rates = 1 / durations.mean(1)
    weights = rates**2 * len(rates) / rates.sum() ** 2
    weighted: np.ndarray = (durations * weights[:, None]).sum(0)
    return weighted


def first_incident_s(run: Run) -> float:
    """When the first passing thing happens: a slow-down that begins or ends inside the run, or a
    server that stands still; infinite if nothing does."""
    instants = [inf]
    for event in run.scenario.disturbances:
        if not isinstance(event, SlowDown):
            instants.append(event.at_s)
        elif event.start_s > 0 or event.end_s < run.makespan_s:
            instants.append(event.start_s)
    return min(instants)


def _fill(scenario: Scenario) -> int:
    """Steps that are the start in any case: the window, and five."""
    return (scenario.steps_ahead or 0) + 5


def steady_steps(run: Run) -> range:
    """The steps that count: without the start, but with every step since the first incident.

    The start is what MSER-5 drops, at least the window and five steps. An incident is not a start:
    a rate without it would be that of a run that never had it.
    """
    durations = step_durations(run)
    steps = run.scenario.steps
    start = 1 + max(warm_up(durations), min(_fill(run.scenario), len(durations) // 2))
    ended = int((run.stamps[Mark.UPDATED] < first_incident_s(run)).sum(1).min())
    return range(min(start, ended), steps)


def step_time(run: Run) -> Estimate:
    """Seconds a step in the steady state, or since the first incident."""
    return mean_interval(step_durations(run, steady_steps(run).start))


def throughput(run: Run) -> Estimate:
    """Samples per second of all ranks in the steady state, with its 95 % interval.

    Where something happens to the run, all from there on counts. Raises ValueError for a run of one
    step.
    """
    step = step_time(run)
    mean = run.scenario.batch / step.mean
    return Estimate(mean, mean * step.relative, step.values)


def bound_of(run: Run) -> Answer:
    """What the closed form allows the steady steps, with the times that they have drawn."""
    steady = steady_steps(run)
    return answer(run.scenario, run.need, run.drawn(steady.start, steady.stop))


def first_steps(scenario: Scenario) -> int:
    """Steps with which a run of open length begins: fewer than the scenario's where its ranks are
    many, at least as many as an interval takes behind the start.

    >>> from persia_sim.presets.point import Point, scenario_of
    >>> [first_steps(scenario_of(Point(ranks=ranks))) for ranks in (64, 128, 1024)]
    [100, 50, 26]
    """
    least = 1 + _fill(scenario) + 2 * _WINDOWS
    return min(scenario.steps, max(least, FIRST_BATCHES // scenario.cluster.ranks))


def until_narrow(
    scenario: Scenario,
    half_width: float,
    most_steps: int,
    miss_rate: float = 0.0,
    watch: Callable[[Scenario], AbstractContextManager[Callable[[], object]]] | None = None,
) -> Run:
    """Simulate, with twice the steps until the throughput's 95 % interval is narrow enough, and the
    rate no further above its bound: queues that still fill let more in than they will let out.

    ``half_width`` is relative. A width falls with the root of the steps: those that would be too
    few by that are left out. A run that is not there at ``most_steps`` has what it has.
    ``miss_rate`` is the share of lookups whose row was evicted; ``watch`` is entered for each try
    and gives what is called at each push.
    """
    while True:
        with watch(scenario) if watch else nullcontext(lambda: None) as on_push:
            run = simulate(scenario, trace=True, need=demand(scenario, miss_rate), on_push=on_push)
        rate = throughput(run)
        most = (1 + half_width) * bound_of(run).samples_per_s
        if 2 * scenario.steps > most_steps or (rate.relative <= half_width and rate.mean <= most):
            return run
        steps = 2 * scenario.steps
        if rate.half_width < inf and half_width:
            enough = scenario.steps * (rate.relative / half_width) ** 2
            while 2 * steps <= min(enough, most_steps):
                steps *= 2
        scenario = replace(scenario, steps=steps)
