"""What a point of a sweep costs: every process counted, and the goals judged from the windows."""

from __future__ import annotations

import os
import re
import sys

import pytest

from experiments.benching import bench_sweep, windows
from experiments.benching.core_seconds import core_seconds
from tests.experiments.clicks import clicks_file
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import Quiet, printed

pytestmark = pytest.mark.multiproc

BURN = "import time\nwhile time.process_time() < {}: pass\n"


def test_the_core_seconds_of_orphans_count():
    """The command's child starts a grandchild and ends at once; the grandchild burns 0.5 s."""
    orphan = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN.format(0.5)!r}])"
    )
    found = core_seconds([sys.executable, "-c", orphan], os.environ)
    idle = core_seconds([sys.executable, "-c", "import subprocess, sys"], os.environ)
    assert 0.4 < found - idle < 2.0


def test_a_command_that_fails_tells_its_last_words():
    with pytest.raises(ValueError, match="out of luck"):
        core_seconds([sys.executable, "-c", "raise SystemExit('out of luck')"], os.environ)


def test_bench_sweep_divides_by_points_and_judges_pairs(tmp_path, monkeypatch):
    clicks_file(tmp_path)
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    commands: list[list[str]] = []

    def cost(command: list[str], environment) -> float:
        assert environment["PERSIA_DATA_DIR"] == str(tmp_path)
        commands.append(command[2:])
        of_a_point = {"runtime": 6.0, "experiments": 3.0}.get(command[2], 4.0)
        seeds = command[command.index("--seeds") + 1 :] if "--seeds" in command else ["0"]
        points = int(seeds[0]) if command[2] == "experiments" else len(seeds)
        return (of_a_point + 0.01 * len(commands)) * points

    monkeypatch.setattr(bench_sweep, "core_seconds", cost)
    told = printed(monkeypatch)
    bench_sweep.run(
        bench_sweep.Options(
            data_dir=tmp_path, ranks=(8,), batch=(128,), seeds=3, rounds=3, out=tmp_path / "out"
        )
    )
    rows = read_csv(tmp_path / "out" / "bench_sweep.csv")
    kinds = [r["name"].split(",")[0] for r in rows]
    assert kinds == ["point", "plain", "sweep", "plain sweep"] * 3
    sweep = [float(r["value"]) for r in rows if r["name"].startswith("sweep")]
    assert sweep == pytest.approx([3.03, 3.07, 3.11])
    words = "\n".join(told)
    assert "W 8, batch 128: 3.07 core-seconds in a sweep; goal 5: met" in words
    assert re.search(r"in a sweep: 0\.\d\d \[.*goal 0.8: ", words)
    assert "one run: 1.49 [" in words and "MISSED" in words
    assert any(w[:2] == ["experiments", "sweep"] and "sync.ranks=8" in w for w in commands)
