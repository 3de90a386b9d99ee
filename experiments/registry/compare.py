"""Two runs beside each other: options, scores, curves, and whether they differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.registry.runs import RunFolder, the_run
from experiments.statistics import delong
from experiments.tables import aligned
from runtime.run.folder import read_metrics, read_predictions

SHOWN_SNAPSHOTS = 12
ABSENT = "(not there)"


def comparison(first: Path, second: Path) -> str:
    """Two runs beside each other, as text. Raises ValueError where they cannot be held against each
    other."""
    for folder in (first, second):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; `runs list` shows those that are there")
    return _runs(the_run(first), the_run(second))


def _runs(first: RunFolder, second: RunFolder) -> str:
    # Options that differ.
    parts = [f"A  {first.folder}   {first.state}", f"B  {second.folder}   {second.state}", ""]
    unlike = differences(first.typed_options(), second.typed_options())
    if unlike:
        parts.append(aligned(["option", "A", "B"], [list(line) for line in unlike]))
    else:
        parts.append("every option is the same")

    # What differs of the data: their bytes, their split, how many rows they have.
    what = differences(_data(first), _data(second))
    if what:
        parts += ["", aligned(["data", "A", "B"], [list(line) for line in what])]
    elif _data(first):
        parts.append(f"the data are the same (sha256 {_data(first)['sha256'][:12]})")

    # What differs of the machine and the versions.
    where = differences(_where(first), _where(second))
    if where:
        parts += ["", aligned(["environment", "A", "B"], [list(line) for line in where])]

    # Scores, whether they differ, and the curves.
    parts += ["", _scores(first, second), _significance(first, second)]
    return "\n".join(line for line in [*parts, _curves(first, second)] if line is not None)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name and both values wherever they differ, in the first one's order."""
    names = dict.fromkeys([*first, *second])
    pairs = ((name, first.get(name, ABSENT), second.get(name, ABSENT)) for name in names)
    return [(name, str(a), str(b)) for name, a, b in pairs if a != b]


_OF_DATA = ("name", "sha256", "split", "train_rows", "test_rows", "rows_skipped")


def _data(run: RunFolder) -> dict[str, str]:
    """What a run that has ended says of its data; empty of any other."""
    data = run.summary.get("data")
    return {name: str(data.get(name)) for name in _OF_DATA} if isinstance(data, dict) else {}


def _where(run: RunFolder) -> dict[str, str]:
    about = run.environment
    packages = about.get("packages")
    versions = packages if isinstance(packages, dict) else {}
    chosen = {name: str(about.get(name, "-")) for name in ("python", "cpu", "cores")}
    return {"commit": run.commit, **chosen, **{k: str(v) for k, v in versions.items()}}


def _scores(first: RunFolder, second: RunFolder) -> str:
    shared = [task for task in first.tasks if task in second.tasks]
    if not shared:
        return "no scores to compare: a run without a summary has none, and tasks must be the same"
    rows = []
    for task in shared:
        for name, unit in (("auc", "AUC"), ("log_loss", "log-loss"), ("mse", "MSE")):
            a = first.tasks[task].get(name)
            b = second.tasks[task].get(name)
            if a is not None and b is not None:
                rows.append([f"{task} {unit}", f"{a:.4f}", f"{b:.4f}", f"{1e3 * (b - a):+.2f}e-3"])
    return aligned(["score", "A", "B", "B - A"], rows)


def _significance(first: RunFolder, second: RunFolder) -> str:
    """DeLong's test per task, where both keep predictions on the same test samples."""
    # The test needs both runs' predictions on the same rows, of the same tasks.
    first_test = read_predictions(first.folder)
    second_test = read_predictions(second.folder)
    if first_test is None or second_test is None:
        return "no DeLong test: a run keeps no predictions"
    if np.array_equal(first_test.predictions, second_test.predictions):
        return "every prediction of the two is the same, to the last bit"
    labels = first_test.labels
    others = second_test.labels
    if labels.shape != others.shape or not np.array_equal(labels, others, equal_nan=True):
        return "no DeLong test: the two were not tested on the same samples"
    if list(first.tasks) != list(second.tasks) or labels.shape[1] != len(first.tasks):
        return "no DeLong test: the two do not keep predictions of the same tasks"

    sentences = []
    for k, task in enumerate(first.tasks):
        a, b = (test.with_label(k) for test in (first_test, second_test))
        scores = a.predictions[:, k], b.predictions[:, k]
        sentences.append(_delong_of(first.part, task, a.labels[:, k], *scores, a.groups, a.weights))
    return "\n".join(filter(None, sentences))


def _delong_of(
    part: str, task: str, labels: np.ndarray, a: np.ndarray, b: np.ndarray, *of: np.ndarray | None
) -> str:
    """DeLong's test of one task in words; nothing where too few rows have a label.

    ``part``: the part of the data that the rows are; ``of``: the rows' users, and their weights.
    """
    # A test needs finite predictions and two rows of either label.
    for name, scores in (("A", a), ("B", b)):
        odd = int((~np.isfinite(scores)).sum())
        if odd:
            return f"{task}: no DeLong test, {odd:,} of {name}'s predictions are not finite numbers"
    if not np.isin(labels, (0, 1)).all():
        return f"{task}: no DeLong test, its labels are not all 0 or 1"
    if min(labels.sum(), len(labels) - labels.sum()) < 2:
        return ""

    difference, error, p_value = delong(labels, a, b, *of)
    whose = "samples" if of[0] is None else "users"
    return (
        f"{task}, {len(labels):,} {part} samples: B - A = {1e3 * difference:+.2f}e-3, standard"
        f" error {1e3 * error:.2f}e-3 over {part} {whose} (DeLong), p ="
        f" {p_value:.2g}; one pair of seeds says nothing of others"
    )


def curve(folder: Path, task: str) -> dict[int, float]:
    """Samples -> AUC along a run. Raises ValueError naming a damaged file."""
    aucs = {line.samples: line.tasks.get(task, {}).get("auc") for line in read_metrics(folder)}
    return {samples: float(auc) for samples, auc in aucs.items() if auc is not None}


def _curves(first: RunFolder, second: RunFolder) -> str:
    task = next((task for task in first.tasks if task in second.tasks), None)
    if task is None:
        return ""

    # Evaluations that both have at the same samples.
    a = curve(first.folder, task)
    b = curve(second.folder, task)
    shared = sorted(set(a) & set(b))
    if len(shared) < 2:
        return "no curve: the two have fewer than two evaluations at the same samples"

    # Not more of them than a person reads, and the last in any case.
    step = -(-len(shared) // SHOWN_SNAPSHOTS)
    chosen = [*shared[:-1][::step], shared[-1]]
    rows = []
    for n in chosen:
        difference = f"{1e3 * (b[n] - a[n]):+.2f}e-3"
        rows.append([f"{n:,}", f"{a[n]:.4f}", f"{b[n]:.4f}", difference])
    return "\n" + aligned([f"samples ({task})", "A", "B", "B - A"], rows)
