"""How far the simulator is off, and what it says: tables of its pages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from statistics import mean, median, quantiles

import numpy as np
from page_tables import markdown, percent

from experiments.paper.record import STORED, Row, read_rows
from persia_sim.presets.costs import CATALOGUE, fitted
from persia_sim.report.ranges import END, MODE_LN, MODEL_LN

_SIZES = {"wide": (16, 3), "wide-dim128": (128, 10)}
"""Workload of the roofline -> numbers in a row, and cache lines that reading one touches: of the
index, of its record, of its values."""
_OCCURRENCES = 4096 * 26
_THREADS = 2


def measured_costs(stage: str) -> tuple[float, float]:
    """Nanoseconds of a core for an id and for a byte of distinct rows in a stage of `runtime/`: two
    batches with rows of two widths, and so two equations."""
    stored = read_rows(STORED / "bench_peers_roofline.csv")
    took = {(row["workload"], row["stage"]): row for row in stored}
    sizes = []
    for workload, (dim, lines) in _SIZES.items():
        distinct = float(took[workload, "lookup"]["lines"]) / lines
        ids = _OCCURRENCES if stage in ("pool", "scatter") else distinct
        sizes.append((ids, 4 * dim * distinct))
    ns = [1e6 * _THREADS * float(took[workload, stage]["measured_ms"]) for workload in _SIZES]
    an_id, a_byte = np.linalg.solve(sizes, ns)
    return float(an_id), float(a_byte)


def costs_table() -> str:
    """What an embedding worker and a server take, by three sources."""
    laws = {
        "worker: pool": ("pool", "worker_pool"),
        "worker: gradients to rows": ("scatter", "worker_scatter"),
        "server: look up": ("lookup", "server_lookup"),
        "server: update": ("update", "server_update"),
    }
    lines = []
    for name, (stage, law) in laws.items():
        of_id, of_byte = measured_costs(stage)
        theirs = [getattr(fitted(cluster), law) for cluster in ("v100-paper", "gcp-100t")]
        mine = getattr(CATALOGUE, law)
        by_fit = " and ".join(f"{1e9 * each.per_byte_s:.2g}" for each in theirs)
        is_fitted = theirs[0].per_byte_s != mine.per_byte_s
        lines.append(
            [
                name,
                f"{max(0.0, of_id):.0f}, {of_byte:.2g}",
                f"-, {by_fit}" if is_fitted else "-",
                f"{1e9 * mine.per_item_s:.0f}, {1e9 * mine.per_byte_s:.2g}",
            ]
        )
    heads = ["ns for an id, for a byte", "`runtime/`", "fitted: 64 V100 and 100T", "catalogue"]
    return markdown(heads, lines)


def held_table() -> str:
    """How many ranges hold what was measured, and how wide they are."""
    lines = []
    for hosts, stored in (("one host", "validate"), ("two hosts", "validate_hosts")):
        name = f"`validate`, {hosts}"
        known = read_rows(STORED / f"{stored}.csv")
        off = [math.log(float(r["predicted"]) / float(r["samples_per_s"])) for r in known]
        pairs = [a - b for a, b in combinations(off, 2)]
        for what, away, sides in (("rates", off, 1), ("ratios of two rates", pairs, 2)):
            half = END * math.sqrt((MODEL_LN**2 if sides == 1 else 0.0) + sides * MODE_LN**2)
            held = sum(abs(each) <= half for each in away) / len(away)
            lines.append(
                [f"{name}, {what}", f"{len(away)}", f"{held:.0%}", f"{math.exp(2 * half):.2g}"]
            )
    left_out = [row for row in read_rows(STORED / "persia_left_out.csv") if row["low"]]
    inside = [float(r["low"]) <= float(r["published"]) <= float(r["high"]) for r in left_out]
    wide = median(float(row["high"]) / float(row["low"]) for row in left_out)
    share = f"{sum(inside) / len(inside):.0%}"
    lines.append(["points of Persia left out of the fit", f"{len(inside)}", share, f"{wide:.2g}"])
    lines = [[cell.replace("%", " %") for cell in line] for line in lines]
    return markdown(["what was measured", "cases", "inside their range", "high over low"], lines)


def _errors(name: str, rows: Iterable[Row], own: str, guess: str = "") -> list[str]:
    """A line of errors: how many points, the median, what nine in ten lie below, the median of a
    guess, what share lies inside its 90 % band, and the middle one of these; columns hold
    logarithms."""
    rows = list(rows)
    sizes, guesses = (
        [math.expm1(abs(float(row[column]))) for row in rows if column and row[column]]
        for column in (own, guess)
    )
    below = quantiles(sizes, n=10, method="inclusive")[-1]
    by_guess = percent(median(guesses)) if guesses else ""
    cells = [f"{len(rows)}", percent(median(sizes), 1), percent(below), by_guess]
    bands = [float(row["half_90"]) for row in rows if "half_90" in row]
    inside = [abs(float(row[own])) <= half for row, half in zip(rows, bands, strict=False)]
    held = [percent(mean(inside)), f"{math.exp(median(bands)):.2f}"] if bands else ["", ""]
    return [name, *cells, *held]


_PERSIA_LEFT_OUT = {
    "kwai-video hybrid": "Persia: hybrid on Kwai",
    "kwai-video async_averaging": "Persia: async_averaging on Kwai",
    "criteo-syn": "Persia: the 100T cluster",
    "kwai-video": "Persia: all of Kwai",
    "several hosts": "Persia: all points of several GPU hosts",
    "sync": "Persia: all points in sync",
}
_STEPS_LEFT_OUT = {
    "software": "tables on GPUs: the software",
    "machine": "tables on GPUs: the kind of machine",
    "software on a machine": "tables on GPUs: the software on that kind of machine",
    "nodes": "tables on GPUs: the number of nodes",
    "network": "tables on GPUs: all steps of several nodes",
    "source": "tables on GPUs: the source, by titles alone",
    "name of the software": "tables on GPUs: all software of a name, by titles alone",
}
"""Group that a fit did not see -> what the page calls it."""


def errors_table() -> str:
    """Errors of what was fitted to, and of what was left out of a fit."""
    persia = read_rows(STORED / "persia_left_out.csv")
    steps = read_rows(STORED / "predict_published_left_out.csv")
    lines = [
        _errors(name, (row for row in persia if row["left_out"] == what), "ln_rate_error",
                "naive_ln_rate_error")
        for what, name in _PERSIA_LEFT_OUT.items()
    ]  # fmt: skip
    fitted_to = read_rows(STORED / "predict_published.csv")
    lines.append(_errors("tables on GPUs: nothing, all were fitted to", fitted_to, "ln_error",
                         "naive_ln_error"))  # fmt: skip
    lines += [
        _errors(name, (row for row in steps if row["left_out"] == what), "ln_error",
                "naive_ln_error")
        for what, name in _STEPS_LEFT_OUT.items()
    ]  # fmt: skip
    heads = ["what the fit did not see", "points", "median error", "nine in ten errors below"]
    heads += ["median error of the guess", "inside their bands", "the middle band: times or over"]
    return markdown(heads, lines)


def validate_table() -> str:
    """Runs of this host that were predicted before they ran: with the servers in the ranks'
    process, and on a second host."""
    lines: dict[str, list[str]] = {}
    for name in ("validate", "validate_hosts"):
        rows = read_rows(STORED / f"{name}.csv")
        errors = [float(row["error"]) for row in rows]
        both = ("sent_error", "come_error")
        ways = [float(row[way]) for row in rows for way in both if way in row]
        shown = {
            "cases": f"{len(rows)}",
            "throughput: error on average": percent(mean(map(abs, errors)), 1),
            "throughput: largest error": percent(max(map(abs, errors))),
            "the simple rule: error on average": percent(
                mean(abs(float(row["rule_error"])) for row in rows)
            ),
            "runs inside their 90 % bands": percent(
                sum(int(row["inside"]) for row in rows) / sum(int(row["runs"]) for row in rows)
            ),
            "histogram of staleness: total variation on average": "{:.2f}".format(
                mean(float(row["stale_variation"]) for row in rows)
            ),
            "bytes over the link: largest error": percent(max(map(abs, ways)), 1) if ways else "",
        }
        for what, value in shown.items():
            lines.setdefault(what, [what]).append(value)
    return markdown(["what was predicted", "one host", "two hosts"], lines.values())


def timeline_table() -> str:
    """Milliseconds of a step in each mode on the simulated cluster."""
    rows = read_rows(STORED / "modes_timeline.csv")
    took = {row["mode"]: 1e3 * float(row["mean_step_s"]) for row in rows}
    cells = [rows[0]["system"], *(f"{step_ms:.1f}" for step_ms in took.values())]
    return markdown(["ms a step", *took], [cells])
