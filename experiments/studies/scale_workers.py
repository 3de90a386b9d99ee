"""Throughput against the number of workers: published bars beside the simulator's."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from experiments.options import SimulatedSteps, StudyOptions
from experiments.published.compare import Row, kwai, public, table
from experiments.tables import drawn, write_csv


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StudyOptions):
    """Taobao, Avazu, Criteo and Kwai, every system and mode that was published."""

    steps: SimulatedSteps = 80
    """Simulated steps of a point."""


def run(options: Options) -> None:
    """Simulate every point, write the table and the figure, print the signed errors."""
    rows = [*public(steps=options.steps), *kwai(steps=options.steps)]
    path = write_csv(options.out / "scale_workers.csv", records(rows))
    print(table(rows))
    print(summary(rows))
    print(f"{len(rows)} points in {path}; {drawn(path)}")


def records(rows: list[Row]) -> list[dict[str, object]]:
    """Rows for a CSV, with the error."""
    return [asdict(row) | {"error": row.error} for row in rows]


def summary(rows: list[Row]) -> str:
    """Mean and largest absolute error of fits and of predictions."""
    lines = []
    for kind in ("fit", "prediction"):
        errors = [abs(r.error) for r in rows if r.kind == kind and r.error is not None]
        if errors:
            mean = sum(errors) / len(errors)
            lines.append(
                f"{kind}: {len(errors)} points, mean |error| {mean:.1%}, largest {max(errors):.1%}"
            )
    return "\n".join(lines)
