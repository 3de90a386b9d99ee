"""The page of a sweep that goes on: its curves so far, and when it stops loading itself again."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.registry.curves import curves_of
from experiments.registry.report import report, write_page
from experiments.registry.runs import runs_below
from experiments.result_cache import sole_writer
from tests.experiments.test_registry import BASE, drawn, hybrid, made, pictures, sweep


def sweep_on_its_way(root: Path) -> Path:
    """One seed of sync and of hybrid has ended; of the second seed hybrid still goes on."""
    curves = {
        ("sync", 0): (0.60, 0.70), ("sync", 1): (0.62, 0.72),
        ("hybrid", 0): (0.59, 0.68), ("hybrid", 1): (0.3,),
    }  # fmt: skip
    for (mode, seed), aucs in curves.items():
        config = hybrid(seed=seed) if mode == "hybrid" else replace(BASE, seed=seed)
        label = "hybrid-tau4" if mode == "hybrid" else mode
        has_ended = len(aucs) == 2
        run = made(root / f"{label}-seed{seed}-0123abcd", config, aucs[-1] if has_ended else None)
        lines = (
            {"updates": n, "samples": 64 * n, "drained": n == 2, "tasks": {"click": {"auc": auc}}}
            for n, auc in enumerate(aucs, 1)
        )
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def test_a_sweep_on_its_way_has_curves_and_the_gap_to_sync_along_the_runs(tmp_path):
    runs = list(runs_below(sweep_on_its_way(tmp_path / "sweep")))
    sync, late = curves_of(runs, "click")
    assert (sync.setting.name, late.setting.name) == ("sync", "hybrid-tau4")
    assert sync.mean() == pytest.approx({64: 0.61, 128: 0.71})
    assert late.mean() == pytest.approx({64: 0.59, 128: 0.68}), "of the seed that has ended"
    assert late.gap_to(sync) == pytest.approx({64: -0.01, 128: -0.02}), "of that seed alone"
    _, chart = pictures(write_page(tmp_path / "sweep").read_text())
    for name in ("test AUC 0", "test AUC 1", "gap to sync [1e-3] 0"):
        assert f'id="{name}"' in chart
    gap = drawn(chart, r"gap to sync \[1e-3\] 0")
    assert len(gap) == 2 and gap[1, 1] > gap[0, 1], "it widens; SVG counts downwards"


def test_a_page_follows_a_sweep_until_nobody_writes_into_its_folder(tmp_path, monkeypatch, capsys):
    root = sweep(tmp_path / "sweep", {0: 0.70})
    page = root / "report.html"
    monkeypatch.setattr("experiments.registry.report.REFRESH_S", 0.05)
    with sole_writer(root):
        follower = threading.Thread(target=report, args=(root, None, True))
        follower.start()
        while not page.is_file():
            time.sleep(0.01)
        assert '<meta http-equiv="refresh" content="0.05">' in page.read_text()
        assert "1 run: 1 done" in page.read_text()
        sweep(root, {1: 0.72})
        while "2 runs: 2 done" not in page.read_text():
            time.sleep(0.01)
        assert follower.is_alive()
    follower.join(60)
    assert not follower.is_alive() and "http-equiv" not in page.read_text()
    assert "report.html follows the sweep" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is one run; --follow is for the folder of a sweep"):
        report(next(root.glob("*-seed0-*")), None, True)
