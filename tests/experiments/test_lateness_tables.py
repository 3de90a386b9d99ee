"""The study of lateness: what is counted in a log, hypotheses, tables from stored runs."""

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

from experiments.lateness.hypotheses import (
    Hypothesis,
    below,
    holm,
    hypothesis_lines,
    rank_order,
)
from experiments.lateness.logs import FieldFacts, burst_shares, missed_share
from experiments.lateness.parts import PARTS
from experiments.lateness.runs import RunsFile, StudyRun
from experiments.lateness.second_plan import field_lines, second_hypotheses
from experiments.lateness.streams import BUFFERS, SHUFFLED, STREAMS, TIME
from experiments.lateness.table import LatenessStudy, gap_lines
from experiments.paper.record import STORED
from experiments.statistics import Interval
from experiments.studies import lateness
from experiments.tables import write_csv
from paper_figs.lateness import lateness_figure
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


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> LatenessStudy:
    trainer = Pretended(tmp_path_factory.mktemp("world") / "x_runs.csv", world)
    for part in PARTS.values():
        for stream in STREAMS.values():
            part(trainer, stream)
    return LatenessStudy(trainer.file, list(STREAMS.values()))


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
    for one in second_hypotheses(nothing, []):
        assert (one.p_holds, one.p_fails, one.complete) == (1.0, 1.0, False)
        assert "tennis" in one.missing


def test_a_line_of_the_table_for_each_setting_and_cell(study):
    lines = pd.DataFrame(gap_lines(study))
    late = lines[(lines.rows_late == 16) & (lines.dense_late == 0) & (lines.data == REAL[1].key)]
    assert set(late.order) == {TIME, SHUFFLED, *(f"buffer-{b}" for b in BUFFERS)}
    assert set(late[late.order == TIME].window) == {"test", "origin-1", "origin-2"}
    assert (lines.seeds == lines.seeds_planned).all()
    sync = lines[(lines.rows_late == 0) & (lines.dense_late == 0) & (lines.batch < 256)]
    assert (sync.gap_to_sync == 0).all()


@pytest.mark.long
def test_the_figure_shows_the_gaps_of_its_table(study, tmp_path):
    lines = gap_lines(study)
    (axes,) = lateness_figure(write_csv(tmp_path / "lateness.csv", lines)).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    start = names.index("MovieLens")
    assert names[start + 1] == "time order" and "shuffled" in names[start:]
    assert "drawn, Zipf 1.8" not in names, "it has one order"
    drawn = sorted(float(c.lines[0].get_xdata()[0]) for c in axes.containers)
    table = pd.DataFrame(lines)
    late = table[(table.rows_late == 16) & (table.dense_late == 0) & (table.rates == "of sync")]
    late = late[(late.window == "test") & (late.optimizer_start == 0) & ~late.redrawn]
    assert drawn == pytest.approx(sorted(1e3 * late.gap_to_sync))


def test_stored_tables_are_those_that_the_stored_runs_give(tmp_path):
    """Cell for cell: nobody edits a table, and no table is older than its runs.

    Numbers to nine digits, and 0 to 1e-12: another processor sums with vectors of another width,
    so that the last bits of a sum differ.
    """
    file = RunsFile(STORED / "lateness_runs.csv")
    assert len(file.records) > 0
    for end, lines in lateness.tables_of(file, list(STREAMS.values())).items():
        stored = STORED / f"lateness{end}.csv"
        made = write_csv(tmp_path / stored.name, lines)
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


def test_stored_runs_are_each_there_once_and_have_what_intervals_need():
    file = RunsFile(STORED / "lateness_runs.csv")
    with (STORED / "lateness_runs.csv").open() as lines:
        hashes = [line["hash"] for line in csv.DictReader(lines)]
    assert len(hashes) == len(set(hashes))
    for record in file:
        if record.run.updates is None:
            for task, auc in record.auc.items():
                assert math.isnan(auc) or file.sums(record.hash, task) is not None
