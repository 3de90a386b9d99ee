"""Which mode for a log on a cluster: the decision, the batch, the candidates, the whole command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import experiments
from experiments import choosing
from experiments.choosing.answer import _workload_of
from experiments.choosing.batch import Cell, batch_for, planned, samples_for
from experiments.choosing.decision import Decision, Entry, bounds_of, decide
from experiments.choosing.speeds import TAUS, candidates
from experiments.choosing.table import columns_of
from experiments.statistics import Interval
from experiments.studies import which_mode_oracle as oracle
from experiments.sweeping import PRELOADED
from persia_sim.base.files import read_document
from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer, cycles
from persia_sim.cluster.demand import demand
from persia_sim.report import sweep
from persia_sim.report.ranges import Input, Range
from runtime.config import DataConfig, TrainConfig
from runtime.config.training_file import predicted_in, read_config
from tests.experiments.raw_runs import read_csv

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-3
SYNC = Entry(name="sync")


def entry(name: str, gap: float, seeds: float, rows: float, low: float, n: int = 4) -> Entry:
    """A late mode with a gap and its two errors, in thousandths, at least ``low`` times cheaper."""
    interval = Interval(1e-3 * gap, 0.0, n, 1e-3 * seeds, 1e-3 * rows)
    gain = Range(low, 1.5 * low, 2 * low, (Input("servers", low, 2 * low),))
    return Entry(name=name, gain=gain, gap=interval)


# The decision.


def test_the_ends_of_a_gap_are_one_sided_and_of_all_comparisons_and_looks_together():
    """Of test users alone the law is normal: 0.05 over 3 gaps and 4 looks on one side."""
    gap = Interval(-1e-3, math.nan, 4, 0.0, 2e-3)
    ends = bounds_of(gap, 3)
    z = NormalDist().inv_cdf(1 - 0.05 / 12)
    assert ends.low == pytest.approx(-1e-3 - z * 2e-3)
    assert ends.high == pytest.approx(-1e-3 + z * 2e-3)
    # Of seeds alone it is Student's.
    of_seeds = bounds_of(Interval(0.0, math.nan, 4, 1e-3, 0.0), 1)
    assert of_seeds.high == pytest.approx(stats.t.ppf(1 - 0.05 / 4, 3) * 1e-3)
    assert bounds_of(Interval(0.0, math.nan, 1), 1).low == -math.inf


@pytest.mark.parametrize(
    ("late", "best"),
    [
        pytest.param([entry("b", 0.0, 0.01, 0.1, 2.0)], "b", id="nothing lost"),
        pytest.param([entry("b", -5.0, 0.01, 0.1, 9.0)], "sync", id="surely too much lost"),
        pytest.param(
            [entry("b", 0.0, 0.01, 0.1, 2.0), entry("c", 0.0, 0.01, 0.1, 3.0)], "c", id="cheaper"
        ),
        pytest.param(
            [entry("b", 0.0, 0.01, 0.1, 2.0), entry("c", -9.0, 0.01, 0.1, 3.0)], "b", id="one lost"
        ),
        pytest.param([replace(SYNC, name="b", gain=Range(1.1, 2, 3))], "b", id="exact"),
        pytest.param(
            [replace(entry("b", 0.0, 0.0, 0.0, 9.0), gap=None, trained=False)],
            "sync",
            id="not trained",
        ),
    ],
)
def test_best_is_the_cheapest_at_its_worst_end_of_what_surely_loses_little(late, best):
    decision = decide([SYNC, *late], TOLERANCE, len(late))
    assert (decision.best, decision.binds) == (best, "")


def test_a_cheaper_mode_that_may_or_may_not_lose_more_is_open_and_seeds_are_counted():
    """So many seeds, each as far apart as these, put the end of the interval at the tolerance."""
    rival = entry("b", 0.0, 1.0, 0.1, 2.0)
    decision = decide([SYNC, rival], TOLERANCE, 1)
    assert (decision.best, decision.rival, decision.binds) == ("sync", "b", "seeds")
    spread = 1e-3 * 2.0  # of single seeds: the error of four times two
    for seeds, is_enough in ((decision.seeds, True), (decision.seeds - 1, False)):
        of_seeds, of_rows = spread**2 / seeds, (1e-4) ** 2
        freedom = (seeds - 1) * ((of_seeds + of_rows) / of_seeds) ** 2
        half = stats.t.ppf(1 - 0.05 / 4, freedom) * math.sqrt(of_seeds + of_rows)
        assert (half < TOLERANCE) == is_enough


def test_where_the_test_users_error_alone_is_too_wide_no_seed_is_asked_for():
    decision = decide([SYNC, entry("b", 0.0, 0.1, 2.0, 2.0)], TOLERANCE, 1)
    assert (decision.binds, decision.seeds) == ("users", 0)
    z = NormalDist().inv_cdf(1 - 0.05 / 4)
    assert decision.users_times == pytest.approx((z * 2.0) ** 2)


def test_of_two_open_modes_the_one_is_told_of_which_seeds_may_tell():
    """The cheaper one waits for users, whom nobody can train."""
    late = [entry("users", 0.0, 0.1, 2.0, 3.0), entry("seeds", 0.0, 0.6, 0.1, 2.0)]
    decision = decide([SYNC, *late], TOLERANCE, 2)
    assert (decision.rival, decision.binds) == ("seeds", "seeds")
    assert 4 < decision.seeds <= 16
    # Once they have told, it is best, and the other one stays open beside it.
    late[1] = entry("seeds", 0.0, 0.05, 0.1, 2.0)
    decision = decide([SYNC, *late], TOLERANCE, 2)
    assert (decision.best, decision.rival, decision.binds) == ("seeds", "users", "users")


def test_a_dearer_mode_is_not_asked_about_however_little_is_known_of_it():
    assert decide([SYNC, entry("b", 0.0, 5.0, 5.0, 0.5)], TOLERANCE, 1).binds != "seeds"


def test_a_mode_that_is_no_cheaper_than_a_simulation_is_exact_is_not_waited_for():
    rival = replace(entry("b", 0.0, 0.01, 0.1, 0.9), gain=Range(0.8, 1.02, 1.2))
    decision = decide([SYNC, rival], TOLERANCE, 1)
    assert (decision.best, decision.binds) == ("sync", "")


def test_a_mode_that_is_cheaper_at_the_middle_alone_waits_for_its_constant():
    decision = decide([SYNC, entry("b", 0.0, 0.01, 0.1, 0.9)], TOLERANCE, 1)
    assert (decision.best, decision.rival) == ("b", "sync")
    assert (decision.binds, decision.constant) == ("simulator", "servers")


def test_until_it_is_decided_the_mode_is_taken_that_is_cheapest_at_its_middle():
    """Lookahead is exact; at its worst end it is dearer than sync, and so is nothing decided."""
    lookahead = Entry(name="lookahead", gain=Range(0.9, 1.2, 1.5))
    rival = entry("hybrid", 0.0, 1.0, 0.1, 1.1)
    decision = decide([SYNC, lookahead, rival], TOLERANCE, 1)
    assert (decision.best, decision.rival, decision.binds) == ("lookahead", "hybrid", "seeds")
    # What surely loses too much is not taken, however cheap.
    lost = entry("async", -9.0, 0.01, 0.1, 3.0)
    assert decide([SYNC, lookahead, rival, lost], TOLERANCE, 2).best == "lookahead"
    # A mode that is cheaper at its worst end, too, is taken for good, whatever another may be.
    sure = Entry(name="sure", gain=Range(1.05, 1.1, 1.2))
    assert decide([SYNC, lookahead, sure, rival], TOLERANCE, 1).best == "sure"


@pytest.mark.long
def test_a_mode_that_loses_too_much_is_advised_in_few_of_many_draws():
    """A gap of -1.5 thousandths at a tolerance of 1, its interval over seeds and users: over four
    looks and two comparisons it is called safe in at most 5 of 100."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        users = random.normal(0, 4e-4)
        gaps = -1.5e-3 + users + random.normal(0, 4e-4, 16)
        for n in (2, 4, 8, 16):
            error = float(np.std(gaps[:n], ddof=1)) / math.sqrt(n)
            gap = Interval(float(gaps[:n].mean()), 0.0, n, error, 4e-4)
            if decide([SYNC, Entry(name="b", gain=Range(2, 3, 4), gap=gap)], 1e-3, 2).best == "b":
                wrong += 1
                break
    assert wrong <= 15


# The batch and the window.


def cells(*late: int) -> list[Cell]:
    return [Cell(rows_late=rows, dense_late=0) for rows in late]


@pytest.mark.parametrize("samples", [70_000, 100_000, 1_000_000, 20_000_000])
@pytest.mark.parametrize("latest", [1, 16, 64])
def test_a_batch_leaves_enough_updates_for_each_late_one_and_in_all_and_twice_it_does_not(
    samples, latest
):
    """At one late 20 of each would be 20 in all: of a model that has not begun to learn."""
    least = max(500, 20 * latest)
    batch = batch_for(cells(1, latest), samples, of_cluster=16_384)
    assert samples / batch >= least or batch == 128
    assert batch == 16_384 or samples / (2 * batch) < least
    assert batch == 16_384 or batch & (batch - 1) == 0


def test_cells_for_which_the_log_is_too_short_are_named_and_the_others_planned():
    plan = planned(cells(1, 4, 100), 20_000, 16_384, 1e9, 4)
    assert plan.cells == tuple(cells(1, 4))
    assert plan.too_late == tuple(cells(100))
    assert samples_for(cells(100)[0]) == 20 * 100 * 128


def test_a_budget_cuts_the_log_first_and_the_latest_cells_then():
    """Runs of a first look: two seeds of sync and of each cell."""
    whole = planned(cells(1, 16), 200_000, 16_384, 6 * 200_000, 4)
    assert (whole.samples, len(whole.cells)) == (200_000, 2)
    cut = planned(cells(1, 16), 200_000, 16_384, 6 * 70_000, 4)
    assert (cut.samples, len(cut.cells)) == (70_000, 2)
    few = planned(cells(1, 16), 200_000, 16_384, 6 * 50_000, 4)
    assert few.cells == tuple(cells(1))
    assert few.no_time == tuple(cells(16))
    assert few.samples == 75_000
    assert not planned(cells(1), 200_000, 16_384, 4 * 60_000, 4).cells, "less than 500 updates"
    assert planned(cells(1), 20_000, 16_384, 4 * 20_000, 4).cells, "the log has no more"


# The candidates.


@pytest.mark.parametrize("keep", [False, True], ids=["free hosts", "given hosts"])
def test_each_mode_is_asked_about_where_it_is_cheapest_and_fastest(keep):
    """Against every window in turn, with the hosts that the cluster has."""
    files = str(EXAMPLES / "cluster.toml"), str(EXAMPLES / "workload.toml")
    found = candidates(*files, "f32-adagrad", keep)
    assert {one.point.mode for one in found} == {
        Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID, Mode.ASYNC
    }  # fmt: skip
    assert len({one.label for one in found}) == len(found)
    rates = {
        one.label: answer(sweep.scenario_of(one.point, 1)).samples_per_s
        for one in found
        if one.point.mode is Mode.HYBRID
    }
    points = [
        sweep.Point(cluster=files[0], workload=files[1], mode=Mode.HYBRID, tau=tau)
        for tau in (1, 2, 4, 8, 16)
    ]
    by_hand = [answer(sweep.scenario_of(point, 1)).samples_per_s for point in points]
    assert max(rates.values()) >= 0.99 * max(by_hand)
    if keep:
        assert max(rates.values()) == pytest.approx(max(by_hand), rel=0.01)


def test_rows_that_no_number_of_servers_holds_are_refused_by_their_largest_table(tmp_path):
    table = (
        '[[tables]]\nname = "{}"\nfields = ["{}"]\nrows = {}\ndim = 64\nids_per_sample = [1.0]\n'
    )
    head = 'name = "huge"\nmlp = [8, 1]\nbatch_per_rank = 64\nsource = "made up"\n'
    both = table.format("small", "a", "1e3") + table.format("large", "b", "2.5e14")
    (tmp_path / "huge.toml").write_text(head + both)
    cluster = str(EXAMPLES / "cluster.toml")
    for keep in (False, True):
        with pytest.raises(ValueError, match=r"memory per server.*largest table, large, has 2\.5e"):
            candidates(cluster, str(tmp_path / "huge.toml"), "f32-adagrad", keep_hosts=keep)


# The whole command.


def asked(folder, **changes):
    return experiments.which_mode(
        EXAMPLES / "clicks.toml",
        EXAMPLES / "cluster.toml",
        **{"config": EXAMPLES / "run.toml", "minutes": 5.0, "out": folder, "hosts": "given"}
        | {"tolerance": 50.0}
        | changes,
    )


@pytest.mark.long  # docs/python.md runs it every time, in tests/test_docs.py
def test_the_answer_for_a_log_and_a_cluster_is_a_table_a_sentence_and_a_file_that_trains(
    tmp_path, capsys
):
    found = asked(tmp_path)
    told = capsys.readouterr().out
    assert {"sync", "lookahead"} & set(found["mode"])
    assert (found.samples_per_s_low <= found.samples_per_s).all()
    late = found[(found.rows_late > 0) & found.gap.notna()]
    assert len(late) >= 1 and (late.seeds >= 2).all()
    assert (late.batch * 20 * late.rows_late <= late.samples).all()
    exact = found[(found.rows_late == 0) & (found.dense_late == 0)]
    assert (exact.gap == 0).all()
    assert "Take " in told or "Not decided" in told
    assert "plan: " in told
    assert (
        "Replayed in its simulated order" in told
        or "is not replayed" in told
        or "Take sync" in told
    )
    assert (tmp_path / "which_mode.png").is_file()
    assert f"persia-runtime train --config {tmp_path / 'advised.toml'}" in told
    advised = tmp_path / "advised.toml"
    assert read_document(advised)["data"]["name"].endswith("clicks.toml")
    mode = str(read_config(advised).sync.mode)
    predicted = predicted_in(advised)
    of_mode = found[found["mode"].str.startswith(mode)]
    assert predicted is not None and predicted.samples_per_s in list(of_mode.samples_per_s)

    # A second call finds all points, and says the same.
    runs = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json"))
    again = asked(tmp_path)
    assert again.equals(found)
    assert sorted(p.stat().st_mtime_ns for p in tmp_path.glob("*/summary.json")) == runs


@pytest.mark.long
def test_json_is_one_document_with_the_advice_and_gaps_of_shuffled_samples(tmp_path, capsys):
    found = asked(tmp_path, json=True, shuffled=True)
    late = found[(found.rows_late > 0) & found.gap.notna()]
    assert late.gap_shuffled.notna().all()
    assert (late.gap_shuffled != late.gap).all()
    document = json.loads(capsys.readouterr().out)
    assert document["advice"]
    assert {"mode", "samples_per_s", "gap"} <= set(document["modes"][0])


def test_simulations_and_runs_are_forks_of_one_server_which_has_loaded_what_runs_need(
    tmp_path, monkeypatch
):
    """A server that the simulations start without torch would have each run load it: seconds."""
    calls = []
    monkeypatch.setattr(choosing.answer, "fork_server", calls.append)

    def simulate_all(*_):
        calls.append("simulations")
        raise ValueError("far enough")

    monkeypatch.setattr(choosing.answer, "simulate_all", simulate_all)
    with pytest.raises(ValueError, match="far enough"):
        asked(tmp_path)
    assert calls == [PRELOADED, "simulations"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"set": ["data.rows=1000"]}, "give a longer log", id="too short"),
        pytest.param({"set": ["batch=64,128"]}, "takes one of each", id="crossed"),
    ],
)
def test_what_cannot_be_asked_says_what_would_do(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        asked(tmp_path, **changes)


def test_a_log_whose_label_has_no_auc_is_refused_before_anything_is_simulated(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("experiments.choosing.answer.derive_workload", None)
    rows = [f"u{k % 7},{k % 5 + 1}" for k in range(400)]
    (tmp_path / "log.csv").write_text("\n".join(["user,rating", *rows]) + "\n")
    (tmp_path / "log.toml").write_text(
        'name = "log"\nfile = "log.csv"\nlabels = ["rating"]\nregression = ["rating"]\n'
        'split = { test_fraction = 0.2 }\ncolumns = ["user"]\n'
    )
    with pytest.raises(
        ValueError,
        match=r"rating, .*is a regression .*log\['liked'\] = 1 \* \(log\['rating'\] >= 4",
    ):
        experiments.which_mode(
            tmp_path / "log.toml", EXAMPLES / "cluster.toml", out=tmp_path / "out"
        )


@pytest.mark.parametrize(("items", "is_told"), [(5, True), (100_000, False)])
def test_a_scale_that_adds_no_rows_says_so(items, is_told, tmp_path, capsys):
    """Where each item has been met many times there are no others to come."""
    random = np.random.default_rng(0)
    clicks = [f"{k},{i % 2}" for i, k in enumerate(random.integers(0, items, 4_000))]
    (tmp_path / "log.csv").write_text("\n".join(["item,click", *clicks]) + "\n")
    (tmp_path / "log.toml").write_text(
        'name = "log"\nfile = "log.csv"\nlabels = ["click"]\n'
        'split = { test_fraction = 0.2 }\ncolumns = ["item"]\n'
    )
    config = replace(TrainConfig(), data=DataConfig(name=str(tmp_path / "log.toml")))
    options = SimpleNamespace(
        workload=None, scale=1000.0, batch_per_rank=64, dense_flops=1e3, out=tmp_path
    )
    _workload_of(options, SimpleNamespace(config=config))
    said = "--scale 1000 adds no rows: the ids of the log no longer grow with its samples"
    assert (said in capsys.readouterr().out) == is_told


@pytest.mark.long
def test_rates_are_searched_and_each_field_is_late_and_fresh_in_turn(tmp_path, capsys):
    """All of it says before how many runs it wants; the searched rates are those of the runs."""
    asked(tmp_path, tune=True, fields=True, set=["data.rows=6000"], tolerance=200.0)
    told = capsys.readouterr().out
    assert "--tune trains" in told and "--fields trains 20 runs" in told
    assert "rates of sync: rows" in told
    fields = read_csv(tmp_path / "which_mode_fields.csv")
    names = [
        f"{f} alone {how}" for f in ("user", "item", "tags", "history") for how in ("late", "fresh")
    ]
    assert [row["line"] for row in fields] == ["sync", "all late", *names]


def test_each_column_of_the_stored_answer_is_one_of_today_and_is_explained():
    """Else run `make demo` again, and store what it prints."""
    text = (EXAMPLES / "demo.txt").read_text()
    (head,) = (line for line in text.splitlines() if line.startswith("mode  "))
    batch = int(re.search(r"at batch ([\d,]+)", head)[1].replace(",", ""))
    columns = columns_of(SimpleNamespace(batch=batch), SimpleNamespace(shuffled=False))
    assert re.split("  +", head.strip()) == list(columns)
    guide = (EXAMPLES.parent / "docs" / "guides.md").read_text()
    section = guide[guide.index("## Reading the answer") : guide.index("## Reproduce")]
    explained = ", ".join(re.findall(r"^\| ([^|]+) \|", section, flags=re.M))
    assert [name for name in columns if name.partition(" at ")[0] not in explained] == []


def test_each_wait_that_may_bind_a_rate_is_explained():
    guide = (EXAMPLES.parent / "docs" / "guides.md").read_text()
    section = guide[guide.index("## Reading the answer") : guide.index("## Reproduce")]
    files = str(EXAMPLES / "cluster.toml"), str(EXAMPLES / "workload.toml")
    waits = set()
    for mode, taus in TAUS.items():
        point = sweep.Point(cluster=files[0], workload=files[1], mode=mode, tau=taus[0])
        scenario = sweep.scenario_of(point, 1)
        waits |= set(cycles(scenario, demand(scenario)))
    assert {"window", "training loop", "refresh"} <= waits
    assert [name for name in sorted(waits) if f"`{name}`" not in section] == []


# What is true of a decision.


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        pytest.param(Decision(best="late"), oracle.RIGHT, id="the fastest that loses little"),
        pytest.param(Decision(best="lost"), oracle.WRONG, id="loses too much"),
        pytest.param(Decision(best="lost", binds="seeds"), oracle.WRONG, id="until then, too"),
        pytest.param(Decision(best="sync"), oracle.WRONG, id="slower, and calls it decided"),
        pytest.param(Decision(best="sync", binds="users"), oracle.UNDECIDED, id="says it is open"),
    ],
)
def test_a_decision_is_wrong_where_it_loses_or_where_it_calls_a_slower_mode_the_best(
    decision, said
):
    gaps = {"sync": (0.0, 0.0), "late": (-0.5e-3, 0.2e-3), "lost": (-4e-3, 1e-3)}
    gaps = {name: Interval(mean, half, 12) for name, (mean, half) in gaps.items()}
    rates = {"sync": 1.0, "late": 2.0, "lost": 3.0}
    assert oracle.verdict(decision, rates, gaps, TOLERANCE) == said


def test_a_drawn_log_has_other_users_at_each_draw_and_the_same_at_the_same(tmp_path):
    first, again, other = (
        oracle.drawn_log("bursts", draw, tmp_path / name).with_name("log.csv").read_bytes()
        for draw, name in ((0, "first"), (0, "again"), (1, "other"))
    )
    assert first == again != other
