"""Stored tables of simulations are what the simulator says today: a line of each, made anew."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.choosing.speeds import HALF_WIDTH, MOST_STEPS
from experiments.studies import ablation, scale
from persia_sim.base.vocabulary import Mode
from persia_sim.presets.point import Point
from persia_sim.report.sweep import evaluate
from tests.experiments.raw_runs import read_csv
from tests.tree import ROOT

Line = tuple[dict[str, Any], dict[str, float]]
"""Which line of the table, and numbers that stand there."""


def of_ablation() -> Iterator[Line]:
    options = ablation.Options(steps=40)
    for place, variant in (("Kwai", ablation.WINDOW), ("100T-10Gbit", ablation.HALF_ROWS)):
        change = ablation.VARIANTS[variant]
        rate = ablation._rate(change(ablation.scenario_of(place, options)))["samples_per_s"]
        yield {"where": f"{place}, 64 GPUs", "variant": variant}, {"value": rate}


def of_scale_workers() -> Iterator[Line]:
    steps = scale.Options().steps
    rate, _ = scale.simulated("v100-paper", "kwai-video", Mode.HYBRID, 8, steps)
    yield {"series": "kwai-video hybrid", "gpus": 8}, {"model": rate}


def of_which_mode() -> Iterator[Line]:
    for mode, tau in ((Mode.SYNC, None), (Mode.HYBRID, 4)):
        point = Point(cluster="h100-host", workload="kwai-video", mode=mode, tau=tau)
        row = evaluate(point, half_width=HALF_WIDTH, most_steps=MOST_STEPS)
        known = {"cluster": "h100-host", "mode": "sync" if tau is None else f"hybrid, tau {tau}"}
        yield known, {"samples_per_s": row["samples_per_s"]}


TABLES = {of.__name__[3:]: of for of in (
    of_ablation, of_scale_workers, of_which_mode,
)}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("table", TABLES)
def test_a_stored_line_is_what_is_simulated_today(table):
    rows = read_csv(ROOT / "docs" / "results" / f"{table}.csv")
    for known, numbers in TABLES[table]():
        (row,) = (r for r in rows if all(_same(r[name], value) for name, value in known.items()))
        found = {name: float(row[name]) for name in numbers}
        assert found == pytest.approx(numbers, rel=1e-6, abs=1e-9), f"{table}.csv is stale: {known}"


def _same(text: str, value: Any) -> bool:
    return text == value if isinstance(value, str) else float(text) == value


def test_a_stored_table_names_a_commit_of_this_history_or_says_that_it_does_not():
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("a copy of the repository without its history")
    for line in read_csv(ROOT / "docs" / "results" / "index.csv"):
        for commit in re.findall(r"\b[0-9a-f]{7,40}\b", line["commit"]):
            known = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"])
            is_marked = "not in this history" in line["commit"]
            assert (known.returncode != 0) == is_marked, f"{line['file']}: {line['commit']}"
