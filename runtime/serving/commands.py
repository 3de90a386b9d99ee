"""`evaluate` and `export`: their options, checks, tables and files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Annotated, Any

from persia_sim.words.command_line import POSITIONAL, read_options
from persia_sim.words.rules import printable
from persia_sim.words.schema import Within, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate a trained model on a test part: AUC and log-loss of each task."""

    run: Annotated[Path, POSITIONAL]
    """Folder of a run, whose best (`--keep-best`) or newest checkpoint is taken, or of one."""
    data: str | None = None
    """Another data set with the same fields, dense features and tasks; else the run's own."""
    data_dir: Path | None = None
    """Folder with the real data sets, as in training."""
    test_rows: Annotated[int | None, Within(2, 2**62)] = None
    """Only the first rows of the test part, >= 2; of the run's own data as in training."""
    out: Path | None = None
    """JSON file to write; an earlier evaluation in its place is replaced."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Write a trained model as files for others: rows as parquet, the network by torch.export."""

    run: Annotated[Path, POSITIONAL]
    """Folder of a run, whose best (`--keep-best`) or newest checkpoint is taken, or of one."""
    out: Path
    """Folder to make; nothing is overwritten."""


def evaluate(arguments: Sequence[str]) -> None:
    """Print a line a task, and write the JSON file that was asked for."""
    options = read_options(Evaluate, arguments, "persia-runtime evaluate")
    if options.out is not None:
        _ensure_place(options.out)
    from runtime.serving.evaluation import evaluate_run

    found = evaluate_run(
        options.run,
        data=options.data,
        data_dir=options.data_dir,
        test_rows=options.test_rows,
        on_warning=warn,
    )
    if options.out is not None:
        from runtime.run.folder import write_json

        write_json(options.out, found)
    print(printable(describe(found), keep="\n"))
    if options.out is not None:
        print(f"written: {options.out}")


def export(arguments: Sequence[str]) -> None:
    """Write the folder and say what lies in it."""
    options = read_options(Export, arguments, "persia-runtime export")
    from runtime.checkpoint.whole import find_checkpoint
    from runtime.serving.exported import export as write
    from runtime.serving.exported import refuse_place
    from runtime.serving.trained import open_trained

    refuse_place(options.out)
    trained = open_trained(find_checkpoint(options.run, warn), device="cpu", on_warning=warn)
    found = write(trained, options.out)
    kind = "a torch.export program"
    if found.why_weights:
        kind = f"a state dict, because torch.export did not take it ({found.why_weights})"
    print(printable(f"dense network: {found.dense}, {kind}"))
    for table, rows in found.rows.items():
        print(f"table {printable(table)}: {rows:,} rows")
    print(f"exported {found.file_bytes:,} bytes: {found.folder}")


def describe(found: dict[str, Any]) -> str:
    """What a person reads after an evaluation."""
    tasks = {name: score for name, score in found["tasks"].items() if "rmse" not in score}
    numbers = {name: score for name, score in found["tasks"].items() if "rmse" in score}
    width = max(len(name) for name in (*tasks, "task"))
    grouped = any(score.get("gauc_groups") for score in tasks.values())
    lines = [
        f"{found['checkpoint']}, after {found['samples']:,} samples",
        f"data: {found['data_says']}; {found['rows_evaluated']:,} evaluated",
    ]
    for name, score in numbers.items():
        lines.append(
            f"{name}: RMSE {score['rmse']:.4g}, MAE {score['mae']:.4g}; RMSE of always saying"
            f" {score['label_rate']:.4g}: {math.sqrt(score['trivial_mse']):.4g}"
        )
    if tasks:
        lines.append(
            f"{'task':<{width}}     AUC  log-loss  label rate  log-loss of the rate"
            f"  calibration{'    GAUC' if grouped else ''}"
        )
    for name, score in tasks.items():
        known = {key: nan if value is None else value for key, value in score.items()}
        auc, loss, gauc = known["auc"], known["log_loss"], known.get("gauc", nan)
        lines.append(
            f"{name:<{width}}  {auc:.4f}    {loss:.4f}      {score['label_rate']:.4f}"
            f"                {score['trivial_log_loss']:.4f}"
            f"       {known['calibration']:6.3f}{f'  {gauc:.4f}' if grouped else ''}"
        )
    for name, score in tasks.items():
        if at_top := ", ".join(f"{key} {v:.4f}" for key, v in score.items() if "@" in key and v):
            lines.append(f"{name}: {at_top} within the groups")
    from runtime.run.evaluate import told_of_rows

    lines += told_of_rows(found["ids_with_row"], "test")
    lines += [f"warning: {text}" for text in found["warnings"]]
    return "\n".join(lines)


def warn(text: str) -> None:
    """Tell a person on stderr."""
    print(printable(f"warning: {text}", keep="\n"), file=sys.stderr)


def _ensure_place(out: Path) -> None:
    """Before any work: whether the file can be written, and what it would replace."""
    if out.is_dir():
        raise ValueError(f"out {out} is a folder; name a file, such as {out / 'evaluation.json'}")
    if out.exists() and not _is_evaluation(out):
        raise ValueError(
            f"out {out} is a file that is no evaluation; it would be lost: name another"
        )
    out.parent.mkdir(parents=True, exist_ok=True)


def _is_evaluation(file: Path) -> bool:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"checkpoint", "tasks"} <= set(found)
