"""Simulated studies: cluster sweep, checkpoint interval, speed of the simulator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from experiments.studies import checkpoint_interval, cluster_sweep
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of
from persia_sim.cli.example import write_examples
from persia_sim.cluster.memory import FORMATS
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.report.sweep import TIE, Point
from tests.experiments.raw_runs import printed_by, read_csv


def sweep_options(out: Path, **changes) -> cluster_sweep.Options:
    chosen = {
        "workloads": ("criteo-syn1", "criteo-syn5"), "modes": (Mode.SYNC, Mode.HYBRID),
        "ranks": (4,), "workers": (4,), "servers": (4, 30), "batch_per_rank": (64,), "taus": (2, 8),
        "precision": 0.5, "out": out, "jobs": 1,
    }  # fmt: skip
    return cluster_sweep.Options(**{**chosen, **changes})


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    out = tmp_path_factory.mktemp("cluster-sweep")
    told = printed_by(cluster_sweep.run, sweep_options(out))
    return out, told, read_csv(out / "cluster_sweep.csv")


def test_the_grid_is_crossed_and_modes_without_a_window_count_once(swept):
    points = {(r["workload"], r["mode"], r["servers"], r["tau"]) for r in swept[2]}
    want = {
        (workload, mode, servers, tau)
        for workload in ("criteo-syn1", "criteo-syn5")
        for servers in ("4", "30")
        for mode, tau in (("sync", ""), ("hybrid", "2"), ("hybrid", "8"))
    }
    assert points == want and len(swept[2]) == len(want)


def test_a_point_without_room_for_its_rows_is_not_simulated(swept):
    for row in swept[2]:
        cluster = CLUSTERS["gcp-100t"]().with_servers(int(row["servers"]))
        each = FORMATS["fp16-lean"].row_bytes(workloads()[row["workload"]].dim)
        need = workloads()[row["workload"]].rows * each / cluster.servers.processes
        assert float(row["bytes_per_server"]) == pytest.approx(need)
        assert float(row["limit_bytes_per_server"]) == cluster.servers.ram_bytes_per_process
        fits = need <= cluster.servers.ram_bytes_per_process
        assert row["fits"] == row["simulated"] == str(fits)
        assert (row["samples_per_s"] == "") == (not fits)
        if not fits:
            assert row["on_front"] == "False"
    refused = [(r["workload"], r["servers"]) for r in swept[2] if r["fits"] == "False"]
    assert set(refused) == {("criteo-syn5", "4")}
    assert "3 points do not fit in memory as fp16-lean" in swept[1]
    assert "a server needs" in swept[1] and all(bool(r["why_not"]) != (r["simulated"] == "True")
                                                for r in swept[2])  # fmt: skip


def test_dollars_and_rates_of_a_row_are_those_of_its_simulation(swept):
    row = next(r for r in swept[2] if (r["mode"], r["servers"], r["tau"]) == ("hybrid", "30", "2"))
    cluster = CLUSTERS["gcp-100t"]().with_ranks(4).with_workers(4).with_servers(30)
    dollars = float(row["usd_per_hour"]) / 3600  # a second
    assert float(row["usd_per_hour"]) == pytest.approx(cluster.usd_per_hour)
    per_million = dollars * 1e6 / float(row["samples_per_s"])
    assert float(row["usd_per_million_samples"]) == pytest.approx(per_million)
    assert 0 < float(row["samples_per_s"]) <= 1.02 * float(row["bound_samples_per_s"])
    assert 0 <= float(row["staleness_steps_mean"]) <= 2


def test_the_front_of_each_workload_is_what_no_other_point_beats(swept):
    for workload in ("criteo-syn1", "criteo-syn5"):
        own = [r for r in swept[2] if r["workload"] == workload and r["simulated"] == "True"]
        scores = [
            np.array([-float(r["samples_per_s"]), float(r["staleness_steps_mean"]),
                      float(r["usd_per_million_samples"]), r["dense_late"] == "True"])
            for r in own
        ]  # fmt: skip
        for row, score in zip(own, scores, strict=True):
            tie = TIE * np.abs(score)
            beaten = any((o <= score).all() and (o < score - tie).any() for o in scores)
            perhaps = any((o <= score + tie).all() and (o < score - tie).any() for o in scores)
            assert row["on_front"] in {str(not beaten), str(not perhaps)}
        assert any(r["on_front"] == "True" for r in own)


def test_a_cheap_workload_does_not_push_another_off_the_front():
    def row(workload: str, speed: float, dollars: float) -> dict:
        same = {"simulated": True, "dense_late": False, "staleness_steps_mean": 0.0}
        own = {"samples_per_s": speed, "usd_per_million_samples": dollars}
        return {"workload": workload, **same, **own}

    rows = [row("small", 10.0, 1.0), row("large", 9.0, 2.0), row("large", 8.0, 3.0)]
    cluster_sweep._mark_fronts(rows)
    assert [r["on_front"] for r in rows] == [True, True, False]


def test_a_second_sweep_computes_only_what_is_missing(swept, monkeypatch, capsys):
    computed: list[str] = []

    def evaluate(point: Point, **_):
        computed.append(point.label)
        return json.loads((swept[0] / "points.jsonl").read_text().splitlines()[0])["row"]

    monkeypatch.setattr(cluster_sweep.sweep, "evaluate", evaluate)
    cluster_sweep.run(sweep_options(swept[0]))
    assert computed == []
    cluster_sweep.run(sweep_options(swept[0], evict=True))
    assert len(computed) == 3, "the points that were refused before"
    computed.clear()
    cluster_sweep.run(sweep_options(swept[0], precision=0.1, workloads=("criteo-syn1",)))
    assert len(computed) == 6, "kept points are not precise enough"
    computed.clear()
    cluster_sweep.run(sweep_options(swept[0], row_format="f32-sgd", workloads=("criteo-syn1",)))
    assert len(computed) == 6, "kept points are of another row format"


def test_a_cluster_of_ones_own_is_swept_and_an_edited_file_is_another_point(tmp_path, monkeypatch):
    write_examples(tmp_path)
    mine, work = (str(tmp_path / f"{name}.toml") for name in ("cluster", "workload"))
    chosen = {"cluster": mine, "workloads": (work,), "modes": (Mode.HYBRID,), "taus": (2,),
              "ranks": (), "workers": (), "servers": (30, 20_000),
              "batch_per_rank": ()}  # fmt: skip
    computed: list[str] = []

    def evaluate(point: Point, **_):
        computed.append(point.label)
        return dict.fromkeys(cluster_sweep.ROW_KEYS, 1.0) | {"binds": "x", "dense_late": False}

    monkeypatch.setattr(cluster_sweep.sweep, "evaluate", evaluate)
    options = sweep_options(tmp_path, **chosen)
    told = printed_by(cluster_sweep.run, options)
    here, cannot = read_csv(tmp_path / "cluster_sweep.csv")
    assert (here["ranks"], here["workers"], here["batch_per_rank"]) == ("64", "100", "1024")
    assert cannot["simulated"] == "False" and "servers is 20000: must be <= 10,000" in told
    assert (tmp_path / "cluster_sweep.png").is_file()
    cluster_sweep.run(options)
    assert len(computed) == 1
    text = (tmp_path / "cluster.toml").read_text()
    (tmp_path / "cluster.toml").write_text(text.replace("loaders = 240", "loaders = 120"))
    cluster_sweep.run(options)
    assert len(computed) == 2


def test_evicting_points_pay_for_their_misses(monkeypatch, tmp_path):
    rates: dict[str, float] = {}

    def evaluate(point: Point, half_width: float, miss_rate: float):
        rates[f"{point.workload}/{point.servers}"] = miss_rate
        return dict.fromkeys(cluster_sweep.ROW_KEYS, 1.0) | {"binds": "x"}

    monkeypatch.setattr(cluster_sweep.sweep, "evaluate", evaluate)
    cluster_sweep.run(sweep_options(tmp_path, modes=(Mode.SYNC,), taus=(2,), evict=True))
    assert rates["criteo-syn5/4"] > 0.01
    assert rates["criteo-syn1/30"] == pytest.approx(0.0, abs=1e-9)


def test_memory_is_that_of_the_row_format_asked_for(tmp_path):
    point = cluster_sweep.points_of(sweep_options(tmp_path))[0]
    lean, full = (cluster_sweep._memory(point, rows) for rows in ("fp16-lean", "f32-adagrad"))
    dim = workloads()["criteo-syn1"].dim
    assert lean.row_bytes == 2 * dim + 90
    assert full.row_bytes == 8 * dim + 66, "a value and its accumulator, 4 bytes each"


def test_rows_are_kept_as_persia_sim_keeps_those_of_the_workload(tmp_path):
    """2e12 / 64 rows of 64 numbers with Adagrad's on 20 hosts of 20 need 841 GiB of 410."""
    options = sweep_options(
        tmp_path, cluster="v100-paper", workloads=("kwai-video", "criteo-syn1"), servers=(20,),
        modes=(Mode.SYNC,), taus=(2,),
    )  # fmt: skip
    points = cluster_sweep.points_of(options)
    kwai, syn = (cluster_sweep._memory(point, options.row_format) for point in points)
    assert (kwai.row_bytes, syn.row_bytes) == (64 * (4 + 4) + 66, 128 * 2 + 90)
    assert kwai.bytes_per_server == pytest.approx(2e12 / 64 * 578 / 20) and not kwai.fits
    labels = [cluster_sweep._label(point, options) for point in points]
    assert "f32-adagrad" in labels[0] and "fp16-lean" in labels[1]
    rows = [cluster_sweep._row(p, None, room) for p, room in zip(points, (kwai, syn), strict=True)]
    assert "2 points do not fit in memory as f32-adagrad, fp16-lean and" in cluster_sweep._notes(
        rows, options
    )


def test_points_wider_than_asked_are_said(tmp_path):
    rows = [{"simulated": True, "relative_half_width_95": w, "usd_per_hour": 1.0}
            for w in (0.1, math.inf, 0.01)]  # fmt: skip
    assert cluster_sweep._notes(rows, sweep_options(tmp_path, precision=0.05)).startswith(
        "2 of 3 points are wider than the precision 5.00%"
    )


def test_a_latin_hypercube_covers_every_axis_evenly_and_takes_the_seed(tmp_path):
    options = sweep_options(
        tmp_path, latin=6, servers=(1, 2, 3), ranks=(1, 2, 3, 4, 5, 6), modes=(Mode.HYBRID,), seed=9
    )
    points = cluster_sweep.points_of(options)
    assert sorted(p.ranks for p in points) == [1, 2, 3, 4, 5, 6]
    assert sorted(p.servers for p in points) == [1, 1, 2, 2, 3, 3]
    assert {p.seed for p in points} == {9}


def test_a_mode_without_a_window_is_in_a_hypercube_once(tmp_path):
    chosen = {"taus": (2, 4, 8), "workloads": ("criteo-syn1",), "servers": (30,)}
    points = cluster_sweep.points_of(sweep_options(tmp_path, latin=12, **chosen))
    assert [p.tau for p in points if p.mode is Mode.SYNC] == [None]
    assert {p.tau for p in points if p.mode is Mode.HYBRID} <= {2, 4, 8}


def test_a_sweep_without_prices_says_so_and_shows_updates_missed(tmp_path, monkeypatch):
    """An async mean lookup that misses 4 own steps and 79 pushes misses 79 updates."""
    found = dict.fromkeys(cluster_sweep.ROW_KEYS, 1.0) | {
        "binds": "x", "usd_per_hour": None, "usd_per_million_samples": None,
        "staleness_steps_mean": 4.0, "staleness_pushes_mean": 79.0,
    }  # fmt: skip
    monkeypatch.setattr(
        cluster_sweep.sweep, "evaluate",
        lambda point, **_: found | {"dense_late": not point.mode.has_barrier},
    )  # fmt: skip
    modes = (Mode.SYNC, Mode.ASYNC_AVERAGING)
    options = sweep_options(tmp_path, modes=modes, taus=(4,), servers=(30,))
    told = printed_by(cluster_sweep.run, options)
    assert "dollars are not known" in told and "0.000" not in told and "None" not in told
    rows = read_csv(tmp_path / "cluster_sweep.csv")
    assert {(r["mode"], r["tau"], r["updates_missed_mean"]) for r in rows} == {
        ("sync", "", "4.0"), ("async_averaging", "4", "79.0")
    }  # fmt: skip
    assert {r["usd_per_million_samples"] for r in rows} == {""}


def test_values_given_twice_count_once(tmp_path):
    assert len(cluster_sweep.points_of(sweep_options(tmp_path, ranks=(4, 4), servers=(4,)))) == 6


def test_a_dry_run_of_the_sweep_shows_the_points_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "none"
    cluster_sweep.run(sweep_options(out, dry_run=True))
    told = capsys.readouterr().out
    assert "12 points (0 done, 9 to run, 3 that cannot be)" in told
    assert told.count("to run ") == 9
    assert not out.exists()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    out = tmp_path_factory.mktemp("checkpoint-interval")
    options = checkpoint_interval.Options(
        ranks=2, steps=60, modes=(Mode.HYBRID,), crashes=(4.0,), factors=(0.5, 2.0), seeds=3,
        out=out,
    )  # fmt: skip
    told = printed_by(checkpoint_interval.run, options)
    return options, told, read_csv(out / "checkpoint_interval.csv")


def test_intervals_are_multiples_of_youngs_and_overheads_lie_near_dalys_form(checkpoints):
    options, _, rows = checkpoints
    useful_s = simulate(
        scenario_of(
            Simulation(cluster="v100-paper", workload="kwai-video", ranks=2, mode=Mode.HYBRID,
                       tau=4, steps=60)
        )
    ).makespan_s  # fmt: skip
    mean_s, write_s = useful_s / 4.0, useful_s * options.checkpoint_share
    back_s = useful_s * options.back_share
    assert [(float(r["factor"]), int(r["seed"])) for r in rows] == [
        (factor, seed) for factor in (0.5, 2.0) for seed in range(3)
    ]
    for row in rows:
        young_s = math.sqrt(2 * write_s * mean_s)
        assert float(row["interval_s"]) == pytest.approx(float(row["factor"]) * young_s)
        kept = float(row["interval_kept_s"])
        daly = mean_s * math.exp(back_s / mean_s) * math.expm1((kept + write_s) / mean_s) / kept - 1
        assert float(row["overhead_closed_form"]) == pytest.approx(daly)
        took_s = useful_s * (1 + float(row["overhead"]))
        assert float(row["throughput_lost"]) == pytest.approx(1 - useful_s / took_s)
        # What a run loses is what it redoes, waits and writes; in hybrid a little of it overlaps.
        lost = sum(float(row[name]) for name in ("redone_s", "down_s", "writing_s"))
        assert float(row["overhead"]) == pytest.approx(lost / useful_s, abs=0.05)
        count = round(useful_s / kept)
        assert float(row["writing_s"]) == pytest.approx(count * write_s, rel=0.05)
    assert sum(int(r["crashes"]) for r in rows) > 0


def test_the_printed_losses_are_those_of_the_figure_with_95_per_cent_intervals(checkpoints):
    _, told, rows = checkpoints
    for factor in (0.5, 2.0):
        own = [float(r["throughput_lost"]) for r in rows if float(r["factor"]) == factor]
        closed = fmean(
            float(r["overhead_closed_form"]) for r in rows if float(r["factor"]) == factor
        )
        (line,) = [x for x in told.splitlines() if f"{factor:g} x Young" in x]
        assert line.startswith("hybrid")
        # Student's t for 2 degrees of freedom, from a printed table
        assert f"{fmean(own):.1%} ± {4.303 * stdev(own) / math.sqrt(3):.1%}" in line
        assert line.endswith(f"{closed / (1 + closed):.1%}")


def test_a_second_run_of_the_intervals_simulates_only_what_is_missing(checkpoints, monkeypatch):
    options, _, rows = checkpoints
    ran: list[object] = []
    monkeypatch.setattr(checkpoint_interval, "simulate", lambda s: ran.append(s) or simulate(s))
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    checkpoint_interval.run(options)
    assert (ran, read_csv(options.out / "checkpoint_interval.csv")) == ([], rows)
    checkpoint_interval.run(replace(options, seeds=4, factors=(2.0,)))
    assert len(ran) == 1, "one seed more"
    checkpoint_interval.run(replace(options, seeds=1, factors=(2.0,), back_share=2e-3))
    assert len(ran) == 2, "another cost of a crash, but the same run without crashes"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"crashes": (3.0, 1e6)}, r"crashes must be <= steps / 4 = 100,.* got 1e\+06"),
        ({"factors": (1.0, 1e3)}, "factors must leave time to work.*1000 x Young's"),
        ({"back_share": 0.9}, "must be <= 4 mean times between crashes, got"),
    ],
)
def test_checkpoint_options_that_would_never_end_are_refused(changes, rule):
    with pytest.raises(ValueError, match=rule):
        checkpoint_interval.Options(**changes)
