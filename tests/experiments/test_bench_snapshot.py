"""The bench of snapshots: what it prints and keeps is what it measured, in a tiny run."""

from __future__ import annotations

import re
from statistics import median

import pytest

from experiments.benching import bench_snapshot
from experiments.benching.bench_snapshot import WAYS, Options
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import printed


@pytest.mark.parametrize(("goal_s", "verdict"), [(60.0, "met"), (0.0, "MISSED")])
def test_bench_snapshot_tells_the_medians_of_both_ways(tmp_path, monkeypatch, goal_s, verdict):
    monkeypatch.setattr(bench_snapshot, "GOAL_S", goal_s)
    monkeypatch.setattr("experiments.benching.wide.FILL", 700)
    told = printed(monkeypatch)
    options = Options(rows=3000, dim=4, batch=50, rounds=3, around_s=0.01, out=tmp_path)
    bench_snapshot.run(options)
    rows = read_csv(tmp_path / "bench_snapshot.csv")
    assert [r["way"] for r in rows] == [*WAYS] * 3
    assert {int(r["copy_bytes"]) for r in rows} == {3000 * (8 + 4 + 2 * 4 * 4)}
    for row in rows:
        assert 0 < float(row["pause_s"]) < float(row["whole_s"])
        assert 0 < float(row["step_meanwhile_s"]) <= float(row["longest_step_s"])
    for way in WAYS:
        pauses = [1e3 * float(r["pause_s"]) for r in rows if r["way"] == way]
        line = rf"^{way} +{median(pauses):.2f} +{max(pauses):.2f} "
        assert re.search(line, told[0], re.MULTILINE)
    assert f"goal: pause behind training < {1e3 * goal_s:.0f} ms: {verdict}" in told
    assert "(the goal is for 1 M rows and dim 16)" in told
