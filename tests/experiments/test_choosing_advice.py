"""What which-mode says of a log on a cluster: the advice, the lines under its table, minutes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.choosing import training
from experiments.choosing.answer import advised, notes, plan_of
from experiments.choosing.batch import EXACT, Cell, Plan, samples_for
from experiments.choosing.decision import Decision, Entry, decide
from experiments.choosing.table import columns_of, why_empty
from experiments.choosing.training import Budget, Log, Training
from experiments.line_search import at_rates
from experiments.points import Line
from experiments.search import Rates
from experiments.sweeping import START_S, Speed
from persia_sim.base.vocabulary import Mode
from persia_sim.report.ranges import Range
from runtime.config import TrainConfig
from runtime.data.open import open_source

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


def as_log(samples: int, samples_per_s: float) -> Log:
    facts = SimpleNamespace(train_rows=samples, test_rows=0, digest="of the log")
    speed = Speed(samples_per_s, 1, samples)
    return Log(config=TrainConfig(), facts=facts, speed=speed, unseen={})


@pytest.fixture
def training_of_100_s(tmp_path, monkeypatch):
    """Sync and four cells, whose runs take three times what the plan said: 10 s each."""
    log = as_log(20_000, 20_000 / (10 / 3 - START_S))
    cells = tuple(Cell(rows_late=late, dense_late=0) for late in (1, 2, 3, 4))
    plan = Plan(cells=cells, too_late=(), no_time=(), batch=32, samples=20_000)
    options = SimpleNamespace(out=tmp_path, jobs=1, minutes=100 / 60, tolerance=1.0)
    trained = Training(options=options, log=log, plan=plan, budget=Budget(100.0, 0.0, jobs=1))
    clock, done = [0.0], []
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])

    def points(self, cells, seeds, batch=None, shuffled=False):
        modes = {EXACT: Mode.SYNC} | dict.fromkeys(cells, Mode.HYBRID)
        return [
            SimpleNamespace(
                label=f"{cell.name}, seed {seed}",
                config=SimpleNamespace(seed=seed, sync=SimpleNamespace(mode=mode)),
                is_done=lambda root, at=(cell, seed): at in done,
                at=(cell, seed),
            )
            for cell, mode in modes.items()
            for seed in range(seeds)
        ]

    def run_points(points, out, jobs, samples, on_result, begins):
        for point in points:
            if point.at not in done:
                if not begins(point):
                    return
                clock[0] += 10.0
                done.append(point.at)
            on_result(point)

    monkeypatch.setattr(Training, "points", points)
    monkeypatch.setattr(Training, "runs", lambda self, cell: [at for at in done if at[0] == cell])
    monkeypatch.setattr(Training, "gap", lambda self, cell, batch=None: None)
    monkeypatch.setattr(training, "run_points", run_points)
    monkeypatch.setattr(training, "decide", lambda *_: Decision(best="sync"))
    return trained, clock, done


def test_cells_that_no_longer_fit_at_the_speed_of_the_runs_do_not_begin(training_of_100_s):
    """By the plan all ten runs take 33 s of the 100; at the speed of the first one 100 s."""
    trained, clock, done = training_of_100_s
    trained.budget.total_s = 75.0
    assert trained.wall_s(10) == pytest.approx(100 / 3)
    trained.until_decided([])
    assert clock[0] == 60.0 and len(done) == 6, "a pair more would end after 80 s"
    first, second, *others = (Cell(rows_late=late, dense_late=0) for late in (1, 2, 3, 4))
    assert trained.left_out == tuple(others)
    assert trained.plan.cells == (first, second)
    assert why_empty(others[0], trained) == "needs 20 s more"
    # The same line again has 75 s more, and does what is missing.
    again = replace(trained, budget=Budget(75.0, clock[0], jobs=1))
    again.plan = replace(trained.plan, cells=(first, second, *others), no_time=())
    again.until_decided([])
    assert (again.left_out, len(done), clock[0]) == ((), 10, 100.0)


def test_rates_of_a_cell_that_is_left_out_are_in_nobodys_way(training_of_100_s, monkeypatch):
    trained, _, _ = training_of_100_s
    line = Line(name="a line", config=TrainConfig())
    monkeypatch.setattr(training, "lines_of", lambda _, cells, over: dict.fromkeys(cells, line))
    first, *others = trained.plan.cells
    trained.rates = dict.fromkeys([first, *others], Rates(row=0.5, dense=0.25))
    trained.plan = replace(trained.plan, cells=(first,), no_time=tuple(others))
    config = at_rates(line.config, trained.rates[first])
    assert trained.lines(32) == {first: replace(line, config=config)}


def test_minutes_are_those_that_the_last_run_of_this_call_took(training_of_100_s):
    """Runs that take three times what the plan said are three times as long in all that is said."""
    trained, _, _ = training_of_100_s
    planned_s = trained.wall_s(6)
    trained.train([], 2)
    assert trained.wall_s(6) == pytest.approx(3 * planned_s)
    # Runs that were there say nothing, nor do those at another batch.
    trained.budget.times_planned = 2.0
    trained.train([], 2)
    trained.train([], 4, batch=40)
    assert trained.wall_s(6) == pytest.approx(2 * planned_s)


def test_more_minutes_complete_a_window_before_they_take_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr(training.time, "monotonic", lambda: 0.0)
    log = as_log(200_000, 10_000.0)
    front = [as_simulated(f"hybrid, tau {k}", Mode.HYBRID, k, 2.0, 9.0) for k in (1, 2)]
    for one in front:
        one.row["batch"] = 16_384

    def window(minutes: float, missing: int) -> int:
        monkeypatch.setattr(Training, "points", lambda *_: [None] * missing)
        monkeypatch.setattr(Training, "missing", lambda self, points: len(points))
        options = SimpleNamespace(out=tmp_path, minutes=minutes, set=(), tune=False)
        return plan_of(options, Budget(60 * minutes, 0.0, jobs=1), log, front).samples

    short = window(2, missing=6)
    assert 90_000 < short < 100_000
    assert window(2, missing=6) == window(3, missing=3) == window(1, missing=3) == short
    assert window(3, missing=0) == short, "no more minutes than before"
    longer = window(3.5, missing=0)
    assert longer > 1.5 * short
    assert window(2, missing=6) == window(3.5, missing=0) == longer


def test_a_field_whose_ids_of_the_test_part_were_never_trained_is_named(tmp_path):
    rows = [f"s{k},{k % 7},a{k % 5}|b{k % 3},{k % 2}" for k in range(400)]
    (tmp_path / "log.csv").write_text("\n".join(["session,item,tags,click", *rows]) + "\n")
    (tmp_path / "log.toml").write_text(
        'name = "log"\nfile = "log.csv"\nlabels = ["click"]\nsplit = { test_fraction = 0.25 }\n'
        'columns = ["session", "item", { name = "tags", kind = "multi", separator = "|" }]\n'
    )
    unseen = training._unseen(open_source(str(tmp_path / "log.toml")))
    assert unseen == {"session": 1.0, "item": 0.0, "tags": 0.0}
    front = [as_simulated("sync", Mode.SYNC, 0, 1.0, 9.0)]
    log = SimpleNamespace(samples=9, unseen={"session": 0.904, "item": 0.9})
    plan = SimpleNamespace(cells=(), samples=9)
    told = notes(SimpleNamespace(log=log, plan=plan, left_out=()), front, [])
    assert [line for line in told if "never trained" in line] == [
        "session: 90 % of its ids in the test part were never trained, so its rows are worth"
        " nothing here: leave it out of columns, or split otherwise"
    ]


def test_a_gap_says_of_how_many_seeds_it_is_and_that_two_are_no_result():
    cell = columns_of(SimpleNamespace(batch=128), SimpleNamespace(shuffled=False))[
        "AUC gap at batch 128 [1e-3]"
    ]
    row = {"empty": "", "rows_late": 2, "dense_late": 0, "gap": 1e-3, "gap_half_width_95": 65.7e-3}
    assert cell(row | {"seeds": 2}) == "+1.0 ± 65.7 at 2, 2 seeds"
    assert cell(row | {"seeds": 8}) == "+1.0 ± 65.7 at 2, 8 seeds"
    front = [as_simulated("hybrid, tau 2", Mode.HYBRID, 2, 3.0, 9.0)]
    plan = SimpleNamespace(cells=(front[0].cell,), samples=9, batch=1)
    log = SimpleNamespace(samples=9, unseen={})
    trained = SimpleNamespace(log=log, plan=plan, left_out=(), seeds_of=lambda cell: 2)
    assert any("2 seeds are a first look" in line for line in notes(trained, front, []))
    trained.seeds_of = lambda cell: 4
    assert not any("first look" in line for line in notes(trained, front, []))


def test_what_binds_a_mode_is_told_once_and_names_do_not_run_together():
    front = [as_simulated("async, tau 2", Mode.ASYNC, 20, 3.0, 9.0)] * 2
    log, plan = SimpleNamespace(samples=9, unseen={}), SimpleNamespace(cells=(), samples=9)
    told = notes(
        SimpleNamespace(log=log, plan=plan, left_out=()),
        front,
        ["lookahead, cheapest", "lookahead, fastest"],
    )
    assert told[0] == "the simulated rate is bound by: window in async, tau 2"
    assert told[1].endswith("as little late: lookahead, cheapest; lookahead, fastest")
