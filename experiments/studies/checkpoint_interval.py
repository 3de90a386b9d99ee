"""Time between checkpoints: crashes inside simulated runs against Young's and Daly's formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import stdev

from experiments.checks import (
    RANKS,
    SEEDS,
    SIMULATED_STEPS,
    all_positive,
    between,
    known,
    not_empty,
    positive,
)
from experiments.tables import aligned, write_csv
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of
from persia_sim.engine.simulate import simulate
from persia_sim.model.checkpointing import (
    Recovery,
    best_interval_s,
    cpr_illustration,
    overhead,
    random_crashes,
    young_interval_s,
)
from persia_sim.model.incidents import Checkpoints
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.vocabulary import Mode

LEAST_STEPS_TO_A_CRASH = 4
MOST_SEGMENT = 4.0  # mean times between crashes; e^4 = 55 attempts at each interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run of hours in small: only the ratios of the four times matter."""

    cluster: str = "v100-paper"
    """A preset of the simulator."""
    workload: str = "kwai-video"
    """A preset of the simulator."""
    ranks: int = 8
    """GPUs."""
    steps: int = 400
    """Steps of a run."""
    crashes: float = 12.0
    """Expected crashes of a rank in a run that redoes nothing."""
    checkpoint_share: float = 5e-4
    """Time of one checkpoint over the time of the run without crashes."""
    back_share: float = 3e-3
    """Detection, restart and load over the same."""
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Intervals, in units of Young's."""
    seeds: int = 12
    """Runs of an interval, each with crashes of its own."""
    out: Path = Path("runs/checkpoint-interval")
    """Folder of the table."""

    def __post_init__(self) -> None:
        known(CLUSTERS, cluster=self.cluster)
        known(workloads(), workload=self.workload)
        between(*RANKS, ranks=self.ranks)
        between(*SIMULATED_STEPS, steps=self.steps)
        positive(crashes=self.crashes, checkpoint_share=self.checkpoint_share)
        between(0, 1, back_share=self.back_share)
        between(0, 1, checkpoint_share=self.checkpoint_share)
        between(*SEEDS, seeds=self.seeds)
        not_empty(factors=self.factors)
        all_positive(factors=self.factors)
        self._makes_progress()

    def _makes_progress(self) -> None:
        """Where crashes come faster than work is saved, a run would never end."""
        most = self.steps / LEAST_STEPS_TO_A_CRASH
        if self.crashes > most:
            raise ValueError(
                f"crashes must be <= steps / {LEAST_STEPS_TO_A_CRASH} = {most:g}, or no step would"
                f" end before the next one, got {self.crashes:g}"
            )
        checkpoint = self.checkpoint_share * self.crashes  # all in mean times between crashes
        for factor in self.factors:
            segment = factor * sqrt(2 * checkpoint) + checkpoint + self.back_share * self.crashes
            if segment > MOST_SEGMENT:
                raise ValueError(
                    f"factors must leave time to work between crashes: {factor:g} x Young's"
                    f" interval with checkpoint and recovery must be <= {MOST_SEGMENT:g} mean times"
                    f" between crashes, got {segment:.3g}; use fewer crashes, or a smaller factor,"
                    " checkpoint_share or back_share"
                )


def run(options: Options) -> None:
    """Simulate every interval with every seed, write the table, print it beside the formulas."""
    from tqdm import tqdm

    scenario = scenario_of(
        Simulation(
            cluster=options.cluster,
            workload=options.workload,
            ranks=options.ranks,
            mode=Mode.HYBRID,
            steps=options.steps,
        )
    )
    useful_s = simulate(scenario).makespan_s
    policy = Recovery(
        mtbf_s=useful_s / options.crashes,
        checkpoint_s=useful_s * options.checkpoint_share,
        back_s=useful_s * options.back_share,
    )
    young_s = young_interval_s(policy.checkpoint_s, policy.mtbf_s)
    records = []
    points = [(factor, seed) for factor in options.factors for seed in range(options.seeds)]
    for factor, seed in tqdm(points, disable=None):
        written = Checkpoints(interval_s=factor * young_s, write_s=policy.checkpoint_s)
        crashes = random_crashes(policy.mtbf_s, 20 * useful_s, options.ranks, policy.back_s, seed)
        found = simulate(replace(scenario, checkpoints=written, disturbances=crashes))
        kept_s = useful_s / max(1, found.losses.checkpoints)
        records.append(
            {
                "factor": factor,
                "seed": seed,
                "interval_s": written.interval_s,
                "interval_kept_s": kept_s,
                "overhead": found.makespan_s / useful_s - 1,
                "overhead_closed_form": overhead(policy, kept_s),
                "redone_s": found.losses.redone_s,
                "down_s": found.losses.down_s,
                "writing_s": found.losses.writing_s,
                "crashes": found.losses.crashes,
            }
        )
    path = options.out / "checkpoint_interval.csv"
    write_csv(path, records)
    rows = []
    for factor in options.factors:
        own = [r for r in records if r["factor"] == factor]
        values = [r["overhead"] for r in own]
        mean = sum(values) / len(values)
        error = "" if len(values) < 2 else f" ± {stdev(values) / sqrt(len(values)):.1%}"
        closed = sum(r["overhead_closed_form"] for r in own) / len(own)
        rows.append(
            [
                f"{factor:g} x Young",
                f"{factor * young_s:.3f}",
                f"{sum(r['interval_kept_s'] for r in own) / len(own):.3f}",
                f"{mean:.1%}{error}",
                f"{closed:.1%}",
            ]
        )
    header = ["interval", "asked s", "kept s", f"overhead (n={options.seeds}, s.e.)", "Daly"]
    print(aligned(header, rows))
    best_s = best_interval_s(policy)
    print(
        f"Young {young_s:.3f} s, best by Daly's form {best_s:.3f} s "
        f"({overhead(policy, best_s):.1%}); an interval ends with a step"
    )
    cpr = cpr_illustration()
    print(
        f"illustration of CPR's figures: full recovery {cpr['full']:.1%}, partial "
        f"{cpr['partial']:.1%} (a crash every 28 h, 5 min a checkpoint, 2 min to be back: assumed)"
    )
    print(path)
