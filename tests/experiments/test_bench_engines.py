"""The bench of engines: what it compares, and what it tells, by hand and in tiny runs."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.benching import windows
from experiments.benching.bench_engines import Options, run
from experiments.benching.questions import (
    TOWERS,
    TRANSPORT_GOALS,
    TRANSPORT_MODES,
    judged,
    transport_config,
)
from experiments.benching.windows import Ratio
from experiments.benching.wire import wire_cases
from persia_sim.base.vocabulary import Mode
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import Quiet, printed

TINY = {"rows": 2_600, "batch": 64, "dim": 4, "threads": 1, "rounds": 3}


@pytest.mark.parametrize(
    ("name", "lookups", "step_ms"),
    [
        ("sync", 10, 33.0), ("lookahead reread, ahead 4", 10, 33.0),
        ("hybrid, tau 4", 1, 33.0), ("hybrid, tau 4", 10, 6.6), ("hybrid, tau 16", 10, 3.3),
        ("hybrid, tau 16", 4, 8.25), ("hybrid, no tau", 10, 3.3),
        ("hybrid, 16 permits", 10, 3.9375), ("lookahead forwarded, ahead 16", 100, 3.0),
    ],
)  # fmt: skip
def test_law_15_over_a_wire_by_hand(name, lookups, step_ms):
    """A round trip of 30 ms; a push is not waited for, but by a permit."""
    (case,) = [c for c in wire_cases((0.03,), (lookups,)) if c.name == name]
    case = replace(case, lookups_in_flight=lookups)
    assert 1e3 * case.predicted_s(0.003) == pytest.approx(step_ms)


@pytest.mark.parametrize(
    ("ratio", "tower", "expected"),
    [
        (Ratio(1.25, 1.0, 2.0, 8, True), "small", ["20.0% [0.0%, 50.0%]", "15%", "not decided"]),
        (Ratio(1.02, 1.01, 1.03, 8, True), "wide", ["2.0% [1.0%, 2.9%]", "5%", "met"]),
        (Ratio(1.2, 1.1, 1.25, 8, True), "wide", ["16.7% [9.1%, 20.0%]", "5%", "MISSED"]),
        (
            Ratio(1.02, 1.01, 1.03, 8, False),
            "wide",
            ["2.0% [1.0%, 2.9%]", "5%", "not decided, the machine was loaded (would be met)"],
        ),
    ],
)
def test_a_fifth_of_a_step_is_transport_when_threads_are_a_quarter_faster(ratio, tower, expected):
    assert judged(ratio, TRANSPORT_GOALS[tower, Mode.SYNC]) == expected


def test_both_kinds_of_servers_have_the_same_work():
    options = Options(servers=3).of("transport")
    here, there = (
        transport_config(options, "small", Mode.HYBRID, where) for where in ("threads", "processes")
    )
    assert here.engine.shard_count == there.engine.shard_count == 3
    assert (here.engine.servers, there.engine.servers) == (0, 3)
    assert (here.model, here.batch, here.rows) == (there.model, there.batch, there.rows)


@pytest.mark.long
def test_the_table_is_what_the_windows_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    told = printed(monkeypatch)
    run(Options(what=("transport",), window_steps=5, out=tmp_path, **TINY))
    rows = read_csv(tmp_path / "bench_transport.csv")
    assert len(rows) == 3 * len(TOWERS) * len(TRANSPORT_MODES) * 2
    rates = {
        where: [float(r["value"]) for r in rows if r["name"] == f"wide, sync, {where}"]
        for where in ("threads", "processes")
    }
    logs = [math.log(a / b) for a, b in zip(rates["threads"], rates["processes"], strict=True)]
    share = 1 - math.exp(-sum(logs) / 3)
    line = next(line for line in told[0].splitlines() if line.startswith("wide, sync"))
    assert f"{share:.1%} [" in line


@pytest.mark.netns
def test_servers_behind_a_link_are_beside_those_of_this_process(tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("a network namespace needs root")
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    told = printed(monkeypatch)
    run(Options(what=("transport",), window_steps=5, gbit_per_s=10.0, out=tmp_path, **TINY))
    lines = {line[:12].strip(): line for line in told[0].splitlines()}
    assert " 5% " in lines["wide, hybrid"] and lines["small, sync"].rstrip().endswith("-")
    gc.collect()
    assert not [*Path("/sys/class/net").glob(f"persia{os.getpid()}*")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"what": ("wire",), "servers": 2}, "servers is only used by --what transport"),
        ({"what": ("transport",), "batch": 1, "ranks": 2}, "batch 1 gives 2 ranks less than a"),
        ({"what": ()}, "what must hold one value or more"),
    ],
)
def test_what_no_question_would_read_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Options(**given)


def test_each_question_takes_what_is_its_own():
    asked = Options(what=("wire", "transport"), batch=64, servers=2, rounds=3)
    wire, transport = (asked.of(what) for what in asked.what)
    assert (wire.servers, transport.servers) == (None, 2)
    assert (wire.rounds, wire.batch, wire.window_steps) == (3, 64, 60)
    assert (transport.rounds, transport.batch, transport.window_steps) == (3, 64, 15)
