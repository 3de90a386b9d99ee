"""What was measured of speed and of faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from page_tables import markdown

from experiments.benching.windows import Window, summarize
from experiments.benching.wire import WireCase, wire_cases
from experiments.paper.record import STORED, read_rows

WIRE_ROUND_TRIPS_S, WIRE_LOOKUPS = (0.01, 0.03), (1, 10)
"""What the stored runs over a slow wire were asked for."""
_WORKLOADS = {"wide-dim128": "wide, width 128", "small-8ids": "small, 8 ids a field"}
_STAGES = {
    "merge": "finds the distinct ids",
    "lookup": "reads their rows: index, record, values",
    "pool": "makes a vector for each field",
    "network": "forward, backward, Adam",
    "scatter": "sums the gradients of each row",
    "update": "Adagrad on each row: record, values, state",
    "step": "all of these",
    "idle": "what the cores had nothing to do, within them",
}


def roofline_table() -> str:
    """Milliseconds of each stage of a step, and the least possible as a share of them."""
    stored = read_rows(STORED / "bench_peers_roofline.csv")
    took = {(row["stage"], row["workload"]): row for row in stored}
    workloads = {row["workload"]: _WORKLOADS.get(row["workload"]) for row in stored}
    lines = [
        [
            stage,
            words,
            *(
                f"{float(row['measured_ms']):.1f}"
                + (f" ({float(row['share']):.2f})" if float(row["share"]) else "")
                for row in (took[stage, workload] for workload in workloads)
            ),
        ]
        for stage, words in _STAGES.items()
    ]
    heads = (words or workload for workload, words in workloads.items())
    return markdown(["stage", "what it does", *heads], lines)


_ROLES = {
    "launcher": "launchers",
    "host": "hosts",
    "server": "servers",
    "rank": "ranks",
    "loader": "loaders",
    "connection": "connections",
    "cable": "cable out for 5 s",
    "one-way": "packets dropped one way for 5 s",
    "long-cut": "cable out for a minute",
    "resize": "a death while the servers change",
}
"""Role in the stored trials -> what was killed or cut."""


def faults_table() -> str:
    """What came of each kind of fault, over all stored trials."""
    files: Sequence[str] = ("fault_drill", "fault_drill_cables", "fault_drill_resize")
    trials = [row for file in files for row in read_rows(STORED / f"{file}.csv")]
    lines = []
    for role, words in _ROLES.items():
        own = [row for row in trials if row["role"] == role]
        alone = sum(row["resumes"] == "0" for row in own)
        lost = _total(row["lost"] for row in own)
        lines.append([words, f"{len(own)}", f"{alone}", f"{len(own) - alone}", f"{lost}"])
    ends = ["went on by itself", "went on after `--resume`", "pushes lost, and counted"]
    return markdown(["what was killed or cut", "runs", *ends], lines)


def _total(values: Iterable[str]) -> int:
    return sum(map(int, values))


def wire_windows() -> list[Window]:
    """Every measurement of `bench-engines --what wire`, in seconds a step."""
    return [
        Window(int(r["round"]), r["name"], float(r["value"]), 0.0, r["quiet"] == "True")
        for r in read_rows(STORED / "bench_engines_wire.csv")
    ]


def wire_steps() -> dict[str, float]:
    """Seconds a step of every case of `bench-engines --what wire`, by its name."""
    windows = wire_windows()
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
    """How many times as fast as sync hybrid is on one host, without a wire and over two; in
    brackets the smallest and the largest ratio of a round."""
    steps = wire_steps()
    values = {(window.round, window.name): window.value for window in wire_windows()}

    def gain(sync: str, late: str) -> str:
        of_rounds = [values[n, sync] / values[n, late] for n in {number for number, _ in values}]
        ends = f"({min(of_rounds):.1f} to {max(of_rounds):.1f})"
        return f"{steps[sync] / steps[late]:.1f} {ends}"

    cases = {
        (case.name, case.round_trip_s): case
        for case in wire_cases(WIRE_ROUND_TRIPS_S, WIRE_LOOKUPS[1:])
    }
    sync, late = (
        [cases[name, s] for s in WIRE_ROUND_TRIPS_S] for name in ("sync", "hybrid, tau 16")
    )
    found = " and ".join(gain(a.key, b.key) for a, b in zip(sync, late, strict=True))
    away = " and ".join(f"{1e3 * s:g}" for s in WIRE_ROUND_TRIPS_S)
    return (
        f"on two cores of a Xeon, with rows {away} ms away, hybrid with tau 16 is {found} times as"
        f" fast as sync, and without a delay {gain(sync[0].alone.key, late[0].alone.key)} times as"
        " fast (two rounds in brackets)."
    )
