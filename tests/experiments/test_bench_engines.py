"""The bench of engines: what it compares, and what it tells, by hand and in tiny runs."""

from __future__ import annotations

import math
import re
from statistics import median

import numpy as np
import pytest

from experiments.benching import windows
from experiments.benching.bench_engines import (
    TOWERS,
    TRANSPORT_MODES,
    LateCase,
    ScalingCase,
    judged,
    late_cases,
    late_table,
    run,
    scaling_command,
    transport_config,
)
from experiments.benching.engine_options import DEFAULTS, Options
from experiments.benching.windows import Ratio
from persia_sim.words.vocabulary import Mode
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import Quiet, printed

TINY = {"rows": 2_600, "batch": 64, "dim": 4, "threads": 1, "rounds": 3}


def test_bench_sync_tells_medians_and_the_paired_ratio_of_its_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    told = printed(monkeypatch)
    run(Options(what=("sync",), hidden=(8,), window_steps=4, out=tmp_path, **TINY))
    rows = read_csv(tmp_path / "bench_sync.csv")
    assert [(r["round"], r["name"]) for r in rows] == [
        (str(n), name) for n in range(3) for name in ("dense-only", "sync")
    ]
    rates = {
        name: [float(r["value"]) for r in rows if r["name"] == name]
        for name in ("dense-only", "sync")
    }
    for name, values in rates.items():
        assert min(values) > 0
        assert re.search(rf"^{name} +{median(values):,.0f} ", told[0], re.MULTILINE)
    logs = np.log(rates["sync"]) - np.log(rates["dense-only"])
    assert f"sync / dense-only: {np.exp(logs.mean()):.2f} [" in told[0]
    assert "over 3 pairs; goal 0.70" in told[0]


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


@pytest.mark.parametrize("change", [{"latency_s": (0.0,)}, {"windows": ()}, {"window_steps": 8}])
def test_bad_options_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Options(what=("latency",), **change)


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
    assert judged(ratio, tower, Mode.SYNC) == expected


def test_both_kinds_of_servers_have_the_same_work():
    options = Options(servers=(3,)).of("transport")
    here, there = (
        transport_config(options, "small", Mode.HYBRID, where) for where in ("threads", "processes")
    )
    assert here.engine.server_count == there.engine.server_count == 3
    assert (here.engine.servers, there.engine.servers) == (0, 3)
    assert (here.model, here.batch, here.rows) == (there.model, there.batch, there.rows)


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
        ({"what": ("sync",), "servers": (2,)}, "servers is only used by --what transport, scaling"),
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
    asked = Options(what=("sync", "transport"), batch=64, servers=(2,), rounds=3)
    sync, transport = (asked.of(what) for what in asked.what)
    assert (sync.servers, transport.servers) == (None, (2,))
    assert (sync.rounds, sync.batch, sync.window_steps) == (3, 64, 12)
    assert (transport.rounds, transport.batch, transport.window_steps) == (3, 64, 15)
    assert (sync.clock, transport.clock) == (None, "wall")
