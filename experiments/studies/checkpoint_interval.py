"""Throughput lost to crashes and checkpoints in simulated runs, beside Young's and Daly's formulas.

In modes with a common step a rank's crash takes all ranks back to the last checkpoint; in the
asynchronous ones that rank alone, which Daly's formula, made for a job that goes back whole, does
not describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import Annotated, Any

from experiments.options import (
    PAPER_MODES,
    OneOf,
    Planned,
    Positive,
    Ranks,
    Seeds,
    SimulatedSteps,
    Some,
)
from experiments.result_cache import ResultCache
from experiments.statistics import t_interval
from experiments.tables import Column, leave, table
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of
from persia_sim.cluster.incidents import (
    Checkpoints,
    Recovery,
    best_interval_s,
    overhead,
    random_crashes,
    young_interval_s,
)
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import CLUSTERS, workloads

LEAST_STEPS_TO_A_CRASH = 4
MOST_SEGMENT = 4.0  # mean times between crashes; e^4 = 55 attempts at each interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """A run of hours in small: only the ratios of the four times matter."""

    cluster: Annotated[str, OneOf(CLUSTERS)] = "v100-paper"
    """A preset of the simulator."""
    workload: Annotated[str, OneOf(workloads())] = "kwai-video"
    """A preset of the simulator."""
    ranks: Ranks = 8
    """GPUs."""
    steps: SimulatedSteps = 400
    """Steps of a run."""
    modes: Some[Mode] = PAPER_MODES
    """Modes to compare."""
    crashes: Some[Positive] = (3.0, 12.0)
    """Expected crashes of a rank in a run that redoes nothing: a rate of crashes each."""
    checkpoint_share: Annotated[Positive, Within(0, 1)] = 5e-4
    """Time of one checkpoint over the time of the run without crashes."""
    back_share: Annotated[float, Within(0, 1)] = 3e-3
    """Detection, restart and load over the same."""
    factors: Some[Positive] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Intervals, in units of Young's."""
    seeds: Seeds = 12
    """Runs of an interval, each with crashes of its own."""

    def _check(self) -> None:
        # Steps must end between crashes.
        most = self.steps / LEAST_STEPS_TO_A_CRASH
        if max(self.crashes) > most:
            raise ValueError(
                f"crashes must be <= steps / {LEAST_STEPS_TO_A_CRASH} = {most:g}, or no step would"
                f" end before the next one, got {max(self.crashes):g}"
            )

        # A run must get past an interval now and then; all in mean times between crashes.
        for crashes, factor in product(self.crashes, self.factors):
            checkpoint = self.checkpoint_share * crashes
            segment = factor * sqrt(2 * checkpoint) + checkpoint + self.back_share * crashes
            if segment > MOST_SEGMENT:
                raise ValueError(
                    f"factors must leave time to work between crashes: {factor:g} x Young's"
                    f" interval with checkpoint and recovery must be <= {MOST_SEGMENT:g} mean times"
                    f" between crashes, got {segment:.3g}; use fewer crashes, or a smaller factor,"
                    " checkpoint_share or back_share"
                )


def run(options: Options) -> None:
    """Simulate every interval with every seed, write the table, print it beside the formulas."""
    cells = list(product(options.crashes, options.factors, range(options.seeds)))
    if options.dry_run:
        runs = len(options.modes) * (1 + len(cells))
        time = options.duration("modes", "crashes", "factors", "seeds", "steps", "ranks")
        left = f"but for those in {options.out}"
        print(f"{runs} simulated runs of {options.steps} steps, {left}; {time}")
        return

    # How long each mode takes when nothing crashes and nothing is written.
    size = {name: getattr(options, name) for name in ("cluster", "workload", "ranks", "steps")}
    scenarios = [scenario_of(Simulation(mode=mode, **size)) for mode in options.modes]
    results = ResultCache(options.out / "runs.jsonl")
    useful_s = results.of(
        lambda scenario: simulate(scenario).makespan_s, [(s,) for s in scenarios], "undisturbed"
    )

    # Crashes and checkpoints are rates of that time; every interval with every seed.
    calls = [
        (scenario, mode_s, policy_of(options, mode_s, cell[0]), *cell)
        for scenario, mode_s in zip(scenarios, useful_s, strict=True)
        for cell in cells
    ]
    records: list[dict[str, Any]] = results.of(interrupted, calls, "simulations")

    # The measured table, and what the formulas say of the first mode.
    print(table(over_seeds(records), _columns_of(options.seeds)))
    for crashes in options.crashes:
        policy = policy_of(options, useful_s[0], crashes)
        best_s = best_interval_s(policy)
        print(
            f"{options.modes[0]}, {crashes:g} crashes: Young"
            f" {young_interval_s(policy.checkpoint_s, policy.mtbf_s):.3f} s, best by Daly's form"
            f" {best_s:.3f} s ({overhead(policy, best_s):.1%} longer); an interval ends with a step"
        )
    leave(options, {"": records}, drawn_first=1)


def policy_of(options: Options, useful_s: float, crashes: float) -> Recovery:
    """What crashes and checkpoints cost a run that would take ``useful_s`` without them."""
    return Recovery(
        mtbf_s=useful_s / crashes,
        checkpoint_s=useful_s * options.checkpoint_share,
        back_s=useful_s * options.back_share,
    )


def interrupted(
    scenario: Scenario, useful_s: float, policy: Recovery, crashes: float, factor: float, seed: int
) -> dict[str, Any]:
    """A line: what a run with crashes took longer than its ``useful_s`` without."""
    # Crashes are drawn for long enough: no run takes 20 times as long.
    young_s = young_interval_s(policy.checkpoint_s, policy.mtbf_s)
    checkpoints = Checkpoints(interval_s=factor * young_s, write_s=policy.checkpoint_s)
    crashing = random_crashes(
        policy.mtbf_s, 20 * useful_s, scenario.cluster.ranks, policy.back_s, seed
    )
    result = simulate(replace(scenario, checkpoints=checkpoints, disturbances=crashing))

    # An interval ends with a step, so the formula gets the interval that came about.
    actual_s = useful_s / max(1, result.losses.checkpoints)
    lost = result.makespan_s / useful_s - 1
    return {
        "mode": str(scenario.mode),
        "crashes_expected": crashes,
        "factor": factor,
        "seed": seed,
        "useful_s": useful_s,
        "interval_s": checkpoints.interval_s,
        "interval_kept_s": actual_s,
        "overhead": lost,
        "throughput_lost": lost / (1 + lost),
        "overhead_closed_form": overhead(policy, actual_s),
        "redone_s": result.losses.redone_s,
        "down_s": result.losses.down_s,
        "writing_s": result.losses.writing_s,
        "crashes": result.losses.crashes,
    }


def over_seeds(records: Sequence[dict[str, Any]]) -> list[Any]:
    """A row for each mode, rate of crashes and interval, in the order of the runs."""
    import pandas as pd  # late: a second to import

    groups = pd.DataFrame(records).groupby(["mode", "crashes_expected", "factor"], sort=False)
    rows = groups.agg(
        requested_s=("interval_s", "first"),
        actual_s=("interval_kept_s", "mean"),
        lost=("throughput_lost", t_interval),
        daly=("overhead_closed_form", "mean"),
    )
    return list(rows.reset_index().itertuples())


def _columns_of(seeds: int) -> dict[str, Column]:
    error = " ± {lost.half_width:.1%}" if seeds > 1 else ""
    return {
        "mode": "{mode}",
        "crashes": "{crashes_expected:g}",
        "interval": "{factor:g} x Young",
        "asked s": "{requested_s:.3f}",
        "kept s": "{actual_s:.3f}",
        f"throughput lost (95 %, n={seeds})": f"{{lost.mean:.1%}}{error}",
        "Daly": lambda row: f"{row.daly / (1 + row.daly):.1%}",
    }
