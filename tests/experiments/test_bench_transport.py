"""The bench of transport: what it compares, and the share that it tells, by hand."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from experiments.benching import bench_transport, machine_load, windows
from experiments.benching.bench_transport import MODES, TOWERS, Options, config_of, judged
from experiments.benching.windows import Ratio
from persia_sim.words.vocabulary import Mode
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import Quiet, printed


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
    options = Options(servers=3)
    here, there = (config_of(options, "small", Mode.HYBRID, n) for n in (0, 3))
    assert here.engine.server_count == there.engine.server_count == 3
    assert (here.engine.servers, there.engine.servers) == (0, 3)
    assert (here.model, here.batch, here.rows) == (there.model, there.batch, there.rows)


def test_the_table_is_what_the_windows_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    told = printed(monkeypatch)
    bench_transport.run(
        Options(rows=2_600, batch=64, dim=4, threads=1, rounds=3, window_steps=5, out=tmp_path)
    )
    rows = read_csv(tmp_path / "bench_transport.csv")
    assert len(rows) == 3 * len(TOWERS) * len(MODES) * 2
    rates = {
        where: [float(r["value"]) for r in rows if r["name"] == f"wide, sync, {where}"]
        for where in ("threads", "processes")
    }
    logs = [math.log(a / b) for a, b in zip(rates["threads"], rates["processes"], strict=True)]
    share = 1 - math.exp(-sum(logs) / 3)
    line = next(line for line in told[0].splitlines() if line.startswith("wide, sync"))
    assert f"{share:.1%} [" in line


def test_the_work_of_a_child_that_goes_on_is_our_own():
    before = machine_load.own_cpu_s()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        ends_s = time.monotonic() + 120
        while machine_load.own_cpu_s() - before < 0.3:
            assert time.monotonic() < ends_s
            time.sleep(0.05)  # works nothing itself
    finally:
        child.kill()
        child.wait()
