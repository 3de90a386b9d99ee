"""`python docs/tools/results_page.py` writes what the pages quote: of the stored tables, and of the
screens that commands print."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median
from textwrap import fill

import numpy as np

from experiments.benching.windows import Window, summarize
from experiments.benching.wire import WireCase, wire_cases
from experiments.lateness.streams import STREAMS
from experiments.paper.claims import answers
from experiments.paper.claims import markdown as claims_table
from experiments.paper.record import STORED, Row, read_rows
from experiments.studies.sharded_map import ranges_of
from experiments.studies.which_mode import LABELS
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.scenario import Scenario
from persia_sim.presets import catalogue
from persia_sim.presets.costs import CATALOGUE, fitted
from persia_sim.report import sweep
from persia_sim.report.ranges import END, MODE_LN, MODEL_LN, OnServers, Range, range_of
from persia_sim.report.sizing import cheapest, unknown_hosts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "README.md"
README = ROOT / "README.md"
GUIDES = ROOT / "docs" / "guides.md"
SIMULATOR = ROOT / "docs" / "simulator.md"
SIMULATED = ROOT / "docs" / "results" / "simulated.md"
ARTIFACT = ROOT / "ARTIFACT.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
TRANSCRIPT = ROOT / "examples" / "first_day.txt"
WIRE_ROUND_TRIPS_S, WIRE_LOOKUPS = (0.01, 0.03), (1, 10)
"""What the stored runs over a slow wire were asked for."""
NAMES = {
    "movielens-latest-small-2016": "MovieLens",
    "kuairand-pure-14d": "KuaiRand, click",
    "oulad-assessments": "OULAD",
    "tennis": "tennis",
    "synthetic:zipf-1.8": "drawn, Zipf 1.8",
    "synthetic:zipf-1.1": "drawn, Zipf 1.1",
}
CELLS = ((7, 0), (16, 0), (64, 0), (0, 7), (7, 7), (39, 7))
HEADS = {
    (7, 0): "rows 7 late [1e-3]", (16, 0): "rows 16 late [1e-3]", (64, 0): "rows 64 late [1e-3]",
    (0, 7): "dense 7 late [1e-3]", (7, 7): "both 7 late [1e-3]",
    (39, 7): "rows 39, dense 7 late [1e-3]",
}  # fmt: skip


def rows_of(end: str) -> list[Row]:
    """A stored table of the study; none where nothing is known yet."""
    path = STORED / f"lateness{end}.csv"
    return read_rows(path) if path.is_file() else []


def number(row: Row | None, name: str = "gap_to_sync", scale: float = 1e3) -> str:
    """A value with the half width of its interval."""
    if row is None or not row[name] or math.isnan(float(row[name])):
        return ""
    return f"{scale * float(row[name]):+.1f} ± {scale * float(row[f'{name}_half_width_95']):.1f}"


def first_task(rows: Iterable[Row]) -> list[Row]:
    """The lines of each data set's first task."""
    tasks: dict[str, str] = {}
    return [row for row in rows if tasks.setdefault(row["data"], row["task"]) == row["task"]]


def the(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The line with these cells; None where there is none."""
    for row in rows:
        if all(
            math.isclose(float(row[k]), v) if isinstance(v, int | float) else row[k] == v
            for k, v in wanted.items()
        ):
            return row
    return None


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; columns that are empty throughout are left out."""
    lines = [list(line) for line in lines]
    used = [k for k in range(len(header)) if any(line[k] for line in lines)]
    cells = [[line[k] for k in used] for line in [list(header), ["---"] * len(header), *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def order_table() -> str:
    """Time order, shuffled, and behind buffers, at sync's rates."""
    rows, lines = first_task(rows_of("")), []
    plain = [r for r in rows if r["window"] == "test" and float(r["optimizer_start"]) == 0
             and r["rates"] == "of sync" and r["redrawn"] == "False"]  # fmt: skip
    for data in STREAMS:
        orders = dict.fromkeys(r["order"] for r in plain if r["data"] == data)
        for order in orders:
            own = [r for r in plain if (r["data"], r["order"]) == (data, order)]
            sync = the(own, rows_late=0, dense_late=0)
            if sync is None:
                continue
            words = {"time": "time order", "shuffled": "shuffled"}.get(
                order, f"shuffle buffer of {order.removeprefix('buffer-')} samples"
            )
            known = sync["b_16"] and not math.isnan(float(sync["b_16"]))
            lines.append(
                [
                    NAMES.get(data, data),
                    words,
                    f"{float(sync['b_16']):.3f}" if known else "",
                    f"{float(sync['test_auc']):.4f}",
                    *(number(the(own, rows_late=r, dense_late=d)) for r, d in CELLS),
                ]
            )
    return markdown(
        ["stream", "order", "b(16), a share", "AUC of sync", *(HEADS[cell] for cell in CELLS)],
        lines,
    )


def chosen_table() -> str:
    """Every stream in its own order, at the rates that the rule chose."""
    rows, lines = first_task(rows_of("")), []
    for data, stream in STREAMS.items():
        for start in stream.starts:
            own = [
                r
                for r in rows
                if r["data"] == data
                and math.isclose(float(r["optimizer_start"]), start)
                and (r["order"], r["window"]) == ("time", "test")
                and int(r["updates"]) != stream.long_updates
            ]
            sync = the(own, rows_late=0, dense_late=0, batch=stream.batch)
            if sync is None:
                continue
            doubled = the(own, rows_late=0, dense_late=0, batch=2 * stream.batch)
            chosen = [r for r in own if r["chosen"] == "True"]
            cells = [number(the(chosen, rows_late=r, dense_late=d)) for r, d in CELLS]
            if any(cells):
                name = NAMES.get(data, data) + (f", Adagrad starts at {start:.3g}" if start else "")
                rates = f"{float(sync['row_lr']):g} / {float(sync['lr']):g}"
                lines.append([name, rates, f"{float(sync['test_auc']):.4f}", *cells,
                              number(doubled)])  # fmt: skip
    head = ["stream", "sync's rates, rows / dense", "AUC of sync"]
    return markdown([*head, *(HEADS[c] for c in CELLS), "twice the batch [1e-3]"], lines)


WINDOWS = {
    "origin-1": "the sixth before the last",
    "origin-2": "the last sixth",
    "test": "the test part",
}
"""What a stream's test windows are called, in the order of time."""


def window_table() -> str:
    """The test windows of each stream, in time order at the rules' rates, and shuffled."""
    rows = [r for r in first_task(rows_of("")) if r["chosen"] == "True"]
    rows = [r for r in rows if float(r["optimizer_start"]) == 0]
    cells = ((7, 0), (16, 0), (0, 7), (7, 7))
    lines = []
    for data, stream in STREAMS.items():
        if not stream.has_windows:
            continue
        for window, words in WINDOWS.items():
            here = [r for r in rows if (r["data"], r["window"]) == (data, window)]
            in_time = [r for r in here if r["order"] == "time"]
            shuffled = [r for r in here if r["order"] == "shuffled"]
            sync = the(in_time, rows_late=0, dense_late=0, batch=stream.batch)
            if sync is not None:
                lines.append(
                    [
                        NAMES.get(data, data),
                        words,
                        sync["updates"],
                        f"{float(sync['test_auc']):.4f}",
                        *(number(the(in_time, rows_late=r, dense_late=d)) for r, d in cells),
                        number(the(shuffled, rows_late=16, dense_late=0)),
                    ]
                )
    head = ["stream", "tested on", "updates", "AUC of sync", *(HEADS[cell] for cell in cells)]
    return markdown([*head, "shuffled, rows 16 late [1e-3]"], lines)


def length_table() -> str:
    """A drawn stream, short and long, at sync's rates."""
    rows = [r for r in first_task(rows_of("")) if r["rates"] == "of sync"]
    lines = []
    for data, stream in STREAMS.items():
        if stream.long_updates is None:
            continue
        here = [r for r in rows if r["data"] == data and float(r["optimizer_start"]) == 0]
        for updates in sorted({int(r["updates"]) for r in here if r["batch"] == str(stream.batch)}):
            of_length = [r for r in here if int(r["updates"]) == updates]
            sync = the(of_length, rows_late=0, dense_late=0)
            gaps = [number(the(of_length, rows_late=r, dense_late=0)) for r in (16, 64)]
            if sync is not None:
                auc = f"{float(sync['test_auc']):.4f}"
                lines.append([NAMES.get(data, data), f"{updates:,}", auc, *gaps])
    head = ["stream", "updates", "AUC of sync"]
    return markdown([*head, HEADS[16, 0], HEADS[64, 0]], lines)


HYPOTHESES = {
    "S0": "Where rows 16 late change the AUC of a stream, shuffling at least halves the change; and"
    " a larger b(16) means a larger loss.",
    "S1": "Rows 16 late lose less than 1.0 on every real stream.",
    "S2": "Dense weights 7 late lose less than 1.0 on every real stream.",
    "S3": "Rows and dense weights 7 late lose what late rows and late dense weights lose alone,"
    " added up, to within 1.0.",
    "S4": "Rows 7 late lose more, the higher s is. They lose less than 1.0 where s < 0.1, and more"
    " than 2.0 where s > 3.",
    "S5": "A larger drift of a synchronous run over 16 updates means a larger loss by rows 16"
    " late.",
}
"""What each hypothesis of the plan says, in whole sentences."""


def fresh_table() -> str:
    """One field fresh, all others late: what it gives back of what all of them late lose."""
    lines = []
    for row in first_task(rows_of("_fresh")):
        if row["seeds"] != row["seeds_planned"]:
            continue
        lines.append(
            [
                NAMES.get(row["data"], row["data"]),
                row["rows_late"],
                row["fresh"],
                number(row, "gap_of_all_late"),
                number(row),
                number(row, "gap_to_all_late"),
            ]
        )
    heads = ["rows late", "fresh field", "all late [1e-3]", "with it fresh [1e-3]", "given back"]
    return markdown(["stream", *heads], lines)


def hypothesis_table() -> str:
    """The six with their outcomes."""
    lines = [
        [r["hypothesis"], HYPOTHESES[r["hypothesis"]], f"**{r['outcome']}**", r["missing"]]
        for r in rows_of("_hypotheses")
        if r["outcome"]
    ]
    return markdown(["hypothesis", "what it says", "outcome", "not run yet"], lines)


def models_table() -> str:
    """By stream and model: its rates, AUC of sync, what late rows change, and how far that lies
    from the first model's change."""
    lines = []
    for row in read_rows(STORED / "models.csv"):
        rates = f"{float(row['row_lr']):g}, {float(row['dense_lr']):.3g}"
        if row["late_rates"] == "of its own":
            late = f"{float(row['late_row_lr']):g}, {float(row['late_dense_lr']):.3g}"
            rates = f"{rates}; late {late}"
        is_first = float(row["beside_first_half_width_95"]) == 0
        lines.append(
            [
                NAMES.get(row["data"], row["data"]),
                row["model"],
                rates,
                f"{float(row['sync_auc']):.4f}",
                number(row),
                "" if is_first else number(row, "beside_first"),
            ]
        )
    head = ["stream", "model", "learning rates of rows, of dense weights", "AUC of sync"]
    return markdown([*head, HEADS[16, 0], "minus mlp's"], lines)


# What the README says of which mode to take.

PAPER, H100 = "paper: 64 V100, 100 CPU hosts", "one host of 8 H100, rows on CPU servers"
MOVIELENS, KUAIRAND = "movielens-latest-small-2016", "kuairand-pure-14d"


def line_of(cluster: str, mode: str, data: str = MOVIELENS) -> Row:
    """The stored line of a cluster, a mode and a stream."""
    rows = read_rows(STORED / "which_mode.csv")
    (line,) = [r for r in rows if (r["cluster"], r["mode"], r["data"]) == (cluster, mode, data)]
    return line


PRESETS = {PAPER: "v100-paper", H100: "h100-host"}


@cache
def scenario_of(cluster: str, mode: str) -> Scenario:
    """A mode on a cluster, as the study has it."""
    of_mode, tau = LABELS[mode]
    return sweep.scenario_of(
        sweep.Point(cluster=PRESETS[cluster], workload="kwai-video", mode=of_mode, tau=tau), 1
    )


@cache
def hosts_of(cluster: str) -> Callable[[float], Cluster] | None:
    """The cluster with as many CPU hosts as a draw has."""
    return unknown_hosts(PRESETS[cluster], scenario_of(cluster, "hybrid, tau 16"))


@cache
def times_sync(cluster: str, mode: str) -> Range:
    """How many times as fast as sync a mode is on the same hosts, over all that is not known."""
    sides = (
        OnServers(scenario=scenario_of(cluster, m), hosts=hosts_of(cluster)) for m in (mode, "sync")
    )
    return range_of(*sides, value=float(line_of(cluster, mode)["times_sync"]), simulated=False)


@cache
def dollars(cluster: str, mode: str) -> Range:
    """Dollars for a billion samples, on the hosts that the cluster has."""
    line = line_of(cluster, mode)
    side = OnServers(scenario=scenario_of(cluster, mode))
    rate = range_of(side, value=float(line["samples_per_s"]), simulated=False)
    return rate.under(float(line["usd_per_hour"]) / 3600 * 1e9)


@cache
def cheapest_hosts(mode: str) -> Scenario:
    """A mode beside 8 H100 with the hosts on which a sample of it costs least."""
    return cheapest(scenario_of(H100, mode), catalogue.rows_of("kwai-video"))


@cache
def cheapest_times(mode: str) -> Range:
    """How many times as fast as sync a mode is where each has the hosts on which it is cheapest."""
    sides = (OnServers(scenario=cheapest_hosts(m)) for m in (mode, "sync"))
    return range_of(*sides, simulated=False)


def gap(mode: str, data: str, order: str) -> str:
    """A mode's gap on a stream, whose rows come in this order, in thousandths; where it was not
    trained as late as the mode is, that."""
    line = line_of(H100, mode, data)
    name = f"{order}_gap_to_sync"
    return "not trained yet" if math.isnan(float(line[name])) else number(line, name)


def tau_gap(rows_late: int, data: str, order: str) -> str:
    """The gap of rows so many updates late, of one pass, in thousandths."""
    (line,) = [
        line
        for line in first_task(rows_of("_tau"))
        if (line["data"], line["order"], line["passes"], line["split"]) == (data, order, "1", "own")
        and (line["rows_late"], line["dense_late"]) == (f"{rows_late}", "0")
    ]
    return number(line)


def answer() -> str:
    """The README's answer: what hybrid gains and loses, what the order does, when it pays."""
    late = "hybrid, tau 16"
    of_h100, of_paper = (times_sync(cluster, late) for cluster in (H100, PAPER))
    usd = {(c, m): f"${dollars(c, m):,.0f}" for c in (H100, PAPER) for m in (late, "sync")}

    # Each mode on hosts of its own: its price follows from what those cost.
    of_own = cheapest_times(late)
    hourly = [cheapest_hosts(m).cluster.usd_per_hour for m in ("sync", late)]
    cheaper = of_own.times(hourly[0] / hourly[1])

    # The smallest and the largest change over all test windows, in time order and shuffled.
    ends = {}
    for order in ("time", "shuffled"):
        changes = [
            float(r["gap_to_sync"])
            for r in first_task(rows_of(""))
            if (r["order"], r["rates"], r["redrawn"]) == (order, "of sync", "False")
            and (r["rows_late"], r["dense_late"]) == ("16", "0")
            and float(r["optimizer_start"]) == 0
        ]
        ends[order] = f"between {1e3 * min(changes):+.1f} and {1e3 * max(changes):+.1f}"
    shuffling = [
        1e3 * (float(shuffled["test_auc"]) - float(timed["test_auc"]))
        for data in STREAMS
        if (timed := _sync_of(data, "time")) and (shuffled := _sync_of(data, "shuffled"))
    ]
    gains = (
        f"**Gained, simulated.** With tau 16 hybrid training is {of_h100:.1f} times as fast as"
        " synchronous training on a host of 8 H100 that keeps its rows on CPU servers, and a"
        f" billion samples cost {usd[H100, late]} instead of {usd[H100, 'sync']}. On the paper's 64"
        f" V100 it is {of_paper:.1f} times as fast: {usd[PAPER, late]} instead of"
        f" {usd[PAPER, 'sync']}. Both modes have the same hosts here. Where each has those on which"
        f" its samples are cheapest, hybrid is {of_own:.1f} times as fast on the H100, and its"
        f" samples cost {cheaper:.1f} times less. In brackets stand ranges: nine of ten draws of"
        " what nobody knows lie in them; of one wider than a factor of three we give the lower end."
    )
    loses = (
        "**Lost, measured** by training an MLP in one pass, in updates of 128 samples, on four real"
        " streams (films rated, clicks on videos, school assessments, tennis). In time order,"
        " against synchronous training in the same order, the test AUC of MovieLens changes by"
        f" {tau_gap(1, MOVIELENS, 'time')}, {tau_gap(2, MOVIELENS, 'time')},"
        f" {tau_gap(4, MOVIELENS, 'time')} and {gap(late, MOVIELENS, 'time')} thousandths with rows"
        " 1, 2, 4 and 16 updates late (95 % intervals; judged on the last fifth of each user's"
        " ratings). Over ten test windows of the four streams rows 16 late change it"
        f" {ends['time']}."
    )
    order = (
        "**The order of the data matters more.** Shuffled, the same training samples give"
        f" synchronous training {min(shuffling):.1f} to {max(shuffling):.1f} thousandths more, and"
        f" rows 16 late change that {ends['shuffled']}. We found no earlier measurement of this."
    )
    fresh = the(rows_of("_fresh"), data=MOVIELENS, fresh="user", rows_late=16)
    assert fresh is not None
    back = (
        "**Given back.** Nearly all of that loss is one field's. With `--fresh user` the rows of"
        " users alone are kept exact, the others stay 16 updates late, and MovieLens changes by"
        f" {number(fresh)} thousandths."
    )
    pays = (
        "**So** take hybrid where your GPUs wait for rows, with the smallest tau that hides the"
        " lookups; shuffle your data if you can; and measure what it costs on them. `which-mode`"
        " does the first and the last."
    )
    paragraphs = (gains, measured_gain(), loses, back, order, pays)
    return "\n".join(fill(f"- {one}", width=118, subsequent_indent="  ") for one in paragraphs)


def _sync_of(data: str, order: str) -> Row | None:
    """Synchronous training on the test part of a stream, whose samples come in this order."""
    plain = (
        row
        for row in first_task(rows_of(""))
        if (row["data"], row["order"], row["window"]) == (data, order, "test")
        and (row["rates"], row["redrawn"]) == ("of sync", "False")
        and float(row["optimizer_start"]) == 0
    )
    return the(plain, rows_late=0, dense_late=0)


def which_mode_table() -> str:
    """The five modes: throughput and dollars on two clusters, AUC on two streams."""
    head = [
        "mode",
        "8 H100: samples/s",
        "over sync's",
        "$ for 10^9 samples",
        "64 V100: samples/s",
        "over sync's",
        "$ for 10^9 samples",
        "AUC gap on MovieLens, time order [1e-3]",
        "AUC gap on MovieLens, shuffled [1e-3]",
        "AUC gap on KuaiRand, time order [1e-3]",
    ]
    lines = []
    for mode in ("sync", "lookahead", "hybrid, tau 4", "hybrid, tau 16", "async"):
        cells = ["async, tau 4" if mode == "async" else mode]
        for cluster in (H100, PAPER):
            line = line_of(cluster, mode)
            rate = float(line["samples_per_s"])
            times = "1" if mode == "sync" else f"{times_sync(cluster, mode):.2f}"
            cells += [f"{rate:,.0f}", times, f"{dollars(cluster, mode):,.0f}"]
        exact = mode in ("sync", "lookahead")
        for data, order in ((MOVIELENS, "time"), (MOVIELENS, "shuffled"), (KUAIRAND, "time")):
            cells.append("0, exact" if exact else gap(mode, data, order))
        lines.append(cells)
    return markdown(head, lines)


def first_run() -> str:
    """What the guide's first table is, as the first day's transcript has it."""
    text = TRANSCRIPT.read_text()
    shown = text[text.index("clicked, clicks.toml") : text.index("table: out/sweep")]
    return f"```\n{shown.rstrip()}\n```"


def screen() -> str:
    """What the command above the block prints, typed in `examples/`."""
    command = re.search(r"## The screen\n\n    persia-sim (.*)\n", SIMULATOR.read_text())
    assert command is not None
    words = [sys.executable, "-m", "persia_sim", *shlex.split(command[1])]
    printed = subprocess.run(
        words, cwd=ROOT / "examples", capture_output=True, text=True, check=True
    ).stdout
    return f"```\n{printed}```"


def claims() -> str:
    """The paper's claims beside the stored numbers."""
    return claims_table(answers(ROOT / "no run at all"))


def sharded_table() -> str:
    """Hybrid against tables on the GPUs, where the host's launching is exposed: a line for each GPU
    and size, a pair for each NIC."""
    rows = [r for r in read_rows(STORED / "sharded_map.csv") if r["host_time"] == "exposed"]
    cells = {(r["gpu"], float(r["parameters"]), float(r["nic_gbit_per_s"])): r for r in rows}
    nics = sorted({nic for *_, nic in cells})
    lines = []
    for gpu, size in dict.fromkeys(place[:2] for place in cells):
        of_place = [cells[gpu, size, nic] for nic in nics]
        pairs = [" / ".join(f"{each:.2f}" for each in ranges_of(r)) for r in of_place]
        words = f"{size / 1e12:g} T" if size >= 1e12 else f"{size / 1e9:g} G"
        lines.append([gpu.upper(), words, f"{int(of_place[0]['sharded_gpus']):,}", *pairs])
    heads = ["GPU", "parameters", "GPUs of sharded", *(f"{nic:g} Gbit/s" for nic in nics)]
    return markdown(heads, lines)


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
    for name, errors in (("`validate`", "validate"), ("an earlier `validate`", "validate_first")):
        known = read_rows(STORED / f"{errors}.csv")
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


def wire_steps() -> dict[str, float]:
    """Seconds a step of every case of `bench-engines --what wire`, by its name."""
    windows = [
        Window(int(r["round"]), r["name"], float(r["value"]), 0.0, r["quiet"] == "True")
        for r in read_rows(STORED / "bench_engines_wire.csv")
    ]
    return {
        name: summarize(windows, name).median for name in dict.fromkeys(w.name for w in windows)
    }


def wire_table() -> str:
    """Every mode over two round trips, with one lookup in flight and with ten."""
    steps = wire_steps()
    lines: dict[tuple[str, float], dict[int, WireCase]] = {}
    for case in wire_cases(WIRE_ROUND_TRIPS_S, WIRE_LOOKUPS):
        lines.setdefault((case.name, case.round_trip_s), {})[case.lookups_in_flight] = case
    one, ten = WIRE_LOOKUPS
    table = []
    for (name, round_trip_s), cases in lines.items():
        alone_s = steps[cases[ten].alone.key]
        at_once = [f"{1e3 * steps[cases[n].key]:.1f}" if n in cases else "" for n in (one, ten)]
        law = f"{1e3 * cases[ten].predicted_s(alone_s):.1f}"
        table.append([name, f"{1e3 * round_trip_s:g}", f"{1e3 * alone_s:.1f}", *at_once, law])
    head = ["run", "round trip [ms]", "step without a wire [ms]", "with 1 lookup", "with 10"]
    return markdown([*head, "by law 15, with 10"], table)


def measured_gain() -> str:
    """How many times as fast as sync hybrid is on one host, without a wire and over two."""
    steps = wire_steps()
    cases = {
        (case.name, case.round_trip_s): case
        for case in wire_cases(WIRE_ROUND_TRIPS_S, WIRE_LOOKUPS[1:])
    }
    sync, late = (
        [cases[name, s] for s in WIRE_ROUND_TRIPS_S] for name in ("sync", "hybrid, tau 16")
    )
    alone_s, late_alone_s = (steps[those[0].alone.key] for those in (sync, late))
    found = " and ".join(
        f"{steps[a.key] / steps[b.key]:.1f}" for a, b in zip(sync, late, strict=True)
    )
    law = " and ".join(
        f"{a.predicted_s(alone_s) / b.predicted_s(late_alone_s):.1f}"
        for a, b in zip(sync, late, strict=True)
    )
    away = " and ".join(f"{1e3 * s:g}" for s in WIRE_ROUND_TRIPS_S)
    return (
        f"**Gained, measured.** On a host with two cores whose rows lie {away} ms away, hybrid with"
        f" tau 16 is {found} times as fast as sync; the [law of latency](docs/laws.md) said {law},"
        " from runs without a wire. With all rows on the host itself it is"
        f" {alone_s / late_alone_s:.1f} times as fast."
    )


BLOCKS: dict[Path, dict[str, Callable[[], str]]] = {
    RESULTS: {
        "lateness: order": order_table,
        "lateness: chosen": chosen_table,
        "lateness: windows": window_table,
        "lateness: lengths": length_table,
        "lateness: hypotheses": hypothesis_table,
        "lateness: fresh": fresh_table,
        "models": models_table,
        "which mode": which_mode_table,
    },
    README: {"answer": answer},
    GUIDES: {"first run": first_run},
    SIMULATOR: {"screen": screen, "held": held_table, "three sources": costs_table},
    SIMULATED: {"who wins": sharded_table},
    ARTIFACT: {"claims": claims},
    BENCHMARKS: {"wire": wire_table},
}
"""By page: what is written between its marks."""


def written(page: Path) -> str:
    """A page's text with each block put between its marks."""
    text = page.read_text()
    for name, block in BLOCKS[page].items():
        start = f"<!-- {name} -->"
        end = f"<!-- end of {name.removeprefix('lateness: ')} -->"
        head, rest = text.split(start)
        text = f"{head}{start}\n{block()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for page in BLOCKS:
        page.write_text(written(page))
