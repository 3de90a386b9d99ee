"""Which mode to take: the answer of the README, and the table of the modes."""

from __future__ import annotations

from functools import cache, partial
from textwrap import fill

from page_tables import first_task, markdown, number, rows_of, the
from speed_blocks import measured_gain

from experiments.lateness.streams import STREAMS
from experiments.paper.record import STORED, Row, read_rows
from experiments.studies.which_mode_oracle import counted
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import updates_missed
from persia_sim.cluster.scenario import Scenario
from persia_sim.presets import catalogue
from persia_sim.report import sweep
from persia_sim.report.hosts import cheapest
from persia_sim.report.ranges import OnServers, Range, range_of

PAPER, H100 = "v100-paper", "h100-host"
MOVIELENS, KUAIRAND = "movielens-latest-small-2016", "kuairand-pure-14d"


def line_of(cluster: str, mode: str) -> Row:
    """The stored line of a cluster and a mode with its window."""
    rows = read_rows(STORED / "which_mode.csv")
    (line,) = [row for row in rows if (row["cluster"], row["mode"]) == (cluster, mode)]
    return line


@cache
def scenario_of(cluster: str, mode: str) -> Scenario:
    """A mode on a cluster, as the study has it."""
    name, _, tau = mode.partition(", tau ")
    point = sweep.Point(
        cluster=cluster, workload="kwai-video", mode=Mode(name), tau=int(tau) if tau else None
    )
    return sweep.scenario_of(point, 1)


def times_sync(cluster: str, mode: str) -> Range:
    """How many times as fast as sync a mode is on the same hosts."""
    line = line_of(cluster, mode)
    return Range(*(float(line[f"times_sync{end}"]) for end in ("_low", "", "_high")))


def dollars(cluster: str, mode: str) -> Range:
    """Dollars for a billion samples, on the hosts that the cluster has."""
    line = line_of(cluster, mode)
    return Range(*(float(line[f"usd_per_billion_samples{end}"]) for end in ("_low", "", "_high")))


@cache
def cheapest_hosts(mode: str) -> Scenario:
    """A mode beside 8 H100 with the hosts on which a sample of it costs least."""
    return cheapest(scenario_of(H100, mode), catalogue.rows_of("kwai-video"))


@cache
def cheapest_times(mode: str) -> Range:
    """How many times as fast as sync a mode is where each has the hosts on which it is cheapest."""
    sides = (OnServers(scenario=cheapest_hosts(m)) for m in (mode, "sync"))
    return range_of(*sides, simulated=False)


def gap(
    rows_late: int,
    data: str,
    order: str,
    dense_late: int = 0,
    *,
    passes: int = 1,
    split: str = "own",
) -> str:
    """The gap of rows and dense weights so many updates late, in thousandths."""
    line = the(
        first_task(rows_of("_tau")),
        data=data,
        order=order,
        passes=passes,
        split=split,
        rows_late=rows_late,
        dense_late=dense_late,
    )
    assert line is not None
    return number(line)


def answer() -> str:
    """The README's answer: what hybrid gains and loses, what the order does, when it pays."""
    late = "hybrid, tau 16"
    of_h100, of_paper = (times_sync(cluster, late) for cluster in (H100, PAPER))
    usd = {(c, m): f"${dollars(c, m):,.0f}" for c in (H100, PAPER) for m in (late, "sync")}

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
        ends[order] = f"by {1e3 * min(changes):+.1f} to {1e3 * max(changes):+.1f}"
    timed, shuffled = (_sync_in_windows(order) for order in ("time", "shuffled"))
    shuffling = [1e3 * (shuffled[each] - timed[each]) for each in timed if each in shuffled]
    fresh = the(rows_of("_fresh"), data=MOVIELENS, fresh="user", rows_late=16)
    assert fresh is not None
    gains = (
        f"**Gained.** Simulated with tau 16, hybrid is {of_h100:.1f} times as fast as sync on a"
        f" host of 8 H100 whose rows lie on CPU servers, and {of_paper:.1f} times as fast on the"
        " paper's 64 V100, both modes on the same hosts. A billion samples cost"
        f" {usd[H100, late]} in place of {usd[H100, 'sync']}, and {usd[PAPER, late]} in place of"
        f" {usd[PAPER, 'sync']}. Brackets hold the [range](docs/simulator.md"
        "#what-a-rate-or-a-ratio-may-be) that follows from what nobody knows; *at least* is the"
        f" lower end of a wide one. {measured_gain()}"
    )
    loses = (
        "**Lost**, measured with an MLP in one pass over four real streams (films rated, clicks on"
        " videos, school assessments, tennis), in updates of 128 samples (tennis: 512). In time"
        f" order rows 16 updates late change the test AUC {ends['time']} thousandths over ten test"
        " windows. The largest loss is that of MovieLens, judged on the last fifth of each user's"
        f" ratings: {gap(16, MOVIELENS, 'time')} (95 % interval), but {gap(4, MOVIELENS, 'time')}"
        f" with rows 4 late, {gap(2, MOVIELENS, 'time')} with rows 2 late, and"
        f" {gap(16, MOVIELENS, 'time', passes=4)} after four passes. Nearly all of it is one"
        f" field's: with the rows of users alone kept exact it is {number(fresh)}. (On another"
        " stream such a field [did harm](docs/results/README.md#one-field-fresh).)"
    )
    order = (
        "**The order of the data matters as much.** Shuffled, the same training samples change the"
        f" AUC of sync in those windows by {min(shuffling):+.1f} to {max(shuffling):+.1f}"
        f" thousandths, and rows 16 late change that {ends['shuffled']}. We found [no earlier"
        " measurement](docs/results/README.md#what-others-know) of this."
    )
    pays = (
        "**So** take hybrid where your GPUs wait for rows, with the smallest tau that hides the"
        " lookups. Shuffle your data where they need not come in time order, and measure on them"
        " what lateness costs. Async may be faster still, but is"
        " [later](docs/results/README.md#the-order-of-the-data)."
    )
    paragraphs = (gains, loses, order, pays)
    wrapped = partial(fill, width=118, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(wrapped(f"- {one}") for one in paragraphs)


def own_hosts() -> str:
    """What hybrid gains where each mode has hosts of its own: its price follows from theirs."""
    late = "hybrid, tau 16"
    of_own = cheapest_times(late)
    hourly = [cheapest_hosts(m).cluster.usd_per_hour for m in ("sync", late)]
    cheaper = of_own.times(hourly[0] / hourly[1])
    return fill(
        "In the table both modes have the same hosts. By the closed form, where each mode has the"
        " CPU hosts beside 8 H100 with which its own samples are cheapest, hybrid with tau 16 is"
        f" {of_own:.1f} times as fast as sync, and its samples cost {cheaper:.1f} times less.",
        width=118,
    )


def _sync_in_windows(order: str) -> dict[tuple[str, str], float]:
    """Stream and test window -> AUC of synchronous training whose samples come in this order."""
    return {
        (row["data"], row["window"]): float(row["test_auc"])
        for row in first_task(rows_of(""))
        if row["data"] in STREAMS
        and (row["order"], row["rates"], row["redrawn"]) == (order, "of sync", "False")
        and (row["rows_late"], row["dense_late"]) == ("0", "0")
        and float(row["optimizer_start"]) == 0
    }


LATE_OF = {
    f"{mode}, tau {tau}": updates_missed(mode, tau, ranks=8)
    for mode, tau in ((Mode.HYBRID, 4), (Mode.HYBRID, 16), (Mode.ASYNC, 4))
}
"""How late a mode is on 8 ranks, where all are equally fast."""


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
    for mode in ("sync", "lookahead", "hybrid, tau 4", "hybrid, tau 16", "async, tau 4"):
        cells = [mode]
        for cluster in (H100, PAPER):
            line = line_of(cluster, mode)
            rate = float(line["samples_per_s"])
            times = "1" if mode == "sync" else f"{times_sync(cluster, mode):.2f}"
            cells += [f"{rate:,.0f}", times, f"{dollars(cluster, mode):,.0f}"]
        late = LATE_OF.get(mode)
        for data, order in ((MOVIELENS, "time"), (MOVIELENS, "shuffled"), (KUAIRAND, "time")):
            cells.append(gap(late.rows, data, order, late.dense) if late else "0, exact")
        lines.append(cells)
    return markdown(head, lines)


def oracle_table() -> str:
    """How often which-mode's decision about a drawn log was right, by log and by what binds."""
    head = ["log", "cluster is bound by", "true best", "right", "undecided", "wrong"]
    rows = counted(read_rows(STORED / "which_mode_oracle.csv"))
    names = ("log", "cluster", "true_best", "right", "undecided", "wrong")
    return markdown(head, [[str(row[name]) for name in names] for row in rows])
