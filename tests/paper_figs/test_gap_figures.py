"""The figures of AUC gaps, drawn from small tables and read back from their axes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from paper_figs.demo import demo_figure
from paper_figs.style import save
from paper_figs.time_to_auc import time_to_auc_figure
from tests.paper_figs.read_back import (
    bands,
    curves,
    error_bars,
    legend,
    tick_labels,
    write_table,
)

T_975_OF_2 = 4.302653  # Student's t for 3 seeds, from a printed table


@pytest.fixture(autouse=True)
def free_figures():
    yield
    plt.close("all")


def end(mode: str, tau: int, gap: float, half: float, task: str = "click") -> dict[str, object]:
    return {
        "data": "clicks", "mode": mode, "tau": tau, "task": task,
        "gap_to_sync": gap, "gap_to_sync_half_width_95": half,
        "gap_to_tau_0": 10 * gap, "gap_to_tau_0_half_width_95": 10 * half,
        "test_auc": 0.7 + gap, "test_auc_half_width_95": 5 * half,
    }  # fmt: skip


def line(mode: str, tau: int, seed: int, samples: int, auc: float, drained: bool = False):
    return {
        "mode": mode, "tau": tau, "seed": seed, "samples": samples, "drained": drained,
        "task": "click", "auc": auc, "log_loss": 1 - auc,
    }  # fmt: skip


SYNC_AUC = {1000: (0.60, 0.61, 0.62), 2000: (0.70, 0.70, 0.71)}
HYBRID_GAP = {1000: (-0.010, -0.020, -0.030), 2000: (0.001, 0.002, 0.003)}


def snapshots() -> list[dict[str, object]]:
    made = []
    for samples, aucs in SYNC_AUC.items():
        for seed, auc in enumerate(aucs):
            made.append(line("sync", 0, seed, samples, auc))
            made.append(line("hybrid", 4, seed, samples, auc + HYBRID_GAP[samples][seed]))
            # the drained end must not be taken for a point of the curve
            made.append(line("hybrid", 4, seed, samples, 0.1, drained=True))
            made.append(line("sync", 0, seed, samples, 0.9, drained=True))
    return made


def check_along(axes, label: str, unit: float) -> None:
    """Mean and t interval of the three paired differences at each snapshot, by hand."""
    x, y = curves(axes)[label]
    assert x == [1000 / unit, 2000 / unit]
    assert y == pytest.approx([-20.0, 2.0])
    half = [T_975_OF_2 * 10.0 / math.sqrt(3), T_975_OF_2 * 1.0 / math.sqrt(3)]
    (band,) = bands(axes)
    for at, mean, wide in zip(x, y, half, strict=True):
        assert band[at] == pytest.approx((mean - wide, mean + wide), rel=1e-5)


def demo(tmp_path: Path):
    rows = [
        end("sync", 0, 0.0, 0.0),
        end("hybrid", 4, -0.0015, 0.0005),
        end("async", 0, 0.002, 0.004),
        end("hybrid", 4, 9.0, 9.0, task="like"),
    ]
    table = write_table(tmp_path / "demo.csv", rows)
    return demo_figure(table, write_table(tmp_path / "demo_curves.csv", snapshots()))


def test_demo_shows_each_settings_gap_to_sync_with_its_interval_in_thousandths(tmp_path):
    left, _ = demo(tmp_path).axes
    ((_, x, y, ends),) = error_bars(left)
    assert x == [0, 1]
    assert tick_labels(left) == ["hybrid\nτ=4", "async\nτ=0"]
    assert y == pytest.approx([-1.5, 2.0])
    assert ends[0] == pytest.approx((-2.0, -1.0))
    assert ends[1] == pytest.approx((-2.0, 6.0))
    assert left.get_ylabel() == "AUC gap to sync [$10^{-3}$]"
    assert [*left.lines[0].get_ydata()] == [0, 0], "the line that stands for sync"


def test_demo_shows_the_paired_gap_along_the_run(tmp_path):
    figure = demo(tmp_path)
    _, right = figure.axes
    assert legend(right) == ["hybrid τ=4"]
    check_along(right, "hybrid τ=4", 1e3)
    assert right.get_xlabel() == "training samples [thousands]"
    assert "not drained" in right.get_title()
    told = figure.get_suptitle()
    assert "click, clicks" in told and "minus that of sync" in told and "3 paired seeds" in told


def test_time_to_auc_puts_the_same_aucs_on_seconds_and_on_samples(tmp_path):
    rows = []
    for mode, seconds in (("sync", (1.0, 2.0)), ("hybrid", (0.4, 0.9))):
        for number, (samples, at) in enumerate(zip((1000, 2000), seconds, strict=True)):
            for seed, offset in enumerate((-0.01, 0.0, 0.04)):
                auc = (0.6 if mode == "sync" else 0.5) + 0.1 * number + offset
                rows.append(
                    {"cluster": "moon", "mode": mode, "seed": seed, "samples": samples,
                     "drained": bool(number), "task": "click", "auc": auc, "simulated_s": at}
                )  # fmt: skip
    rows.append({**rows[0], "task": "like", "auc": 0.99, "simulated_s": 50.0})
    ends = [
        {"mode": mode, "target_share": share, "target_auc": 0.5 + share / 10, "seeds": 3,
         "reached": reached, "seconds": seconds, "seconds_half_width_95": 0.25,
         "not_before_s": watched}
        for mode, share, reached, seconds, watched in (
            ("sync", 0.9, 3, 1.5, ""), ("hybrid", 0.9, 3, 0.5, ""),
            ("sync", 0.95, 3, 1.75, ""), ("hybrid", 0.95, 2, "", 0.9),
        )
    ]  # fmt: skip
    figure = time_to_auc_figure(
        write_table(tmp_path / "time_to_auc.csv", rows),
        write_table(tmp_path / "time_to_auc_targets.csv", ends),
    )
    left, right, waits = figure.axes
    (_, x, seconds, ends_of), hybrid = error_bars(waits)
    assert x == pytest.approx([-0.075, 0.925]) and seconds == [1.5, 1.75]
    assert ends_of == [(1.25, 1.75), (1.5, 2.0)]
    assert hybrid[1:3] == ([pytest.approx(0.075)], [0.5])
    (watched,) = [y for label, (_, y) in curves(waits).items() if "not reached" in label]
    assert watched == [0.9]
    assert tick_labels(waits) == ["90%\n0.5900", "95%\n0.5950"]
    assert curves(left)["sync"] == ([1.0, 2.0], pytest.approx([0.61, 0.71]))
    assert curves(left)["hybrid"] == ([0.4, 0.9], pytest.approx([0.51, 0.61]))
    assert curves(right)["hybrid"] == ([1.0, 2.0], pytest.approx([0.51, 0.61]))
    assert bands(left)[0][2.0] == pytest.approx((0.69, 0.74))
    assert bands(right)[1][1.0] == pytest.approx((0.49, 0.54))
    assert left.get_xlabel() == "simulated time on moon [s]"
    assert right.get_xlabel() == "training samples [thousands]"
    assert left.get_ylabel() == "test AUC" and legend(left) == ["sync", "hybrid"]
    assert "bands: range, bars: 95 % t interval, over 3 seeds" in figure.get_suptitle()


def test_a_saved_figure_is_a_picture_in_the_styles_resolution_and_is_freed(tmp_path):
    figure = demo(tmp_path)
    path = save(figure, tmp_path / "new" / "demo.png")
    assert plt.imread(path).shape[1] > 500
    assert not plt.fignum_exists(figure.number)
