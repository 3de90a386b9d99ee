"""Sweeps: points, precision, the front, and what makes a study resumable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.studies.cluster_sweep import Options, points_of, run
from persia_sim.insight.sweep import Point, analytic, evaluate, grid, latin_hypercube, pareto
from persia_sim.words.vocabulary import Mode

SMALL = Point(ranks=4, workers=4, servers=2, batch_per_rank=512)


def test_a_point_is_run_until_its_interval_is_narrow_enough() -> None:
    rough, fine = evaluate(SMALL, 0.05), evaluate(SMALL, 0.004)
    assert rough["steps"] <= fine["steps"]
    assert fine["relative_half_width_95"] <= 0.004
    assert fine["samples_per_s"] == pytest.approx(rough["samples_per_s"], rel=0.05)


def test_the_closed_form_bounds_the_simulation() -> None:
    for mode in (Mode.SYNC, Mode.HYBRID, Mode.ASYNC):
        point = replace(SMALL, mode=mode, gpu_cv=0.0)
        assert evaluate(point)["samples_per_s"] <= analytic(point)["samples_per_s"] * 1.001


def test_grid_and_hypercube_cover_every_value() -> None:
    assert len(grid(ranks=(8, 16), tau=(1, 2, 4))) == 6
    points = latin_hypercube(12, 0, ranks=(8, 16, 32), batch_per_rank=(256, 512))
    assert [sum(p.ranks == r for p in points) for r in (8, 16, 32)] == [4, 4, 4]
    assert [sum(p.batch_per_rank == b for p in points) for b in (256, 512)] == [6, 6]
    assert points == latin_hypercube(12, 0, ranks=(8, 16, 32), batch_per_rank=(256, 512))


def test_front_holds_what_nothing_beats() -> None:
    rows = [
        {
            "samples_per_s": rate,
            "staleness_steps_mean": late,
            "usd_per_million_samples": dollars,
            "dense_late": dense,
        }
        for rate, late, dollars, dense in (
            (1.0, 0.0, 3.0, False),
            (2.0, 4.0, 2.0, False),
            (1.5, 4.0, 2.5, False),
            (0.5, 0.0, 3.0, False),
            (3.0, 0.0, 1.0, True),
        )
    ]
    assert pareto(rows) == [True, True, False, False, True]


def test_modes_without_a_window_count_once() -> None:
    options = Options(workloads=("criteo-syn1",), taus=(1, 2, 4))
    modes = [p.mode for p in points_of(options)]
    assert modes.count(Mode.SYNC) == 1 and modes.count(Mode.HYBRID) == 3


@pytest.mark.multiproc
def test_a_sweep_keeps_its_points_and_does_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(
        workloads=("criteo-syn1",), modes=(Mode.SYNC,), ranks=(4, 6), workers=(4,), servers=(2,),
        batch_per_rank=(256,), out=tmp_path, half_width=0.02, jobs=1,
    )  # fmt: skip
    run(replace(options, ranks=(4,)))
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write('{"label": "cut sho')
        file.write("\n")
    capsys.readouterr()
    run(options)
    said = capsys.readouterr().out
    assert "2 points (1 done, 1 to run" in said and (tmp_path / "cluster_sweep.csv").is_file()
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    assert sum(line.endswith("}") and bool(json.loads(line)) for line in lines) == 2


def test_sensitivity_finds_what_binds() -> None:
    from persia_sim.insight.sensitivity import RESOURCES, gains
    from tests.persia_sim.sim_configurations import small_scenario

    scenario = small_scenario(Mode.HYBRID, steps=30, tau=4)
    slow = replace(scenario.costs, gpu_fixed_s=0.1)
    found = gains(replace(scenario, costs=slow))
    assert set(found) == set(RESOURCES)
    assert max(found, key=lambda name: found[name].mean) == "GPU"
    assert found["GPU"].mean > 0.05 and found["loaders"].mean == pytest.approx(0, abs=1e-3)
