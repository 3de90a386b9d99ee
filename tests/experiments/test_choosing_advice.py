"""What which-mode says of a log on a cluster: the advice, the lines under its table, minutes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from experiments.choosing import training
from experiments.choosing.answer import advised, notes
from experiments.choosing.batch import Cell, samples_for
from experiments.choosing.decision import Decision, Entry, decide
from experiments.choosing.table import columns_of
from experiments.choosing.training import Budget, Log, Training
from experiments.sweeping import Speed
from persia_sim.base.vocabulary import Mode
from persia_sim.report.ranges import Range
from runtime.config import TrainConfig

TOLERANCE = 1e-3


def as_simulated(name: str, mode: Mode, late: int, gain: float, usd_per_hour: float):
    point = SimpleNamespace(mode=mode, cluster="h100-host")
    return SimpleNamespace(
        candidate=SimpleNamespace(label=name, name=name, point=point),
        row={"binds": "window", "workers": 4, "servers": 3},
        gain=Range(gain, gain, 1.2 * gain),
        cell=Cell(rows_late=late, dense_late=0),
        usd_per_hour=usd_per_hour,
    )


def as_trained(front, entropy: float):
    """Nothing but sync: the budget held no other cell."""
    plan = SimpleNamespace(too_late=(front[1].cell,), no_time=())
    return SimpleNamespace(
        score_of_sync=lambda name: entropy, gap=lambda cell: None, plan=plan, log=None
    )


@pytest.mark.parametrize(("usd_per_hour", "word"), [(9.0, "cheap"), (math.nan, "fast")])
def test_sync_is_not_advised_over_a_mode_that_gains_more_and_was_not_trained(usd_per_hour, word):
    front = [
        as_simulated("sync", Mode.SYNC, 0, 1.0, usd_per_hour),
        as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 2.5, usd_per_hour),
    ]
    told = advised(front, Decision(best="sync"), as_trained(front, 0.9), None, None)
    assert told.startswith(
        f"Not decided between sync and hybrid, tau 2, which is 2.5 (2.5 to 3.0) times as {word}"
    )
    assert f"needs {samples_for(front[1].cell):,} samples" in told
    front[1] = as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 1.0, usd_per_hour)
    told = advised(front, Decision(best="sync"), as_trained(front, 0.9), None, None)
    assert told.startswith("Take sync") and f"surely {word}er" in told


def test_of_a_model_that_has_learned_nothing_nothing_is_advised():
    front = [
        as_simulated("sync", Mode.SYNC, 0, 1.0, 9.0),
        as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 2.5, 9.0),
    ]
    told = advised(front, Decision(best="sync"), as_trained(front, 1.017), None, None)
    assert told.startswith("Not decided: sync itself has not learned") and "1.017" in told


@pytest.mark.parametrize(("schema", "who"), [({"group": "user"}, "users"), ({}, "samples")])
def test_samples_that_have_no_group_are_not_called_users(schema, who):
    front = [
        as_simulated("sync", Mode.SYNC, 0, 1.0, 9.0),
        as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 2.5, 9.0),
    ]
    trained = as_trained(front, 0.9)
    trained.log = SimpleNamespace(facts=SimpleNamespace(schema=schema))
    decision = Decision(best="sync", rival="hybrid, tau 2", binds="users", users_times=2.0)
    told = advised(front, decision, trained, None, SimpleNamespace(tolerance=1.0))
    assert f"test {who} bind" in told and "at least 2.0 times as many would tell" in told


def test_an_exact_mode_that_may_be_cheaper_is_named_until_the_simulator_knows():
    front = [
        as_simulated("sync", Mode.SYNC, 0, 1.0, 9.0),
        as_simulated("lookahead", Mode.LOOKAHEAD, 0, 1.2, 9.0),
    ]
    front[1].gain = Range(0.9, 1.2, 1.5)
    entries = [Entry(name=one.candidate.label, gain=one.gain) for one in front]
    told = advised(front, decide(entries, TOLERANCE, 0), as_trained(front, 0.9), None, None)
    assert told.startswith("Not decided between lookahead and sync: the simulator binds, by")
    assert told.endswith("Until then lookahead.")


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        pytest.param(5, "about 5 would be needed; 8 take about 12 s more", id="a later look"),
        pytest.param(17, "about 17 would be needed, and at most 16 are trained", id="too many"),
    ],
)
def test_seeds_that_would_be_needed_are_an_estimate_and_their_minutes_go_to_the_next_look(
    needed, words
):
    front = [
        as_simulated("sync", Mode.SYNC, 0, 1.0, 9.0),
        as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 2.5, 9.0),
    ]
    trained = as_trained(front, 0.9)
    trained.seeds_of = lambda cell: 2
    trained.points = lambda cells, look: [None] * (1 + len(cells)) * (look - 2)
    trained.missing = len
    trained.wall_s = lambda runs: 1.0 * runs
    decision = Decision(best="sync", rival="hybrid, tau 2", binds="seeds", seeds=needed)
    told = advised(front, decision, trained, None, SimpleNamespace(tolerance=1.0))
    assert f"By an estimate from 2, {words}" in told


def test_minutes_are_those_that_the_runs_of_this_call_took(tmp_path, monkeypatch):
    """Runs that take three times what the plan said are three times as long in all that is said."""
    log = Log(
        config=TrainConfig(),
        facts=SimpleNamespace(train_rows=1_000, test_rows=0),
        fields=(),
        speed=Speed(100.0, 1, 1_000),
    )
    plan = SimpleNamespace(samples=1_000, batch=10, too_late=(), no_time=())
    trained = Training(
        options=SimpleNamespace(out=tmp_path, jobs=2),
        log=log,
        plan=plan,
        budget=Budget(600.0, 0.0, jobs=2),
    )
    planned_s = trained.wall_s(6)
    assert planned_s == 3 * log.run_s(1_000)
    seconds = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: seconds[0])
    points = [SimpleNamespace(is_done=lambda root, k=k: k == 0) for k in range(5)]
    monkeypatch.setattr(Training, "points", lambda *_: points)

    def three_times_as_long(*_):
        seconds[0] += 3 * 2 * log.run_s(1_000)

    monkeypatch.setattr(training, "run_points", three_times_as_long)
    trained.train([], 2)  # four runs, two at a time
    assert trained.wall_s(6) == pytest.approx(3 * planned_s)
    # Runs that were there say nothing, nor do those at another batch.
    points[1:] = []
    trained.train([], 2)
    assert trained.wall_s(6) == pytest.approx(3 * planned_s)


def test_a_gap_says_of_how_many_seeds_it_is_and_that_two_are_no_result():
    cell = columns_of(SimpleNamespace(batch=128), SimpleNamespace(shuffled=False))[
        "AUC gap at batch 128 [1e-3]"
    ]
    row = {"empty": "", "rows_late": 2, "dense_late": 0, "gap": 1e-3, "gap_half_width_95": 65.7e-3}
    assert cell(row | {"seeds": 2}) == "+1.0 ± 65.7 at 2, 2 seeds"
    assert cell(row | {"seeds": 8}) == "+1.0 ± 65.7 at 2, 8 seeds"
    front = [as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 3.0, 9.0)]
    plan = SimpleNamespace(cells=(front[0].cell,), samples=9, batch=1)
    trained = SimpleNamespace(log=SimpleNamespace(samples=9), plan=plan, seeds_of=lambda cell: 2)
    assert any("2 seeds are a first look" in line for line in notes(trained, front, []))
    trained.seeds_of = lambda cell: 4
    assert not any("first look" in line for line in notes(trained, front, []))


def test_what_binds_a_mode_is_told_once_and_names_do_not_run_together():
    front = [as_simulated("async, tau 2", Mode.ASYNC, 20, 3.0, 9.0)] * 2
    log, plan = SimpleNamespace(samples=9), SimpleNamespace(cells=(), samples=9)
    told = notes(
        SimpleNamespace(log=log, plan=plan), front, ["lookahead, cheapest", "lookahead, fastest"]
    )
    assert told[0] == "the simulated rate is bound by: window in async, tau 2"
    assert told[1].endswith("as little late: lookahead, cheapest; lookahead, fastest")
