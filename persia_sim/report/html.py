"""The whole screen as a page in one file, with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

from persia_sim.report.measure import Estimate
from persia_sim.report.report import BINDS, HELPS, Answers, Report

NOT_ASKED = (
    "Not asked: --sensitivity runs it again with each resource 10 % faster, or twice as many."
)


def write_html(
    path: Path, result: Report, questions: Answers, gains: Mapping[str, Mapping[str, Estimate]]
) -> None:
    """Write the report as a page in one file, with pictures; ``gains``: relative ones, by kind of
    change. Raises OSError."""
    from persia_sim.base.page import Section, write_page  # jinja2: only a page needs it

    shares = {"of the critical path": result.blame, "in use": result.use}
    shown: dict[str, dict[str, Any]]
    shown = {
        BINDS: {
            title: {n: Estimate(x, 0.0, 1) for n, x in panel.items()}
            for title, panel in shares.items()
        },
        HELPS: {f"more samples/s, {name}": panel for name, panel in gains.items()},
    }

    # A section for each question, with its picture.
    parts = [
        Section(
            title=question,
            facts=lines,
            chart=_bars(shown.get(question, {})),
            paragraphs=[NOT_ASKED] if question == HELPS and not gains else [],
        )
        for question, lines in questions.items()
        if lines or question == HELPS
    ]
    title = f"{result.run.scenario.mode} on {result.run.scenario.cluster.name}"
    write_page(path, title=title, lead=(), parts=parts)


def _bars(panels: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Shares with their intervals, the largest on top; a panel for each kind, none for nothing."""
    from persia_sim.base.page import drawn

    top = {
        title: [
            item
            for item in sorted(shares.items(), key=lambda item: -item[1].mean)[:6]
            if abs(item[1].mean) >= 5e-4
        ]
        for title, shares in panels.items()
    }
    top = {title: shares for title, shares in top.items() if shares}
    sizes = [2 + len(shares) for shares in top.values()]

    # Drawn only if there is something to show.
    def draw(figure: Any) -> None:
        every = figure.subplots(len(top), squeeze=False, height_ratios=sizes)[:, 0]
        for axes, (title, shares) in zip(every, top.items(), strict=True):
            names, values = zip(*shares, strict=True)
            widths = [100 * v.half_width if 0 < v.half_width < inf else nan for v in values]
            axes.barh(names, [100 * v.mean for v in values], xerr=widths, color="#56b4e9")
            axes.invert_yaxis()
            axes.set_xlabel(f"{title} [%]")

    return drawn(draw, 0.3 * sum(sizes)) if top else ""
