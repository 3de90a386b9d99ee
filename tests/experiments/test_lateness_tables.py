"""The study of lateness: what is counted in a log, delays, hypotheses, tables from stored runs."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.lateness import logs as log_facts
from experiments.lateness.delays import delays, smooth
from experiments.lateness.forest import pooled
from experiments.lateness.hypotheses import (
    Hypothesis,
    below,
    holm,
    hypotheses,
    hypothesis_lines,
    loss_of,
    rank_order,
    within,
)
from experiments.lateness.logs import (
    FieldFacts,
    LogFacts,
    burst_shares,
    mean_square_gradient,
    missed_share,
)
from experiments.lateness.parts import PARTS
from experiments.lateness.runs import RunsFile, StudyRun
from experiments.lateness.second_plan import field_lines, second_hypotheses
from experiments.lateness.streams import (
    BUFFERS,
    ROWS_16,
    SHUFFLED,
    STREAMS,
    TIME,
)
from experiments.lateness.table import (
    COLUMNS_OF_EMPTY,
    LatenessStudy,
    StreamSetting,
    delay_lines,
    gap_lines,
)
from experiments.paper.record import STORED
from experiments.statistics import Interval
from experiments.studies import lateness
from experiments.tables import write_csv
from paper_figs.lateness import lateness_figure
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.executors.given_order import OrderedRun, constant_lag_order
from runtime.executors.open import source_of
from runtime.rank.components import assemble
from tests.experiments.test_lateness import Pretended

REAL = [stream for stream in STREAMS.values() if not stream.is_drawn]


# What is counted in a log.


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 9))
def test_the_share_of_young_lookups_is_counted_as_one_would_by_hand(ids, batch, late):
    young, first = 0, {}
    for place, one in enumerate(ids):
        update = place // batch
        young += update - first.setdefault(one, update) < late
    updates = np.arange(len(ids)) // batch
    assert burst_shares(np.array(ids), updates, [late])[late] == pytest.approx(young / len(ids))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 9))
def test_lookups_that_miss_half_of_their_row_are_counted_as_one_would_by_hand(ids, batch, late):
    count, updates_of = 0, {}
    for place, one in enumerate(ids):
        update = place // batch
        before = {other for other in updates_of.setdefault(one, set()) if other < update}
        missed = {other for other in before if other >= update - late}
        count += bool(before) and len(missed) >= len(before) / 2
        updates_of[one].add(update)
    updates = np.arange(len(ids)) // batch
    assert missed_share(np.array(ids), updates, late) == pytest.approx(count / len(ids))


def test_squared_gradients_are_those_that_plain_sgd_moves_rows_by(monkeypatch):
    """A row that SGD moves by d had the gradient d / rate; nothing is read off an accumulator."""
    monkeypatch.setattr(log_facts, "GRADIENT_UPDATES", 1)
    config = TrainConfig(
        batch=64,
        steps=1,
        sync=SyncConfig(mode=Mode.HYBRID, ranks=2, tau=0),
        data=DataConfig(name="synthetic", rows=64),
        model=ModelConfig(hidden=(8,)),
        rows=TableConfig(optimizer=RowOptimizer(lr=0.1)),
    )
    sgd = replace(config, rows=TableConfig(optimizer=RowOptimizer(kind="sgd", lr=0.25)))
    parts = assemble(sgd, source_of(sgd))
    batch = next(iter(source_of(sgd).chunks("train"))).rows(0, 64)
    before = {name: rows.copy() for name, rows in parts.store.peek(batch).values.items()}
    OrderedRun(parts).run(constant_lag_order(sgd, parts.feed))
    after = parts.store.peek(batch).values
    moved = np.concatenate([(after[name] - before[name]).ravel() for name in before])
    want = float(np.square(moved / 0.25).mean())
    assert mean_square_gradient(config) == pytest.approx(want, rel=1e-4)


# Delays.

TIMES = np.array([81.0 * k for k in range(1, 17)])


def test_a_power_curve_is_smoothed_to_itself():
    truth = 0.75 - 0.4 * TIMES**-0.5
    assert smooth(TIMES, truth)(TIMES) == pytest.approx(truth, abs=1e-6)


@pytest.mark.parametrize("delay", [-20, 0, 7, 16, 64])
def test_the_delay_is_that_of_a_shifted_curve_though_its_order_wiggles_each_draw(delay):
    """What a draw's data order does to sync and late runs alike cancels; the first study, which
    read a running maximum, was misled by it by 100 updates."""
    draw = np.random.default_rng(delay + 20)

    def curve(times: np.ndarray) -> np.ndarray:
        return 0.75 - 0.4 * times**-0.5

    wiggle = 0.8e-3 * draw.normal(size=(12, len(TIMES)))
    pair = 0.5e-3 * draw.normal(size=(12, 1))
    sync = curve(TIMES) + wiggle + pair
    late = curve(TIMES - delay) + wiggle + pair
    found = delays(TIMES, sync, late)
    assert found.delay == pytest.approx(delay, abs=max(2.5, 0.1 * abs(delay)))


@pytest.mark.first_case
@pytest.mark.parametrize("wiggle", [0.0, 0.8e-3])
def test_the_interval_of_a_delay_covers_it(wiggle, monkeypatch):
    """95 % of 60 studies, or three standard errors of a share less."""
    monkeypatch.setattr("experiments.lateness.delays.RESAMPLES", 80)
    draw, covered, studies, delay = np.random.default_rng(3), 0, 60, 16.0
    for _ in range(studies):
        shared = wiggle * draw.normal(size=(12, len(TIMES)))
        pair = 0.5e-3 * draw.normal(size=(12, 1))
        noise = 0.4e-3 * draw.normal(size=(2, 12, len(TIMES)))
        sync = 0.75 - 0.4 * TIMES**-0.5 + shared + pair + noise[0]
        late = 0.75 - 0.4 * (TIMES - delay) ** -0.5 + shared + pair + noise[1]
        found = delays(TIMES, sync, late)
        covered += found.low <= delay <= found.high
    assert covered / studies >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / studies)


# Hypotheses.


def loss(mean: float, error: float, n: int = 6) -> Interval:
    return Interval(mean, 2.571 * error, n, error, 0.0)


def test_a_loss_is_below_its_limit_where_students_t_says_so():
    """One-sided, 5 degrees of freedom: 5 % lies beyond 2.015 standard errors (a printed table)."""
    edge = below("x", loss(1e-3 - 2.015e-4, 1e-4), 1e-3)
    assert edge.p_holds == pytest.approx(0.05, abs=2e-4)
    assert edge.p_fails == pytest.approx(0.95, abs=2e-4)
    assert below("x", loss(1e-3 + 2.015e-4, 1e-4), 1e-3).p_fails == pytest.approx(0.05, abs=2e-4)


def test_errors_of_seeds_and_of_users_count_together():
    both = Interval(0.0, 1.0, 6, 3e-4, 4e-4)
    freedom = 5 * (25 / 9) ** 2  # Hillis
    from scipy.stats import t

    assert below("x", both, 1e-3).p_holds == pytest.approx(t.cdf(-1e-3 / 5e-4, freedom))


def test_an_excess_must_be_small_either_way():
    assert within("x", loss(0, 1e-4), 1e-3).p_holds < 0.01
    for mean in (3e-3, -3e-3):
        one = within("x", loss(mean, 1e-4), 1e-3)
        assert one.p_holds > 0.99 and one.p_fails < 0.01


def test_one_run_or_none_shows_nothing():
    one = below("x", Interval(-5e-3, math.nan, 1), 1e-3)
    assert (one.p_holds, one.p_fails) == (1.0, 1.0)


def test_a_loss_of_no_variance_is_known():
    assert below("x", Interval(0.0, 0.0, 6, 0.0, 0.0), 1e-3).p_holds == 0
    assert below("x", Interval(2e-3, 0.0, 6, 0.0, 0.0), 1e-3).p_fails == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_contrary_of_several_statements_is_the_least_times_their_number(values):
    """Bonferroni: one of six is below 0.05 by chance in a quarter of all cases."""
    parts = [replace(below("x", loss(0.0, 1e-4), 1e-3), p_holds=1 - p, p_fails=p) for p in values]
    one = Hypothesis(name="S9", says="x", statements=parts)
    assert one.p_fails == min(1.0, len(values) * min(values))
    assert one.p_holds == max(1 - p for p in values)
    assert replace(one, complete=False).p_holds == 1.0
    assert replace(one, beside=parts * 3).p_fails == one.p_fails


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.permutations(range(4)))
def test_the_rank_correlation_is_spearmans(measure, places):
    from scipy.stats import spearmanr

    if len(set(measure)) > 1:
        one = rank_order("x", measure, [loss(1e-3 * k, 1e-6) for k in places])
        assert one.value == pytest.approx(spearmanr(measure, places)[0])


def test_the_order_of_losses_is_sure_where_errors_are_small():
    measure = [0.1, 0.2, 0.3, 0.4]
    sure = rank_order("x", measure, [loss(1e-3 * k, 1e-5) for k in range(4)])
    assert (sure.value, sure.p_holds) == (1.0, 0.0)
    turned = rank_order("x", measure, [loss(-1e-3 * k, 1e-5) for k in range(4)])
    assert (turned.value, turned.p_fails) == (-1.0, 0.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holms_correction_keeps_the_order_and_multiplies_the_least_by_their_number(values):
    adjusted = holm(values)
    least = min(range(len(values)), key=lambda k: values[k])
    assert adjusted[least] == pytest.approx(min(1.0, len(values) * values[least]))
    ranked = sorted(range(len(values)), key=lambda k: values[k])
    assert [adjusted[k] for k in ranked] == sorted(adjusted)
    assert all(a >= v for a, v in zip(adjusted, values, strict=True))


def facts(stream: str, order: str, b_16: float, drift: float) -> LogFacts:
    return LogFacts(
        hash=f"{stream} {order}", stream=stream, order=order, row_lr=0.1, dense_lr=1e-3, samples=1,
        b_4=b_16 / 2, b_16=b_16, b_64=2 * b_16, burst_field="user", field_b_16=b_16,
        mean_square_gradient=1e-3, drift_16=drift, drift_64=drift,
    )  # fmt: skip


def world(run: StudyRun) -> float:
    """Rows late cost what the order says, more from a large start; dense weights nothing."""
    number = [stream.key for stream in STREAMS.values()].index(run.stream.removesuffix("-whole"))
    noise = 1e-5 * ((run.seed * 7 + number + run.rows_late) % 5)
    lost = 1e-4 * (number + 1) * run.rows_late * (1.0 if run.order == TIME else 0.1)
    lost *= 0.0 if run.stream.startswith("kuairand") and not run.start else 1.0
    lost += 1e-2 * run.start**0.25 * bool(run.rows_late)
    lost *= 1 - share_of(run.stream, run.fresh)
    return 0.75 - lost / run.passes**2 - 0.1 * share_of(run.stream, run.without) + noise


def share_of(stream: str, field: str) -> float:
    """Of what late rows lose, and of what all fields are worth."""
    names = (*STREAMS.get(stream, REAL[0]).fresh_fields, "third")
    return dict(zip(names, (0.7, 0.1, 0.2), strict=False)).get(field, 0.0)


COUNTED = [
    FieldFacts(
        data="x", stream=stream.key, field=field, b_16=0.5,
        b_4=loses * share_of(stream.key, field), missed_half_16=loses + 0.01,
    )
    for number, stream in enumerate(REAL)
    for loses in (0.0 if stream.key.startswith("kuairand") else (number + 1) / 4,)
    for field in (*stream.fresh_fields, "third")
]  # fmt: skip


KNOWN = {
    (stream.key, order): facts(
        stream.key, order,
        (1 + number) * (0.01 if order == TIME else 0.001),
        0.0 if stream.key.startswith("kuairand") else number + 1.0,
    )
    for number, stream in enumerate(STREAMS.values())
    for order in ((TIME,) if stream.is_drawn else (TIME, SHUFFLED))
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> LatenessStudy:
    trainer = Pretended(tmp_path_factory.mktemp("world") / "x_runs.csv", world)
    for part in PARTS.values():
        for stream in STREAMS.values():
            part(trainer, stream)
    return LatenessStudy(trainer.file, list(STREAMS.values()))


@pytest.mark.long
def test_losses_are_those_of_the_world_that_was_made(study):
    for number, stream in enumerate(STREAMS.values()):
        setting = StreamSetting(stream=stream, updates=stream.updates)
        want = 0.0 if stream.key.startswith("kuairand") else 1e-4 * (number + 1) * 16
        assert loss_of(study, setting, ROWS_16).mean == pytest.approx(want, abs=5e-5)


def test_hypotheses_come_out_as_the_world_was_made(study):
    lines = hypothesis_lines(hypotheses(study, KNOWN))
    outcome = {line["hypothesis"]: line["outcome"] for line in lines if line["outcome"]}
    assert set(outcome) == {"S0", "S1", "S2", "S3", "S4", "S5"}
    assert outcome["S1"] == "fails", "tennis loses 6.4"
    assert (outcome["S2"], outcome["S3"]) == ("holds", "holds")
    assert outcome["S5"] == "holds"
    shuffled = [line for line in lines if line["hypothesis"] == "S0" and "half of" in line["what"]]
    assert len(shuffled) == 2 * 3, "KuaiRand changes nothing in time order"
    assert all(line["p_holds"] < 1e-3 for line in shuffled)


def test_hypotheses_of_fresh_fields_come_out_as_the_world_was_made(study):
    lines = hypothesis_lines(second_hypotheses(study, COUNTED))
    outcome = {line["hypothesis"]: line["outcome"] for line in lines if line["outcome"]}
    assert outcome == dict.fromkeys(("F1", "F2", "F3", "F4", "F5"), "holds")
    judged = [line["what"].split(":")[0] for line in lines if line["hypothesis"] == "F1"][1:]
    assert judged == ["oulad-assessments", "tennis"], "the others lose less than 2.0"

    # What a field gives back and is worth is what the world made of it.
    table = pd.DataFrame(field_lines(study, COUNTED))
    tennis = table[table.data == "tennis"].set_index("field")
    shares = {"tourney": 0.7, "b_id": 0.1, "third": 0.2}
    back = {field: share * 6.4e-3 for field, share in shares.items()}
    assert tennis.given_back.to_dict() == pytest.approx(back, abs=1e-8)
    value = {field: 0.1 * share for field, share in shares.items()}
    assert tennis.worth.to_dict() == pytest.approx(value, abs=1e-8)

    # A measure that turns the order round is refuted.
    turned = [replace(one, b_4=-one.b_4, missed_half_16=-one.missed_half_16) for one in COUNTED]
    lines = hypothesis_lines(second_hypotheses(study, turned))
    outcome = {line["hypothesis"]: line["outcome"] for line in lines if line["outcome"]}
    assert (outcome["F4"], outcome["F5"]) == ("fails", "fails")

    # Of one stream's fields alone nothing is decided.
    few = hypothesis_lines(second_hypotheses(study, turned[:3]))
    outcome = {line["hypothesis"]: line["outcome"] for line in few if line["outcome"]}
    assert (outcome["F4"], outcome["F5"]) == ("open", "open")


def test_what_has_not_run_is_open_and_named(study, tmp_path):
    nothing = LatenessStudy(RunsFile(tmp_path / "no_runs.csv"), list(STREAMS.values()))
    for one in (*hypotheses(nothing, {}), *second_hypotheses(nothing, [])):
        assert (one.p_holds, one.p_fails, one.complete) == (1.0, 1.0, False)
        assert "tennis" in one.missing or one.name == "S4"


def test_a_line_of_the_table_for_each_setting_and_cell(study):
    lines = pd.DataFrame(gap_lines(study, KNOWN))
    late = lines[(lines.rows_late == 16) & (lines.dense_late == 0) & (lines.data == REAL[1].key)]
    assert set(late.order) == {TIME, SHUFFLED, *(f"buffer-{b}" for b in BUFFERS)}
    assert set(late[late.order == TIME].window) == {"test", "origin-1", "origin-2"}
    assert (lines.seeds == lines.seeds_planned).all()
    sync = lines[(lines.rows_late == 0) & (lines.dense_late == 0) & (lines.batch < 256)]
    assert (sync.gap_to_sync == 0).all()


def test_a_pooled_loss_of_equal_streams_is_theirs_and_of_unequal_ones_is_wide():
    equal = pooled({k: [loss(2e-3, 1e-4)] for k in "abcd"})
    assert (equal.mean, equal.n) == (pytest.approx(2e-3), 4)
    assert equal.half_width == pytest.approx(3.182 * 1e-4 / 2, rel=1e-3)  # t(3), a printed table
    # Nine windows of a stream have a mean of a third of the error; so many of one stream alone
    # give it more weight, though its windows are one stream.
    windows = pooled({k: [loss(2e-3, 1e-4)] * 9 for k in "abcd"})
    assert windows.half_width == pytest.approx(equal.half_width / 3, rel=1e-9)
    uneven = pooled({"a": [loss(2.0001e-3, 1e-4)] * 9, "b": [loss(2e-3, 1e-4)]})
    assert uneven.mean == pytest.approx((9 * 2.0001e-3 + 2e-3) / 10, rel=1e-9)
    apart = pooled({k: [loss(2e-3 * n, 1e-4)] for n, k in enumerate("abcd")})
    assert apart.mean == pytest.approx(3e-3, rel=1e-2)
    spread = np.std([0, 2e-3, 4e-3, 6e-3], ddof=1) / 2
    assert apart.half_width == pytest.approx(3.182 * spread, rel=1e-2)


@pytest.mark.long
def test_the_figure_shows_the_gaps_of_its_tables(study, tmp_path):
    tables = {
        "": gap_lines(study, KNOWN),
        "_moderator": lateness.moderator_lines(study, KNOWN),
        "_forest": lateness.forest_lines(study),
    }
    paths = [write_csv(tmp_path / f"lateness{end}.csv", lines) for end, lines in tables.items()]
    left, middle, right = lateness_figure(*paths).axes
    assert middle.get_legend_handles_labels()[1] == ["KuaiRand", "drawn, Zipf 1.8"]
    names = [label.get_text() for label in left.get_yticklabels()]
    start = names.index("MovieLens")
    assert names[start + 1] == "time order" and "shuffled" in names[start:]
    assert "drawn, Zipf 1.8" not in names, "it has one order"
    forest = pd.read_csv(paths[2])
    assert len(right.containers) == len(forest)
    dots = sorted(float(c.lines[0].get_xdata()[0]) for c in right.containers)
    assert dots == pytest.approx(sorted(-1e3 * forest.loss)), "a loss is a gap below zero"
    (line,) = forest[
        (forest.data == "tennis") & (forest.window == "test") & (forest.rows_late == 16)
    ].itertuples()
    assert line.loss == pytest.approx(6.4e-3, abs=1e-4)


def test_stored_tables_are_those_that_the_stored_runs_give(tmp_path):
    """Cell for cell: nobody edits a table, and no table is older than its runs.

    Numbers to nine digits, and 0 to 1e-12: another processor sums with vectors of another width,
    so that the last bits of a sum differ.
    """
    file = RunsFile(STORED / "lateness_runs.csv")
    assert len(file.records) > 0
    for end, lines in lateness.tables_of(file, list(STREAMS.values())).items():
        stored = STORED / f"lateness{end}.csv"
        made = write_csv(tmp_path / stored.name, lines, COLUMNS_OF_EMPTY.get(end))
        with made.open(newline="") as here, stored.open(newline="") as there:
            pairs = list(zip_longest(csv.reader(here), csv.reader(there), fillvalue=[]))
        for number, (made_cells, stored_cells) in enumerate(pairs, start=1):
            assert len(made_cells) == len(stored_cells), f"{stored.name}, line {number}"
            for cells in zip(made_cells, stored_cells, strict=True):
                assert same_cell(*cells), f"{stored.name}, line {number}: {cells}"


def same_cell(made: str, stored: str) -> bool:
    """Whether two cells of a table hold one text, or one number up to its last bits."""
    if made == stored:
        return True
    try:
        numbers = float(made), float(stored)
    except ValueError:
        return False
    return math.isclose(*numbers, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("made", "stored"),
    [("-2.1", "-2.10001"), ("0.0", "1e-9"), ("True", "False"), ("12", ""), ("nan", "0.5")],
)
def test_a_cell_that_was_edited_is_another_cell(made, stored):
    assert not same_cell(made, stored)


def test_a_table_without_lines_has_the_header_that_it_will_have(study):
    tables = {
        "_moderator": lateness.moderator_lines(study, KNOWN),
        "_forest": lateness.forest_lines(study),
        "_delays": delay_lines(study),
    }
    for end, lines in tables.items():
        assert tuple(lines[0]) == COLUMNS_OF_EMPTY[end]


def test_stored_runs_are_each_there_once_and_have_what_intervals_need():
    file = RunsFile(STORED / "lateness_runs.csv")
    with (STORED / "lateness_runs.csv").open() as lines:
        hashes = [line["hash"] for line in csv.DictReader(lines)]
    assert len(hashes) == len(set(hashes))
    for record in file:
        if record.run.updates is None:
            for task, auc in record.auc.items():
                assert math.isnan(auc) or file.sums(record.hash, task) is not None


@pytest.fixture
def short(monkeypatch) -> None:
    """A rule of one pair of rates, and two seeds."""
    from experiments import search as rates

    one = rates.Grid(rates.ROW_RATES[:1], rates.DENSE_RATES[:1])
    monkeypatch.setattr(rates, "STUDY_GRID", one)
    monkeypatch.setattr(rates, "MOST_WIDENINGS", 0)


@pytest.mark.long
@pytest.mark.multiproc
def test_a_readers_own_stream_is_studied_in_its_folder(short, tmp_path, capsys):
    rows = ["user,item,clicked,day"]
    draw = np.random.default_rng(0)
    for place in range(1_500):
        user, item = draw.integers(0, 40), draw.integers(0, 60)
        rows.append(f"{user},{item},{int(draw.random() < 0.3 + 0.4 * (user % 2))},{place // 100}")
    (tmp_path / "mine.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nfile = "mine.csv"\nlabels = ["clicked"]\ngroup = "user"\n'
        'split = { column = "day", test_from = 12 }\ncolumns = ["user", "item"]\n'
    )
    options = lateness.Options(
        streams=(str(tmp_path / "mine.toml"),), parts=("buffers",), seeds=2, jobs=2,
        out=tmp_path / "out",
    )  # fmt: skip
    lateness.run(options)
    told = capsys.readouterr().out
    assert "buffer of 2,048: 4 of 4 runs to train" in told
    file = RunsFile(tmp_path / "out" / "lateness_runs.csv")
    late = [r for r in file if r.run.order == "buffer-2048" and r.run.rows_late == 16]
    assert [r.run.seed for r in sorted(late, key=lambda r: r.run.seed)] == [0, 1]
    assert not list((tmp_path / "out").glob("*/summary.json")), "a kept run's folder is removed"
    table = pd.read_csv(tmp_path / "out" / "lateness.csv")
    (line,) = table[(table.order == "buffer-2048") & (table.rows_late == 16)].itertuples()
    sync = [r for r in file if r.run.order == "buffer-2048" and r.run.rows_late == 0]
    want = np.mean([r.auc["clicked"] for r in late]) - np.mean([r.auc["clicked"] for r in sync])
    assert line.gap_to_sync == pytest.approx(want, abs=1e-8)
    lateness.run(options)
    assert "runs to train" not in capsys.readouterr().out.replace("to train, as far", "")
