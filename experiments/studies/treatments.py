"""What is done about late rows, and what it gives back: each treatment, and what others run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from experiments.gaps import Run, gap_columns, gap_over_seeds, means_and_gap, of_sync
from experiments.options import Count, PairedSeeds, Parallel, Positive, Ranks, Samples, Some, Tau
from experiments.points import Point, data_sha256, over_seeds
from experiments.studies.demo import REAL_DATA, find_data, one_pass
from experiments.sweep import print_points, trained
from experiments.tables import Column, leave, table
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, SyncConfig, TrainConfig
from runtime.config.presets import PresetName, with_preset
from runtime.config.sync import MOST_DENSE_LAG

Treatment = Literal["sync_steps", "dense_lag", "delay_compensation", "lr_by_staleness", "wire"]
EVERY: tuple[Treatment, ...] = get_args(Treatment)
WITHOUT_OPTION = {"lr_by_staleness": True, "wire": "half"}
"""Treatments that have one strength, and that strength."""
UNTREATED = "untreated"
PRESETS = "as others run it"
"""Base of the presets, which have no untreated twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """hybrid and async with and without each treatment, and the presets; gaps over paired seeds."""

    taus: Some[Count] = (16, 64)
    """Bounds of hybrid."""
    async_tau: Tau | None = 4
    """Bound of async; none leaves async out."""
    treatments: tuple[Treatment, ...] = EVERY
    """Which treatments; wire, rows that travel as float16, is one of sync, too; without a common
    step, in async, there are no synchronous start and no dense lag."""
    presets: tuple[PresetName, ...] = get_args(PresetName)
    """What others run: as `persia-runtime train --preset`, with the executor constant_lag."""
    sync_steps: Count = 300
    """Steps of the synchronous start, in the treatment that has one."""
    dense_lag: Annotated[int, Within(1, MOST_DENSE_LAG)] = 1
    """Steps by which the dense update is late, in the treatment where it is late, too."""
    delay_compensation: Annotated[Positive, Within(0, 1e9)] = 128.0
    """Strength lambda of the treatment that compensates delay."""
    seeds: PairedSeeds = 5
    """Paired seeds, >= 2."""
    ranks: Ranks = 8
    """Ranks W."""
    batch: Count = 128
    """Samples per dense update."""
    samples: Samples | None = None
    """Train on the first samples only and test on as many (2,000 at least), for a quick look; else
    one pass, and the whole test part."""
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, slots=True)
class TreatedMode:
    """One row of the table."""

    base: str
    """What is treated, in words; an untreated row has its own."""
    treatment: str
    sync: SyncConfig

    @property
    def slug(self) -> str:
        """The start of a point's folder."""
        return f"{self.base}-{self.treatment}".replace(" ", "-")


def run(options: Options) -> None:
    """Plan, train what is missing, print the table, draw the figure."""
    # The real clicks, or what was downloaded, or else the synthetic stream.
    if options.data.name == REAL_DATA:
        name = find_data(options.data.dir).name
        options = replace(options, data=replace(options.data, name=name))

    # Two rows may be the same run: it is trained once, under the name of the first.
    chosen = settings(options)
    first: dict[SyncConfig, TreatedMode] = {}
    for setting in chosen:
        first.setdefault(setting.sync, setting)
    points = {setting: _points(options, first[setting.sync]) for setting in chosen}
    runs = trained(points, options)
    if runs is None:
        print_points([point for group in points.values() for point in group], options.out)
        return

    # The screen shows the first task, the CSV has all of them.
    tasks = list(runs[chosen[0]][0].summary["tasks"])
    lines = {task: [_line(one, runs, task, options.out) for one in chosen] for task in tasks}
    print(
        f"\n{options.data.name}, {tasks[0]}, W = {options.ranks}, {options.batch} samples a dense"
        f" update, {options.seeds} paired seeds; gaps in thousandths of AUC;\n"
        "late: updates that rows / dense weights miss; ± 95 % over seeds and test samples"
    )
    print(table(lines[tasks[0]], COLUMNS))
    every = [{"data": options.data.name, **line} for of_task in lines.values() for line in of_task]
    leave(options, {"": every}, drawn_first=1)


def settings(options: Options) -> list[TreatedMode]:
    """The rows, sync first; a base's untreated row comes before its treated ones."""
    # The bases that are treated.
    bases = [(Mode.HYBRID, tau) for tau in options.taus]
    if options.async_tau is not None:
        bases.append((Mode.ASYNC, options.async_tau))
    untreated = [TreatedMode("sync", UNTREATED, SyncConfig(ranks=options.ranks))]
    for mode, tau in bases:
        sync = SyncConfig(mode=mode, tau=tau, ranks=options.ranks)
        untreated.append(TreatedMode(f"{mode} tau {tau}", UNTREATED, sync))

    # Each base with its treatments behind it.
    rows: list[TreatedMode] = []
    for setting in untreated:
        rows += [setting, *_treated(setting, options)]

    # What others run comes last.
    start = TrainConfig(sync=untreated[0].sync, batch=options.batch)
    rows += [TreatedMode(PRESETS, name, with_preset(start, name).sync) for name in options.presets]
    return rows


def _treated(setting: TreatedMode, options: Options) -> Iterator[TreatedMode]:
    """Each treatment that the mode has; sync has nothing late to treat."""
    mode = setting.sync.mode
    needs_common_step = ("sync_steps", "dense_lag")
    for name in options.treatments:
        treats_late_rows = mode.reads_late_rows and (
            mode.has_barrier or name not in needs_common_step
        )
        if name == "wire" or treats_late_rows:
            value = WITHOUT_OPTION.get(name) or getattr(options, name)
            yield replace(setting, treatment=name, sync=replace(setting.sync, **{name: value}))


def _points(options: Options, setting: TreatedMode) -> list[Point]:
    base = one_pass(options.data, options.batch, options.samples)
    config = replace(base, sync=setting.sync)
    return over_seeds(setting.slug, config, options.seeds, data_sha256(config))


def _line(
    setting: TreatedMode, runs: dict[TreatedMode, list[Run]], task: str, root: Path
) -> dict[str, Any]:
    """One line of the CSV: a setting over its seeds."""
    treated = runs[setting]
    sync = setting.sync

    # The untreated twin has the same base; presets and untreated rows have none.
    twins = [s for s in runs if s.base == setting.base and s.treatment == UNTREATED]
    untreated = runs[twins[0]] if twins and twins[0] != setting else []

    # The gap to sync, which is the first setting, and what the treatment gives back.
    scores = means_and_gap(treated, runs[next(iter(runs))], task, root)
    given_back = gap_columns(gap_over_seeds(treated, untreated, task, root), "gap_to_untreated")
    log_loss = scores.pop("log_loss")
    return {
        "base": setting.base,
        "treatment": setting.treatment,
        "mode": str(sync.mode),
        "tau": sync.window,
        "merge_pushes": sync.merges,
        **{name: getattr(sync, name) for name in EVERY},
        "ranks": sync.ranks,
        "task": task,
        "rows_late": treated[0].late.rows,
        "dense_late": treated[0].late.dense,
        **scores,
        **given_back,
        "log_loss": log_loss,
    }


COLUMNS: dict[str, Column] = {
    "base": "{base}",
    "treatment": "{treatment}",
    "late": "{rows_late} / {dense_late}",
    "test AUC": "{test_auc:.4f}",
    "gap to sync": lambda line: "-" if line["base"] == "sync" else of_sync(line),
    "gap to untreated": lambda line: of_sync(line, "gap_to_untreated"),
    "log-loss": "{log_loss:.4f}",
}
