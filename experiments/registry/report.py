"""A page about one run or one sweep: scores, curves, staleness, options, environment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from experiments.gaps import thousandths
from experiments.paper.page import described
from experiments.registry.compare import settings_of
from experiments.registry.runs import HEADER, Run, cells, counts, is_sweep, runs_below, the_run
from experiments.statistics import t_interval
from persia_sim.words import page as pages
from persia_sim.words.command_line import option_values
from persia_sim.words.files import is_page, refuse_loss
from persia_sim.words.page import Part
from runtime.config import TrainConfig
from runtime.run.folder import SUMMARY, flat, read_command, read_metrics

Lines = Mapping[str, Sequence[tuple[float, float, float]]]
"""By name: x, y and half the width of y's interval (NaN for none) of each point."""
PAGE = "report.html"
MOST_LINES = 10
"""Of a picture that can be read."""


def write_page(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run or a sweep, else into the folder; returns where. Runs of a sweep get
    pages in their own folders, where these lack one or have an older one.

    Raises ValueError where the folder is neither, and where the page would replace another file.
    """
    path = path or folder / PAGE
    refuse_loss("--out", path, "page", is_page)
    title, lead, parts = _sweep(folder, path) if is_sweep(folder) else _run(the_run(folder))
    return pages.write_page(path, title=title, lead=lead, parts=parts)


def _run(run: Run) -> tuple[str, list[str], list[Part]]:
    parts = [_scores(run), _curves(run), _options(run), _staleness(run), _environment(run)]
    return f"Run {run.folder.name}: {run.mode} on {run.data}", _state(run), parts


def _state(run: Run) -> list[str]:
    if run.state != "done":
        last = f" It said: {run.why}" if run.why else ""
        return [f"This run is {run.state}; what follows is as far as it came.{last}"]
    units = {"samples": "samples", "updates": "dense updates", "wall_s": "s",
             "samples_per_s": "samples/s"}  # fmt: skip
    known = {unit: run.summary.get(name) for name, unit in units.items()}
    told = [f"{n:,.0f} {unit}" for unit, n in known.items() if isinstance(n, int | float)]
    return [f"Done: {', '.join(told)}." if told else "Done."]


def _scores(run: Run) -> Part:
    if not run.tasks:
        return Part(title="Scores", said=["The run has no summary, so it has no final scores."])
    names = dict.fromkeys(name for scores in run.tasks.values() for name in scores)
    told = [run.summary.get(name) for name in ("warnings", "notes")]
    return Part(
        title="Scores",
        kind="plain",
        header=["score", *run.tasks],
        rows=[
            [name.replace("_", " "), *(_score(scores, name) for scores in run.tasks.values())]
            for name in names
            if not name.startswith("gauc_groups")  # said beside the figure
        ],
        notes=[
            str(run.summary.get("evaluated_on", "")),
            *(str(line) for lines in told if isinstance(lines, list) for line in lines),
        ],
    )


def _score(scores: Mapping[str, Any], name: str) -> str:
    value, groups = _number(scores.get(name), ".4f"), scores.get("gauc_groups")
    return f"{value} over {groups:,} users" if name == "gauc" and groups else value


def _curves(run: Run) -> Part:
    """The training loss; AUC and log-loss of every task that was evaluated twice."""
    lines = read_metrics(run.folder)
    panels = _training_loss(run)
    for label, name in ((f"{run.part} AUC", "auc"), (f"{run.part} log-loss", "log_loss")):
        found = {
            task: [
                (line.samples, value, math.nan)
                for line in sorted(lines, key=lambda line: line.samples)
                if (value := line.tasks.get(task, {}).get(name)) is not None
            ]
            for task in run.tasks or ["click"]
        }
        if found := {task: points for task, points in found.items() if len(points) > 1}:
            panels[label] = found
    if not panels:
        said = "It has no curve: no summary, and fewer than two evaluations."
        return Part(title="Along the run", said=[said])
    said = f"After so many training samples; the last on {run.part} rows is after all pushes."
    return Part(title="Along the run", chart=line_chart(panels, "training samples"), notes=[said])


def _training_loss(run: Run) -> dict[str, Lines]:
    names = "training_loss", "samples", "updates"
    found, samples, updates = (run.summary.get(name) for name in names)
    if not found or not samples or not updates:  # of an older version
        return {}
    each = samples / updates * found.get("updates_per_point", 1)
    losses = enumerate(found.get("points", ()))
    known = [(number, loss) for number, loss in losses if loss is not None]
    points = [((number + 0.5) * each, loss, math.nan) for number, loss in known]
    return {"training loss": {"all tasks": points}} if points else {}


def line_chart(panels: Mapping[str, Lines], x_label: str, *, from_0: bool = False) -> str:
    """Panels below each other, each called as its y axis, over one x axis; as SVG.

    ``from_0``: points with intervals, over an axis that is logarithmic from 1 on and has a 0.
    """

    def draw(figure: Any) -> None:
        every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (y_label, lines) in zip(every, panels.items(), strict=True):
            handles = []
            for number, points in enumerate(lines.values()):
                x, y, half_width = zip(*sorted(points), strict=True)
                gid, marker = f"{y_label} {number}", "o" if from_0 else ""
                handles += axes.plot(x, y, marker=marker, gid=gid)
                axes.errorbar(x, y, half_width, fmt="none", ecolor=handles[-1].get_color())
            axes.set_ylabel(y_label)
            axes.legend(handles, lines)
        every[-1].set_xlabel(x_label)
        if from_0:
            every[-1].set_xscale("symlog", linthresh=1)
        else:
            every[-1].locator_params(axis="x", nbins=5)
        every[-1].xaxis.set_major_formatter("{x:,.0f}")

    return pages.drawn(draw, 2.4 * len(panels))


def _staleness(run: Run) -> Part:
    found = run.summary.get("staleness")
    if not isinstance(found, Mapping):
        return Part(title="How late", said=["Not known: the run has no summary."])
    pairs = [(name.replace("_", " "), _number(value)) for name, value in found.items()]
    return Part(title="How late", facts=[pair for pair in pairs if len(pair[1]) < 200])


def _options(run: Run) -> Part:
    """What was chosen, and folded away what was not."""
    typed = read_command(run.folder).train
    defaults = {f"--{name}": str(value) for name, value in option_values(TrainConfig())}
    rows: tuple[list[Any], list[Any]] = [], []
    for name, value in run.typed_options().items():
        rows[value == defaults.get(name)].append([Markup("<code>{}</code>").format(name), value])
    return Part(
        title="Options",
        command="" if typed is None else " ".join(["persia-runtime train", *typed]),
        kind="plain",
        header=["option", "value"],
        rows=rows[False],
        folded=f"The other {len(rows[True])}, at their defaults",
        more=rows[True],
    )


def _environment(run: Run) -> Part:
    skipped = {"commit", "modified", "started", "process"}
    found = [("commit", run.commit), ("started", run.started)]
    found += [(name, value) for name, value in flat(run.environment).items() if name not in skipped]
    data = run.summary.get("data")
    if isinstance(data, Mapping):
        found += [(f"data {name}", value) for name, value in data.items()
                  if isinstance(value, str | int) and value != ""]  # fmt: skip
    found += [(f"terms of {name}", terms) for name, terms in described([run.data])]
    facts = [(name.replace("_", " "), value) for name, value in found]
    return Part(title="Where it comes from", facts=facts)


def _sweep(folder: Path, path: Path) -> tuple[str, list[str], list[Part]]:
    from tqdm import tqdm  # a page takes a third of a second

    runs = list(runs_below(folder))
    data = dict.fromkeys(run.data for run in runs if run.data != "-")
    rows = []
    for run in tqdm(runs, unit=" pages", delay=1, leave=False, disable=None):
        name, *rest = cells(run, folder)
        rows.append([_linked(run, name, path), *rest])
    parts = [
        _gaps(runs),
        Part(title="Runs", kind="plain", header=HEADER, rows=rows),
        Part(title="Data", facts=described(data)),
    ]
    return f"Sweep {folder.name}", [counts(runs)], parts


def _linked(run: Run, name: str, path: Path) -> str:
    """A link from a page to the run's own; the name alone where that cannot be made."""
    own = run.folder / PAGE
    with suppress(ValueError, OSError):
        if not own.exists() or own.stat().st_mtime < (run.folder / SUMMARY).stat().st_mtime:
            write_page(run.folder)
        link = quote(os.path.relpath(own, path.parent))
        return Markup('<a href="{}">{}</a>').format(link, name)
    return name


def _gaps(runs: list[Run]) -> Part:
    """Mean AUC of each setting, and its gap to the sync of the same seeds where there is one."""
    title = "AUC against lateness"
    settings, notes = settings_of(runs)
    if not settings:
        return Part(title=title, said=["No run of it has ended."])
    rows = []
    parts = {run.part for run in runs if run.state == "done"}
    label = f"{parts.pop()} AUC" if len(parts) == 1 else "AUC"
    panels: dict[str, dict[str, list[Any]]] = {label: {}, "gap to sync [1e-3]": {}}
    for setting in settings:
        sync, late = setting.sync_beside_it(settings), setting.rows_late
        auc = t_interval(list(setting.aucs.values()))
        gap = None if sync is None or sync is setting else setting.gap_to(sync)
        told = "-" if gap is None else thousandths(gap)
        rows.append([setting.name, "-" if late is None else late, auc.n, f"{auc.mean:.4f}", told])
        for found, scale, lines in zip((auc, gap), (1, 1e3), panels.values(), strict=True):
            if found is not None and found.n and late is not None:
                point = late, scale * found.mean, scale * found.half_width
                lines.setdefault(setting.line, []).append(point)
    panels = {label: lines for label, lines in panels.items() if 0 < len(lines) <= MOST_LINES}
    return Part(
        title=title,
        chart=line_chart(panels, "updates that rows miss", from_0=True) if panels else "",
        header=["setting", "rows late", "seeds", "mean AUC", "gap to sync [1e-3]"],
        rows=rows,
        notes=[*notes, "AUC of the first task; ± of it, in the picture, is a 95 % t interval over"
               " seeds. ± of gaps is 95 % over paired seeds, and over judged rows where runs kept"
               " predictions."],
    )  # fmt: skip


def _number(value: Any, form: str = ".4g") -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else format(value, form)
    return "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
