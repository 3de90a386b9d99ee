"""Predictions from sync with one rank: schedules by hand, bands, knees, and a study of small
runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from experiments.__main__ import main
from experiments.benching import validate
from experiments.benching.validate import Options, cases
from experiments.validating.cases import Case, held_by, knee_cases, travels
from experiments.validating.contention import (
    Burden,
    Host,
    Thread,
    burdened,
    burdens,
    threads,
)
from experiments.validating.predictions import (
    Prediction,
    conclusion,
    knee_of,
    predictions,
    records_of,
    write_before_runs,
)
from experiments.validating.profiling import (
    MeasuredRun,
    ProfileRun,
    fit_profile,
    profile_runs,
    run_case,
)
from experiments.validating.schedule import schedule
from experiments.validating.stages import costs_by_law, step_durations_of
from persia_sim.base.vocabulary import Mode, Stage
from runtime.profiling.laws import LawPoint
from runtime.profiling.stage_times import STAGES as NAMES
from runtime.profiling.stage_times import StageTimes, TimedSpan
from tests.experiments.test_validate import MS, NO_PYTHON, STAGES, flat_laws


def step_ms(case: Case, steps: int = 61) -> float:
    found = schedule(case, STAGES, steps)
    return 1e3 * case.updates_per_step * case.batch / found.samples_per_s


@pytest.mark.parametrize(
    ("case", "expected_ms"),
    [
        (Case(mode=Mode.SYNC, shards=2, slow_s=0.006), 7 + 2 * 6),  # a read and a push in turn
        (Case(shards=2, slow_s=0.006), 2 * 6 + 0.5 / 2 + 0.5 / 2),  # its server alone binds
        (Case(latency_s=0.01, window=16, permits=1), 7 + 2 * 10),  # one batch at a time
        (Case(latency_s=0.01, window=16, permits=3), (7 + 2 * 10) / 3),
        (Case(queue=1), 1 + 2 + 1),  # training alone, however few batches wait
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_schedule_that_decides_by_hand(case, expected_ms):
    assert step_ms(case) == pytest.approx(expected_ms, rel=1e-6)


def test_a_server_that_stands_still_costs_sync_all_of_it_and_a_window_hides_a_part():
    """60 steps, of which the last 40 count; at the 40th the server is away for 0.2 s. In sync they
    take 40 x 7 + 200 ms. A window of 4 has at most five batches of 4 ms behind that server."""
    sync_ms = 40 * step_ms(Case(mode=Mode.SYNC, dead_s=0.2), 60)
    assert sync_ms == pytest.approx(40 * 7 + 200, abs=0.01)
    late_ms = 40 * step_ms(Case(dead_s=0.2), 60)
    assert 40 * 4 + 200 - 5 * 4 - 1 <= late_ms < 40 * 4 + 200


def test_as_many_batches_wait_for_a_dead_server_as_the_window_lets_in():
    """The runtime's queues hold the window and one more, so a window of 64 is used whole."""
    found = schedule(Case(window=64, dead_s=2.0), STAGES, 240)
    assert len(found.stale_shares) == 64 + 1
    assert found.stale_shares[64] > 0.5


def test_knees_of_the_schedule_are_where_rounds_are_full():
    """Once loaded a batch takes 6 + 2 x 10 ms, training 4 of it: 26 / 4 in flight fill it."""
    rates = {
        case.window: schedule(case, STAGES, 20 * (case.window + 1)).samples_per_s
        for case in knee_cases()[:6]
    }
    assert rates[16] == pytest.approx(512 / 0.004, rel=1e-3)
    assert knee_of(rates) == pytest.approx(26 / 4 - 1, abs=0.05)
    assert knee_of({0: 49.0, 16: 50.0}) == 0.0  # nothing grows


def test_fair_turns_make_a_stages_python_longer_by_the_share_that_others_hold():
    """A second thread holds the interpreter for 1 of 4 ms: 0.4 ms of Python take 0.1 ms longer."""
    mine = Thread(("load",), 1 * MS, 0.4 * MS)
    other = Thread(("forward",), 2 * MS, 1.0 * MS)
    host = Host(4)
    by = burdens([mine, other], 1, 250.0, host)
    assert [burden.held for burden in by] == pytest.approx([0.25, 0.1])
    python = NO_PYTHON | {"load": 0.4 * MS, "forward": 1.0 * MS}
    longer = burdened(STAGES, [mine, other], by, host, python)
    assert longer["load"] == pytest.approx(1.1 * MS)
    assert longer["forward"] == pytest.approx((1 + 0.1) * MS)
    nobody = [Burden(1.0, 1.0, 0.0, 0.0, 0.0)] * 2
    assert burdened(STAGES, [mine, other], nobody, host, python)["load"] == STAGES["load"]


def test_steps_last_from_an_update_to_the_next():
    def update(rank: int, step: int, end_s: float) -> TimedSpan:
        return TimedSpan(rank, Stage.DENSE_SYNC, step, rank, end_s - 0.1, end_s, 0.0, 0.0)

    ends = [update(0, s, t) for s, t in enumerate((1.0, 2.0, 4.0, 7.0))]
    ends += [update(1, s, t) for s, t in enumerate((1.0, 2.5, 4.5, 7.5))]
    assert sorted(step_durations_of(ends, 2)) == pytest.approx([2.0, 2.0, 3.0, 3.0])
    assert len(step_durations_of([], 2)) == 0


def small_profile() -> tuple[dict[ProfileRun, list[MeasuredRun]], dict[str, list[LawPoint]]]:
    """Runs of a host whose laws are flat, the second measurement two per cent slower."""
    laws = flat_laws()
    runs = {}
    for batch in (32, 64, 128):
        run = ProfileRun(Case(mode=Mode.SYNC, batch=batch, hidden=(8,)), 30)
        stages = costs_by_law(laws, held_by(run.case, 30), run.case.mode, 1).stages
        runs[run] = []
        for longer in (1.0, 1.02):
            as_timed = {name: longer * stages[name] for name in NAMES}
            rate = batch / sum(as_timed.values())
            timed = StageTimes(as_timed, as_timed, 0.0)
            runs[run].append(MeasuredRun(rate, 0.0, timed, 0.0))
    loops = {
        "add_gradient": [LawPoint({"one": 1.0, "dense_params": n}, 1e-6) for n in (1e3, 1e5)],
        "half": [LawPoint({"one": 1.0, "distinct_floats": n}, 1e-6) for n in (1e3, 1e5)],
        "pull": [LawPoint({"one": 1.0, "dense_params": n}, 1e-6) for n in (1e3, 1e5)],
        "sleep": [LawPoint({"one": 1.0, "asked_s": s}, s) for s in (0.001, 0.01)],
    }
    return runs, loops


def test_two_runs_at_once_say_what_a_second_rank_costs():
    """Their stages take 1.4 times as long by the clock, though each has a core: so does a rank that
    does all of it in one thread, beside another one. Without them nothing is known but turns."""
    runs, loops = small_profile()
    for run, repeats in list(runs.items()):
        runs[replace(run, case=replace(run.case, copies=2))] = [
            replace(
                one,
                samples_per_s=one.samples_per_s / 1.4,
                measured=replace(
                    one.measured, wall={k: 1.4 * v for k, v in one.measured.wall.items()}
                ),
            )
            for one in repeats
        ]
    profile = fit_profile(runs, loops, 99)
    case = Case(mode=Mode.SYNC, batch=64, hidden=(8,))
    costs = costs_by_law(profile.laws, held_by(case, 30), case.mode, 1)
    of_rank = threads(case.mode, 1, costs.stages, costs.python)
    by = burdens(of_rank, 2, 1 / (1.4 * of_rank[0].work_s), profile.host)
    beside = burdened(costs.stages, of_rank, by, profile.host, costs.python)
    assert sum(beside.values()) == pytest.approx(1.4 * sum(costs.stages.values()), rel=0.02)
    alone = burdens(of_rank, 1, 1 / of_rank[0].work_s, profile.host)
    assert burdened(costs.stages, of_rank, alone, profile.host, costs.python) == costs.stages


def test_a_copy_beside_a_run_changes_nothing_of_what_is_trained():
    small = {"mode": Mode.SYNC, "batch": 32, "dim": 4, "hidden": (8,)}
    both = run_case(Case(copies=2, **small), 30)
    assert both.samples_per_s > 0 and both.stale_shares == (1.0,)


def test_bands_hold_what_two_measurements_of_the_profile_differ_by():
    """Both ln 1.02 apart: the mean of two has half of a variance of ln(1.02)**2 / 2, a run all of
    it; the laws are exact but for that."""
    runs, loops = small_profile()
    every = [Case(mode=Mode.SYNC, batch=64, hidden=(8,)), Case(batch=64, hidden=(8,))]
    found = predictions(every, runs, loops, 99, 30)
    variance = math.log(1.02) ** 2 / 2
    for case in every:
        each = found[case.name]
        factor = math.exp(1.645 * math.sqrt(1.5 * variance))
        assert each.high / each.samples_per_s == pytest.approx(factor, rel=2e-3)
        assert each.samples_per_s / each.low == pytest.approx(factor, rel=2e-3)
    sync = found[every[0].name]
    assert sync.rule == pytest.approx(sync.samples_per_s, rel=1e-6) and sync.stale_shares == (1.0,)
    late = found[every[1].name]
    assert late.samples_per_s > sync.samples_per_s and sum(late.stale_shares) == pytest.approx(1)


def test_predictions_that_lie_there_are_not_written_over(tmp_path):
    path = tmp_path / "new" / "predictions.json"
    foretold = {"a": Prediction(1.0, 0.9, 1.1, 1.0, 0.0, 0.1, (1.0,))}
    write_before_runs(path, foretold)
    assert json.loads(path.read_text())["a"]["low"] == 0.9
    write_before_runs(path, foretold)
    other = {"a": Prediction(2.0, 0.9, 1.1, 1.0, 0.0, 0.1, (1.0,))}
    with pytest.raises(ValueError, match="holds other predictions than these runs"):
        write_before_runs(path, other)
    assert json.loads(path.read_text())["a"]["samples_per_s"] == 1.0


def test_goals_stand_beside_errors_knee_and_histograms():
    every = knee_cases()
    timed = StageTimes(STAGES, STAGES, 0.0)
    foretold, runs = {}, {}
    for case in every:
        expected, rate = (min(100.0 * (case.window + 1), most) for most in (800.0, 1000.0))
        foretold[case.name] = Prediction(expected, 0.9 * expected, 1.1 * expected, 400.0, 2.0, 0.2,
                                         (0.0, 0.5, 0.5))  # fmt: skip
        shares = (0.0, 0.4, 0.4, 0.2)
        runs[case.name] = [MeasuredRun(rate, 2.2, timed, 0.0, 0.0, step_p95_s=0.1,
                                       stale_shares=shares)]  # fmt: skip
    records = records_of(every, foretold, runs)
    assert [r["inside"] for r in records] == [1] * 4 + [0] * 4
    assert records[0]["error"] == 0 and records[-1]["error"] == pytest.approx(-0.2)
    assert {round(r["stale_variation"], 9) for r in records} == {0.2}
    said = conclusion(every, records)
    assert "throughput, mean error: 8.9% (goal 6.0%: MISSED)" in said
    assert "throughput, largest: 20.0% (goal 20.0%: met)" in said
    assert "knee at tau 7.0, measured 9.0, apart: 2.0 (goal 1.0: MISSED)" in said
    assert "hold 50% of them" in said and "95th percentile of a step, mean error 100.0%" in said
    assert "histogram of staleness, worst: 0.200 (goal 0.050: MISSED)" in said


def test_a_server_that_is_slow_or_dead_is_so_in_a_run():
    small = {"batch": 32, "dim": 4, "hidden": (8,)}
    slow = run_case(Case(mode=Mode.SYNC, shards=2, slow_s=0.01, **small), 30)
    assert slow.samples_per_s < 32 / 0.02  # a read and a push, 10 ms each
    assert slow.stale_shares == (1.0,) and slow.step_p95_s > 0.02
    dead = run_case(Case(dead_s=0.5, **small), 30)
    assert dead.samples_per_s < 20 * 32 / 0.5
    assert sum(dead.stale_shares) == pytest.approx(1) and len(dead.stale_shares) <= 5


@pytest.mark.long
def test_a_small_study_writes_its_predictions_before_its_cases_run(tmp_path, monkeypatch, capsys):
    laws = flat_laws()
    order = []
    small = {"batch": 32, "dim": 4, "hidden": (8,)}
    every = [Case(**small), Case(mode=Mode.SYNC, ranks=2, **small)]

    def measured(case: Case, steps: int) -> MeasuredRun:
        order.append((case, (tmp_path / "predictions.json").exists()))
        stages = costs_by_law(laws, held_by(case, 30), case.mode, case.ranks).stages
        found = schedule(case, stages, 30)
        return MeasuredRun(found.samples_per_s, found.stale_steps, StageTimes(stages, stages, 0.01),
                           0.0, step_p95_s=found.step_p95_s,
                           stale_shares=found.stale_shares)  # fmt: skip

    of_profile = [ProfileRun(Case(mode=Mode.SYNC, batch=b, hidden=(8,)), 30) for b in (32, 64)]
    monkeypatch.setattr(validate, "run_case", measured)
    monkeypatch.setattr(validate, "profile_runs", lambda hosts: of_profile)
    monkeypatch.setattr(validate, "deciding", lambda quick: every)
    options = Options(rounds=2, steps=60, out=tmp_path, most_foreign_cores=99)
    validate.run(options)
    assert [there for case, there in order if case in every] == [True] * 4
    assert [there for case, there in order if case not in every] == [False] * 4
    said = capsys.readouterr().out
    assert "4 runs left, and 4 of the profile" in said and "2 predictions in" in said
    assert "validate.csv" in said and "two-line rule" in said
    first = (tmp_path / "validate.csv").read_text()
    order.clear()
    validate.run(options)
    assert not order and (tmp_path / "validate.csv").read_text() == first
    file = tmp_path / "measured.jsonl"
    file.write_text(file.read_text().replace("samples_per_s", "samples_a_second"))
    with pytest.raises(ValueError, match="samples_a_second is not known; did you"):
        validate.run(options)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_plan_of_the_whole_study_says_its_minutes_and_makes_nothing(hosts, tmp_path, capsys):
    out = tmp_path / "v"
    assert main(["validate", "--hosts", str(hosts), "--dry-run", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    names = [case.name for case in cases(Options(hosts=hosts))]
    assert len(set(names)) == len(names) >= 20 and all(name in said for name in names)
    runs = 2 * len(profile_runs(hosts))
    assert f"{len(names)} cases x 3 rounds: {3 * len(names)} runs left, and {runs} of" in said
    assert " minutes" in said and not out.exists()


def test_cases_that_are_not_there_are_told_with_the_options_that_leave_none():
    with pytest.raises(ValueError, match="modes raw_hybrid with ranks 1 leave no case"):
        cases(Options(hosts=2, modes=("raw_hybrid",), ranks=(1,)))


def test_the_profile_is_of_sync_with_one_rank_and_no_case_is_predicted_from_itself():
    for hosts in (1, 2):
        of_profile = [run.case for run in profile_runs(hosts)]
        assert {(case.mode, case.ranks) for case in of_profile} == {(Mode.SYNC, 1)}
        assert all((case.servers > 0) == (hosts == 2) for case in of_profile)
        assert not set(of_profile) & set(cases(Options(hosts=hosts)))
    every = cases(Options())
    assert {(case.mode, case.ranks) for case in every} >= {(m, 2) for m in Mode}
    assert Case(mode=Mode.SYNC) not in every and set(Mode) == {case.mode for case in every}


def test_bytes_of_a_link_are_judged_and_runs_off_its_rate_left_out():
    case = Case(servers=1, gbit_per_s=1.0)
    moved = travels(case)
    bytes_of_run = (moved.request_bytes + moved.push_bytes, moved.rows_bytes / 1.1)
    timed = StageTimes(STAGES, STAGES, 0.0)
    runs = [
        MeasuredRun(rate, 4.0, timed, 0.0, 0.0, bytes_of_run, control, 0.1, (1.0,))
        for rate, control in ((100.0, 1.0), (100.0, 1.04), (900.0, 1.2))
    ]
    foretold = {case.name: Prediction(100.0, 90.0, 110.0, 100.0, 4.0, 0.1, (1.0,))}
    [record] = records_of([case], foretold, {case.name: runs})
    assert (record["error"], record["runs"], record["off_their_link"]) == (0.0, 2, 1)
    assert record["sent_error"] == 0 and record["come_error"] == pytest.approx(0.1)
    assert "bytes, largest error: 10.0% (goal 1.0%: MISSED)" in conclusion([case], [record])
