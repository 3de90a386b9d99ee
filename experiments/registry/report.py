"""A page about one run or one sweep: scores, curves, staleness, options, environment."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from experiments.gaps import thousandths
from experiments.paper.page import described, rendered
from experiments.registry.compare import curve, settings_of
from experiments.registry.runs import HEADER, Run, cells, counts, is_sweep, runs_below, the_run
from experiments.statistics import t_interval
from persia_sim.words.files import atomic_write
from runtime.run.folder import read_command

COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
DASHES = ("-", "--", ":", "-.", (0, (8, 3, 2, 3)))
"""Lines differ in grey, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section of the page; what is empty is not shown."""

    title: str
    command: str = ""
    chart: str = ""
    """SVG that is marked as such."""
    kind: str = "numbers"
    """Of the table."""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    facts: Sequence[tuple[str, object]] = ()
    said: Sequence[str] = ()
    """Paragraphs at the end."""


def write_page(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run or a sweep, else into the folder; returns where.

    Raises ValueError where the folder is neither.
    """
    path = path or folder / "report.html"
    title, lead, parts = _sweep(folder) if is_sweep(folder) else _run(the_run(folder))
    template = Path(__file__).with_name("page.html")
    content = rendered(template, title=title, lead=lead, parts=parts)
    with atomic_write(path) as file:
        file.write(content.encode())
    return path


def _run(run: Run) -> tuple[str, str, list[Part]]:
    parts = [_scores(run), _curves(run), _staleness(run), _options(run), _environment(run)]
    return f"Run {run.folder.name}: {run.mode} on {run.data}", _state(run), parts


def _state(run: Run) -> str:
    if run.state == "done":
        samples = run.summary.get("samples")
        return f"Done: {samples:,} samples." if isinstance(samples, int) else "Done."
    last = f" It said: {run.why}" if run.why else ""
    return f"This run is {run.state}; what follows is as far as it came.{last}"


def _scores(run: Run) -> Part:
    if not run.tasks:
        return Part(title="Scores", said=["The run has no summary, so it has no final scores."])
    names = list(dict.fromkeys(name for scores in run.tasks.values() for name in scores))
    return Part(
        title="Scores",
        header=["task", *(name.replace("_", " ") for name in names)],
        rows=[
            [task, *(_number(scores.get(name), ".4f") for name in names)]
            for task, scores in run.tasks.items()
        ],
        said=[str(run.summary.get("evaluated_on", ""))],
    )


def _curves(run: Run) -> Part:
    lines = {task: sorted(curve(run.folder, task).items()) for task in run.tasks or ["click"]}
    lines = {task: points for task, points in lines.items() if len(points) > 1}
    if not lines:
        said = "It was evaluated fewer than two times: there is no curve."
        return Part(title="Along the run", said=[said])
    said = "Test AUC after so many training samples; the last point is after all pushes."
    chart = line_chart(lines, "training samples", "test AUC")
    return Part(title="Along the run", chart=chart, said=[said])


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str
) -> Markup:
    """Named lines over one x axis, as SVG that stands inside a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, which takes seconds

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):  # text; equal bytes
        picture = Figure(figsize=(7.0, 3.4), layout="constrained")
        axes = picture.add_subplot(xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:.4f}")
        axes.grid(color="#d0d7de")
        for number, points in enumerate(lines.values()):
            style = {"color": COLOURS[number % 5], "linestyle": DASHES[number % 5]}
            axes.plot(*zip(*points, strict=True), gid=f"line-{number}", **style)
        for text in axes.legend(axes.lines, lines).get_texts():
            text.set_parse_math(False)  # a task's name may hold a dollar sign
        file = io.StringIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        picture.savefig(file, format="svg", metadata=unsaid)
    return Markup(file.getvalue()[file.getvalue().index("<svg") :])


def _staleness(run: Run) -> Part:
    found = run.summary.get("staleness")
    if not isinstance(found, Mapping):
        return Part(title="How late", said=["Not known: the run has no summary."])
    pairs = [(name.replace("_", " "), _number(value)) for name, value in found.items()]
    return Part(title="How late", facts=[pair for pair in pairs if len(pair[1]) < 200])


def _options(run: Run) -> Part:
    typed = read_command(run.folder).train
    command = "" if typed is None else " ".join(["persia-runtime train", *typed])
    code = Markup("<code>{}</code>")
    rows = [[code.format(name), value] for name, value in run.typed_options().items()]
    return Part(title="Options", command=command, header=["option", "value"], rows=rows,
                kind="plain")  # fmt: skip


def _environment(run: Run) -> Part:
    pairs: list[tuple[str, object]] = [("commit", run.commit), ("started", run.started)]
    skipped = {"commit", "modified", "started", "process"}
    for name, value in run.environment.items():
        if name not in skipped:
            several = value if isinstance(value, dict) else {}
            shown = ", ".join(f"{k} {v}" for k, v in several.items()) or value
            pairs.append((name.replace("_", " "), shown))
    data = run.summary.get("data")
    if isinstance(data, Mapping):
        pairs += [(f"data {name}", value) for name, value in data.items()
                  if isinstance(value, str | int) and value != ""]  # fmt: skip
    pairs += [(f"terms of {name}", terms) for name, terms in described([run.data])]
    return Part(title="Where it comes from", facts=pairs)


def _sweep(folder: Path) -> tuple[str, str, list[Part]]:
    runs = list(runs_below(folder))
    data = dict.fromkeys(run.data for run in runs if run.data != "-")
    parts = [
        _gaps(runs),
        Part(title="Runs", header=HEADER, rows=[cells(run, folder) for run in runs]),
        Part(title="Data", facts=described(data)),
    ]
    return f"Sweep {folder.name}", counts(runs), parts


def _gaps(runs: list[Run]) -> Part:
    """Mean AUC of each setting, and its gap to the sync of the same seeds where there is one."""
    title = "Against sync, paired by seed"
    settings, notes = settings_of(runs)
    if not settings:
        return Part(title=title, said=["No run of it has ended."])
    rows = []
    for setting in settings:
        own, sync = setting.aucs, setting.sync_beside_it(settings)
        reference = {} if sync is None else sync.aucs
        gap = t_interval([own[seed] - reference[seed] for seed in sorted({*own} & {*reference})])
        told = "-" if sync is setting else thousandths(gap)
        mean = float(np.mean(list(own.values())))
        rows.append([setting.name, len(own), f"{mean:.4f}", told])
    note = "AUC of the first task; ± is a 95 % t interval over paired seeds."
    header = ["setting", "seeds", "mean AUC", "gap to sync [1e-3]"]
    return Part(title=title, header=header, rows=rows, said=[note, *notes])


def _number(value: Any, form: str = ".4g") -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else format(value, form)
    return "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
