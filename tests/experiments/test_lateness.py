"""The study of lateness: what decides a run, what is kept of it, the rule of rates, intervals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from experiments import search as rules
from experiments.lateness.data import cut_by, fields_of, tables_apart
from experiments.lateness.parts import PARTS, RateSearch, gap_of
from experiments.lateness.runs import (
    FIRST_DRAW,
    FIRST_TUNING_SEED,
    FLUSHED,
    KEPT,
    TUNING_SEEDS,
    USER_GROUPS,
    WINDOW_SHARE,
    Record,
    RunsFile,
    StreamData,
    StudyRun,
    config_of,
    group_sums,
    run_of,
    samples_of,
)
from experiments.lateness.second_plan import fresh_lines
from experiments.lateness.streams import (
    APART,
    ASYNC_0,
    ASYNC_4,
    BY_TIME,
    BY_USER,
    DOUBLED,
    ORIGINS,
    RANKS,
    ROWS_16,
    SHUFFLED,
    STREAMS,
    SYNC,
    TIME,
    VALIDATION,
    Cell,
)
from experiments.lateness.table import LatenessStudy
from experiments.search import (
    BETTER,
    CHANCE_AUC,
    DENSE_RATES,
    NO_RATE,
    ROW_RATES,
    STUDY_GRID,
    SYNCS,
    Rates,
    best_of,
    choice_of,
    points_of,
    to_try_of_cell,
    to_try_of_sync,
)
from experiments.statistics import Interval, contrast, covariance_over_rows, placements
from experiments.studies import lateness
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import updates_missed
from runtime.data.open import open_source
from runtime.run.folder import Predictions

KUAIRAND, ZIPF = STREAMS["kuairand-pure-14d"], STREAMS["synthetic:zipf-1.8"]
DATA = StreamData("kuairand-pure-14d", "data", 120_000)


# What decides a run.


def test_hashes_of_stored_runs_stay_as_they_are():
    """They are written in docs/results/lateness_runs.csv: another hash would train a run again."""
    late = run_of(KUAIRAND, ROWS_16, 0.05, 1e-3, 3, arithmetic=KEPT)
    drawn = run_of(ZIPF, ASYNC_0, 0.1, 3.5e-4, 7, start=0.01 / 64, arithmetic=KEPT)
    other = {"window": VALIDATION, "order": SHUFFLED, "arithmetic": KEPT}
    judged = run_of(KUAIRAND, DOUBLED, 0.2, 1.25e-4, 900, **other)
    assert [run.hash("data") for run in (late, drawn, judged)] == [
        "187db2ee66cc17fe",
        "e8b5a3091cb0e986",
        "dd0cee1a54c359d1",
    ]


def test_every_field_of_a_run_and_its_data_change_its_hash():
    run = run_of(ZIPF, ROWS_16, 0.05, 1e-3, 3)
    others = [
        replace(run, **{name: value})
        for name, value in {
            "stream": "tennis", "order": SHUFFLED, "window": VALIDATION, "start": 0.01,
            "rows_late": 7, "dense_late": 7, "batch": 256, "row_lr": 0.1, "dense_lr": 2e-3,
            "seed": 4, "updates": 2_501, "passes": 2, "split": BY_USER, "arithmetic": KEPT,
            "fresh": "user", "without": "item",
        }.items()
    ]  # fmt: skip
    hashes = {one.hash("data") for one in (run, *others)} | {run.hash("other data")}
    assert len(hashes) == len(others) + 2


@pytest.mark.parametrize("stream", STREAMS.values(), ids=lambda stream: stream.name)
def test_no_final_run_has_a_seed_or_a_draw_that_rates_were_chosen_on(stream):
    tuning = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + TUNING_SEEDS)
    assert not set(tuning) & set(range(stream.seeds))
    if stream.is_drawn:
        data = StreamData(stream.name, "", 0)
        names = {
            config_of(run_of(stream, SYNC, 0.1, 1e-3, seed), data).data.name
            for seed in (0, 1, FIRST_TUNING_SEED)
        }
        assert names == {f"{stream.name}:1:{FIRST_DRAW + s}" for s in (0, 1, FIRST_TUNING_SEED)}


def test_async_lies_on_the_grid():
    for tau, cell in ((0, ASYNC_0), (4, ASYNC_4)):
        assert updates_missed(Mode.ASYNC, tau, ranks=RANKS) == (cell.rows_late, cell.dense_late)


def test_a_window_trains_on_all_rows_before_it_and_the_next_begins_where_it_ends():
    spans = []
    for window in ORIGINS:
        config = config_of(run_of(KUAIRAND, SYNC, 0.1, 1e-3, 0, window=window), DATA)
        judged = round(config.data.rows * config.data.validation_fraction)
        spans.append((config.data.rows - judged, config.data.rows))
        assert config.evaluation.eval_split == "validation"
    size = DATA.train_rows // WINDOW_SHARE
    assert spans == [(4 * size, 5 * size), (5 * size, 6 * size)]


@pytest.mark.parametrize("window", ORIGINS)
def test_a_shuffled_window_differs_from_that_in_time_order_by_the_order_alone(window):
    """The rows that train and those that judge are the same: only training samples are shuffled."""
    in_time, shuffled = (
        config_of(run_of(KUAIRAND, ROWS_16, 0.1, 1e-3, 0, window=window, order=order), DATA)
        for order in (TIME, SHUFFLED)
    )
    assert shuffled == replace(in_time, data=replace(in_time.data, shuffle=True))


def test_a_run_with_batches_of_twice_the_samples_reads_as_many_samples():
    for stream, rows in ((KUAIRAND, 120_000), (ZIPF, 0)):
        plain, doubled = (run_of(stream, cell, 0.1, 1e-3, 0) for cell in (SYNC, DOUBLED))
        assert samples_of(plain, rows) == samples_of(doubled, rows)
        assert doubled.batch == 2 * plain.batch


# What is kept of it.


def record(run: StudyRun, auc: float) -> Record:
    values = {
        "hash": run.hash("data"), "run": run, "trained_updates": 10, "train_samples": 1280,
        "test_rows": 50, "auc": {"click": auc}, "log_loss": {"click": 0.5},
        "snapshots": {5 * k: round(auc - 0.1 / k, 6) for k in range(1, 17)},
        "commit": "abc", "machine": "a, b",
    }  # fmt: skip
    return Record(**values)


def test_a_run_is_read_back_as_it_was_written_and_a_cut_line_is_no_run(tmp_path):
    path = tmp_path / "x_runs.csv"
    file = RunsFile(path)
    runs = [run_of(ZIPF, ROWS_16, 0.1, 3.5e-4, seed) for seed in range(3)]
    kept = [
        replace(record(runs[0], 0.71), auc={"click": 0.71, "long view": math.nan}),
        record(runs[1], 0.72),
    ]
    file.add(kept[0], {"click": np.arange(4.0)})
    file.add(kept[1], {})
    again = RunsFile(path)
    assert repr([*again]) == repr(kept)  # NaN is not equal to itself
    assert again.sums(kept[0].hash, "click").tolist() == [0, 1, 2, 3]
    assert again.sums(kept[1].hash, "click") is None
    path.write_text(path.read_text()[:-20])
    cut = RunsFile(path)
    assert kept[0].hash in cut and kept[1].hash not in cut
    cut.add(record(runs[2], 0.73), {})
    assert {one.run for one in RunsFile(path)} == {runs[0], runs[2]}


def predictions(users: int, seed: int, weights: bool = False) -> list[Predictions]:
    """Of four runs on the same test samples of so many users; labels are harder for some users."""
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(users), 1 + draw.integers(0, 4, users))
    skill = draw.normal(size=users)[owner]
    labels = (draw.random(len(owner)) < 0.4).astype(float)
    counts = draw.integers(1, 3, len(owner)).astype(float) if weights else None
    scores = [labels * skill + draw.normal(size=len(owner)) for _ in range(4)]
    return [Predictions(labels[:, None], one[:, None], owner, counts) for one in scores]


@pytest.mark.parametrize("weights", [False, True])
def test_group_sums_give_the_interval_over_users_where_each_has_a_group(tmp_path, weights):
    file = RunsFile(tmp_path / "x_runs.csv")
    made = predictions(200, 1, weights)
    labels, users, counts = made[0].labels[:, 0], made[0].groups, made[0].weights
    want = contrast(
        labels, [[p.predictions[:, 0] for p in pair] for pair in (made[::2], made[1::2])],
        clusters=users, weights=counts,
    )  # fmt: skip
    terms = []
    for place, factor in ((1, 1.0), (0, -1.0)):
        runs = []
        for seed in range(2):
            run = run_of(KUAIRAND, Cell(rows_late=place), 0.1, 1e-3, seed)
            one = made[2 * seed + place]
            auc = roc_auc_score(labels, one.predictions[:, 0], sample_weight=counts)
            file.add(record(run, auc), {"click": group_sums(one, 0)})
            runs.append(run)
        terms.append((factor, runs))
    got = gap_of(RunsFile(tmp_path / "x_runs.csv"), terms)
    for name in ("mean", "half_width", "seeds_error", "rows_error"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=4e-3, abs=1e-7), name


def test_more_users_than_groups_have_about_their_error():
    """The relative error of a variance over G groups is sqrt(2 / G); three of them are allowed."""
    one = predictions(4_000, 2)[0]
    labels, scores = one.labels[:, 0], one.predictions[:, 0]
    shares = placements(labels, scores)[None]
    want = covariance_over_rows(labels, shares, one.groups).item()
    sums = 1e-3 * group_sums(one, 0)
    assert len(sums) == USER_GROUPS
    got = float(sums @ sums) * USER_GROUPS / (USER_GROUPS - 1)
    assert got == pytest.approx(want, rel=3 * math.sqrt(2 / USER_GROUPS))


def test_a_seed_of_which_a_run_is_missing_is_left_out_of_the_gap(tmp_path):
    file = RunsFile(tmp_path / "x_runs.csv")
    late, sync = ([run_of(ZIPF, cell, 0.1, 1e-3, s) for s in range(4)] for cell in (ROWS_16, SYNC))
    for seed, (gap, run) in enumerate(zip((3e-3, 1e-3, 5e-3), late, strict=False)):
        file.add(record(run, 0.7 + gap), {})
        if seed != 1:
            file.add(record(sync[seed], 0.7), {})
    found = gap_of(file, [(1, late), (-1, sync)])
    assert (found.n, found.mean) == (2, pytest.approx(4e-3))
    assert found.half_width == pytest.approx(12.706 * 1e-3, rel=1e-4)  # Student's t, from a table


def test_runs_of_two_arithmetics_are_never_paired(tmp_path):
    file = RunsFile(tmp_path / "lateness_runs.csv")
    late, sync = (run_of(ZIPF, cell, 0.1, 1e-3, 0) for cell in (ROWS_16, SYNC))
    file.add(record(late, 0.7), {})
    file.add(record(replace(sync, arithmetic=KEPT), 0.8), {})
    assert gap_of(file, [(1, [late]), (-1, [sync])]).n == 0
    assert file.arithmetic_of(ZIPF) == KEPT and file.arithmetic_of(KUAIRAND) == FLUSHED


def test_a_fresh_field_is_one_of_a_schema_in_which_each_has_a_table_of_its_own(tmp_path):
    """The same samples as the stream's, by a schema whose fields share no table."""
    (tmp_path / "mine.csv").write_text("user,item,label\n" + "1,2,0\n2,3,1\n1,3,1\n" * 10)
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nfile = "mine.csv"\ncolumns = ["user", "item"]\n'
        "split = { test_fraction = 0.2 }\n"
    )
    own = StreamData(str(tmp_path / "mine.toml"), "digest", 24)
    apart = tables_apart(own, lateness.Options(out=tmp_path / "out"))
    one, other = (open_source(data.name) for data in (own, apart))
    assert [(f.name, f.table) for f in other.layout.fields] == [("user", "user"), ("item", "item")]
    pairs = zip(one.chunks("train"), other.chunks("train"), strict=True)
    assert all((a.ids == b.ids).all() and (a.labels == b.labels).all() for a, b in pairs)
    assert apart.sha256 != own.sha256 and apart.train_rows == 24
    stream = replace(KUAIRAND, batch=16)
    for fresh, names in (("user", ("user",)), (APART, ())):
        run = run_of(stream, ROWS_16, 0.1, 1e-3, 0, fresh=fresh)
        assert config_of(run, apart).sync.fresh == names

    # Without a field the samples are the same, and so are the others' lookups.
    less = tables_apart(own, lateness.Options(out=tmp_path / "out"), without="user")
    assert fields_of(less) == ("item",) and less.sha256 != apart.sha256
    pairs = zip(one.chunks("train"), open_source(less.name).chunks("train"), strict=True)
    assert all((a.labels == b.labels).all() and len(b.ids) == b.size for a, b in pairs)


def test_a_fresh_field_that_takes_half_of_the_loss_away_gives_a_half_back(tmp_path):
    file = RunsFile(tmp_path / "lateness_runs.csv")
    stream = replace(STREAMS["tennis"], seeds=2)
    search = [
        run_of(stream, SYNC, 0.1, 1e-3, seed, window=VALIDATION)
        for seed in range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + TUNING_SEEDS)
    ]
    for run in search:
        file.add(record(run, 0.7), {})
    for seed in range(2):
        aucs = {(SYNC, APART): 0.70, (ROWS_16, APART): 0.66, (ROWS_16, "tourney"): 0.68}
        for (cell, fresh), auc in aucs.items():
            file.add(record(run_of(stream, cell, 0.1, 1e-3, seed, fresh=fresh), auc), {})
    (line,) = fresh_lines(LatenessStudy(file, [stream]))
    assert (line["fresh"], line["rows_late"], line["seeds"]) == ("tourney", 16, 2)
    assert line["given_back"] == pytest.approx(0.5)
    assert line["gap_to_sync"] == pytest.approx(-0.02)


@pytest.mark.parametrize(("split", "judging"), [(BY_TIME, 20), (BY_USER, 5 * (20 // 5))])
def test_a_stream_cut_another_way_has_all_rows_and_judges_the_last_ones(tmp_path, split, judging):
    """Five users of twenty rows each, whose clock does not go by the file's order."""
    draw = np.random.default_rng(0)
    clock = draw.permutation(100)
    user = np.arange(100) % 5
    table = pa.table({"user": user, "clock": clock, "label": draw.integers(0, 2, 100)})
    pq.write_table(table, tmp_path / "all.parquet")
    keys = {"group": "user", "labels": ["label"], "columns": ["user"]}
    schema, train_rows = cut_by(tmp_path / "all.parquet", keys, split, "clock", tmp_path / "cut")
    cut = pq.read_table(schema.parent / "data.parquet").to_pandas()
    trains, judges = cut[:train_rows], cut[train_rows:]
    assert sorted(cut["clock"]) == list(range(100)) and len(judges) == judging
    assert trains["clock"].is_monotonic_increasing and judges["clock"].is_monotonic_increasing
    if split == BY_TIME:
        assert trains["clock"].max() < judges["clock"].min()
    for _, rows in judges.groupby("user") if split == BY_USER else ():
        before = trains[trains["user"] == rows["user"].iloc[0]]
        assert len(rows) == 4 and before["clock"].max() < rows["clock"].min()
    found = open_source(str(schema)).provenance()
    assert (found.train_rows, found.test_rows) == (train_rows, judging)


def test_what_users_add_is_left_out_where_a_run_kept_nothing_of_it(tmp_path):
    """Then the interval is over seeds alone, and the rows' error is not known."""
    file = RunsFile(tmp_path / "x_runs.csv")
    late, sync = ([run_of(ZIPF, cell, 0.1, 1e-3, s) for s in range(3)] for cell in (ROWS_16, SYNC))
    for seed, gap in enumerate((3e-3, 1e-3, 5e-3)):
        file.add(record(late[seed], 0.7 + gap), {"click": np.arange(3.0)})
        file.add(record(sync[seed], 0.7), {} if seed == 1 else {"click": np.ones(3)})
    found = gap_of(file, [(1, late), (-1, sync)])
    assert (found.n, found.mean) == (3, pytest.approx(3e-3))
    assert found.half_width == pytest.approx(4.3027 * 2e-3 / 3**0.5, rel=1e-4)
    assert math.isnan(found.rows_error)


# The rule of rates.


def searched(height, most: int = 100) -> dict[Rates, float]:
    """All that sync's search tries on this surface."""
    tried: dict[Rates, float] = {}
    while asked := to_try_of_sync(tried):
        tried |= {rates: height(rates) for rates in asked}
        assert len(tried) < most
    return tried


@settings(max_examples=60)
@given(st.floats(-5, 6), st.floats(-7, 4), st.floats(0.2, 3))
def test_the_best_rates_of_sync_lie_inside_what_was_tried_or_the_widening_is_used_up(
    row, dense, tilt
):
    def height(rates: Rates) -> float:
        place = math.log2(rates.row / 0.1), math.log2(rates.dense / 3.5e-4)
        return -((place[0] - row) ** 2) - tilt * (place[1] - dense) ** 2

    tried = searched(height)
    best = best_of(tried)
    for name, grid in (("row", ROW_RATES), ("dense", DENSE_RATES)):
        values = sorted({getattr(rates, name) for rates in tried})
        at = values.index(getattr(best, name))
        ratio = (grid[-1] / grid[0]) ** (1 / (len(grid) - 1))
        used_up = {grid[0] / ratio**rules.MOST_WIDENINGS, grid[-1] * ratio**rules.MOST_WIDENINGS}
        inside = 0 < at < len(values) - 1
        assert inside or any(values[at] == pytest.approx(end, rel=0.01) for end in used_up)
    assert set(STUDY_GRID.points) <= set(tried)


def test_rates_that_diverge_are_never_the_best():
    tried = searched(lambda rates: math.nan if rates.dense > 2e-4 else 0.7)
    assert best_of(tried).dense <= 2e-4


SYNC_RATES = Rates(row=0.1, dense=1e-3)
HALF_ROW, LOW_DENSE = points_of(SYNC_RATES)[1], points_of(SYNC_RATES)[4]


def gain_of(mean: float, seeds_error: float, rows_error: float):
    return lambda rates: Interval(mean, 0.0, 3, seeds_error, rows_error)


@pytest.mark.parametrize(
    ("gain", "errors", "outcome"),
    [
        (2.1e-3, (1e-3, 0.0), BETTER),
        (1.9e-3, (1e-3, 0.0), SYNCS),
        (2.1e-3, (0.0, 1e-3), BETTER),
        (2.1e-3, (1e-3, 1e-3), SYNCS),  # both errors count together
    ],
)
def test_a_cell_leaves_syncs_rates_only_for_a_gain_of_more_than_two_errors(gain, errors, outcome):
    tried = dict.fromkeys(points_of(SYNC_RATES), 0.7) | {LOW_DENSE: 0.7 + gain}
    choice = choice_of(SYNC_RATES, tried, gain_of(gain, *errors))
    assert choice.outcome == outcome
    assert choice.rates == (LOW_DENSE if outcome == BETTER else SYNC_RATES)


def test_a_search_among_diverged_runs_ends_without_a_rate():
    """The first study chose the best of such noise."""
    tried = {rates: 0.5 + 0.01 * k for k, rates in enumerate(points_of(SYNC_RATES))}
    assert max(tried.values()) < CHANCE_AUC
    assert choice_of(SYNC_RATES, tried, gain_of(0.04, 1e-4, 1e-4)).outcome == NO_RATE
    nothing = dict.fromkeys(points_of(SYNC_RATES), math.nan)
    assert choice_of(SYNC_RATES, nothing, gain_of(0, 1, 1)).outcome == NO_RATE


def test_a_cell_that_loses_much_goes_on_to_lower_dense_rates_until_it_does_not():
    """Its AUC is that of sync from a 64th of sync's dense rate on."""
    tried: dict[Rates, float] = {}
    while asked := to_try_of_cell(SYNC_RATES, tried, 0.75):
        tried |= {r: 0.75 if r.dense <= SYNC_RATES.dense / 64 else 0.51 for r in asked}
    assert sorted({r.dense / SYNC_RATES.dense for r in tried}) == [1 / 64, 1 / 16, 1 / 4, 1 / 2, 1]
    assert best_of(tried).dense == SYNC_RATES.dense / 64


def test_a_cell_that_loses_little_tries_its_five_points_and_no_more():
    tried = dict.fromkeys(points_of(SYNC_RATES), 0.735)
    assert to_try_of_cell(SYNC_RATES, tried, 0.75) == []
    assert len(tried) == 5 and next(iter(tried)) == SYNC_RATES


class Pretended:
    """Trains nothing: a run's AUC is a function of it."""

    def __init__(self, path: Path, auc) -> None:
        self.file, self.auc, self.plans_only = RunsFile(path), auc, False
        self.trained: list[StudyRun] = []

    def train(self, runs, what) -> None:
        with patch("os.fsync"):  # thousands of lines need not survive a crash
            for run in runs:
                if run not in self.file.by_run:
                    self.trained.append(run)
                    sums = {} if run.updates else {"click": np.zeros(3)}
                    self.file.add(record(run, self.auc(run)), sums)

    def fields(self, stream) -> tuple[str, ...]:
        return (*stream.fresh_fields, "third")


def auc_by_lateness(run: StudyRun) -> float:
    """Best at row rate 0.1 and dense rate 3.5e-4; late runs lose, less at a quarter of the rate."""
    place = abs(math.log2(run.row_lr / 0.1)) + abs(math.log2(run.dense_lr / 3.5e-4))
    noise = 1e-5 * (run.seed % 3) * (1 + run.rows_late)
    lost = 1e-4 * run.rows_late + 3e-3 * (run.dense_late > 0) * (run.dense_lr > 1e-4)
    return 0.75 - 1e-3 * place * (not run.dense_late) - lost + noise


@pytest.mark.long
def test_all_parts_train_each_run_once_and_a_second_call_trains_nothing(tmp_path):
    trainer = Pretended(tmp_path / "x_runs.csv", auc_by_lateness)
    for part in PARTS.values():
        for stream in (KUAIRAND, ZIPF):
            part(trainer, stream)
    assert len(trainer.trained) == len(set(trainer.trained)) > 800
    again = Pretended(tmp_path / "x_runs.csv", auc_by_lateness)
    for part in PARTS.values():
        for stream in (KUAIRAND, ZIPF):
            part(again, stream)
    assert again.trained == []
    search = RateSearch(again.file, KUAIRAND)
    assert search.sync() == Rates(row=0.1, dense=3.5e-4)
    choice = search.choice(ASYNC_0)
    assert choice is not None and (choice.outcome, choice.rates.dense) == (BETTER, 3.5e-4 / 4)
    assert search.choice(ROWS_16).outcome == SYNCS


def test_final_runs_of_late_cells_are_paired_with_sync_by_seed(tmp_path):
    trainer = Pretended(tmp_path / "x_runs.csv", auc_by_lateness)
    PARTS["cells"](trainer, KUAIRAND)
    finals = [run for run in trainer.trained if run.window == "test"]
    sync = {run.seed for run in finals if not (run.rows_late or run.dense_late)}
    assert sync == set(range(KUAIRAND.seeds))
    for cell in (ROWS_16, ASYNC_0):
        seeds = [
            r.seed
            for r in finals
            if (r.rows_late, r.dense_late) == (cell.rows_late, cell.dense_late)
        ]
        assert set(seeds) == sync

    # Only what the rule moves away from sync's rates is trained at rates of its own, too.
    rates = {
        cell: {
            Rates(row=r.row_lr, dense=r.dense_lr)
            for r in finals
            if (r.rows_late, r.dense_late) == (cell.rows_late, cell.dense_late)
        }
        for cell in (ROWS_16, ASYNC_0)
    }
    assert rates[ROWS_16] == {Rates(row=0.1, dense=3.5e-4)}
    assert rates[ASYNC_0] == {Rates(row=0.1, dense=3.5e-4), Rates(row=0.1, dense=3.5e-4 / 4)}
