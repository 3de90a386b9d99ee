"""Claims judged on small hand-made tables; the expected numbers are worked out by hand."""

from __future__ import annotations

import math

import pytest
from scipy.stats import t

from experiments.paper.claims import (
    async_gaps,
    at_chosen_rates,
    claim_records,
    hybrid_gaps,
    judged_claims,
    retained_by_hybrid,
)
from experiments.paper.rate_evidence import deviations, efficiencies, ratio
from experiments.paper.record import Table, table
from experiments.paper.verdicts import (
    FITTED,
    PREDICTED,
    Finding,
    Range,
    Verdict,
    judged,
    together,
)  # fmt: skip


def found(low: float, high: float, no_evidence: str = "") -> Finding:
    value = (low + high) / 2
    return Finding(label="", value=value, low=low, high=high, no_evidence=no_evidence)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.0, 2.0, "supported"),  # the ends belong to the range
        (0.5, 0.99, "contradicted"),
        (2.01, 9.0, "contradicted"),
        (0.5, 1.0, "none possible"),  # they touch, and no seeds would move it
        (0.0, 3.0, "none possible"),
    ],
)
def test_an_interval_is_judged_by_where_it_lies(low, high, word):
    assert judged(Range(1.0, 2.0), found(low, high)).word == word


def test_what_was_fitted_neither_supports_nor_contradicts():
    for low, high in ((1.4, 1.6), (3.0, 4.0)):
        verdict = judged(Range(1.0, 2.0), found(low, high, "fitted to it"))
        assert str(verdict) == "no independent evidence possible: fitted to it"


def of_seeds(value: float, n: int, seeds_error: float, rows_error: float) -> Finding:
    """An interval wide enough to be open."""
    return Finding(
        label="", value=value, low=value - 1, high=value + 1, n=n, seeds_error=seeds_error,
        rows_error=rows_error,
    )  # fmt: skip


def test_it_says_how_many_more_seeds_would_decide():
    verdict = judged(Range(-1.0, math.inf), of_seeds(-0.5, 5, 0.4, 0.0))
    # 0.4 sqrt(5) t(n-1) / sqrt(n) <= 0.5: n = 15 gives 0.4953, n = 14 gives 0.5164.
    assert str(verdict) == "needs 10 more seeds"
    assert judged(Range(-1.0, 1.0), of_seeds(-1.5, 5, 0.4, 0.0)) == verdict, "outside, as far"
    assert judged(Range(0.0, 1.0), of_seeds(0.5, 1, math.nan, math.nan)).seeds == 1


def test_a_ratio_over_seeds_needs_as_many_more_as_its_interval_says():
    late, sync = (Finding.around(v, h, label="", n=5) for v, h in ((10.5, 1.0), (10.0, 0.0)))
    # 0.1 t(n-1) sqrt(5) / (t(4) sqrt(n)) <= 0.05: n = 13 gives 0.0487, n = 12 gives 0.0512.
    assert str(judged(Range(-math.inf, 1.1), late.over(sync, ""))) == "needs 8 more seeds"


def test_no_seed_takes_away_what_test_rows_leave_open():
    verdict = judged(Range(-1.0, math.inf), of_seeds(-0.5, 5, 0.4, 0.3))  # 1.96 x 0.3 > 0.5
    assert verdict.word == "none possible" and "test samples" in verdict.why


def test_an_interval_is_widened_by_the_degrees_of_freedom_that_it_was_made_with():
    """A gap of the stored treatments, among ten: test samples that seeds share bring freedom."""
    seeds, rows = 0.193, 0.194
    freedom = 4 * ((seeds**2 + rows**2) / seeds**2) ** 2  # Hillis, five seeds
    for law, error, known in (
        (t(freedom), math.hypot(seeds, rows), {"seeds_error": seeds, "rows_error": rows}),
        (t(4), 0.2, {}),  # an interval over seeds alone
    ):
        gap = Finding.around(0.93, law.ppf(0.975) * error, label="", n=5, **known)
        ends = [0.93 + law.ppf(share) * error for share in (0.0025, 0.9975)]
        assert [gap.widened(10).low, gap.widened(10).high] == pytest.approx(ends)
    nothing = Finding.around(0.0, 0.0, label="", n=5, seeds_error=0.0)
    assert nothing.widened(10) == Range(0.0, 0.0)


def test_of_a_gap_without_predictions_seeds_alone_decide():
    claimed = Range(-1.0, math.inf)
    kept, lost = (judged(claimed, of_seeds(-0.5, 5, 0.4, rows)) for rows in (0.0, math.nan))
    assert lost == kept and kept.word == "more seeds"


def test_a_claim_is_as_good_as_its_worst_part():
    yes, no, none = (Verdict(word) for word in ("supported", "contradicted", "none possible"))
    few, many = (Verdict("more seeds", seeds=n) for n in (3, 8))
    assert together([yes, no, none, few]) == no
    assert together([yes, none, few]).word == "none possible"
    assert together([few, yes, many]) == many
    assert together([yes, yes]) == yes
    assert str(together([])) == "no independent evidence possible: no table yet"


def gap(
    rows_late: int, dense_late: int, mean: float, half: object, task: str = "click",
    data: str = "clicks", rates: str = "own", **other: str,
) -> dict[str, str]:  # fmt: skip
    """A line of the study of lateness."""
    error = math.nan if half == "" else float(str(half)) / 2.776  # t(4)
    return {
        "data": data, "task": task, "optimizer_start": "0.0", "rows_late": str(rows_late),
        "dense_late": str(dense_late), "rates": rates, "batch": "128", "seeds": "5",
        "updates": "1305", "redrawn": "False", "chosen": "True", "order": "time",
        "window": "test", "gap_to_sync": str(mean),
        "gap_to_sync_half_width_95": str(half), "seeds_error": str(error), "rows_error": "0.0",
    } | other  # fmt: skip


def beside(rows_late: object, mean: float = math.nan, half: float = math.nan) -> dict[str, str]:
    """What a line has of the hybrid that it is held against; both errors are made up."""
    return {"hybrid_rows_late": str(rows_late), "gap_to_hybrid": str(mean),
            "gap_to_hybrid_half_width_95": str(half), "gap_to_hybrid_seeds_error": "1e-05",
            "gap_to_hybrid_rows_error": "2e-05"}  # fmt: skip


SETS = ("clicks", "census", "flights")


def on_three(
    rows_late: int, dense_late: int, mean: float, half: object, **other: str
) -> list[dict[str, str]]:
    """The same gap on as many data sets as support a claim of every one."""
    return [gap(rows_late, dense_late, mean, half, data=data, **other) for data in SETS]


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


def test_of_hybrid_the_latest_rows_up_to_16_stand_for_it():
    rows = [gap(r, 0, -1e-4 * r, 1e-4) for r in (0, 4, 7, 16, 64)] + [gap(16, 7, -1, 1e-4)]
    (only,) = hybrid_gaps(rows)
    assert only.label == "clicks, click, 16 / 0 updates late" and only.n == 5
    assert (only.low, only.value, only.high) == pytest.approx((-1.7e-3, -1.6e-3, -1.5e-3))
    assert hybrid_gaps(rows[:3])[0].label == "clicks, click, 7 / 0 updates late"


def test_of_async_rows_and_dense_weights_are_late_as_at_tau_0_and_4():
    rows = [gap(r, d, 0, 1e-4) for r in (0, 7, 39, 64) for d in (0, 1, 7)]
    assert [f.label.split(", ")[2] for f in async_gaps(rows)] == [
        "7 / 7 updates late", "39 / 7 updates late",
    ]  # fmt: skip


def test_hybrid_is_held_against_async_whose_rows_are_no_later():
    """By the study's own contrast: two gaps to one sync are not independent."""
    rows = [gap(7, 0, -1e-3, 3e-4), gap(64, 0, -3e-3, 4e-4), gap(7, 1, -1e-3, 3e-4, **beside(7)),
            gap(7, 7, -2e-3, 4e-4, **beside(7, -1.1e-3, 2e-4)),
            gap(39, 7, -2.5e-3, 3e-4, **beside(64, 0.5e-3, 3e-4))]  # fmt: skip
    one, other = retained_by_hybrid([*rows, gap(39, 7, -1e-3, 3e-4, task="like", **beside(""))])
    assert (one.label, other.label) == (
        "clicks, click, 7 / 0 minus 7 / 7", "clicks, click, 64 / 0 minus 39 / 7",
    )  # fmt: skip
    assert (one.low, one.value, one.high) == pytest.approx((0.9e-3, 1.1e-3, 1.3e-3))
    assert (other.low, other.value, other.high) == pytest.approx((-0.8e-3, -0.5e-3, -0.2e-3))
    assert (one.n, one.seeds_error, one.rows_error) == (5, 1e-5, 2e-5)
    assert retained_by_hybrid([gap(7, 0, 0, 1e-4), gap(7, 7, 0, 1e-4)]) == (), "of an older version"


def test_only_real_data_at_own_rates_with_the_plain_batch_count():
    rows = [
        gap(16, 0, 0, 1e-4), gap(16, 0, -1, 0, chosen="False"),
        gap(16, 0, -1, 0, order="shuffled"), gap(16, 0, -1, 0, window="origin-1"),
        gap(16, 0, -1, 0, redrawn="True", data="synthetic:zipf-1.4"),
        gap(16, 0, -1, 0, optimizer_start="0.01"), gap(16, 0, -1, 0, batch="256"),
        gap(16, 0, -1, 0, updates="326", batch="64"),
    ]  # fmt: skip
    _, own = at_chosen_rates(tables(lateness=rows))
    assert own == rows[:1]


def test_without_the_study_the_demo_stands_with_async_at_its_own_rate():
    rows = [
        gap(r, d, 0, 1e-4) | {"mode": mode, "lr": lr}
        for mode, r, d, lr in (
            ("sync", 0, 0, "0.001"), ("hybrid", 7, 0, "0.001"), ("hybrid", 0, 7, "0.001"),
            ("async", 7, 7, "0.001"), ("async", 7, 7, "0.00025"),
        )
    ]  # fmt: skip
    drawn = [gap(16, 0, -1, 0, redrawn="True", data="synthetic:zipf-1.4")]  # of a quick report
    for others in ({}, {"lateness": drawn}):
        table, own = at_chosen_rates(tables(demo=rows, **others))
        assert own == [rows[1], rows[2], rows[4]] and table.rows is rows
    synthetic = [row | {"data": "synthetic"} for row in rows]
    assert at_chosen_rates(tables(demo=synthetic))[1] == []


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [
        (-2e-4, 3e-4, "supported"),  # -0.5 to 0.1 thousandths
        (2e-3, 5e-4, "supported"),  # better than sync is within the claim
        (-8e-4, 5e-4, "more seeds"),
        (-3e-3, 1e-3, "contradicted"),
        (-2e-4, "", "more seeds"),
    ],
)
def test_hybrid_is_judged_against_one_thousandth(mean, half, word):
    assert claim("hybrid-auc", lateness=on_three(16, 0, mean, half)).verdict.word == word


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [
        (-7.5e-3, 1e-3, "supported"),
        (-4e-3, 2e-3, "more seeds"),
        (-1e-3, 2e-3, "contradicted"),  # 2 becomes 3.2 thousandths for three intervals at once
        (-15e-3, 2e-3, "contradicted"),
    ],
)
def test_async_is_judged_against_five_to_ten_thousandths(mean, half, word):
    assert claim("async-auc", lateness=on_three(7, 7, mean, half)).verdict.word == word


def test_the_central_claim_is_that_hybrid_keeps_what_async_loses():
    def kept(mean: float):
        return claim("kept", lateness=on_three(7, 7, 0, 1e-4, **beside(7, mean, 1e-3)))

    assert (kept(-3e-3).verdict.word, kept(-3e-3).plots_verdict.word) == ("supported",) * 2
    assert kept(3e-3).verdict.word == "contradicted"


def test_the_more_asynchronous_loses_more():
    """Of -1 and -6 thousandths with errors of 0.3 each, the difference is -5 with an error of
    0.3 sqrt(2), whose variance has as many degrees of freedom as one of them."""

    def more(mean: float) -> Finding:
        small = {"seeds_error": "3e-4", "rows_error": "0"}
        rows = [*on_three(7, 7, -1e-3, 1e-3, **small), *on_three(39, 7, mean, 1e-3, **small)]
        return claim("more-async", lateness=rows)

    lost = more(-6e-3)
    assert (lost.verdict.word, lost.plots_verdict.word) == ("supported", "supported")
    assert more(4e-3).verdict.word == "contradicted"
    (number, *_) = lost.parts[0].evidence
    half_width = t.ppf(0.975, number.n - 1) * 3e-4 * math.sqrt(2)
    assert number.value == pytest.approx(-5e-3)
    assert number.high - number.value == pytest.approx(half_width)


def test_a_hundred_thousandth_on_private_data_cannot_be_told():
    rows = [gap(16, 0, 0, 1e-3, rows_error="2e-4")]
    verdict = claim("hybrid-kwai", lateness=rows).verdict
    assert verdict.word == "none possible" and "20 times the claim" in verdict.why


def test_one_data_set_that_contradicts_decides():
    rows = [gap(16, 0, 0, 1e-4), gap(16, 0, -5e-3, 1e-3, task="view")]
    assert claim("hybrid-auc", lateness=rows).verdict.word == "contradicted"


@pytest.mark.parametrize("sets", [2, 3])
def test_what_is_claimed_of_every_data_set_takes_three_to_support(sets):
    verdict = claim("hybrid-auc", lateness=on_three(16, 0, 0, 1e-4)[:sets]).verdict
    assert verdict.word == ("supported" if sets == 3 else "none possible")
    assert ("1 more" in verdict.why) == (sets == 2)


def test_one_of_many_intervals_may_miss_by_chance():
    """-1.2 thousandths, +- 0.1 alone: outside; +- 0.25 among 20 of five seeds: not decided."""
    far = gap(16, 0, -1.2e-3, 1e-4, task="far")
    close = [gap(16, 0, 0, 1e-4, task=str(n), data=str(n % 3)) for n in range(19)]
    assert claim("hybrid-auc", lateness=[far]).verdict.word == "contradicted"
    assert claim("hybrid-auc", lateness=[far, *close]).verdict.word != "contradicted"


def test_without_tables_nothing_but_arithmetic_is_decided():
    for one in judged_claims(tables()):
        word = "supported" if one.key == "capacity" else "none possible"
        assert (one.verdict.word, one.tables) == (word, ())


def test_a_table_without_a_run_that_counts_is_not_called_missing():
    drawn = [gap(16, 0, -1, 0, redrawn="True", data="synthetic:zipf-1.4")]
    verdict = claim("hybrid-auc", lateness=drawn).verdict
    assert verdict == Verdict("none possible", why="its tables lack it")


def test_100_trillion_parameters_fit_as_float16_by_arithmetic():
    values, rows = (part.evidence[0] for part in claim("capacity").parts)
    assert values.value == pytest.approx(200 / 360)
    # 265 to 280 TB of 322: two bytes a parameter and 83 to 103 a row of 128.
    assert (rows.low, rows.high) == pytest.approx((265 / 322, 280 / 322), rel=5e-3)


def test_hybrid_converges_as_fast_as_sync_at_syncs_step():
    rows = [
        {"case": case, "updates": "512", "batch": "256", "mode": mode, "tau": tau, "seeds": "10",
         "alpha": "0.1", "measured": "1.0", "measured_half_width_95": "0.01",
         "measured_at_sync_step": at_sync, "measured_at_sync_step_half_width_95": "0.01"}
        for case, late in (("cold", "1.0"), ("hot", "1.5"))
        for mode, tau, at_sync in (("sync", "0", "1.0"), ("hybrid", "4", late))
    ]  # fmt: skip
    told = claim("as-fast", convergence_bound=rows)
    assert [f.value for f in told.parts[0].evidence] == [1.0, 1.5]
    assert told.verdict.word == "contradicted"
    assert claim("as-fast", convergence_bound=rows[:2]).verdict.word == "supported"


def test_beside_async_hybrid_has_the_published_ratio():
    rows = [rate("kwai-video hybrid", 64, 402000, 1.0), rate("kwai-video async", 64, 588000, 1.0)]
    told = claim("beside-async", scale_workers=rows)
    assert told.parts[0].plots[0].value == pytest.approx(1 / 1.46, rel=5e-3)
    assert told.plots_verdict.word == "contradicted"


def test_a_claim_of_two_parts_is_not_supported_by_one():
    bars = [rate(f"kwai-video {mode}", 64, 400_000, 400_000) for mode in ("hybrid", "async")]
    beside = claim("beside-async", scale_workers=bars)
    assert [len(part.plots) for part in beside.parts] == [1, 0]
    assert beside.plots_verdict == Verdict("not decided", why="none of them shows it")


def test_a_published_ratio_has_the_error_of_reading_both_bars():
    (told,) = ratio("plots", RATES, "taobao-ad Persia hybrid", "taobao-ad XDL async", 8)
    # The bars of the public sets were read to +-150 samples/s.
    assert told.value == pytest.approx(7.2)
    assert (told.low, told.high) == pytest.approx((71850 / 10150, 72150 / 9850))


def test_a_simulated_ratio_has_the_largest_errors_of_both_series():
    (told,) = ratio("evidence", RATES, "taobao-ad Persia hybrid", "taobao-ad XDL sync", 8)
    # Each series is off by 10/9 at most, so the ratio of 8 may be off by (10/9)^2 either way.
    assert told.value == pytest.approx(8.0)
    assert (told.low, told.high) == pytest.approx((8 * 0.81, 8 / 0.81))
    assert told.no_evidence == PREDICTED


def test_fitted_and_predicted_points_have_errors_of_their_own():
    fitted = rate("taobao-ad XDL sync", 4, 1000, 9000, kind="fit")
    args = ("taobao-ad Persia hybrid", "taobao-ad XDL sync", 8)
    assert ratio("evidence", [*RATES, fitted], *args) == ratio("evidence", RATES, *args)


def test_only_points_that_were_all_fitted_to_count_as_fitted():
    sizes = [row | {"kind": "fit"} for row in SIZES]
    args = ("100T cluster hybrid", "100T cluster sync", 64)
    assert ratio("evidence", sizes, *args)[0].no_evidence == FITTED
    assert ratio("evidence", SIZES, *args)[0].no_evidence == PREDICTED


def test_the_ratio_at_100_t_is_of_the_largest_size():
    told = ratio("plots", SIZES, "100T cluster hybrid", "100T cluster sync", 64)
    assert told[0].value == pytest.approx(3.0)


def test_swapped_speed_ups_are_contradicted_by_the_bars():
    # 8.0 times sync and 7.2 times async, where the text has 7.12 and 8.4.
    xdl = claim("xdl", scale_workers=RATES)
    first, second = xdl.parts
    assert judged(first.claimed, first.plots[0]).word == "contradicted"
    assert judged(second.claimed, second.plots[0]).word == "contradicted"
    assert xdl.plots_verdict.word == "contradicted" and "swapped" in xdl.says


def test_efficiency_is_speed_up_over_gpus_and_the_halved_bar_is_not_used():
    plotted = {f.label: f.value for f in efficiencies("plots", RATES)}
    simulated = {f.label: f.value for f in efficiencies("evidence", RATES)}
    series = "taobao-ad Persia hybrid"
    assert plotted == pytest.approx(
        {f"{series}, 1 to 8 GPUs": 72 / 30 / 8, f"{series}, 2 to 8 GPUs": 72 / 20 / 4}
    )
    assert simulated[f"{series}, 2 to 8 GPUs"] == pytest.approx(1.0)


def test_deviations_are_over_the_mean_of_the_sizes():
    assert [f.value for f in deviations("plots", SIZES)] == pytest.approx([0.95, 1.05])
    assert [f.value for f in deviations("evidence", SIZES)] == [1.0, 1.0]
    low = deviations("plots", SIZES)[0].low
    assert low == pytest.approx((1_900_000 - 15_000) / 2_000_000)


def test_the_numbers_of_the_claims_are_all_in_their_table():
    lines = claim_records(
        judged_claims(tables(lateness=[gap(16, 0, -2e-4, 3e-4)], scale_workers=RATES))
    )
    own = [line for line in lines if line["claim"] == "hybrid-auc" and line["of"] == "found here"]
    assert [(x["value"], x["verdict"], x["seeds"]) for x in own] == [(-2e-4, "supported", 5)]
    assert {line["claim"] for line in lines} >= {"hybrid-auc", "async-auc", "xdl", "linear"}
    assert "persia-experiments study (this run)" in own[0]["command"]


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
