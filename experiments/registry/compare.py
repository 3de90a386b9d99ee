"""Two runs, or two sweeps, beside each other: options, scores, curves, and whether they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gaps import paired_interval, thousandths
from experiments.points import SYNTHETIC, stream_of_seeds
from experiments.registry.runs import RunFolder, is_run, is_sweep, runs_below, the_run
from experiments.statistics import Interval, delong
from experiments.tables import aligned
from persia_sim.base.rules import counted
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import updates_missed
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


def _sweeps(first: Path, second: Path) -> str:
    """The settings that two sweeps share, paired by seed."""
    left, notes_on_left = settings_of(runs_below(first))
    right, notes_on_right = settings_of(runs_below(second))
    shared = list(pairs(left, right))
    if not shared:
        raise ValueError(_nothing_shared(first, second, left, right))

    # A line for each pair, over the seeds of both; and in which options the two differ.
    rows = []
    names_by_difference: dict[str, list[str]] = {}
    for one, other in shared:
        seeds = one.aucs.keys() & other.aucs.keys()
        gap = other.gap_to(one)
        both = ([setting.aucs[seed] for seed in seeds] for setting in (one, other))
        means = [f"{np.mean(aucs):.4f}" if seeds else "-" for aucs in both]
        rows.append([one.name, str(gap.n), *means, thousandths(gap)])
        values = differences(one.options, other.options)
        difference = ", ".join(f"{name} {_short(a)} and {_short(b)}" for name, a, b in values)
        names_by_difference.setdefault(difference, []).append(one.name)

    # Below the table: settings without a partner, differences, notes on either sweep.
    head = f"A  {first}\nB  {second}\nAUC of the first task, paired by seed; ± is 95 % over"
    head += " seeds, and over judged rows where runs kept predictions"
    paired = [setting for pair in shared for setting in pair]
    alone = [s.name for s in [*left, *right] if not any(s is other for other in paired)]
    tail = []
    if alone:
        tail.append(f"in one of them only: {', '.join(dict.fromkeys(alone))}")
    for difference, names in names_by_difference.items():
        if difference:
            tail.append(f"{', '.join(names)}: A and B differ in {difference}")
    tail += [f"A: {note}" for note in notes_on_left]
    tail += [f"B: {note}" for note in notes_on_right]
    table = aligned(["setting", "seeds", "A", "B", "B - A [1e-3]"], rows)
    return "\n".join([f"{head}\n\n{table}", *tail])


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


_MOST_SHOWN = 32
_DECIDES_NO_RESULT = ("seed", "data.dir", "data.keep")


@dataclass(slots=True)
class SweepSetting:
    """Runs of one config, but for their seeds."""

    options: Mapping[str, str]
    """Every option that decides a result, and the data."""
    aucs: dict[int, float] = field(default_factory=dict)
    """AUC of a task by seed; of two runs with one seed, the one that was started last."""
    folders: dict[int, Path] = field(default_factory=dict)
    """Folders of those runs, by seed."""
    line: str = ""
    """The mode, and what beside tau tells it from others of the same mode."""
    column: int = 0
    """The task's column in the predictions."""

    @property
    def mode(self) -> str:
        """Mode; "-" where it cannot be read."""
        return self.options.get("sync.mode", "-")

    @property
    def label(self) -> str:
        """Mode and bound."""
        late = self.mode not in ("sync", "lookahead", "-")
        return f"{self.mode}-tau{self.options.get('sync.tau')}" if late else self.mode

    @property
    def name(self) -> str:
        """The label, and what tells it from others of the same mode."""
        return self.label + self.line.removeprefix(self.mode)

    @property
    def rows_late(self) -> int | None:
        """Updates that lookups miss; None without a bound, or where that cannot be read."""
        try:
            mode = Mode(self.mode)
            tau, ranks = (json.loads(self.options[f"sync.{name}"]) for name in ("tau", "ranks"))
            window = tau if mode.reads_late_rows else 0
            return updates_missed(mode, window, ranks=ranks).rows
        except (KeyError, TypeError, ValueError):
            return None  # of another version, or no config of a run

    def gap_to(self, other: SweepSetting) -> Interval:
        """AUC minus the other's, over the seeds that both have."""
        seeds = sorted(self.aucs.keys() & other.aucs.keys())
        gaps = [self.aucs[seed] - other.aucs[seed] for seed in seeds]
        folders = [(other.folders[seed], self.folders[seed]) for seed in seeds]
        return paired_interval(gaps, folders, self.column)

    def sync_beside_it(self, settings: Sequence[SweepSetting]) -> SweepSetting | None:
        """The sync that this setting differs from in synchronisation alone, or, where both labels
        are of one config each, the only sync, if it has the same data."""
        # The only sync beside a label of one config may differ in more than synchronisation.
        syncs = [other for other in settings if other.mode == "sync"]
        only = sum(other.label == self.label for other in settings) == len(syncs) == 1
        must = (
            ("data", "evaluation.eval_split") if only else ""
        )  # what both share, by its beginning
        for other in syncs:
            unlike = (name for name, *_ in differences(self.options, other.options))
            if all(name.startswith("sync.") or not name.startswith(must) for name in unlike):
                return other
        return None


def settings_of(
    runs: Iterable[RunFolder], task: str | None = None
) -> tuple[list[SweepSetting], list[str]]:
    """The settings of all runs that have ended, by the AUC of a task (None: of each run's first),
    and what a reader must know of them."""
    # Runs in the order of their start, so that the last of a seed stays.
    by_options: dict[str, SweepSetting] = {}
    twice: Counter[str] = Counter()
    for run in sorted(runs, key=lambda run: run.started):
        auc = run.auc if task is None else run.auc_of(task)
        if run.state != "done" or auc is None or not isinstance(run.seed, int):
            continue
        options = dict(options_of(run))
        key = json.dumps(options, sort_keys=True)
        column = 0 if task is None else list(run.tasks).index(task)
        setting = by_options.setdefault(key, SweepSetting(options, column=column))
        twice[key] += run.seed in setting.aucs
        setting.aucs[run.seed] = auc
        setting.folders[run.seed] = run.folder

    # Give them names, and note what a reader would stumble over.
    settings = sorted(by_options.values(), key=lambda s: (s.mode, s.rows_late or 0))
    notes = list(tell_apart(settings))
    notes += [
        f"{by_options[key].name}: {counted(count, 'run')} left out, of a seed that ran again later"
        for key, count in twice.items()
        if count
    ]
    return settings, notes


def pairs(
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


def tell_apart(settings: Sequence[SweepSetting]) -> Iterator[str]:
    """Names all settings; yields a sentence for each mode that has several configs, whatever their
    tau."""
    for mode in dict.fromkeys(setting.mode for setting in settings):
        # Options, but for tau, in which settings of the mode differ.
        same = [setting for setting in settings if setting.mode == mode]
        names = dict.fromkeys(name for setting in same for name in setting.options)
        unlike = [name for name in names if len({s.options.get(name) for s in same}) > 1]
        unlike = [name for name in unlike if name != "sync.tau"]

        # Each setting's line names its values of them.
        for setting in same:
            values = (f"{name} {_short(setting.options.get(name, '-'))}" for name in unlike)
            setting.line = f"{mode} ({', '.join(values)})" if unlike else mode

        if unlike:
            yield (
                f"{mode}: {counted(len({s.line for s in same}), 'different config')}, which differ"
                f" in {', '.join(unlike)}, and are told apart"
            )


def _short(value: str) -> str:
    """A value as it is shown: a long one by its checksum."""
    return value if len(value) <= _MOST_SHOWN else sha256(value.encode()).hexdigest()[:8]


OF_ENDED = "data's "
"""What the names begin with of facts of the data, which the summary of an ended run brings."""


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
        yield from ((f"{OF_ENDED}{fact}", json.dumps(data.get(fact))) for fact in facts)
