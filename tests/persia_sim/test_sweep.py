"""Sweeps: points, precision, columns, fronts and designs, each computed again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies.cluster_sweep import Options, points_of, run
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import steady_steps, throughput
from persia_sim.insight.sweep import (
    Point,
    analytic,
    evaluate,
    grid,
    latin_hypercube,
    pareto,
    scenario_of,
)
from persia_sim.model.stamps import Mark
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


ROW = st.fixed_dictionaries({
    "samples_per_s": st.integers(1, 4).map(float),
    "staleness_steps_mean": st.integers(0, 3).map(float),
    "usd_per_million_samples": st.integers(1, 3).map(float),
    "dense_late": st.booleans(),
})  # fmt: skip


@given(st.lists(ROW, max_size=8))
def test_the_front_is_what_no_other_point_beats(rows: list[dict[str, float]]) -> None:
    """By brute force: at least as good in all four, and better in one."""

    def beats(a: dict[str, float], b: dict[str, float]) -> bool:
        good = (
            a["samples_per_s"] - b["samples_per_s"],
            b["staleness_steps_mean"] - a["staleness_steps_mean"],
            b["usd_per_million_samples"] - a["usd_per_million_samples"],
            int(b["dense_late"]) - int(a["dense_late"]),
        )
        return min(good) >= 0 and max(good) > 0

    assert pareto(rows) == [not any(beats(other, own) for other in rows) for own in rows]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3))
def test_a_hypercube_takes_every_value_of_an_axis_evenly(
    count: int, levels: int, seed: int
) -> None:
    points = latin_hypercube(count, seed, ranks=range(1, levels + 1))
    taken = np.bincount([p.ranks for p in points], minlength=levels + 1)[1:]
    assert len(points) == count == taken.sum()
    assert taken.max() - taken.min() <= 1


def test_axes_of_a_hypercube_are_shuffled_apart() -> None:
    points = latin_hypercube(64, 0, ranks=range(1, 65), workers=range(1, 65))
    pairs = np.array([(p.ranks, p.workers) for p in points])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.4
    other = latin_hypercube(64, 1, ranks=range(1, 65), workers=range(1, 65))
    assert [p.ranks for p in other] != [p.ranks for p in points]


def test_a_grid_holds_every_combination_once_the_last_axis_fastest() -> None:
    points = grid(ranks=(8, 16), tau=(1, 2, 4))
    assert [(p.ranks, p.tau) for p in points] == [
        (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4)
    ]  # fmt: skip
    assert {p.workers for p in points} == {Point().workers}


def test_labels_tell_points_apart() -> None:
    point = Point()
    other: dict[str, object] = {
        "cluster": "v100-paper", "workload": "criteo-syn1", "mode": Mode.SYNC, "ranks": 8,
        "workers": 9, "servers": 10, "batch_per_rank": 11, "tau": None, "gpu_cv": 0.5, "seed": 12,
    }  # fmt: skip
    labels = {point.label} | {replace(point, **{k: v}).label for k, v in other.items()}  # type: ignore[arg-type]
    assert len(labels) == 1 + len(other) and point.label == Point().label


def test_a_point_becomes_the_cluster_that_it_names() -> None:
    """The preset has 240 loaders for 64 ranks, so 3.75 for each."""
    scenario = scenario_of(replace(SMALL, gpu_cv=0.25, seed=9), steps=7)
    cluster = scenario.cluster
    assert (cluster.ranks, cluster.embedding_workers.hosts, cluster.servers.hosts) == (4, 4, 2)
    assert cluster.loaders == 15 and scenario_of(replace(SMALL, ranks=1), 7).cluster.loaders == 4
    assert (scenario.workload.name, scenario.workload.batch_per_rank) == ("criteo-syn5", 512)
    assert (scenario.mode, scenario.tau, scenario.steps, scenario.seed) == (Mode.HYBRID, 4, 7, 9)
    assert scenario.noise.gpu_cv == 0.25
    assert scenario_of(replace(SMALL, mode=Mode.SYNC), 7).tau is None


def turns(point: Point) -> Iterator[tuple[int, float]]:
    """Steps and relative half width of each turn, as the contract of `evaluate` says."""
    steps = 64 if point.mode.has_barrier else 96
    while True:
        rate = throughput(simulate(scenario_of(point, steps), trace=True))
        yield steps, rate.half_width / rate.mean
        steps *= 2


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ASYNC])
def test_columns_of_a_simulated_point(mode: Mode) -> None:
    point = replace(SMALL, mode=mode, gpu_cv=0.2)
    point = replace(point, merge_pushes=False if mode.may_merge else None)
    row = evaluate(point, half_width=0.01)
    for steps, width in turns(point):
        if width <= 0.01 or steps > 1536 // 2:
            break
    assert (row["steps"], row["relative_half_width_95"]) == (steps, pytest.approx(width))
    run = simulate(scenario_of(point, steps), trace=True)
    read, applied = run.stamps[Mark.READ], run.stamps[Mark.APPLIED]
    closed = applied.max(0) if mode.has_barrier else None
    late = [
        int(((closed if closed is not None else applied[r])[:s] > read[r, s]).sum())
        for r in range(4)
        for s in steady_steps(run)
    ]
    assert row["staleness_steps_mean"] == pytest.approx(np.mean(late))
    if not run.scenario.merges:
        full = read[:, -1].min()
        kept = [s for s in steady_steps(run) if applied[:, s].max() <= full]
        batches = [(read[r, s], applied[r, s]) for r in range(4) for s in kept]
        least = np.mean([((applied > a) & (applied < b)).sum() for a, b in batches])
        most = np.mean([((applied >= a) & (applied <= b)).sum() - 1 for a, b in batches])
        assert least <= row["staleness_pushes_mean"] <= most  # some instants are equal
    assert row["dense_late"] == (mode is Mode.ASYNC)
    # Half a host of 8 GPUs is rented whole: list prices a month of 730 hours.
    dollars = (1 * 21888 + 4 * 1007 + 2 * 45251) / 730
    assert row["usd_per_hour"] == pytest.approx(dollars)
    per_million = dollars / (row["samples_per_s"] * 3600 / 1e6)
    assert row["usd_per_million_samples"] == pytest.approx(per_million)
    assert (row["mode"], row["discipline"], row["ranks"]) == (str(mode), "fluid", 4)
    assert (row["batch_per_rank"], row["batch"]) == (512, 2048)
    assert row["bound_samples_per_s"] == pytest.approx(analytic(point)["samples_per_s"])
    assert row["binds"] == analytic(point)["binds"]
    assert set(asdict(point)) <= set(row)


def test_a_point_that_stays_wide_stops_before_the_most_steps() -> None:
    row = evaluate(replace(SMALL, gpu_cv=0.5), half_width=1e-9, most_steps=200)
    assert row["steps"] == 128 and row["relative_half_width_95"] > 1e-9
    assert evaluate(SMALL, half_width=1e-9, most_steps=128)["steps"] == 128
    assert evaluate(SMALL, half_width=1e-9, most_steps=127)["steps"] == 64


def test_the_closed_forms_row_by_its_dollars() -> None:
    row = analytic(SMALL)
    dollars = (1 * 21888 + 4 * 1007 + 2 * 45251) / 730
    assert row["usd_per_million_samples"] == pytest.approx(
        dollars / 3600 * 1e6 / row["samples_per_s"]
    )
    assert row["ranks"] == 4 and isinstance(row["binds"], str)
