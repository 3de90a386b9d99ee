"""Claims judged on small hand-made tables; the expected numbers are worked out by hand."""

from __future__ import annotations

import math

import pytest

from experiments.paper.auc_evidence import auc_gaps
from experiments.paper.claims import claim_records, judged_claims
from experiments.paper.evidence import Table, table
from experiments.paper.rate_evidence import (
    deviations,
    efficiencies,
    plotted_deviations,
    plotted_efficiencies,
    plotted_ratio,
    simulated_ratio,
)
from experiments.paper.verdicts import Found, Range, judged, together


def found(low: float, high: float, fitted: bool = False) -> Found:
    return Found(label="", value=(low + high) / 2, low=low, high=high, fitted=fitted)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.0, 2.0, "supported"),  # the ends belong to the range
        (0.5, 0.99, "contradicted"),
        (2.01, 9.0, "contradicted"),
        (0.5, 1.0, "undecided"),  # they touch
        (0.0, 3.0, "undecided"),
        (math.nan, math.nan, "undecided"),  # one seed
    ],
)
def test_an_interval_is_judged_by_where_it_lies(low, high, verdict):
    assert judged(Range(1.0, 2.0), found(low, high)) == verdict


def test_what_was_fitted_supports_nothing_but_may_contradict():
    assert judged(Range(1.0, 2.0), found(1.4, 1.6, fitted=True)) == "undecided"
    assert judged(Range(1.0, 2.0), found(3.0, 4.0, fitted=True)) == "contradicted"


def test_a_claim_is_as_good_as_its_worst_part():
    assert together(["supported", "contradicted", "undecided"]) == "contradicted"
    assert together(["supported", "undecided"]) == "undecided"
    assert together(["supported", "supported"]) == "supported"
    assert together([]) == "undecided"


def gap(
    mode: str, tau: int, mean: float, half: object, task: str = "click", data: str = "clicks"
) -> dict[str, str]:
    return {
        "data": data, "mode": mode, "tau": str(tau), "task": task, "seeds": "5",
        "gap_to_sync": str(mean), "gap_to_sync_half_width_95": str(half),
    }  # fmt: skip


GAPS = [gap("sync", 0, 0, 0), gap("hybrid", 4, -2e-4, 3e-4), gap("hybrid", 64, -9e-3, 1e-3),
        gap("async", 4, -7e-3, 1e-3)]  # fmt: skip


def on_three(mode: str, mean: float, half: object) -> list[dict[str, str]]:
    """The same gap on as many data sets as support a claim of every one."""
    return [gap(mode, 4, mean, half, data=data) for data in ("clicks", "census", "flights")]


def rate(series: str, gpus: int, published: object, model: float, **other: str) -> dict[str, str]:
    error = "" if published == "" else model / float(str(published)) - 1
    return {"series": series, "label": f"{gpus} GPUs", "gpus": str(gpus), "kind": "prediction",
            "published": str(published), "model": str(model), "note": "",
            "error": str(error)} | other  # fmt: skip


RATES = [
    rate("taobao-ad Persia hybrid", 1, 1000, 1000, note="plotted as half of 2 GPUs"),
    rate("taobao-ad Persia hybrid", 2, 20000, 20000),
    rate("taobao-ad Persia hybrid", 8, 72000, 80000),
    rate("taobao-ad Persia hybrid", 1, 30000, 30000, note="dashed bar"),
    rate("taobao-ad XDL sync", 8, 9000, 10000),
    rate("taobao-ad XDL async", 8, 10000, 10000),
]
SIZES = [
    rate("100T cluster hybrid", 64, 1_900_000, 2_000_000, label="6.25T"),
    rate("100T cluster hybrid", 64, 2_100_000, 2_000_000, label="100T"),
    rate("100T cluster sync", 64, 700_000, 700_000, label="100T", kind="fit"),
]


def tables(**rows: list[dict[str, str]]):
    return lambda name: (
        Table(rows[name.removesuffix(".csv")], "this run", "study")
        if name.removesuffix(".csv") in rows
        else None
    )


def claim(key: str, **rows: list[dict[str, str]]):
    return next(c for c in judged_claims(tables(**rows)) if c.key == key)


def test_gaps_are_those_of_the_default_bound_with_their_interval():
    (only,) = auc_gaps(GAPS, "hybrid")
    assert only.label == "clicks, click, tau 4" and only.n == 5
    assert (only.low, only.value, only.high) == pytest.approx((-5e-4, -2e-4, 1e-4))


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (-2e-4, 3e-4, "supported"),  # -0.5 to 0.1 thousandths
        (2e-3, 5e-4, "supported"),  # better than sync is within the claim
        (-8e-4, 5e-4, "undecided"),
        (-3e-3, 1e-3, "contradicted"),
        (-2e-4, "nan", "undecided"),
    ],
)
def test_hybrid_is_judged_against_one_thousandth(mean, half, verdict):
    assert claim("hybrid-auc", demo=on_three("hybrid", mean, half)).verdict == verdict


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (-7.5e-3, 1e-3, "supported"),
        (-4e-3, 2e-3, "undecided"),
        (-1e-3, 2e-3, "contradicted"),  # 2 becomes 3.2 thousandths for three intervals at once
        (-15e-3, 2e-3, "contradicted"),
    ],
)
def test_async_is_judged_against_five_to_ten_thousandths(mean, half, verdict):
    assert claim("async-auc", demo=on_three("async", mean, half)).verdict == verdict


def test_one_data_set_that_contradicts_decides():
    rows = [gap("hybrid", 4, 0, 1e-4), gap("hybrid", 4, -5e-3, 1e-3, task="view")]
    assert claim("hybrid-auc", demo=rows).verdict == "contradicted"


def test_the_study_of_many_data_sets_goes_before_the_demo():
    rows = [
        gap("hybrid", 4, 0, 1e-4) | {"rates": rates, "steps": "1000"}
        for rates in ("fixed", "tuned")
    ]
    rows.append(gap("hybrid", 4, -1, 0) | {"rates": "fixed", "steps": "999"})
    told = claim("hybrid-auc", gap_study=rows, demo=[gap("hybrid", 4, -1, 0)])
    labels = [found.label for part in told.parts for found in part.found]
    assert labels == [f"clicks, click, tau 4, {rates} rates" for rates in ("fixed", "tuned")]
    assert told.verdict == "undecided"  # one data set is not every one


def test_a_quick_look_is_no_evidence_about_trained_models():
    short = [gap("hybrid", 4, -1, 0) | {"rates": "fixed", "steps": "200"}]
    told = claim("hybrid-auc", gap_study=short, demo=on_three("hybrid", 0, 1e-4))
    assert told.verdict == "supported"
    assert [table.rows for table in told.tables] == [on_three("hybrid", 0, 1e-4)]


@pytest.mark.parametrize("sets", [2, 3])
def test_what_is_claimed_of_every_data_set_takes_three_to_support(sets):
    rows = on_three("hybrid", 0, 1e-4)[:sets]
    assert claim("hybrid-auc", demo=rows).verdict == ("supported" if sets == 3 else "undecided")


def test_one_of_many_intervals_may_miss_by_chance():
    """-1.2 thousandths, +- 0.1 alone: outside; +- 0.25 among 20 of five seeds: not decided."""
    far = gap("hybrid", 4, -1.2e-3, 1e-4, task="far")
    close = [gap("hybrid", 4, 0, 1e-4, task=str(n), data=str(n % 3)) for n in range(19)]
    assert claim("hybrid-auc", demo=[far]).verdict == "contradicted"
    assert claim("hybrid-auc", demo=[far, *close]).verdict == "undecided"


def test_without_tables_nothing_is_decided_by_what_was_found():
    for one in judged_claims(tables()):
        assert one.verdict == "undecided" and one.tables == ()


def test_a_published_ratio_has_the_error_of_reading_both_bars():
    (told,) = plotted_ratio(RATES, "taobao-ad Persia hybrid", "taobao-ad XDL async", 8)
    # The bars of the public sets were read to +-150 samples/s.
    assert told.value == pytest.approx(7.2)
    assert (told.low, told.high) == pytest.approx((71850 / 10150, 72150 / 9850))


def test_a_simulated_ratio_has_the_largest_errors_of_both_series():
    (told,) = simulated_ratio(RATES, "taobao-ad Persia hybrid", "taobao-ad XDL sync", 8)
    # Each series is off by 10/9 at most, so the ratio of 8 may be off by (10/9)^2 either way.
    assert told.value == pytest.approx(8.0)
    assert (told.low, told.high) == pytest.approx((8 * 0.81, 8 / 0.81))
    assert not told.fitted


def test_fitted_and_predicted_points_have_errors_of_their_own():
    fitted = rate("taobao-ad XDL sync", 4, 1000, 9000, kind="fit")
    args = ("taobao-ad Persia hybrid", "taobao-ad XDL sync", 8)
    assert simulated_ratio([*RATES, fitted], *args) == simulated_ratio(RATES, *args)


def test_only_points_that_were_all_fitted_to_count_as_fitted():
    sizes = [row | {"kind": "fit"} for row in SIZES]
    args = ("100T cluster hybrid", "100T cluster sync", 64)
    assert simulated_ratio(sizes, *args)[0].fitted
    assert not simulated_ratio(SIZES, *args)[0].fitted


def test_the_ratio_at_100_t_is_of_the_largest_size():
    told = plotted_ratio(SIZES, "100T cluster hybrid", "100T cluster sync", 64)
    assert told[0].value == pytest.approx(3.0)


def test_swapped_speed_ups_are_contradicted_by_the_bars():
    # 8.0 times sync and 7.2 times async, where the text has 7.12 and 8.4.
    xdl = claim("xdl", scale_workers=RATES)
    first, second = xdl.parts
    assert judged(first.claimed, first.plots[0]) == "contradicted"
    assert judged(second.claimed, second.plots[0]) == "contradicted"
    assert xdl.plots_verdict == "contradicted"


def test_efficiency_is_speed_up_over_gpus_and_the_halved_bar_is_not_used():
    plotted = {f.label: f.value for f in plotted_efficiencies(RATES)}
    simulated = {f.label: f.value for f in efficiencies(RATES)}
    series = "taobao-ad Persia hybrid"
    assert plotted == pytest.approx(
        {f"{series}, 1 to 8 GPUs": 72 / 30 / 8, f"{series}, 2 to 8 GPUs": 72 / 20 / 4}
    )
    assert simulated[f"{series}, 2 to 8 GPUs"] == pytest.approx(1.0)


def test_deviations_are_over_the_mean_of_the_sizes():
    assert [f.value for f in plotted_deviations(SIZES)] == pytest.approx([0.95, 1.05])
    assert [f.value for f in deviations(SIZES)] == [1.0, 1.0]
    low = plotted_deviations(SIZES)[0].low
    assert low == pytest.approx((1_900_000 - 15_000) / 2_000_000)


def test_the_numbers_of_the_claims_are_all_in_their_table():
    lines = claim_records(judged_claims(tables(demo=GAPS, scale_workers=RATES)))
    own = [line for line in lines if line["claim"] == "hybrid-auc" and line["of"] == "found"]
    assert [(x["value"], x["verdict"], x["seeds"]) for x in own] == [(-2e-4, "supported", 5)]
    assert {line["claim"] for line in lines} >= {"hybrid-auc", "async-auc", "xdl", "linear"}
    assert "python -m experiments study (this run)" in own[0]["command"]


def test_the_stored_tables_answer_where_nothing_has_run(tmp_path):
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "demo.csv").write_text("mode,tau\nhybrid,4\n")
    read = table("demo.csv", tmp_path / "none", stored)
    assert read is not None and read.source == "stored"
    assert read.rows == [{"mode": "hybrid", "tau": "4"}]
    assert table("other.csv", tmp_path / "none", stored) is None
    (stored / "index.csv").write_text("file,date,commit\ndemo.csv,2026-01-02,abc\n")
    read = table("demo.csv", tmp_path / "none", stored)
    assert read is not None and read.source == "stored: 2026-01-02, commit abc"
