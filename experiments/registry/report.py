"""A page about one run or one sweep: scores, curves, staleness, options, environment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gaps import thousandths
from experiments.paper import html
from experiments.paper.figures import described
from experiments.registry.compare import curve
from experiments.registry.found import Run, is_sweep, runs_below, the_run
from experiments.registry.listing import HEADER, cells, counts
from experiments.registry.options import typed_options
from experiments.registry.settings import settings_of
from experiments.registry.svg import line_chart
from experiments.statistics import t_interval
from persia_sim.words.files import atomic_write
from runtime.run.folder import read_command


def write_page(folder: Path, path: Path) -> Path:
    """Write the page of a run or a sweep. Raises ValueError where the folder is neither."""
    content = _sweep(folder) if is_sweep(folder) else _run(the_run(folder))
    with atomic_write(path) as file:
        file.write(content.encode())
    return path


def _run(run: Run) -> str:
    title = f"Run {run.folder.name}: {run.mode} on {run.data}"
    return html.page(
        title,
        html.tag("h1", html.text(title)),
        html.paragraph(_state(run), class_="lead"),
        _part("Scores", _scores(run)),
        _part("Along the run", _curves(run)),
        _part("How late", _staleness(run)),
        _part("Options", _options(run)),
        _part("Where it comes from", _environment(run)),
    )


def _part(title: str, inside: str) -> str:
    return html.tag("section", html.tag("h2", html.text(title)), inside)


def _state(run: Run) -> str:
    if run.state == "done":
        samples = run.summary.get("samples")
        return f"Done: {samples:,} samples." if isinstance(samples, int) else "Done."
    last = f" It said: {run.why}" if run.why else ""
    return f"This run is {run.state}; what follows is as far as it came.{last}"


def _scores(run: Run) -> str:
    if not run.tasks:
        return html.paragraph("The run has no summary, so it has no final scores.")
    names = list(dict.fromkeys(name for scores in run.tasks.values() for name in scores))
    rows = [
        [html.text(task), *(_score(scores.get(name)) for name in names)]
        for task, scores in run.tasks.items()
    ]
    head = ["task", *(name.replace("_", " ") for name in names)]
    told = str(run.summary.get("evaluated_on", ""))
    return html.table(head, rows, "numbers") + html.paragraph(told, class_="soft")


def _curves(run: Run) -> str:
    tasks = list(run.tasks) or ["click"]
    lines = {task: sorted(curve(run.folder, task).items()) for task in tasks}
    lines = {task: points for task, points in lines.items() if len(points) > 1}
    if not lines:
        return html.paragraph("It was evaluated fewer than two times: there is no curve.")
    chart = line_chart(lines, "training samples", "test AUC", "Test AUC against training samples")
    said = "Test AUC after so many training samples; the last point is after all pushes."
    return html.tag("figure", chart, html.tag("figcaption", html.paragraph(said)))


def _staleness(run: Run) -> str:
    found = run.summary.get("staleness")
    if not isinstance(found, Mapping):
        return html.paragraph("Not known: the run has no summary.")
    pairs = [(name.replace("_", " "), _number(value)) for name, value in found.items()]
    return html.facts([pair for pair in pairs if len(pair[1]) < 200])


def _options(run: Run) -> str:
    rows = [
        [html.tag("code", html.text(name)), html.text(value)]
        for name, value in typed_options(run).items()
    ]
    return _command(run) + html.table(["option", "value"], rows, "plain")


def _command(run: Run) -> str:
    typed = read_command(run.folder).train
    if typed is None:
        return ""
    words = " ".join(["python -m runtime train", *typed])
    return html.tag("p", html.tag("code", html.text(words)))


def _environment(run: Run) -> str:
    pairs = [("commit", html.text(run.commit)), ("started", html.text(run.started))]
    skipped = {"commit", "modified", "started", "process"}
    for name, value in run.environment.items():
        if name not in skipped:
            several = value if isinstance(value, dict) else {}
            shown = ", ".join(f"{k} {v}" for k, v in several.items()) or value
            pairs.append((name.replace("_", " "), html.text(shown)))
    data = run.summary.get("data")
    if isinstance(data, Mapping):
        pairs += [(f"data {name}", html.text(value)) for name, value in data.items()
                  if isinstance(value, str | int) and value != ""]  # fmt: skip
    pairs += [(f"terms of {name}", html.text(terms)) for name, terms in described([run.data])]
    return html.facts(pairs)


def _sweep(folder: Path) -> str:
    runs = list(runs_below(folder))
    title = f"Sweep {folder.name}"
    rows = [[html.text(cell) for cell in cells(run, folder)] for run in runs]
    data = dict.fromkeys(run.data for run in runs if run.data != "-")
    return html.page(
        title,
        html.tag("h1", html.text(title)),
        html.paragraph(counts(runs), class_="lead"),
        _part("Against sync, paired by seed", _gaps(runs)),
        _part("Runs", html.table(HEADER, rows, "numbers")),
        _part("Data", html.facts([(n, html.text(t)) for n, t in described(data)])),
    )


def _gaps(runs: list[Run]) -> str:
    """Mean AUC of each setting, and its gap to the sync of the same seeds where there is one."""
    settings, notes = settings_of(runs)
    if not settings:
        return html.paragraph("No run of it has ended.")
    rows = []
    for setting in settings:
        own, sync = setting.aucs, setting.sync_beside_it(settings)
        reference = {} if sync is None else sync.aucs
        gap = t_interval([own[seed] - reference[seed] for seed in sorted({*own} & {*reference})])
        told = "-" if sync is setting else thousandths(gap)
        mean = float(np.mean(list(own.values())))
        rows.append([html.text(setting.name), str(len(own)), f"{mean:.4f}", html.text(told)])
    note = "AUC of the first task; ± is a 95 % t interval over paired seeds."
    head = ["setting", "seeds", "mean AUC", "gap to sync [1e-3]"]
    said = [html.paragraph(html.text(text)) for text in notes]
    return html.table(head, rows, "numbers") + html.paragraph(note, class_="soft") + "".join(said)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return html.text(
        "-" if value is None else json.dumps(value) if isinstance(value, list) else value
    )
