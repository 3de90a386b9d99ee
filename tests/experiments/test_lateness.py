"""The study of lateness: climbs and delays against known curves, and a tiny run recomputed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from experiments.gaps import Run
from experiments.lateness import streams
from experiments.lateness.streams import STREAMS, Cell, Rates, config_of
from experiments.lateness.table import (
    Group,
    behind,
    delays,
    drift_hypothesis_lines,
    gap_lines,
    hypothesis_lines,
)
from experiments.points import Point
from experiments.staleness.drift import PROBED_SAMPLES
from experiments.staleness.frequency import first_samples
from experiments.statistics import contrast
from experiments.studies import lateness
from experiments.tables import table
from paper_figs.lateness import lateness_figure
from runtime.config import EvaluationConfig, ModelConfig, TrainConfig
from runtime.data.open import open_source
from runtime.order.executor import OrderedRun, lag_order
from runtime.rank.parts import assemble
from tests.experiments.raw_runs import printed_by
from tests.paper_figs.read_back import curves

PLACE = st.integers(-6, 6)


def climbed(height, start: Rates, line: bool = False) -> dict[Rates, float]:
    """All that a climb on this surface tries."""
    tried: dict[Rates, float] = {}
    while asked := streams.to_try(tried, start, line=line):
        tried |= {rates: height(rates) for rates in asked}
    return tried


@given(row=PLACE, dense=PLACE, start_row=PLACE, start_dense=PLACE, tilt=st.floats(0.1, 3))
def test_a_climb_finds_the_top_of_a_hill_and_has_tried_all_around_it(
    row, dense, start_row, start_dense, tilt
):
    start = Rates(row=start_row, dense=start_dense)
    if max(abs(row - start_row), abs(dense - start_dense)) >= streams.MOST_ROUNDS:
        return
    tried = climbed(lambda r: -((r.row - row) ** 2) - tilt * (r.dense - dense) ** 2, start)
    assert streams.best_of(tried) == Rates(row=row, dense=dense)
    assert streams.is_inside(tried)


def test_a_climb_without_a_top_ends_after_its_rounds_and_says_so():
    tried = climbed(lambda r: r.dense, Rates())
    assert streams.best_of(tried).dense == streams.MOST_ROUNDS and not streams.is_inside(tried)


def test_rates_that_diverge_are_never_the_best():
    tried = climbed(lambda r: math.nan if r.dense > 0 else float(r.dense), Rates(dense=2), True)
    assert streams.best_of(tried) == Rates()


def test_the_dense_line_is_tried_whole():
    tried = climbed(lambda r: -abs(r.dense), Rates(row=1), line=True)
    assert {r.dense for r in tried if r.row == 1} >= set(streams.DENSE_LINE)


UPDATES = [100, 200, 400, 800]


@settings(max_examples=15)
@given(st.integers(0, 90), st.integers(2, 5))
def test_a_curve_that_is_shifted_is_as_late_as_its_shift(shift, seeds):
    """Linear in the updates, so that reading between snapshots is exact."""
    sync = np.array([[0.6 + 1e-4 * t + 1e-3 * s for t in UPDATES] for s in range(seeds)])
    late = sync - 1e-4 * shift
    found, growth = delays(UPDATES, sync, late)
    assert [d["behind"] for d in found[1:]] == pytest.approx([shift] * 3)
    assert [d["gap"] for d in found] == pytest.approx([-1e-4 * shift] * 4)
    if shift:  # every seed has the same
        assert (growth[0], *growth[1]) == pytest.approx((0, 0, 0), abs=1e-9)


def test_a_delay_that_is_a_share_of_the_run_doubles_with_it():
    sync, late = (np.array([[0.5 + 1e-4 * f * t for t in UPDATES]] * 2) for f in (1, 0.9))
    found, growth = delays(UPDATES, sync, late)
    assert [d["behind"] for d in found] == pytest.approx([10, 20, 40, 80])
    assert growth[0] == pytest.approx(1)


def test_seeds_that_differ_widen_the_interval_of_the_delay():
    sync = np.array([[0.6 + 1e-4 * t for t in UPDATES]] * 3)
    late = sync - 1e-4 * np.array([[10], [20], [60]])
    end = delays(UPDATES, sync, late)[0][-1]
    assert [*end.values()][2:] == pytest.approx([30, 10, 60])


def test_a_run_above_or_below_all_of_syncs_curve_has_a_delay_beyond_its_ends():
    aucs = np.array([0.45, 0.65, 0.8])
    found = behind([10, 20, 30], np.array([0.6, 0.7, 0.7]), aucs)
    assert found == pytest.approx([math.inf, 5.0, -math.inf])


def studied(
    draw: np.random.Generator, updates: list[int], delay: np.ndarray, noise: float, seeds: int = 20
) -> tuple[list[dict[str, float]], tuple[float, tuple[float, float]]]:
    """The delays of a drawn study of linear curves, the late one ``delay`` updates behind: means
    over seeds err by ``noise`` updates at each snapshot, beside what a pair has in common."""
    sync = 0.6 + 1e-4 * np.array(updates) + draw.normal(0, 1e-3, (seeds, 1))
    errors = draw.normal(0, noise * math.sqrt(seeds), (seeds, len(updates)))
    return delays(updates, sync, sync - 1e-4 * (delay + errors))


@pytest.mark.parametrize("delay", [-8, 0, 8, 40])
def test_the_interval_of_the_delay_covers_it_though_draws_lie_above_all_of_syncs_curve(delay):
    """By simulation, means that err by 10 updates: 95 % of 300 studies, or three standard errors of
    a share less; no more, either, where no draw is beyond the end of sync's curve."""
    draw, studies = np.random.default_rng(delay + 8), 300
    ends = np.array([
        [end["behind_low_95"], end["behind_high_95"]]
        for _ in range(studies)
        for end in studied(draw, UPDATES, np.array(delay), 10.0)[0][-1:]
    ])  # fmt: skip
    covered, error = (ends[:, 0] <= delay) & (delay <= ends[:, 1]), math.sqrt(0.95 * 0.05 / studies)
    assert covered.mean() >= 0.95 - 3 * error
    if delay == 40:
        assert covered.mean() <= 0.95 + 3 * error
        assert np.isfinite(ends).mean() > 0.95
    else:
        assert (ends[:, 0] == -math.inf).mean() > 0.8 and np.isfinite(ends[:, 1]).all()


def test_an_end_among_draws_beyond_the_curve_is_open():
    """A seed of ten is far above sync: drawn twice, in a quarter of the draws, it lifts the mean
    above all of sync's curve."""
    sync = np.array([[0.6 + 1e-4 * t for t in UPDATES]] * 10)
    late = sync - 1e-4 * np.array([[10]] * 9 + [[-80]])
    found = delays(UPDATES, sync, late)[0][-1]
    assert [*found.values()][2:] == pytest.approx([1, -math.inf, 10])


def test_where_every_draw_is_beyond_the_curve_its_end_is_all_that_is_known():
    sync = np.array([[0.6 + 1e-4 * t for t in UPDATES]] * 3)
    above, growth = delays(UPDATES, sync, sync + 0.1)
    below, _ = delays(UPDATES, sync, sync - 0.5)
    names = ("behind", "behind_low_95", "behind_high_95")
    assert [[line[name] for name in names] for line in above] == [
        [-math.inf, -math.inf, count - 800] for count in UPDATES
    ]
    assert [[line[name] for name in names] for line in below] == [
        [math.inf, count, math.inf] for count in UPDATES
    ]
    assert math.isnan(growth[0]) and growth[1] == (-math.inf, math.inf)


def test_the_growth_of_a_delay_that_falls_below_0_is_not_biased_upward():
    """By hand, the first of 16 snapshots left out: the sum over n = 4, 6, ... 16 is 84, over
    n = 2, 3, ... 8 it is 147. Below 0 the last would be beyond the end of sync's curve."""
    updates = [50 * n for n in range(1, 17)]
    delay = np.array([*(36 - 3 * n for n in range(1, 16)), 30])
    draw, true, seen = np.random.default_rng(3), 84 / 147 - 1, 200
    found = [studied(draw, updates, delay, 5.0)[1] for _ in range(seen)]
    values, ends = np.array([v for v, _ in found]), np.array([e for _, e in found])
    assert abs(values.mean() - true) < 3 * values.std() / math.sqrt(seen)
    covered = (ends[:, 0] <= true) & (true <= ends[:, 1])
    assert abs(covered.mean() - 0.95) < 3 * math.sqrt(0.95 * 0.05 / seen)


def test_on_a_flat_stretch_the_first_time_counts():
    assert behind([10, 20, 30], np.array([0.6, 0.7, 0.7]), np.array([0.5, 0.6, 0.7]))[2] == 10


@pytest.mark.parametrize("name", STREAMS)
def test_no_final_run_has_a_seed_or_a_draw_that_rates_were_chosen_on(name):
    stream = STREAMS[name]

    def configs(tuning: bool, seeds: int):
        for seed in range(seeds):
            yield config_of(
                stream, Cell(), Rates(), start=0.0, seed=seed, train_rows=1000, tuning=tuning
            )

    tuned, final = (list(configs(*pair)) for pair in ((True, 2), (False, stream.seeds)))
    assert not {c.seed for c in tuned} & {c.seed for c in final}
    assert {c.evaluation.part for c in tuned} == {"validation"}
    assert {c.evaluation.part for c in final} == {"test"}
    if stream.is_drawn:
        draws = {c.data.name for c in final}
        assert len(draws) == stream.seeds and not draws & {c.data.name for c in tuned}


def gap_line(drift: float, loss: float, error: float, rows: int = 16) -> dict[str, float]:
    """Of the gaps' table, with what the order of losses is told from."""
    return {"rows_late": rows, "drift_of_sync": drift, "gap_to_sync": -loss, "seeds_error": error,
            "rows_error": math.nan, "seeds": 12}  # fmt: skip


def test_the_drift_of_sync_orders_the_losses_of_each_lateness():
    """By hand: of four streams two neighbours are exchanged, 1 - 6 * 2 / (4 * 15) = 0.8."""
    other_cell = gap_line(math.nan, 9e-3, 0.0)
    exchanged = [gap_line(d, loss, 0.0) for d, loss in ((1, 1e-3), (2, 3e-3), (3, 2e-3), (9, 4e-3))]
    ordered = [gap_line(d, d * 1e-3, 0.0, rows=64) for d in (1, 2, 3, 4)]
    lines = drift_hypothesis_lines([other_cell, *ordered, *exchanged])
    told = [(line["what"][-12:], line["value"], line["low_95"], line["outcome"]) for line in lines]
    assert told == [
        ("rows 16 late", pytest.approx(0.8), pytest.approx(0.8), "holds"),
        ("rows 64 late", pytest.approx(1.0), pytest.approx(1.0), "holds"),
    ]
    assert lines[0]["data"] == "4 streams" and {line["hypothesis"] for line in lines} == {"H5"}


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([gap_line(d, -d * 1e-3, 1e-6) for d in (1, 2, 3, 4)], "fails"),
        ([gap_line(d, d * 1e-3, 9e-3) for d in (1, 2, 3, 4)], "open"),
        ([gap_line(d, d * 1e-3, 0.0) for d in (1, 2, 3)], "open"),
    ],
)
def test_an_order_that_other_seeds_may_turn_is_open_and_so_is_that_of_three_streams(lines, outcome):
    assert [line["outcome"] for line in drift_hypothesis_lines(lines)] == [outcome]


def test_async_lies_on_the_grid():
    assert streams.cell_of_async(0) == Cell(rows_late=7, dense_late=7)
    assert streams.cell_of_async(4) == Cell(rows_late=39, dense_late=7)
    assert {streams.cell_of_async(0), streams.cell_of_async(4)} <= set(lateness.CELLS)


LABELS, USERS = (np.arange(400) % 3 == 0).astype(float), np.arange(400) // 4
Made = dict[tuple[Cell, Literal["own", "of sync"]], list[np.ndarray]]


@pytest.fixture
def group(tmp_path) -> tuple[Group, Made]:
    """A group with its scores, drawn; every user has four rows, and the late runs err on the same
    users, whatever their seed."""
    kinds: tuple[Literal["own", "of sync"], ...] = ("own", "of sync")
    keys = [
        *((Cell(rows_late=r, dense_late=d), kind) for r in (0, 7, 16, 64) for d in (0, 7)
          for kind in kinds),
        (Cell(batch_factor=2), "own"),
    ]  # fmt: skip
    draw = np.random.default_rng(0)
    runs: dict[Any, dict[int, Run]] = {}
    made: Made = {}
    for number, key in enumerate(keys):
        shared = draw.normal(size=100)[USERS]
        for seed in range(3):
            scores = LABELS + shared + 0.1 * draw.normal(size=400)
            point = Point(label=f"{number}-{seed}", config=TrainConfig(seed=seed))
            point.folder(tmp_path).mkdir()
            np.savez(point.folder(tmp_path) / "predictions.npz", labels=LABELS[:, None],
                     predictions=scores[:, None], groups=USERS)  # fmt: skip
            auc = roc_auc_score(LABELS, scores)
            told = {"seed": seed, "updates": 9, "tasks": {"click": {"auc": auc}}}
            runs.setdefault(key, {})[seed] = Run(point, told)
            made.setdefault(key, []).append(scores)
    rates = {cell: Rates() for cell, _ in keys}
    return Group(stream=STREAMS["tennis"], start=0.0, rates=rates, runs=runs, drifts={}), made


def delayed(patch: pytest.MonkeyPatch, low: float, high: float) -> None:
    """Give every cell this interval of its delay and of the delay's growth."""
    line = {"behind": high, "behind_low_95": low, "behind_high_95": high}
    patch.setattr(Group, "delays", lambda *_: ([line], (high, (low, high))))


@pytest.mark.parametrize(
    ("low", "high", "outcomes", "told"),
    [
        (10.0, 14.0, ["holds", "holds", "fails"], ["1.4 to 2", "0.62 to 0.88", "0.16 to 0.22"]),
        (-math.inf, 10.0, ["open", "open", "fails"], ["< 1.4", "< 0.62", "< 0.16"]),
        (-math.inf, 0.0, ["fails"] * 3, ["< 0"] * 3),
        (20.0, math.inf, ["fails", "open", "open"], ["> 2.9", "> 1.2", "> 0.31"]),
        (-math.inf, math.inf, ["open"] * 3, ["not known"] * 3),
        (math.nan, math.nan, ["open"] * 3, ["not known"] * 3),
    ],
)
def test_a_hypothesis_that_hangs_on_an_open_end_is_open(
    low, high, outcomes, told, group, tmp_path, monkeypatch
):
    """Asked is a delay of 0.5 to 2 times the lateness, of rows 7, 16 and 64 late."""
    delayed(monkeypatch, low, high)
    found = [line for line in hypothesis_lines(group[0], tmp_path) if line["hypothesis"] == "H2"]
    assert [line["outcome"] for line in found] == outcomes
    printed = table(found, {"95 %": lateness.HYPOTHESES["95 %"]}).splitlines()[2:]
    assert printed == told


def test_a_late_cell_is_paired_with_the_one_whose_rows_alone_are_late(group, tmp_path):
    """At sync's rates the rows 7 late are not there: the next later stand for them."""
    found, made = group
    runs = {k: v for k, v in found.runs.items() if k != (Cell(rows_late=7), "of sync")}
    lines = {
        (line["rows_late"], line["dense_late"], line["rates"]): line
        for line in gap_lines(replace(found, runs=runs), tmp_path)
        if line["batch"] == 128
    }
    for kind, rows in (("own", 7), ("of sync", 16)):
        both, alone = (made[Cell(rows_late=r, dense_late=d), kind] for r, d in ((7, 7), (rows, 0)))
        want, line = contrast(LABELS, (alone, both), clusters=USERS), lines[7, 7, kind]
        assert line["hybrid_rows_late"] == rows
        told = [line[f"gap_to_hybrid{end}"] for end in ("", "_half_width_95", "_rows_error")]
        assert told == pytest.approx([want.mean, want.half_width, want.rows_error])
    alone = [line for (r, d, _), line in lines.items() if not r or not d]
    assert {line["hybrid_rows_late"] for line in alone} == {None}


def test_additivity_and_the_ruler_are_held_against_other_test_users_too(
    group, tmp_path, monkeypatch
):
    delayed(monkeypatch, 1.0, 1.0)
    lines, made = hypothesis_lines(group[0], tmp_path), group[1]
    sync, weights, rows, both, ruler = (
        made[cell, "own"]
        for cell in (Cell(), Cell(dense_late=7), Cell(rows_late=16),
                     Cell(rows_late=16, dense_late=7), Cell(batch_factor=2))
    )  # fmt: skip
    wanted = {
        "rows 16 and dense 7 late, beyond the sum of both alone":
            contrast(LABELS, (weights, rows, sync, both), (-1, -1, 1, 1), USERS),
        "rows 16 late minus a doubling of the batch":
            contrast(LABELS, (ruler, rows), clusters=USERS),
    }  # fmt: skip
    for what, want in wanted.items():
        (line,) = (line for line in lines if line["what"] == what)
        ends = want.mean - want.half_width, want.mean, want.mean + want.half_width
        assert [line[name] for name in ("low_95", "value", "high_95")] == pytest.approx(ends)
        assert want.rows_error > 3 * want.seeds_error > 0


# A tiny run.

TINY_CELLS = tuple(c for c in lateness.CELLS if c.dense_late != 1 or not c.rows_late)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    out = tmp_path_factory.mktemp("lateness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lateness, "TUNING_SEEDS", 1)
        patch.setattr(lateness, "to_try", lambda tried, start, line: [] if tried else [start])
        one = streams.STREAMS["synthetic:zipf-1.4"]
        short = lateness.replace(one, updates=64, batch=32, seeds=2, starts=(0.0,))
        patch.setitem(streams.STREAMS, one.name, short)
        patch.setattr(streams, "ModelConfig", partial(ModelConfig, hidden=(8,)))
        patch.setattr(streams, "TEST_ROWS_OF_A_DRAW", 300)
        patch.setattr(streams, "SNAPSHOTS", 4)
        patch.setattr(lateness, "CELLS", TINY_CELLS)
        yield out, printed_by(lateness.run, lateness.Options(streams=(one.name,), out=out, jobs=2))


def final_auc(root: Path, label: str) -> float:
    (folder,) = root.glob(f"{label}-????????")
    return float(json.loads((folder / "summary.json").read_text())["tasks"]["click"]["auc"])


@pytest.mark.multiproc
@pytest.mark.slow
def test_every_gap_of_the_table_is_paired_by_draw(tiny):
    lines = pd.read_csv(tiny[0] / "lateness.csv")
    assert len(lines) == 2 * len(TINY_CELLS) - 1 and set(lines.seeds) == {2}
    name = "synthetic-zipf-1.4-start-0"
    for line in lines.itertuples():
        doubled = "-batch-x2" if line.batch == 64 else ""
        cell = f"rows-{line.rows_late}-dense-{line.dense_late}{doubled}"
        late, sync = (
            [final_auc(tiny[0], f"{name}-{c}-seed{seed}") for seed in range(2)]
            for c in (cell, "rows-0-dense-0")
        )
        gaps = np.subtract(late, sync)
        assert line.gap_to_sync == pytest.approx(gaps.mean(), abs=1e-9)
        assert line.test_auc == pytest.approx(np.mean(late), abs=1e-9)
        # Student's t for 1 degree of freedom, from a printed table
        assert line.gap_to_sync_half_width_95 == pytest.approx(12.706 * gaps.std(), rel=1e-3)


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_drift_is_that_of_the_rows_of_sync_from_step_0_on(tiny):
    """64 updates: rows may be 64 updates late from the first step on, and from no other."""
    config = config_of(
        streams.stream_of("synthetic:zipf-1.4"), Cell(), Rates(), start=0.0, seed=0, train_rows=0
    )
    config = replace(config, batch=32, steps=64, evaluation=EvaluationConfig())
    source = open_source(config.data.name, rows=config.data.rows and 64 * 32)
    samples = first_samples(source, "test", PROBED_SAMPLES)
    parts = assemble(config, source)
    fresh = parts.store.peek(samples)
    OrderedRun(parts).run(lag_order(config, parts.feed))
    moved = parts.store.peek(samples)
    way = sum(
        float(np.square(moved.values[name] - fresh.values[name], dtype=float)[plan.inverse].sum())
        for name, plan in moved.plans.items()
    )
    lines = pd.read_csv(tiny[0] / "lateness.csv")
    (line,) = lines[(lines.rows_late == 64) & lines.drift_of_sync.notna()].itertuples()
    assert (line.dense_late, line.rates) == (0, "of sync")
    assert line.drift_of_sync == pytest.approx(way / samples.size, rel=1e-5)
    assert lines.drift_of_sync.notna().sum() == 4 and lines.drift_of_sync.min() > 0


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_delays_gaps_are_those_of_the_snapshots(tiny):
    lines = pd.read_csv(tiny[0] / "lateness_delays.csv")
    assert set(lines.rows_late) == {4, 7, 16, 64}
    line = lines[(lines.rows_late == 16) & (lines.updates == 32)].iloc[0]

    def at_32(cell: str) -> float:
        found = []
        for folder in tiny[0].glob(f"synthetic-zipf-1.4-start-0-{cell}-seed?-????????"):
            own = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            found += [
                one["tasks"]["click"]["auc"]
                for one in own
                if one["updates"] == 32 and not one["drained"]
            ]
        return float(np.mean(found))

    assert line.gap == pytest.approx(at_32("rows-16-dense-0") - at_32("rows-0-dense-0"), abs=1e-9)


@pytest.mark.multiproc
@pytest.mark.slow
def test_every_hypothesis_of_the_plan_but_that_of_drift_has_an_outcome(tiny):
    lines = pd.read_csv(tiny[0] / "lateness_hypotheses.csv")
    assert set(lines.hypothesis) == {"H1", "H2", "H3", "H4", "H6"}, "H5 is of several streams"
    assert set(lines.outcome) <= {"holds", "fails", "open"}
    for line in lines.itertuples():
        low, high = line.low_95, line.high_95
        if line.outcome == "holds":
            assert line.asked_low <= low and high <= line.asked_high
        if line.outcome == "fails":
            assert high < line.asked_low or low > line.asked_high


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_figure_shows_the_gaps_and_the_rates_of_its_tables(tiny):
    figure = lateness_figure(*(tiny[0] / f"lateness{e}.csv" for e in ("", "_rates", "_delays")))
    along, rates, ruler = figure.axes
    delayed = pd.read_csv(tiny[0] / "lateness_delays.csv")
    (points,) = curves(along).values()
    assert sorted(points[1]) == pytest.approx(sorted(1e3 * delayed.gap))
    assert set(curves(rates)) == {"dense 0 late", "dense 1 late", "dense 7 late"}
    gaps = pd.read_csv(tiny[0] / "lateness.csv")
    (container,) = ruler.containers
    shown = sorted(container.lines[0].get_xdata())
    names = [tick.get_text() for tick in ruler.get_yticklabels()]
    assert len(shown) == len(names) == 8 and "batch twice as large, own rates" in names
    assert set(np.round(shown, 9)) <= set(np.round(1e3 * gaps.gap_to_sync, 9))
    (bars,) = container.lines[2]
    ends = {np.round(s[1][0] - s[0][0], 9) for s in bars.get_segments()}
    assert ends <= set(np.round(2e3 * gaps.gap_to_sync_half_width_95, 9))
