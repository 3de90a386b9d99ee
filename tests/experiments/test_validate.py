"""Predictions against runs: laws, schedules, errors and bands by numbers computed by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from experiments.benching import validate
from experiments.benching.validate import Done, Forecast, Options, cases, compare, conclusion
from experiments.commands import main
from experiments.validating.bands import band_of, error, verdicts
from experiments.validating.cases import Case, Held, held_by, weights_of
from experiments.validating.host_laws import TERMS, Point, fit_law, quantities, stages_by_law
from experiments.validating.running import Found, run_case
from experiments.validating.schedule import Schedule, contended, schedule
from experiments.validating.stages import RowWork, Stages, measured_stages
from persia_sim.words.chrome import Span
from persia_sim.words.vocabulary import Mode

MS = 1e-3
STAGES = Stages(
    load_s=1 * MS, read_s=0.5 * MS, pool_s=0.5 * MS, forward_s=1 * MS, backward_s=2 * MS,
    update_s=1 * MS, scatter_s=0.5 * MS, push_s=0.5 * MS, refresh_s=0.1 * MS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "step_ms"),
    [
        (Case(mode=Mode.SYNC), 1 + 0.5 + 0.5 + 1 + 2 + 1 + 0.5 + 0.5),  # all in turn
        (Case(mode=Mode.SYNC, ranks=2), 7 + 0.5 + 0.5),  # one lock: reads and updates in turn
        (Case(mode=Mode.SYNC, latency_s=0.01), 7 + 2 * 10),
        (Case(), 1 + 2 + 1),  # training alone
        (Case(window=0, mode=Mode.RAW_HYBRID), 7),
        (Case(latency_s=0.01), (7 + 2 * 10) / 5),  # five batches share a round
        (Case(mode=Mode.LOOKAHEAD), 0.1 + 0.5 + 1 + 2 + 1 + 0.5 + 0.5),  # load and read are hidden
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_schedule_by_hand(case, step_ms):
    found = schedule(case, STAGES, 60)
    assert 1e3 * case.batch / found.samples_per_s == pytest.approx(step_ms, rel=1e-6)


def test_a_window_that_training_fills_is_missed_whole_and_sync_misses_nothing():
    assert schedule(Case(), STAGES, 60).stale_steps == 4
    assert schedule(Case(window=1), STAGES, 60).stale_steps == 1
    assert schedule(Case(mode=Mode.SYNC), STAGES, 60).stale_steps == 0


def test_threads_that_want_more_cores_than_there_are_share_them():
    """Two ranks do 2 x 6.1 + 1 = 13.2 ms of work a step in 4 ms: 3.3 cores; 2 give 6.6 ms."""
    found = contended(Case(ranks=2), STAGES, 60, cores=2)
    assert STAGES.work_s(2) == pytest.approx(13.2 * MS)
    assert found.stretch == pytest.approx(1.65)
    assert 512 / found.samples_per_s == pytest.approx(6.6 * MS)
    assert contended(Case(ranks=2), STAGES, 60, cores=4) == schedule(Case(ranks=2), STAGES, 60)


def test_a_law_is_found_from_eight_exact_points_and_says_where_it_was_measured():
    helds = [Held(n, 26 * n, 10 * n, 500, dim) for n in (64, 256, 1024, 4096) for dim in (16, 32)]
    at = [quantities(h) for h in helds]
    points = [Point(q, 5e-6 + 3e-9 * q["distinct"] + 2e-10 * q["distinct_floats"]) for q in at]
    law = fit_law("server_lookup", points)
    assert law.terms["one"] == pytest.approx(5e-6)
    assert law.terms["distinct"] == pytest.approx(3e-9)
    assert law.terms["distinct_floats"] == pytest.approx(2e-10)
    assert law.points == 8 and law.spread < 1e-9
    assert law.ranges == {"distinct": (640, 40960), "dim": (16, 32)}
    assert law(quantities(Held(100, 0, 1000, 0, 20))) == pytest.approx(5e-6 + 3e-6 + 4e-6)
    assert law.outside(quantities(Held(100, 0, 639, 0, 64))) == ["distinct", "dim"]


def test_stages_by_law_add_a_gradient_for_each_further_rank_and_name_what_is_extrapolated():
    held = Held(10, 260, 100, 1000, 16, again=0.5, created=0.2)
    at = [quantities(Held(n, 26 * n, 10 * n, p, 16)) for n in (5, 20) for p in (500, 2000)]
    flat = {
        "worker_forward": 1e-8, "server_lookup": 2e-8, "server_create": 5e-8, "worker_pool": 1e-8,
        "worker_scatter": 1e-8, "server_update": 4e-8,
    }  # fmt: skip
    by = {"server_lookup": "distinct", "server_create": "distinct", "server_update": "distinct"}
    laws = {
        name: fit_law(name, [Point(q, each * q[by.get(name, "occurrences")]) for q in at])
        for name, each in flat.items()
    }
    dense = [Point(q, 1e-4 + 1e-9 * q["dense_params"] + 1e-10 * q["flops"]) for q in at]
    laws["dense"] = fit_law("dense", dense)
    small = [Point(quantities(Held(1, 0, 0, n, 1)), 3e-9 * n) for n in (500, 700)]
    laws["add_gradient"] = fit_law("add_gradient", small)
    stages, flags = stages_by_law(laws, held, ranks=3)
    assert stages.update_s == pytest.approx(1e-9 * 1000 + 2 * 3e-9 * 1000)
    assert stages.forward_s + stages.backward_s == pytest.approx(1e-4 + 1e-10 * 6 * 1000 * 10)
    assert stages.load_s == pytest.approx(2.6e-6)
    assert stages.read_s == pytest.approx(100 * 2e-8 + 0.2 * 100 * 5e-8)
    assert stages.refresh_s == pytest.approx(0.5 * 2e-6)
    assert flags == ("add_gradient (dense_params)",)  # measured to 700 weights
    assert stages_by_law(laws, held, ranks=1)[1] == ()


def test_what_a_batch_holds_is_counted_in_its_stream():
    case = Case(batch=256, ranks=2, mode=Mode.LOOKAHEAD)
    held = held_by(case, 64)  # 128 batches of 128: one chunk of the stream
    chunk = next(case.source().chunks("train"))
    assert (held.samples, held.occurrences) == (128, 128 * 26)
    distinct = [len(set(chunk.rows(k, k + 128).ids.tolist())) for k in range(0, chunk.size, 128)]
    assert held.distinct == pytest.approx(sum(distinct) / len(distinct))
    own = set(chunk.rows(chunk.size - 128, chunk.size).ids.tolist())
    before = set(chunk.rows(chunk.size - 9 * 128, chunk.size - 128).ids.tolist())
    assert held.again == pytest.approx(len(own & before) / len(own))
    seen, new, met = set(), 0, 0
    for k in range(0, chunk.size, 128):
        ids = set(chunk.rows(k, k + 128).ids.tolist())
        if k >= 128 * 2 * (64 // 3):
            new, met = new + len(ids - seen), met + len(ids)
        seen |= ids
    assert held.created == pytest.approx(new / met) and 0 < new < met
    assert held_by(Case(bag=3, batch=128)).occurrences == pytest.approx(2 * 128 * 26, rel=0.02)
    assert weights_of(26 * 16 + 13, (256, 128)) == 429 * 256 + 256 * 128 + 128


def test_measured_stages_leave_out_waiting_and_warm_up():
    def span(rank: int, stage: str, step: int, ms: float) -> Span:
        return Span(rank, "", stage, step, 0.0, ms * MS)

    spans = [
        span(rank, stage, step, ms)
        for step, factor in ((0, 100), (1, 1))
        for rank in (0, 1)
        for stage, ms in {
            "load": 1 * factor, "lookup": 2 * factor, "forward": 3 * factor,
            "backward": 4 * factor, "dense_sync": (5, 0.5)[rank] * factor, "push": 2 * factor,
        }.items()
    ]  # fmt: skip
    rows = RowWork(
        read=[(0, 1.0), (1, 0.3 * MS), (1, 0.5 * MS)],
        refresh=[],
        update=[(0, 1.0), (1, 1.0 * MS)],  # merged: of both ranks
    )
    found = measured_stages(spans, rows, first=1, prefetches=False)
    assert found == Stages(
        load_s=1 * MS, read_s=pytest.approx(0.4 * MS), pool_s=2 * MS, forward_s=3 * MS,
        backward_s=4 * MS, update_s=0.5 * MS, scatter_s=pytest.approx(1.5 * MS),
        push_s=pytest.approx(0.5 * MS),
    )  # fmt: skip
    ahead = measured_stages(spans, rows, first=1, prefetches=True)
    assert ahead.pool_s == pytest.approx(1.6 * MS)
    assert found.parts()["lookup"] == pytest.approx(2.4 * MS)


def test_errors_are_signed():
    assert error(110, 100) == pytest.approx(0.1) and error(90, 100) == pytest.approx(-0.1)
    assert error(0, 0) == 0 and error(1, 0) == math.inf


def test_a_band_comes_from_the_other_configurations_and_their_runs():
    same = {name: [1.1, 1.1] for name in "abcd"}
    band = band_of("a", same | {"a": [9.0]})
    assert band is not None
    assert (band.low, band.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert band_of("a", {"a": [1.0], "b": [1.0], "c": [1.0]}) is None


def test_bands_hold_about_nine_in_ten_of_normal_errors():
    random = np.random.default_rng(3)
    inside = []
    for _ in range(60):
        ratios = {
            str(n): np.exp(random.normal(0.1, 0.1) + random.normal(0, 0.03, 3)) for n in range(20)
        }
        band = band_of("0", ratios)
        assert band is not None
        inside += [band.holds(ratio) for ratio in ratios["0"]]
    assert 0.82 <= np.mean(inside) <= 0.97  # the mean of 60: standard error 0.04


def test_goals_stand_beside_what_was_found():
    found = verdicts([0.04, -0.16], [0.02, -0.06], [True] * 9 + [False])
    assert [(str(v).rpartition("(")[2], round(v.found, 6)) for v in found] == [
        ("MISSED)", 0.1), ("MISSED)", 0.16), ("met)", 0.04), ("met)", 0.9),
    ]  # fmt: skip
    assert verdicts([0.01], [], [])[0].met


def test_a_record_holds_errors_of_throughput_stages_and_staleness():
    case = Case(mode=Mode.SYNC)
    alone = schedule(case, STAGES, 200).samples_per_s
    told = Forecast(STAGES.times(2), Schedule(alone / 2, 0.0, 1.0), ("dense (samples)",))
    runs = [Done(case, k, Found(alone * f, 0.0, STAGES), 1.5) for k, f in enumerate((0.5, 1, 2))]
    [record] = compare([case], {case.name: told}, runs)
    assert record["error"] == pytest.approx(-0.5)
    assert record["schedule_error"] == pytest.approx(0.0, abs=1e-9)
    assert record["dense_error"] == pytest.approx(1.0)
    assert record["stale_error"] == 0 and record["inside"] == ""
    told_all = conclusion([record])
    assert "throughput, largest <= 15%: 50.0% (MISSED)" in told_all
    assert "the machine was loaded" in told_all and "staleness" not in told_all


def test_a_run_measures_every_stage_of_every_mode():
    for mode in (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID):
        found = run_case(Case(mode=mode, batch=32, dim=4, hidden=(8,), shards=2), 30)
        parts = found.stages.parts()
        assert found.samples_per_s > 0 and all(seconds > 0 for seconds in parts.values())
        assert (found.stages.refresh_s > 0) == (mode is Mode.LOOKAHEAD)
        assert 0 <= found.stale_steps <= (4 if mode is Mode.HYBRID else 0)


def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch, capsys):
    options = Options(modes=("sync",), ranks=(1,), rounds=1, out=tmp_path)
    runs = []

    def measured(case: Case, steps: int) -> Found:
        runs.append(case)
        return Found(1000.0, 0.0, STAGES)

    def host(*_: object, **__: object) -> dict[str, list[Point]]:
        at = [quantities(Held(n, 26 * n, n, 100, d)) for n in (100, 1000) for d in (16, 32)]
        return {name: [Point(q, 1e-6 * q["samples"]) for q in at] for name in TERMS}

    monkeypatch.setattr(validate, "run_case", measured)
    monkeypatch.setattr(validate, "measure_host", host)
    validate.run(options)
    first = (tmp_path / "validate.csv").read_text()
    assert [case.name for case in cases(options)] == [case.name for case in dict.fromkeys(runs)]
    runs.clear()
    validate.run(options)
    assert not runs and (tmp_path / "validate.csv").read_text() == first
    assert "0 runs left" in capsys.readouterr().out
    [file] = (tmp_path / "runs").iterdir()
    assert json.loads(file.read_text())["found"]["samples_per_s"] == 1000.0


def test_a_plan_is_printed_and_nothing_made(tmp_path, capsys):
    assert main(["validate", "--dry-run", "--rounds", "1", "--out", str(tmp_path / "v")]) == 0
    assert "4 cases x 1 rounds: 4 runs left" in capsys.readouterr().out
    assert not (tmp_path / "v").exists()


def test_names_of_cases_are_all_different():
    names = [case.name for case in cases(Options())]
    assert len(set(names)) == len(names) >= 20
