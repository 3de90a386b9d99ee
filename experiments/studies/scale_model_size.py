"""Throughput against the size of the model at 6.25 to 100 trillion parameters, and what binds."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.options import SimulatedSteps, StudyOptions
from experiments.published.compare import candidates, model_size, table
from experiments.studies.scale_workers import records, summary
from experiments.tables import drawn, write_csv
from experiments.tables import table as shown
from persia_sim.presets.costs import EVERY, FITS

SUSPECT_STEPS = 60  # a run of each suspect, batch and mode; enough for a rate within a per cent


SUSPECTS = {
    "suspect": "{suspect}",
    "batch a rank": "{batch_per_rank}",
    "would need": "{would_need}",
    "async (fit)": "{error_async:+.1%}",
    "hybrid": "{error_hybrid:+.1%}",
    "sync": "{error_sync:+.1%}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StudyOptions):
    """Five sizes in hybrid, three modes at 100T, and suspects for what binds there."""

    steps: SimulatedSteps = 160
    """Simulated steps of a point."""
    suspects: bool = True
    """Also slow one resource at a time until it explains the published async rate."""


def run(options: Options) -> None:
    """Simulate, write the tables and the figure, print the signed errors."""
    rows = list(model_size(steps=options.steps))
    path = write_csv(options.out / "scale_model_size.csv", records(rows))
    print(table(rows))
    print(summary(rows))
    sizes = [row for row in rows if row.series.endswith("hybrid")]
    held_out = []
    for row in sizes:
        others = [r.published for r in sizes if r is not row and r.published]
        level = sum(others) / len(others)
        held_out.append(abs(level / (row.published or level) - 1))
    print(
        f"one level fitted to four sizes, the fifth held out: mean |error| "
        f"{sum(held_out) / len(held_out):.1%}, largest {max(held_out):.1%}"
    )
    shared, own = FITS[EVERY], FITS["gcp-100t"]
    print(f"fitted constants: {len(shared)} of {EVERY} ({', '.join(shared)})")
    print(f"and {len(own)} of this one ({', '.join(own)})")
    if options.suspects:
        found = candidates(steps=min(options.steps, SUSPECT_STEPS))
        lines = [
            {"suspect": c.name, "batch_per_rank": c.batch_per_rank, "would_need": c.constant}
            | {f"error_{mode}": error for mode, error in c.errors.items()}
            for c in found
        ]
        write_csv(options.out / "scale_model_size_suspects.csv", lines)
        print("\none resource alone slowed until async fits; the rest nominal")
        print(shown(lines, SUSPECTS))
    print(f"{len(rows)} points in {path}; {drawn(path)}")
