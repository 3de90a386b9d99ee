"""The CSVs that describe what others have measured: the options that name them, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.published.descriptions import nodes_of, rankers_of
from experiments.published.gpu_rows import Measured, measured_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFiles:
    """The options of every study over such CSVs."""

    rows: tuple[Path, ...] = ()
    """Lines of measurements: workload, system, framework, precision, gpus, global_batch and the
    like; measured columns may be empty where only a prediction is asked for."""
    workloads: Path = Path()
    """What the workloads of the rows are made of."""
    systems: Path = Path()
    """What the systems of the rows are made of."""
    tables: Path | None = None
    """Tables of each workload; default: workload_tables.csv beside the workloads, if there."""

    def check(self, needed: bool, **others: Path | tuple[Path, ...]) -> None:
        """Raise ValueError naming the first option whose file is not there, or that is needed and
        not given."""
        given = {"rows": self.rows, "workloads": self.workloads, "systems": self.systems}
        files(**given, **others, tables=self.tables or ())
        if needed:
            files(needed=True, **given)

    def load(self, rows: Sequence[Path]) -> tuple[list[Measured], list[str]]:
        """All lines of some files as jobs, and why others are left out. Raises ValueError where
        they give none."""
        beside = self.workloads.with_name("workload_tables.csv")
        tables = self.tables or (beside if beside.is_file() else None)
        rankers, nodes = rankers_of(self.workloads, tables), nodes_of(self.systems)
        found: list[Measured] = []
        left_out: list[str] = []
        ids: set[str] = set()
        for file in rows:
            known, missing = measured_of(file, rankers, nodes, ids)
            found += known
            left_out += missing
        if not found:
            first = left_out[0] if left_out else "no file was named"
            raise ValueError(f"rows give nothing to predict: {first}")
        return found, left_out


def files(needed: bool = False, **options: Path | tuple[Path, ...]) -> None:
    """Raise ValueError naming the first option whose file is not there, or that is not given."""
    for name, value in options.items():
        named = [
            path for path in ((value,) if isinstance(value, Path) else value) if path != Path()
        ]
        if needed and not named:
            raise ValueError(f"{name} must name a CSV file, got none")
        for path in named:
            if not path.is_file():
                raise ValueError(f"{name} {path} is missing; name a CSV with a header line")
