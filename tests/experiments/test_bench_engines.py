"""The bench of engines: what it compares, and what it tells, by hand and in tiny runs."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.benching import questions, windows
from experiments.benching.bench_engines import (
    DEFAULTS,
    LateCase,
    Options,
    ScalingCase,
    late_cases,
    late_table,
    run,
    scaling_command,
)
from experiments.benching.questions import (
    TOWERS,
    TRANSPORT_GOALS,
    TRANSPORT_MODES,
    beside_its_bytes,
    judged,
    transport_config,
)
from experiments.benching.wide import FIELDS
from experiments.benching.windows import Ratio
from experiments.benching.wire import wire_cases
from persia_sim.base.vocabulary import Mode
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import Quiet, printed

TINY = {"rows": 2_600, "batch": 64, "dim": 4, "threads": 1, "rounds": 3}


L, C = 0.020, 0.006


@pytest.mark.parametrize(
    ("mode", "window", "lookahead", "step_s"),
    [
        (Mode.SYNC, 0, "reread", 0.046),  # 2 L + C
        (Mode.LOOKAHEAD, 4, "reread", 0.046),
        (Mode.LOOKAHEAD, 4, "forwarded", 0.0092),  # (2 L + C) / 5
        (Mode.HYBRID, 1, "reread", 0.023),
        (Mode.RAW_HYBRID, 4, "reread", 0.0092),
        (Mode.HYBRID, 16, "reread", 0.006),  # C binds
    ],
)
def test_law_15_by_hand(mode, window, lookahead, step_s):
    assert LateCase("", mode, window, lookahead, L).predicted_s(C) == pytest.approx(step_s)


def test_every_case_with_latency_has_its_own_mode_without_latency_as_c():
    everything = late_cases((0.01, 0.02), (1, 4))
    medians = {f"{c.name}, L {c.latency_s:g}": 0.001 * (k + 1) for k, c in enumerate(everything)}
    lines = late_table(everything, medians)
    assert len(everything) == 3 * (1 + 2 * 4)
    assert len(lines) == 2 * (1 + 2 * 4)
    sync = lines[0]  # C: 1 ms; measured: that of the tenth case
    assert sync == ["sync", "10.00", "1.00", "10.00", "21.00", "0.48"]
    ahead = next(line for line in lines if line[0] == "lookahead forwarded, ahead 4")
    place = [c.name for c in everything].index("lookahead forwarded, ahead 4")
    compute, measured = place + 1, place + 1 + 9
    law = max(compute, (2 * 10 + compute) / 5)
    assert ahead[2:] == [f"{x:.2f}" for x in (compute, measured, law, measured / law)]


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


@pytest.mark.parametrize(
    ("between_ms", "quiet", "said"),
    [(1.26, 3, "met"), (1.28, 3, "MISSED"), (0.9, 3, "MISSED"), (1.1, 2, "not decided (would be")],
)
def test_a_lookup_over_a_link_takes_its_bytes_over_the_rate_and_a_tenth_of_a_ms(
    between_ms, quiet, said
):
    held = 1448 / 1514 * 1.25e6  # a millisecond at 10 Gbit/s
    here, there = (
        windows.Summary("", ms / 1e3, 0.0, 0.0, quiet, 3, 0.0) for ms in (0.5, 0.5 + between_ms)
    )
    *ms, share, found = beside_its_bytes(held, 10.0, here, there)
    assert ms == ["0.50", f"{0.5 + between_ms:.2f}", f"{between_ms:.2f}", "1.10"]
    assert share == f"{between_ms / 1.1:.2f}"
    assert found.startswith(said)


def test_both_kinds_of_servers_have_the_same_work():
    options = Options(servers=(3,)).of("transport")
    here, there = (
        transport_config(options, "small", Mode.HYBRID, where) for where in ("threads", "processes")
    )
    assert here.engine.server_count == there.engine.server_count == 3
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
    told.clear()
    run(Options(what=("lookups",), window_steps=5, out=tmp_path, **TINY))
    sizes = [line.split()[:2] for line in told[0].splitlines()[2:]]
    batch, held = TINY["batch"], [float(mb) * 1e6 for _, mb in sizes]
    assert [int(size) for size, _ in sizes] == [-(-batch // 16), -(-batch // 4), batch]
    most = batch * FIELDS * (8 + 4 * TINY["dim"])
    assert held[0] <= held[1] <= held[2] <= most + 5e3 and held[2] > most / 4
    gc.collect()
    assert not [*Path("/sys/class/net").glob(f"persia{os.getpid()}*")]


def test_engines_of_a_configuration_are_started_with_the_same_work():
    options = Options(what=("scaling",), hidden=(8,)).of("scaling")
    cases = [ScalingCase("hybrid", 2, 3, 0.01, engine) for engine in DEFAULTS["scaling"]["engines"]]
    words = [" ".join(scaling_command(options, case, options.out)) for case in cases]
    assert ["--ranks 2" in w for w in words] == [True, True, False]
    assert ["--nproc-per-node 2" in w for w in words] == [False, False, True]
    assert ["--shards 3" in w for w in words] == [True, False, False]
    assert ["--servers 3" in w for w in words] == [False, True, True]
    assert all("--mode hybrid" in w and "--latency-s 0.01" in w and "--steps 150" in w
               for w in words)  # fmt: skip


@pytest.mark.long
@pytest.mark.multiproc
def test_a_whole_run_is_timed_and_told_with_its_staleness(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    told = printed(monkeypatch)
    run(Options(what=("scaling",), engines=("threads",), modes=("sync",), ranks=(1,), servers=(1,),
                batch=32, dim=4, hidden=(8,), window_steps=20, rounds=1, out=tmp_path))  # fmt: skip
    (row,) = read_csv(tmp_path / "bench_scaling.csv")
    assert row["name"] == "sync, 1 ranks, 1 servers: threads"
    line = told[0].splitlines()[-1]
    assert line.split()[-2:] == [f"{float(row['value']):,.0f}", "0.00"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"what": ("latency",), "servers": (2,)}, "servers is only used by --what transport, look"),
        ({"what": ("latency",), "modes": ("sync",)}, "modes is only used by --what scaling"),
        ({"what": ("transport",), "ranks": (1, 2)}, r"ranks must be one number .* got \[1, 2\]"),
        ({"what": ("transport",), "batch": 1, "ranks": (2,)}, "batch 1 gives 2 ranks less than a"),
        ({"what": ()}, "what must hold one value or more"),
    ],
)
def test_what_no_question_would_read_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Options(**given)


def test_each_question_takes_what_is_its_own():
    asked = Options(what=("latency", "transport"), batch=64, servers=(2,), rounds=3)
    latency, transport = (asked.of(what) for what in asked.what)
    assert (latency.servers, transport.servers) == (None, (2,))
    assert (latency.rounds, latency.batch, latency.window_steps) == (3, 64, 60)
    assert (transport.rounds, transport.batch, transport.window_steps) == (3, 64, 15)


def test_memory_reads_rows_and_what_lies_beside_them(tmp_path, monkeypatch):
    sizes = iter([3 << 30, 5 << 30] + [4 << 30] * 200)
    monkeypatch.setattr(questions, "status_bytes", lambda _: next(sizes))
    told = printed(monkeypatch)
    tiny = {"window_steps": 50, "ranks": (2,), "servers": (2,), "batch": 64}
    run(Options(what=("memory",), out=tmp_path, **tiny))
    rows = read_csv(tmp_path / "bench_memory.csv")
    assert [int(r["steps"]) for r in rows] == list(range(1, 51))
    held = [float(r["rows_bytes"]) for r in rows]
    assert 0 < held[0] <= held[-1]
    words = "\n".join(told)
    beside = max(float(r["all_bytes"]) - float(r["rows_bytes"]) for r in rows) / 2**30
    assert 4.9 < beside <= 5
    assert f"{50 * 7} events in the trace; at most {beside:.3f} GiB beside the rows" in words
    assert "MISSED" in words


def test_the_memory_of_this_process_is_read():
    before = questions.status_bytes("RssAnon")
    held = np.ones(8 << 20)
    assert held.nbytes // 2 < questions.status_bytes("RssAnon") - before < 2 * held.nbytes
