"""A page about one run or one sweep: scores, curves, staleness, options, environment."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from experiments.gaps import thousandths
from experiments.paper.page import described
from experiments.registry.compare import settings_of
from experiments.registry.curves import Curve, curves_of, lines_of
from experiments.registry.runs import (
    HEADER,
    RunFolder,
    cells,
    counts,
    is_run,
    is_sweep,
    runs_below,
    the_run,
)
from experiments.result_cache import is_written
from experiments.statistics import t_interval
from persia_sim.base import page as pages
from persia_sim.base.command_line import option_values
from persia_sim.base.files import is_page, refuse_loss
from persia_sim.base.page import Section
from runtime.config import TrainConfig
from runtime.run.folder import SUMMARY, flat, read_command, read_metrics

Lines = Mapping[str, Sequence[tuple[float, float, float]]]
"""Lines by name: x, y and half the width of y's interval (NaN for none) of each point."""
PAGE = "report.html"
MOST_LINES = 10
"""Most lines of a picture that can be read."""


REFRESH_S = 5
"""Seconds between two versions of the page of a sweep that goes on."""


def report(folder: Path, path: Path | None = None, follow: bool = False) -> Path:
    """Write the page of a run or a sweep, or ``follow`` a sweep: write it anew until the sweep has
    ended; returns where it is.

    Raises as `write_page` does, and ValueError for a run that is to be followed.
    """
    if not follow:
        return write_page(folder, path)
    if is_run(folder):
        raise ValueError(f"{folder} is one run; --follow is for the folder of a sweep")

    # As long as a process writes into the folder, the page asks the browser to load it again.
    path = path or folder / PAGE
    print(f"{path} follows the sweep; open it in a browser, which loads it again", flush=True)
    while is_written(folder):
        with suppress(FileNotFoundError):  # a study removes the folder of a run that it has read
            write_page(folder, path, REFRESH_S)
        time.sleep(REFRESH_S)
    return write_page(folder, path)


def write_page(folder: Path, path: Path | None = None, refresh_s: int | None = None) -> Path:
    """Write the page of a run or a sweep to ``path``, else into the folder; returns where.

    Runs of a sweep get pages in their own folders, where these lack one or have an older one.
    ``refresh_s``: seconds after which a browser loads it again.

    Raises ValueError where the folder is neither, and where the page would replace another file.
    """
    path = path or folder / PAGE
    refuse_loss("--out", path, "page", is_page)
    title, lead, parts = _sweep(folder, path) if is_sweep(folder) else _run(the_run(folder))
    return pages.write_page(path, title=title, lead=lead, parts=parts, refresh_s=refresh_s)


def _run(run: RunFolder) -> tuple[str, list[str], list[Section]]:
    parts = [_scores(run), _curves(run), _options(run), _staleness(run), _environment(run)]
    return f"Run {run.folder.name}: {run.mode} on {run.data}", _state(run), parts


def _state(run: RunFolder) -> list[str]:
    # Why it is not done, as far as that is known.
    if run.state != "done":
        last = f" It said: {run.why}" if run.why else ""
        return [f"This run is {run.state}; what follows is as far as it came.{last}"]

    # What it has trained, and how fast; small numbers keep their digits.
    units = {
        "samples": "samples",
        "updates": "dense updates",
        "wall_s": "s",
        "samples_per_s": "samples/s",
    }
    figures = {unit: run.summary.get(name) for name, unit in units.items()}
    shown = [
        f"{n:.2g} {unit}" if 0 < n < 10 else f"{n:,.0f} {unit}"
        for unit, n in figures.items()
        if isinstance(n, int | float)
    ]
    return [f"Done: {', '.join(shown)}." if shown else "Done."]


def _scores(run: RunFolder) -> Section:
    if not run.tasks:
        return Section(
            title="Scores", paragraphs=["The run has no summary, so it has no final scores."]
        )

    # A row for each score that any task has, a column for each task.
    names = dict.fromkeys(name for scores in run.tasks.values() for name in scores)
    remarks = [run.summary.get(name) for name in ("warnings", "notes")]
    return Section(
        title="Scores",
        kind="plain",
        header=["score", *run.tasks],
        rows=[
            [name.replace("_", " "), *(_score(scores, name) for scores in run.tasks.values())]
            for name in names
            if not name.startswith("gauc_groups")  # stands beside the figure
        ],
        notes=[
            str(run.summary.get("evaluated_on", "")),
            *(str(line) for lines in remarks if isinstance(lines, list) for line in lines),
        ],
    )


def _score(scores: Mapping[str, Any], name: str) -> str:
    value = _number(scores.get(name), ".4f")
    groups = scores.get("gauc_groups")
    return f"{value} over {groups:,} users" if name == "gauc" and groups else value


def _curves(run: RunFolder) -> Section:
    """The training loss; AUC and log-loss of every task that was evaluated twice."""
    snapshots = sorted(read_metrics(run.folder), key=lambda line: line.samples)
    panels = _training_loss(run)

    # A panel for each score, with a line for each task that has two points.
    for label, name in ((f"{run.part} AUC", "auc"), (f"{run.part} log-loss", "log_loss")):
        lines: dict[str, Sequence[tuple[float, float, float]]] = {}
        for task in run.tasks or ["click"]:
            scores = [(line.samples, line.tasks.get(task, {}).get(name)) for line in snapshots]
            points = [(x, y, math.nan) for x, y in scores if y is not None]
            if len(points) > 1:
                lines[task] = points
        if lines:
            panels[label] = lines

    if not panels:
        sentence = "It has no curve: no summary, and fewer than two evaluations."
        return Section(title="Along the run", paragraphs=[sentence])
    note = "After so many training samples"
    is_judged = bool(panels.keys() - {"training loss"})
    note += f"; the last on {run.part} samples is after all pushes." if is_judged else "."
    return Section(
        title="Along the run", chart=line_chart(panels, "training samples"), notes=[note]
    )


def _training_loss(run: RunFolder) -> dict[str, Lines]:
    # A summary of an older version has no losses.
    record = run.summary.get("training_loss")
    samples = run.summary.get("samples")
    updates = run.summary.get("updates")
    if not record or not samples or not updates:
        return {}

    # A point is the mean over so many samples: it stands in their middle.
    each = samples / updates * record.get("updates_per_point", 1)
    points = [
        ((number + 0.5) * each, loss, math.nan)
        for number, loss in enumerate(record.get("points", ()))
        if loss is not None
    ]
    return {"training loss": {"all tasks": points}} if points else {}


def line_chart(panels: Mapping[str, Lines], x_label: str, *, from_0: bool = False) -> str:
    """Panels below each other, each called as its y axis, over one x axis; as SVG.

    ``from_0``: points with intervals, over an axis that is logarithmic from 1 on and has a 0.
    """

    def draw(figure: Any) -> None:
        # Each panel: its lines, with bars where points have an interval.
        every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (y_label, lines) in zip(every, panels.items(), strict=True):
            handles = []
            for number, points in enumerate(lines.values()):
                x, y, half_width = zip(*sorted(points), strict=True)
                marker = "o" if from_0 else ""
                handles += axes.plot(x, y, marker=marker, gid=f"{y_label} {number}")
                axes.errorbar(x, y, half_width, fmt="none", ecolor=handles[-1].get_color())
            axes.set_ylabel(y_label)
            axes.legend(handles, lines)

        # The axis that all share.
        every[-1].set_xlabel(x_label)
        if from_0:
            every[-1].set_xscale("symlog", linthresh=1)
        else:
            every[-1].locator_params(axis="x", nbins=5)
        every[-1].xaxis.set_major_formatter("{x:,.0f}")

    return pages.drawn(draw, 2.4 * len(panels))


def _staleness(run: RunFolder) -> Section:
    staleness = run.summary.get("staleness")
    if not isinstance(staleness, Mapping):
        return Section(title="How late", paragraphs=["Not known: the run has no summary."])
    pairs = [(name.replace("_", " "), _number(value)) for name, value in staleness.items()]
    return Section(title="How late", facts=[pair for pair in pairs if len(pair[1]) < 200])


def _options(run: RunFolder) -> Section:
    """The options that were chosen, and folded away those that were not."""
    # Options at their defaults are of less interest.
    typed = read_command(run.folder).train
    defaults = {f"--{name}": str(value) for name, value in option_values(TrainConfig())}
    rows: tuple[list[Any], list[Any]] = [], []
    for name, value in run.typed_options().items():
        rows[value == defaults.get(name)].append([Markup("<code>{}</code>").format(name), value])
    return Section(
        title="Options",
        command="" if typed is None else " ".join(["persia-runtime train", *typed]),
        kind="plain",
        header=["option", "value"],
        rows=rows[False],
        folded=f"The other {len(rows[True])}, at their defaults",
        more=rows[True],
    )


def _environment(run: RunFolder) -> Section:
    # The machine and the versions.
    skipped = {"commit", "modified", "started", "process"}
    pairs = [("commit", run.commit), ("started", run.started)]
    pairs += [(name, value) for name, value in flat(run.environment).items() if name not in skipped]

    # The data and their terms.
    data = run.summary.get("data")
    if isinstance(data, Mapping):
        for name, value in data.items():
            if isinstance(value, str | int) and value != "":
                pairs.append((f"data {name}", value))
    pairs += [(f"terms of {name}", terms) for name, terms in described([run.data])]
    facts = [(name.replace("_", " "), value) for name, value in pairs]
    return Section(title="Where it comes from", facts=facts)


def _sweep(folder: Path, path: Path) -> tuple[str, list[str], list[Section]]:
    from tqdm import tqdm  # a page takes a third of a second

    # Each run gets its own page where it lacks one, which takes time.
    runs = list(runs_below(folder))
    data = dict.fromkeys(run.data for run in runs if run.data != "-")
    rows = []
    for run in tqdm(runs, unit=" pages", delay=1, leave=False, disable=None):
        name, *rest = cells(run, folder)
        rows.append([_linked(run, name, path), *rest])

    parts = [
        *_gaps(runs),
        *_curves_of_sweep(runs),
        Section(title="Runs", kind="plain", header=HEADER, rows=rows),
        Section(title="Data", facts=described(data)),
    ]
    return f"Sweep {folder.name}", [counts(runs)], parts


def _linked(run: RunFolder, name: str, path: Path) -> str:
    """A link from a page to the run's own; the name alone where that cannot be made."""
    page = run.folder / PAGE
    with suppress(ValueError, OSError):
        if not page.exists() or page.stat().st_mtime < (run.folder / SUMMARY).stat().st_mtime:
            write_page(run.folder)
        link = quote(os.path.relpath(page, path.parent))
        return Markup('<a href="{}">{}</a>').format(link, name)
    return name


def _gaps(runs: list[RunFolder]) -> list[Section]:
    """A section for each task that has an AUC."""
    tasks = dict.fromkeys(task for run in runs for task in run.tasks)
    judged = [task for task in tasks if settings_of(runs, task)[0]]
    if not judged:
        return [Section(title=_title(""), paragraphs=["No run of it has ended."])]
    return [_gaps_of(runs, task, _title(task if len(judged) > 1 else "")) for task in judged]


def _title(task: str) -> str:
    return f"AUC of {task} against lateness" if task else "AUC against lateness"


def _part(runs: Sequence[RunFolder]) -> str:
    """AUC on the part that all runs were judged on."""
    parts = {run.part for run in runs}
    return f"{parts.pop()} AUC" if len(parts) == 1 else "AUC"


def _gaps_of(runs: list[RunFolder], task: str, title: str) -> Section:
    """Mean AUC of each setting, and its gap to the sync of the same seeds where there is one."""
    settings, notes = settings_of(runs, task)

    # The axes: AUC on the part that all runs were judged on, and gaps.
    rows = []
    label = _part([run for run in runs if run.state == "done"])
    panels: dict[str, dict[str, list[Any]]] = {label: {}, "gap to sync [1e-3]": {}}
    for setting in settings:
        # A row of the table.
        sync = setting.sync_beside_it(settings)
        late = setting.rows_late
        auc = t_interval(list(setting.aucs.values()))
        gap = None if sync is None or sync is setting else setting.gap_to(sync)
        shown = "-" if gap is None else thousandths(gap)
        rows.append([setting.name, "-" if late is None else late, auc.n, f"{auc.mean:.4f}", shown])

        # A point of each panel, where both its coordinates are known.
        for interval, scale, lines in zip((auc, gap), (1, 1e3), panels.values(), strict=True):
            if interval is not None and interval.n and late is not None:
                point = late, scale * interval.mean, scale * interval.half_width
                lines.setdefault(setting.line, []).append(point)

    panels = {label: lines for label, lines in panels.items() if 0 < len(lines) <= MOST_LINES}
    return Section(
        title=title,
        chart=line_chart(panels, "updates that rows miss", from_0=True) if panels else "",
        header=["setting", "rows late", "seeds", "mean AUC", "gap to sync [1e-3]"],
        rows=rows,
        notes=[
            *notes,
            f"AUC of {task}; ± of it, in the picture, is a 95 % t interval over seeds. ± of gaps is"
            " 95 % over paired seeds, and over judged rows where runs kept predictions.",
        ],
    )


def _points(curve: Curve, scale: float = 1.0) -> list[tuple[float, float, float]]:
    return [(samples, scale * value, math.nan) for samples, value in curve.items()]


def _curves_of_sweep(runs: list[RunFolder]) -> list[Section]:
    """AUC along the runs of each setting and its gap to sync, as far as they have come; nothing
    where no run is evaluated on the way."""
    tasks = dict.fromkeys(task for run in runs for line in lines_of(run) for task in line.tasks)
    sections = []
    for task in tasks:
        curves = [one for one in curves_of(runs, task) if len(one.mean()) > 1]
        if not 0 < len(curves) <= MOST_LINES:
            continue

        # The AUC of each setting, and what it is above that of its sync at the same samples.
        lines = {one.setting.name: _points(one.mean()) for one in curves}
        panels = {_part(runs): lines, "gap to sync [1e-3]": {}}
        settings = [one.setting for one in curves]
        for one in curves:
            sync = one.setting.sync_beside_it(settings)
            if sync is not None and sync is not one.setting:
                gaps = one.gap_to(curves[settings.index(sync)])
                panels["gap to sync [1e-3]"][one.setting.name] = _points(gaps, 1e3)
        sections.append(
            Section(
                title=f"Along the runs, {task}" if len(tasks) > 1 else "Along the runs",
                chart=line_chart({n: x for n, x in panels.items() if x}, "training samples"),
                notes=[
                    "Means over the seeds that have ended; before the first has, over those that go"
                    " on. Gaps are paired by seed."
                ],
            )
        )
    return sections


def _number(value: Any, form: str = ".4g") -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else format(value, form)
    return "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
