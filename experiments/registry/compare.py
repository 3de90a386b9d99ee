"""Two runs, or two sweeps, beside each other: options, scores, curves, and whether they differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gaps import paired_interval, thousandths
from experiments.points import SYNTHETIC, stream_of_seeds
from experiments.registry.runs import LATE_MODES, RunFolder, is_run, is_sweep, runs_below, the_run
from experiments.statistics import delong
from experiments.tables import aligned
from persia_sim.base.rules import counted
from runtime.run.folder import flat, read_metrics, read_predictions

SHOWN_SNAPSHOTS = 12
ABSENT = "(not there)"


def comparison(first: Path, second: Path) -> str:
    """Two runs or two sweeps beside each other, as text. Raises ValueError where they cannot be
    held against each other."""
    for folder in (first, second):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; `runs list` shows those that are there")
    sweeps = [is_sweep(folder) for folder in (first, second)]
    if all(sweeps):
        return _sweeps(first, second)
    if any(sweeps) and any(map(is_run, (first, second))):
        kinds = ["a sweep" if sweep else "a run" for sweep in sweeps]
        raise ValueError(
            f"{first} is {kinds[0]} and {second} is {kinds[1]}; name two runs or two sweeps"
        )
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


_MOST_SHOWN = 32
_DECIDES_NO_RESULT = ("seed", "data.dir", "data.keep")


@dataclass(slots=True)
class SweepSetting:
    """Runs of a sweep that have one config, but for their seeds."""

    options: Mapping[str, str]
    """Every option that decides a result, and the data."""
    name: str = ""
    """Mode and bound, and what tells it from others of the sweep that have the same."""
    runs: dict[int, tuple[float, Path]] = field(default_factory=dict)
    """By seed, of those that have ended: AUC of the first task, and the folder."""

    @property
    def label(self) -> str:
        """Mode and bound."""
        mode = self.options.get("sync.mode", "-")
        is_bounded = mode in LATE_MODES
        return f"{mode}-tau{self.options.get('sync.tau')}" if is_bounded else mode


def _sweeps(first: Path, second: Path) -> str:
    """The settings that two sweeps share, paired by seed."""
    sides = [settings_of(runs_below(folder)) for folder in (first, second)]
    (left, _), (right, _) = sides
    shared = list(_pairs(left, right))
    if not shared:
        raise ValueError(_nothing_shared(first, second, left, right))

    # A line for each pair, over the seeds of both.
    rows = []
    tail = []
    for one, other in shared:
        seeds = sorted(one.runs.keys() & other.runs.keys())
        aucs = [(one.runs[seed][0], other.runs[seed][0]) for seed in seeds]
        folders = [(one.runs[seed][1], other.runs[seed][1]) for seed in seeds]
        gap = paired_interval([b - a for a, b in aucs], folders, task=0)
        means = [f"{np.mean(side):.4f}" for side in zip(*aucs, strict=True)] or ["-", "-"]
        rows.append([one.name, str(gap.n), *means, thousandths(gap)])
        values = differences(one.options, other.options)
        if unlike := ", ".join(f"{name} {_short(a)} and {_short(b)}" for name, a, b in values):
            tail.append(f"{one.name}: A and B differ in {unlike}")

    # What is beside the table: settings without a partner, and runs that stand for nothing.
    paired = [setting for pair in shared for setting in pair]
    alone = [s.name for s in [*left, *right] if not any(s is other for other in paired)]
    if alone:
        tail.append(f"in one of them only: {', '.join(dict.fromkeys(alone))}")
    for side, (_, again) in zip("AB", sides, strict=True):
        if again:
            tail.append(f"{side}: {counted(again, 'run')} left out, of a seed that ran again later")

    head = f"A  {first}\nB  {second}\nAUC of the first task, paired by seed; ± is 95 % over"
    head += " seeds, and over judged rows where runs kept predictions"
    table = aligned(["setting", "seeds", "A", "B", "B - A [1e-3]"], rows)
    return "\n".join([f"{head}\n\n{table}", *tail])


def settings_of(runs: Iterable[RunFolder]) -> tuple[list[SweepSetting], int]:
    """The settings of all runs that have ended with an AUC, and how many of these are left out:
    of two runs with one seed, the one that was started first."""
    by_options: dict[str, SweepSetting] = {}
    again = 0
    for run in sorted(runs, key=lambda run: run.started):
        if run.state != "done" or run.auc is None or not isinstance(run.seed, int):
            continue
        options = dict(options_of(run))
        setting = by_options.setdefault(json.dumps(options, sort_keys=True), SweepSetting(options))
        again += run.seed in setting.runs
        setting.runs[run.seed] = run.auc, run.folder

    # Tau 4 comes before tau 16; settings of one mode and bound are told apart by the options in
    # which they differ.
    settings = sorted(by_options.values(), key=lambda one: (len(one.label), one.label))
    for setting in settings:
        alike = [other.options for other in settings if other.label == setting.label]
        unlike = [n for n in setting.options if len({other.get(n) for other in alike}) > 1]
        values = ", ".join(f"{name} {_short(setting.options[name])}" for name in unlike)
        setting.name = f"{setting.label} ({values})" if unlike else setting.label
    return settings, again


def _pairs(
    first: Sequence[SweepSetting], second: Sequence[SweepSetting]
) -> Iterator[tuple[SweepSetting, SweepSetting]]:
    """Settings of two sweeps that answer to each other: the only ones of a label, or, where a label
    has several configs, those of one config."""
    for one in first:
        others = [other for other in second if other.label == one.label]
        if len(others) == 1 and sum(other.label == one.label for other in first) == 1:
            yield one, others[0]
        else:
            yield from ((one, other) for other in others if other.options == one.options)


def _nothing_shared(
    first: Path, second: Path, left: Sequence[SweepSetting], right: Sequence[SweepSetting]
) -> str:
    """Why two sweeps cannot be paired: the settings of each, and in what those differ that are
    called the same."""
    reason = f"{first} and {second} have no setting in common that has ended"
    for folder, settings in ((first, left), (second, right)):
        names = ", ".join(setting.name for setting in settings)
        reason += f"\n  {folder} has {names or 'none that has ended'}"
    unlike = [
        name
        for one in left
        for other in right
        if one.label == other.label
        for name, *_ in differences(one.options, other.options)
    ]
    if unlike:
        reason += f"\n  those of one mode and tau differ in {', '.join(dict.fromkeys(unlike))}"
    return reason


def _short(value: str) -> str:
    """A value as it is shown: a long one by its checksum."""
    return value if len(value) <= _MOST_SHOWN else sha256(value.encode()).hexdigest()[:8]


def options_of(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Name and value of all that tells a run's setting from others."""
    stream = stream_of_seeds(str(run.data), run.seed if isinstance(run.seed, int) else 0)
    for name, value in flat(run.config).items():
        if name == "data.name":
            value = stream
        if name not in _DECIDES_NO_RESULT:
            yield name, value if isinstance(value, str) else json.dumps(value)

    # A seed draws a synthetic stream anew, so bytes and split are those of the seed.
    data = run.summary.get("data")
    facts = ("schema",) if stream.startswith(SYNTHETIC) else ("sha256", "split", "schema")
    if isinstance(data, Mapping):
        yield from ((f"data's {fact}", json.dumps(data.get(fact))) for fact in facts)
