"""How much test AUC a mode and a bound cost, over paired seeds and any factors of the start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments.gaps import (
    COLUMNS,
    FOOTNOTE,
    Run,
    Setting,
    curve_records,
    gap_columns,
    gap_over_seeds,
    gap_table,
    mean_auc,
    of_sync,
)
from experiments.lateness.rates import CHANCE_AUC
from experiments.options import Count, Parallel, Ranks, Seeds, Some, Tau, TestRows, hold
from experiments.points import Point, files_digest, setting_points, what_decides
from experiments.statistics import t_interval
from experiments.sweep import print_points, trained
from experiments.tables import Column, leave, table
from persia_sim.base.command_line import Option, options_of, read_words, with_changes
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Unread, Within, fit, nearest
from persia_sim.base.vocabulary import Mode
from runtime.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
    read_config,
)
from runtime.config.presets import PresetName, with_preset
from runtime.embedding.config import TableConfig
from runtime.files import BrokenFileError
from runtime.models.imported import refuse_code_named_in

DEFAULT_TAUS = (0, 4, 16)
VARIED = ("sync.mode", "sync.tau", "sync.ranks", "seed")
"""Options of training that are no factors: the sweep has words of its own for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Sweep modes and bounds with the deterministic executor; every factor list is crossed."""

    modes: Some[Mode] = (Mode.SYNC, Mode.HYBRID, Mode.ASYNC)
    """Modes to compare; sync is the reference of the gaps."""
    taus: tuple[Tau, ...] = ()
    """Bounds for the modes that have one; else 0, 4 and 16."""
    seeds: Seeds = 5
    """Paired seeds 0, 1, ..., >= 1; an interval needs two."""
    ranks: Ranks = 8
    """Ranks W."""
    batch: Count = 128
    """Samples per dense update."""
    steps: Count | None = None
    """Dense updates; else one pass over the data."""
    factor: tuple[str, ...] = ()
    """Any options of training by dotted name, with the values that are tried, such as
    model.lr=1e-3,2e-3 sync.dense_lag=0,1 rows.optimizer.initial_accumulator=0,0.01. All are
    crossed; what only some modes read varies in these alone, and what sync reads of `sync` stays as
    it is in sync."""
    config: Path | None = None
    """Options of training from a file, as run.toml of `train --config`; those typed here win. Its
    mode, bound and seed are not read: the sweep has its own."""
    preset: PresetName | None = None
    """What others run, as `train --preset`, against sync: in place of modes and taus."""
    also_hash: tuple[Path, ...] = ()
    """Files that a model of your own reads by itself, as vocabulary.txt: where they change, a
    point runs anew, as where its options, data, schema, split or the model's code do."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    evaluate_every_steps: Count | None = None
    """For curves: evaluate a snapshot every so many updates."""
    eval_split: Literal["test", "validation"] = "test"
    """Judge on this part; rates are chosen on `validation` (of --data.validation-fraction), so that
    the test part is read once."""
    windows: Annotated[int, Within(2, 100)] | None = None
    """Rolling origins: judge on this many windows in turn, each after training on all rows before
    it; together they are the second half of the training part. Else on ``eval_split``."""
    test_rows: TestRows | None = None
    """Evaluate on the first rows of that part only."""

    @classmethod
    def completed(cls, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The typed options, completed by those of a file and a preset; options of `sync` become
        factors of one value."""
        start = _start(typed.get("config"))
        names = {option.path for option in options_of(cls)}
        if "config" in typed and "model.name" not in typed:
            remedy = f"type --model.name {start.model.name}"
            refuse_code_named_in(typed["config"], start.model.name, trust=False, remedy=remedy)
        filled: dict[str, Any] = {}

        # A preset chooses the mode that is compared with sync, and its bound.
        if typed.get("preset") is not None:
            start = with_preset(start, typed["preset"], "constant_lag")
            filled["modes"] = (Mode.SYNC, start.sync.mode)
            if start.sync.mode.reads_late_rows:
                filled["taus"] = (start.sync.tau,)

        # Whatever else they set becomes an option of the sweep of that name, or a factor; what is
        # typed wins.
        factors = list(typed.get("factor", ()))
        for option in options_of(TrainConfig):
            path = option.path
            name = path.removeprefix("evaluation.").removeprefix("sync.")
            value = of(start, path)
            if value == option.default:
                continue
            if name in names:
                filled[name] = value
                continue
            is_typed = any(word.startswith(f"{path}=") for word in factors)
            if path.startswith("sync.") and path not in VARIED and not is_typed:
                factors.append(f"{path}={value}")
        return filled | typed | {"factor": tuple(factors)}

    @property
    def models(self) -> list[str]:
        """The names of the models that are trained."""
        return factors_of(self.factor).get("model.name", [self.model.name])

    def _check(self) -> None:
        # What a built-in model reads is its data alone.
        if self.also_hash and not any(":" in name for name in self.models):
            rule = "names files that a model of your own reads, and a built-in one reads none"
            raise Refused("also_hash", f"{rule}; remove it, or name a model (MODULE:CLASS)")

        # Windows are of rows in one order, and choose the part that is judged on.
        if self.windows is not None and self.data.name.startswith("synthetic"):
            raise ValueError(
                "windows are of rows in an order, and each seed draws the rows of a synthetic"
                " stream anew; name another data set or remove windows"
            )
        chooses_part = (
            self.eval_split == "validation"
            or self.data.validation_fraction is not None
            or any(word.startswith(("data.", "evaluation.")) for word in self.factor)
        )
        if self.windows is not None and chooses_part:
            raise ValueError(
                "windows say what is judged on; remove --eval-split, --data.validation-fraction and"
                " factors of data and evaluation"
            )
        if self.taus and not any(m.reads_late_rows for m in self.modes):
            raise ValueError("taus is only used by modes that read late rows; add one or remove it")

        # A sweep of more points than anybody trains is a slip.
        late = len(self.taus or DEFAULT_TAUS)
        of_modes = sum(late if mode.reads_late_rows else 1 for mode in self.modes)
        crossed = math.prod(map(len, factors_of(self.factor).values()))
        points = crossed * of_modes * self.seeds * (self.windows or 1)
        hold("the number of points", points, Within(1, MOST_POINTS))

        # Some mode must read each factor, in some combination, else the table would show noise.
        read: set[str] = set()
        refusals: dict[str, Refused] = {}
        for chosen in combinations(factors_of(self.factor)):
            for mode in self.modes:
                base = _base(self)
                config = replace(base, sync=replace(base.sync, mode=mode))
                after, unread = treated(config, chosen)
                refusals |= unread
                taken = (path for path in chosen if path not in unread)
                read |= {path for path in taken if of(after, path) != of(config, path)}
        for path in refusals.keys() - read:
            raise ValueError(f"factor {refusals[path]}")


MOST_CROSSED, MOST_POINTS = 1_000, 100_000
"""Combinations of values, each of them trained with every mode, bound, window and seed; and all of
that together."""


def factors_of(words: Sequence[str]) -> dict[str, list[Any]]:
    """Name -> values, from ``NAME=VALUE,VALUE``; the words of a value that is a list stand apart.

    Raises `Refused` for what is no option of training, or no value of it.

    >>> factors_of(["sync.dense_lag=0,1", "model.hidden=256 128,64"])
    {'sync.dense_lag': [0, 1], 'model.hidden': [(256, 128), (64,)]}
    """
    crossed = math.prod(word.count(",") + 1 for word in words)
    if crossed > MOST_CROSSED:
        rule = f"has {crossed:,} combinations of values, at most {MOST_CROSSED:,} are tried"
        raise Refused("factor", f"{rule}; a sweep of fewer, around the best of them, may follow")
    # Each word names one option and its values; whatever is wrong with it is refused here.
    options = {o.path: o for o in options_of(TrainConfig) if o.path not in VARIED}
    factors: dict[str, list[Any]] = {}
    for word in words:
        path, equals, values = word.partition("=")
        if path not in options:
            raise Refused(
                "factor", f"{path!r} is no option that may vary; {nearest(path, options)}"
            )
        if not equals or path in factors:
            raise Refused("factor", f"must be NAME=VALUE,VALUE with each name once, got {word!r}")
        try:
            factors[path] = [_value(options[path], text) for text in values.split(",")]
        except ValueError as error:
            raise Refused("factor", f"{word} cannot be: {error}") from None
    return factors


def _start(file: Path | None) -> TrainConfig:
    return TrainConfig() if file is None else read_config(file)


def of(config: TrainConfig, path: str) -> Any:
    """The value of an option by its dotted name."""
    return reduce(getattr, path.split("."), config)


def _value(option: Option, text: str) -> Any:
    if option.kind is bool:
        return fit({"true": True, "false": False}.get(text.lower(), text), bool, option.path)
    return read_words(TrainConfig, [f"--{option.name}", *text.split()], "train")[option.path]


def combinations(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """One value of each factor, in every combination."""
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def treated(
    config: TrainConfig, chosen: Mapping[str, Any]
) -> tuple[TrainConfig, dict[str, Refused]]:
    """The config with those of the chosen values that it reads, and why it has not the others; sync
    stays the reference that it is."""
    refusals: dict[str, Refused] = {}
    if config.sync.mode is Mode.SYNC:
        rule = "does not vary in sync, the reference; add another mode or remove it"
        refusals |= {path: Refused(path, rule) for path in chosen if path.startswith("sync.")}

    # The config names one value at a time that it does not read: leave that out and try again.
    while True:
        left = {path: chosen[path] for path in chosen.keys() - refusals.keys()}
        try:
            return with_changes(config, left), refusals
        except Unread as error:
            if error.field not in left:
                raise
            refusals[error.field] = error


def _base(options: Options) -> TrainConfig:
    # A file's options, over which the sweep's own stand; lateness must be constant.
    start = _start(options.config)
    return replace(
        start,
        sync=SyncConfig(ranks=options.ranks),
        engine=replace(start.engine, executor="constant_lag", trace=None),
        checkpoint=CheckpointConfig(),
        batch=options.batch,
        steps=options.steps,
        data=options.data,
        model=options.model,
        rows=options.rows,
        evaluation=replace(
            start.evaluation,
            evaluate_every_steps=options.evaluate_every_steps,
            eval_split=options.eval_split if options.windows is None else "validation",
            test_rows=options.test_rows,
        ),
    )


def run(options: Options) -> None:
    """Plan, run, print a table for each combination of factors."""
    groups = plan(options)
    if note := what_decides(options.models, options.also_hash):
        print(f"  {note}")
    for label, group in groups:
        print(f"  {label or 'all'}: {len(group)} points")
        if options.dry_run:
            print_points(group, options.out)
    runs_of = trained(dict(groups), options)
    if runs_of is None:
        return

    # A table on the screen for each combination of factors and each task.
    tables: dict[str, list[dict[str, Any]]] = {"": [], "_curves": []}
    part = _base(options).evaluation.eval_split
    columns = {name.replace("test", part): show for name, show in COLUMNS.items()}
    for label, runs in runs_of.items():
        for task, scores in runs[0].summary["tasks"].items():
            if "mse" in scores:
                print(f"\n{task} is a regression, without AUC: its MSE is on the runs' pages")
                continue
            rows = [{"factors": label, **r} for r in gap_table(runs, task, options.out)]
            print(f"\n{task}, {label or options.data.name}, W = {options.ranks}")
            print(table(rows, columns))
            tables[""] += rows

        # The guides ask for ten times as many updates as rows are late, at least.
        updates = runs[0].summary["updates"]
        late = sorted({r.late.rows for r in runs if (r.late.rows or 0) * 10 > updates})
        if late:
            shares = [f"{100 * missed / updates:.0f}" for missed in late]
            print(
                f"rows {', '.join(map(str, late))} updates late miss {', '.join(shares)} % of the"
                f" run's {updates:,} updates.\nWhere it is more than a tenth, a gap tells of the"
                " start of training only."
            )
        tables["_curves"] += [{"factors": label, **c} for c in curve_records(runs, options.out)]

    # Factors are varied to choose among them: each mode's best.
    if len(runs_of) > 1 and options.windows is None:
        tables["_best"] = best_of_modes(runs_of, options.out)
        print(f"\nthe values of the factors with the highest {part} AUC, by mode")
        print(table(tables["_best"], BEST_COLUMNS))
        if part == "test":
            print("they were chosen on the test part; use --eval-split validation, and test after")

    # With rolling origins the mean over the windows is the result.
    if options.windows is not None:
        means = over_windows(tables[""])
        tables["_windows"] = means
        print(f"\nmean over {options.windows} windows, ± 95 % over windows (t)")
        print(table([line for line in means if line["mode"] != "sync"], WINDOW_COLUMNS))
    print(f"\n{FOOTNOTE}")
    leave(options, tables)


def best_of_modes(runs_of: Mapping[str, Sequence[Run]], root: Path) -> list[dict[str, Any]]:
    """A line for each mode and bound: the factors whose runs have the highest mean AUC of the first
    task, and that AUC minus that of sync at its own best; no factors where all are at chance."""
    # The runs of each mode and bound, by the values of the factors.
    task = next(iter(next(iter(runs_of.values()))[0].summary["tasks"]))
    by_setting: dict[Setting, dict[str, list[Run]]] = {}
    for label, runs in runs_of.items():
        for run in runs:
            of_label = by_setting.setdefault(run.setting, {})
            of_label.setdefault(label, []).append(run)

    # Sync's best is what all others are held against.
    aucs = {
        setting: {label: mean_auc(runs, task) for label, runs in of_label.items()}
        for setting, of_label in by_setting.items()
    }
    best = {setting: highest(of_setting) for setting, of_setting in aucs.items()}
    sync: list[Run] = next(
        (by_setting[setting][label] for setting, label in best.items() if setting[0] == Mode.SYNC),
        [],
    )
    lines = []
    for setting, label in best.items():
        auc = aucs[setting][label]
        gap = gap_over_seeds(by_setting[setting][label], sync, task, root)
        lines.append(
            {
                "mode": setting[0],
                "tau": setting[1],
                "task": task,
                "factors": label if auc >= CHANCE_AUC else "none above chance",
                "seeds": gap.n,
                "auc": auc,
                **gap_columns(gap),
            }
        )
    return lines


def highest(aucs: Mapping[str, float]) -> str:
    """The label with the highest AUC; a run that diverged (NaN) has the lowest."""
    return max(aucs, key=lambda label: -math.inf if math.isnan(aucs[label]) else aucs[label])


BEST_COLUMNS: dict[str, Column] = {
    "mode": "{mode}",
    "tau": COLUMNS["tau"],
    "best factors": "{factors}",
    "AUC": "{auc:.4f}",
    "gap to sync's best [1e-3]": COLUMNS["gap to sync [1e-3]"],
}


def plan(options: Options) -> list[tuple[str, list[Point]]]:
    """The points, grouped by the values of the factors that vary."""
    factors = factors_of(options.factor)

    # Rolling origins split the training part, whose rows must be counted.
    windows: list[int | None] = [None]
    rows = 0
    if options.windows is not None:
        from runtime.engines.open import source_of  # late: a second to import

        windows = [*range(1, options.windows + 1)]
        rows = source_of(_base(options)).provenance().train_rows or 0

    # A mode without a bound is one setting.
    settings: list[Setting] = []
    for mode in options.modes:
        taus = (options.taus or DEFAULT_TAUS) if mode.reads_late_rows else (0,)
        settings += [(str(mode), tau) for tau in taus]

    try:
        also = files_digest(options.also_hash)
    except BrokenFileError as error:
        raise Refused("also_hash", f"names files; {error}; correct its name") from None
    groups = []
    for chosen, window in product(combinations(factors), windows):
        # A group is named by what varies.
        varied = {path: value for path, value in chosen.items() if len(factors[path]) > 1}
        if window is not None:
            varied["window"] = window
        label = " ".join(f"{name}={value}" for name, value in varied.items())

        # Train on the rows before the window, and judge on the window, the last of the data then.
        base, _ = treated(_base(options), chosen)
        if window is not None:
            size = rows // (2 * options.windows)
            end = rows - (options.windows - window) * size
            base = replace(base, data=replace(base.data, rows=end, validation_fraction=size / end))

        # Points are made without the factors, so that labels of settings stay; then they get them.
        points = setting_points(base, settings, options.seeds, also=also)
        groups.append((label, [replace(p, config=treated(p.config, chosen)[0]) for p in points]))
    return groups


def over_windows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a setting and task: the gap to sync in each window, and their mean with its interval,
    over windows as the drawn things; both sources of doubt are in it, seeds and rows."""
    # The gaps of a setting, in the order of the windows.
    names = ("mode", "tau", "rows_late", "dense_late", "lr", "ranks", "task", "seeds")
    gaps: dict[tuple[Any, ...], list[float]] = {}
    for line in records:
        factors, _, _ = line["factors"].partition("window=")
        key = factors.strip(), *(line[name] for name in names)
        gaps.setdefault(key, []).append(line["gap_to_sync"])

    lines = []
    for key, by_window in gaps.items():
        mean = t_interval(by_window)
        lines.append(
            dict(zip(("factors", *names), key, strict=True))
            | {f"gap_{number}": gap for number, gap in enumerate(by_window, start=1)}
            | {"gap_to_sync": mean.mean, "gap_to_sync_half_width_95": mean.half_width}
        )
    return lines


WINDOW_COLUMNS: dict[str, Column] = {
    "task": "{task}",
    "factors": "{factors}",
    "mode": "{mode}",
    "rows late": "{rows_late}",
    "dense late": "{dense_late}",
    "gaps [1e-3]": lambda line: " ".join(
        f"{1e3 * gap:+.1f}" for name, gap in line.items() if name[4:].isdigit()
    ),
    "mean [1e-3]": of_sync,
}
