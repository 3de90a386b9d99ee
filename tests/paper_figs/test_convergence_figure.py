"""The convergence figure, drawn from a small table and read back from its axes."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.auc import convergence_figure
from tests.paper_figs.read_back import error_bars, intervals, write_table

T_975_OF_1 = 12.7062  # Student's t for 2 seeds, from a printed table
SYNC = {0.5: (0.60, 0.62), 1.0: (0.70, 0.71)}
GAP = {0.5: (-0.010, -0.020), 1.0: (0.001, 0.003)}
END = (-0.004, 0.002)
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
                    rows += [row, row | other]
                    if share == 1.0:  # is no point of the curve
                        late = END[seed] if name == "hybrid" else 0.0
                        rows.append(row | {"drained": True, "auc": 0.8 + late})
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


def test_the_end_shows_paired_gaps_beside_the_published_and_what_has_syncs_own_order(
    figure: Figure,
):
    lost = figure.axes[0]
    half = T_975_OF_1 * 3.0  # gaps -4 and 2: standard error 3
    assert intervals(lost) == [pytest.approx((-1 - half, -1, -1 + half))] * 2
    names = [text.get_text() for text in lost.get_yticklabels()]
    assert names == ["sync", "hybrid", "xdl_sync", "sync", "hybrid"]
    heights = dict(zip(lost.get_yticks(), names, strict=True))
    own_order = [line for line in lost.lines if line.get_label() == "sync's own order"]
    assert [heights[line.get_ydata()[0]] for line in own_order] == ["sync", "xdl_sync", "sync"]
    assert {line.get_xdata()[0] for line in own_order} == {0.0}
    [cross] = [line for line in lost.lines if line.get_label() == "published"]
    assert cross.get_xdata()[0] == pytest.approx(-0.7)
    assert heights[cross.get_ydata()[0]] == "hybrid" and cross.get_ydata()[0] < 2
    assert {text.get_text() for text in lost.texts} == {
        "shape of taobao-ad, moon", "shape of avazu-ad, moon"
    }  # fmt: skip


def test_the_time_to_sync_s_auc_is_over_that_of_xdl_sync_beside_the_published(figure: Figure):
    lost, time, *_ = figure.axes
    heights = lost.get_yticks()
    right = [(0.9 * s / 400, s / 400, 1.2 * s / 400) for s in sorted(SECONDS.values())]
    taobao = [one for one in error_bars(time) if one[2][0] in heights[:3]]
    assert sorted(x[0] for _, x, _, _ in taobao) == [
        pytest.approx(middle) for _, middle, _ in right
    ]
    assert [one for one in intervals(time) if one[1] == 1.0] == [pytest.approx(right[-1])]
    avazu = [y for _, _, (y,), _ in error_bars(time) if y in heights[3:]]
    assert avazu == [heights[3]], "hybrid did not reach it"
    [cross] = [line for line in time.lines if line.get_marker() == "x"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (0.125, heights[1])
    assert time.get_xscale() == "log" and "95% of sync's climb" in time.get_title()
    assert [text.get_text() for text in time.get_yticklabels()] == [""] * 5


def test_hybrids_gap_is_followed_along_the_run_paired_by_seed(figure: Figure):
    along = figure.axes[2:]
    assert [axes.get_title() for axes in along] == [
        "shape of taobao-ad\nmoon", "shape of avazu-ad\nmoon"
    ]  # fmt: skip
    half = T_975_OF_1 * 5.0  # gaps -10 and -20: standard error 5
    for axes in along:
        [(_, x, y, ends)] = error_bars(axes)
        low, high = axes.get_ylim()
        assert low < -15 - half and high > 2, "no point is cut off"
        assert x == [0.5, 1.0]
        assert y == pytest.approx([-15.0, 2.0])
        assert ends[0] == pytest.approx((-15 - half, -15 + half))


def test_the_title_says_how_many_seeds_and_that_published_data_differ(figure: Figure):
    assert "2 paired seeds" in figure.get_suptitle()
    assert "of other data" in figure.get_suptitle()


def test_no_text_of_it_is_smaller_than_8_points(figure: Figure):
    for axes in figure.axes:
        texts = [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels()]
        assert min(text.get_fontsize() for text in texts) >= 8
