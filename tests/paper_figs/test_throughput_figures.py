"""The figures of throughput: published and modelled points must not change places."""

from __future__ import annotations

import math

import pytest

from paper_figs.style import look_of
from paper_figs.throughput import (
    bench_peers_figure,
    scale_model_size_figure,
    scale_workers_figure,
)
from tests.paper_figs.read_back import bars, tick_labels, write_table


def point(series: str, gpus: int, published: object, model: float, kind="fit", note="", label=""):
    error = "" if published == "" else model / float(str(published)) - 1
    return {
        "series": series, "label": label or f"{gpus} GPUs", "gpus": gpus, "published": published,
        "model": model, "kind": kind, "note": note, "error": error,
    }  # fmt: skip


def test_scale_workers_draws_the_model_as_lines_and_the_published_points_as_open_markers(tmp_path):
    rows = [
        point("taobao-ad Persia hybrid", 8, 160e3, 170e3),  # out of order: a line must not zigzag
        point("taobao-ad Persia hybrid", 2, 50e3, 60e3),
        point("taobao-ad Persia hybrid", 1, 90e3, 95e3, note="dashed bar: no all-reduce"),
        point("taobao-ad XDL sync", 2, 4e3, 5e3),
        point("avazu-ad Persia hybrid", 2, 30e3, 20e3, kind="prediction"),
        point("criteo-ad Persia hybrid", 2, "", 54e3, kind="prediction"),
        point("kwai-video async", 8, 40e3, 44e3),
    ]
    figure = scale_workers_figure(write_table(tmp_path / "scale_workers.csv", rows))
    taobao, avazu, criteo, _ = figure.axes
    model, published = taobao.lines[2:]
    assert published.get_label() == "Persia hybrid"
    assert [*model.get_xdata()] == [2, 8] and [*model.get_ydata()] == [60.0, 170.0]
    assert [*published.get_ydata()] == [50.0, 160.0]
    assert (model.get_linestyle(), published.get_linestyle()) == ("-", "None")
    assert published.get_markerfacecolor() == "none" and model.get_marker() == "None"
    assert published.get_color() == model.get_color() == look_of("hybrid").color
    assert taobao.lines[0].get_color() == look_of("sync").color
    assert avazu.lines[0].get_linestyle() == "--", "nothing was fitted to this series"
    assert [*avazu.lines[0].get_ydata()] == [20.0] and [*avazu.lines[1].get_ydata()] == [30.0]
    assert all(math.isnan(y) for y in criteo.lines[1].get_ydata())
    assert [a.get_title() for a in figure.axes] == [
        "taobao-ad", "avazu-ad", "criteo-ad (prediction)", "kwai-video",
    ]  # fmt: skip
    assert tick_labels(taobao) == ["2", "8"] and taobao.get_xlabel() == "GPUs"
    assert taobao.get_ylabel() == "thousand samples per second"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["XDL sync", "Persia hybrid"]
    marks = [handle.get_marker() for handle in figure.legends[0].legend_handles]
    assert marks == [taobao.lines[1].get_marker(), taobao.lines[3].get_marker()], "told in grey"
    assert [t.get_text() for t in figure.legends[1].get_texts()] == ["async_averaging"]
    assert taobao.get_xscale() == taobao.get_yscale() == "log"


def test_scale_model_size_draws_published_as_bars_and_the_model_as_dots(tmp_path):
    rows = [
        point("100T cluster hybrid", 64, 1.80e6, 1.89e6, label="6.25T"),
        point("100T cluster hybrid", 64, 1.92e6, 1.89e6, label="100T"),
        point("100T cluster async", 64, 2.16e6, 2.10e6, label="100T"),
    ]
    figure = scale_model_size_figure(write_table(tmp_path / "scale_model_size.csv", rows))
    sizes, modes = figure.axes
    assert [bar.get_height() for bar in sizes.patches] == pytest.approx([1.80, 1.92])
    assert [*sizes.lines[0].get_ydata()] == pytest.approx([1.89, 1.89])
    assert [t.get_text() for t in sizes.texts] == ["+5.0%", "-1.6%"]
    assert tick_labels(sizes) == ["6.25T", "100T"]
    assert [bar.get_height() for bar in modes.patches] == pytest.approx([1.92, 2.16])
    assert [*modes.lines[0].get_ydata()] == pytest.approx([1.89, 2.10])
    assert tick_labels(modes) == ["hybrid", "async_averaging"]
    assert sizes.get_ylabel() == "million samples per second"
    assert "published (bars), simulated (dots)" in figure.get_suptitle()


def window(workload: str, name: str, value: float, quiet: bool = True) -> dict[str, object]:
    return {
        "workload": workload, "unit": "samples/s", "round": 0, "name": name, "value": value,
        "foreign_cores": 0.0, "quiet": quiet,
    }  # fmt: skip


def test_bench_peers_draws_medians_with_extremes_of_quiet_windows(tmp_path):
    values = {"dense-only": (9e3, 10e3, 14e3), "ours sync": (7e3, 8e3, 8.5e3)}
    rows = [window("wide", name, v) for name, all_of in values.items() for v in all_of]
    rows.append(window("wide", "ours sync", 1e3, quiet=False))
    rows += [window("small", name, 5e3) for name in values for _ in range(2)]
    rows.append(window("small", "ours sync", 1e3, quiet=False))
    figure = bench_peers_figure(write_table(tmp_path / "bench_peers.csv", rows), "dense-only")
    wide, small = figure.axes
    lengths, ends = bars(wide)
    assert lengths == [10.0, 8.0]
    assert ends == [pytest.approx((9.0, 14.0)), pytest.approx((7.0, 8.5))]
    assert [*wide.lines[-1].get_xdata()] == [10.0, 10.0], "the ceiling's median"
    assert tick_labels(wide, "y") == ["dense-only", "ours sync"]
    assert wide.yaxis_inverted(), "read from the top"
    assert bars(small)[1][1] == pytest.approx((1.0, 5.0)), "two quiet windows are too few"
    assert [wide.get_title(), small.get_title()] == ["wide", "small"]
    assert wide.get_xlabel() == "thousand samples/s"
    assert "dense-only" in figure.get_suptitle()
