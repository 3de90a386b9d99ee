"""The runs below a folder as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from experiments.registry.found import Run, State, runs_below
from experiments.tables import aligned
from persia_sim.words.rules import counted

HEADER = ("folder", "mode", "tau", "ranks", "data", "seed", "AUC", "when (UTC)", "commit", "state")


def listing(root: Path) -> str:
    """The table, with one line of counts and one about each run that cannot be used."""
    runs = list(runs_below(root))
    if not runs:
        return f"no runs in {root}"
    lines = [aligned(HEADER, [cells(run, root) for run in runs]), counts(runs)]
    lines += [f"{_name(run, root)}: {run.why.splitlines()[0]}" for run in runs if run.why]
    return "\n".join(lines)


def cells(run: Run, root: Path) -> list[str]:
    """One line of the table."""
    tau = "-" if run.mode in ("sync", "lookahead", "-") else str(run.tau)
    return [
        _name(run, root),
        run.mode,
        "unbounded" if tau == "None" else tau,
        str(run.sync.get("ranks", "-")),
        run.data,
        "-" if run.seed is None else str(run.seed),
        "-" if run.auc is None else f"{run.auc:.4f}",
        run.started.replace("T", " ").removesuffix("Z"),
        run.commit,
        run.state,
    ]


def counts(runs: Sequence[Run]) -> str:
    """How many, and in which states."""
    states = Counter(run.state for run in runs)
    told = ", ".join(f"{states[name]} {name}" for name in get_args(State) if states[name])
    return f"{counted(len(runs), 'run')}: {told}"


def _name(run: Run, root: Path) -> str:
    return "." if run.folder == root else str(run.folder.relative_to(root))
