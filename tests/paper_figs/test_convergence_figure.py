"""The convergence figure, drawn from a small table and read back from its axes."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.auc import convergence_figure
from tests.paper_figs.read_back import bands, curves, error_bars, intervals, write_table

T_975_OF_1 = 12.7062  # Student's t for 2 seeds, from a printed table
SYNC = {0.5: (0.60, 0.62), 1.0: (0.70, 0.71)}
GAP = {0.5: (-0.010, -0.020), 1.0: (0.001, 0.003)}
SECONDS = {"sync": 40.0, "hybrid": 10.0, "xdl_sync": 400.0}


def made_up(tmp_path: Path) -> tuple[Path, Path, Path]:
    rows = []
    for data_set in ("taobao-ad", "avazu-ad"):
        for name in SECONDS if data_set == "taobao-ad" else ("sync", "hybrid"):
            for share, aucs in SYNC.items():
                for seed, auc in enumerate(aucs):
                    value = auc + (GAP[share][seed] if name == "hybrid" else 0.0)
                    row = {
                        "data_set": data_set, "title": f"shape of {data_set}; moon", "line": name,
                        "seed": seed, "samples": int(2000 * share), "drained": False,
                        "task": "click", "auc": value, "share_of_run": share,
                    }  # fmt: skip
                    other = {"task": "like", "auc": 0.9}
                    end = {"drained": True, "auc": 0.1}  # is no point of the curve
                    rows += [row, row | other, row | end]
    papers = [
        {"data_set": "taobao-ad", "line": name, "system": system, "share_of_pass": share,
         "auc": 0.6, "gap_to_sync": gap}
        for name, system, gaps in (
            ("hybrid", "Persia hybrid", (-0.002, -0.0007)),
            ("xdl_async", "XDL async", ("", -0.003)),
            ("paddle", "PaddlePaddle async", (-0.09, -0.07)),
        )
        for share, gap in zip((0.5, 0.9), gaps, strict=True)
    ]  # fmt: skip
    times = [
        {"data_set": data_set, "mode": name, "target_share": 0.95,
         "ratio_to_sync": "nan" if (data_set, name) == ("avazu-ad", "hybrid") else end_s / 400,
         "ratio_to_sync_low_95": 0.9 * end_s / 400, "ratio_to_sync_high_95": 1.2 * end_s / 400,
         "published_ratio_to_sync": 0.125 if name == "hybrid" else "nan"}
        for data_set in ("taobao-ad", "avazu-ad")
        for name, end_s in SECONDS.items()
        if (data_set, name) != ("avazu-ad", "xdl_sync")
    ]  # fmt: skip
    return (
        write_table(tmp_path / "convergence.csv", rows),
        write_table(tmp_path / "convergence_published.csv", papers),
        write_table(tmp_path / "convergence_targets.csv", times),
    )


@pytest.fixture
def figure(tmp_path: Path):
    yield convergence_figure(*made_up(tmp_path))
    plt.close("all")


def test_each_data_set_has_its_aucs_on_samples(figure: Figure):
    assert len(figure.axes) == 6
    for first in (figure.axes[0], figure.axes[1]):
        assert curves(first)["sync"] == ([1.0, 2.0], pytest.approx([0.61, 0.705]))
        assert curves(first)["hybrid"] == ([1.0, 2.0], pytest.approx([0.595, 0.707]))
        assert first.get_xlabel() == "training samples [thousands]"
    assert figure.axes[1].get_title() == "shape of avazu-ad\nmoon"
    half = T_975_OF_1 * 0.01  # two values 0.02 apart: standard error 0.01
    assert bands(figure.axes[0])[0][1.0] == pytest.approx((0.61 - half, 0.61 + half), abs=1e-5)


def test_the_time_to_sync_s_auc_is_told_over_that_of_xdl_sync_beside_the_published(figure: Figure):
    taobao, avazu = figure.axes[2:4]
    right = [(0.9 * s / 400, s / 400, 1.2 * s / 400) for s in sorted(SECONDS.values())]
    assert intervals(taobao) == [pytest.approx(one) for one in right]
    assert [(x, y) for _, x, y, _ in error_bars(taobao)] == [
        ([0.1], [3]),
        ([0.025], [2]),
        ([1], [1]),
    ]
    assert [tick.get_text() for tick in taobao.get_yticklabels()] == list(SECONDS)
    assert [y for _, _, y, _ in error_bars(avazu)] == [[3]], "hybrid did not reach it"
    assert curves(taobao)["published"] == ([0.125], [2])
    assert taobao.get_xscale() == "log" and "95% of sync's climb" in taobao.get_xlabel()
    assert taobao.get_xlabel().endswith("over xdl_sync's")
    assert avazu.get_xlabel().endswith("over sync's"), "XDL's sync has no clock there"


def test_gaps_are_paired_and_those_of_one_order_are_left_out(figure: Figure):
    shown = curves(figure.axes[4])
    assert shown["hybrid"] == ([0.5, 1.0], pytest.approx([-15.0, 2.0]))
    assert "sync" not in shown and "xdl_sync" not in shown
    half = T_975_OF_1 * 5.0  # gaps -10 and -20: standard error 5
    assert bands(figure.axes[4])[0][0.5] == pytest.approx((-15 - half, -15 + half), abs=1e-2)


def test_published_gaps_stand_in_grey_at_their_share_of_the_pass(figure: Figure):
    shown = curves(figure.axes[4])
    assert shown["published Persia hybrid"] == ([0.5, 0.9], pytest.approx([-2.0, -0.7]))
    assert shown["published XDL async"] == ([0.9], pytest.approx([-3.0])), "the rest is not plotted"
    assert not any("Paddle" in label for label in shown)
    assert not any(label.startswith("published") for label in curves(figure.axes[5]))
    grey = [line for line in figure.axes[4].lines if str(line.get_label()).startswith("published")]
    assert {line.get_color() for line in grey} == {"0.6"}


def test_the_title_says_how_many_seeds_and_that_published_data_differ(figure: Figure):
    assert "2 paired seeds" in figure.get_suptitle()
    assert "of other data" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(SECONDS)
