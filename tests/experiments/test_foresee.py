"""`foresee` holds a log against the stored study: its bursts, and the start of Adagrad."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from experiments.studies import foresee

CLICKS = Path(__file__).parents[2] / "examples" / "clicks.toml"
LOSSES = [  # stream, start, s, rows and dense weights late, loss and its half-width
    ("a", 0.0, 0.0, 7, 0, 0.0002, 0.0005),
    ("a", 1e-4, 50.0, 7, 0, 0.0026, 0.0012),
    ("a", 1e-4, 50.0, 7, 7, 0.0130, 0.0040),
    ("a", 1e-2, 5000.0, 7, 0, 0.0034, 0.0011),
    ("b", 0.0, 0.0, 7, 0, 0.0010, 0.0020),
    ("b", 1e-2, 900.0, 7, 0, 0.0020, 0.0015),
]


@pytest.fixture
def stored(tmp_path) -> Path:
    path = tmp_path / "lateness_moderator.csv"
    head = "data,optimizer_start,s,rows_late,dense_late,loss,loss_half_width_95"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head.split(","))
        writer.writerows(LOSSES)
    return path


def test_each_stream_and_start_is_a_point_with_its_losses(stored):
    points = foresee.start_points(stored)
    assert [(point["data"], point["start"], point["s"]) for point in points] == [
        ("a", 0.0, 0.0),
        ("a", 1e-4, 50.0),
        ("a", 1e-2, 5000.0),
        ("b", 0.0, 0.0),
        ("b", 1e-2, 900.0),
    ]
    assert points[1]["rows"] == (0.0026, 0.0012)
    assert points[1]["both"] == (0.0130, 0.0040)
    assert "both" not in points[0]


def test_the_advice_names_where_the_study_surely_lost_and_where_it_did_not(stored):
    """a loses 2.6 ± 1.2 at s = 50, surely above 1.0; b's 2.0 ± 1.5 is not sure."""
    points = foresee.start_points(stored)
    text = " ".join(foresee.advice_on_start(points, gradient=1e-4))
    said = (
        "With s = 50 or more, rows 7 updates late surely lost more than 1.0 thousandths on a; on b"
    )
    assert f"{said} no start did." in text
    # PERSIA's start of 0.000156 is s = 1.6 at such gradients, Keras' of 0.1 is s = 1000.
    assert "On your log s is as high with Keras' default." in text
    assert "PERSIA" not in text


def test_without_a_sure_loss_only_the_start_of_torch_is_advised(stored):
    points = [point for point in foresee.start_points(stored) if point["data"] == "b"]
    assert foresee.advice_on_start(points, gradient=1e-4) == [
        "Start Adagrad's accumulator at 0, as torch does."
    ]


def test_the_command_prints_bursts_starts_and_what_follows(tmp_path, capsys):
    foresee.run(foresee.Options(data=str(CLICKS), rows=4000, out=tmp_path))
    printed = capsys.readouterr().out
    for text in (
        "burstiest field",
        "your log, PERSIA's on 8 ranks",
        "Start Adagrad's accumulator at 0",
    ):
        assert text in printed
    with (tmp_path / "foresee.csv").open() as file:
        orders = [line["order"] for line in csv.DictReader(file)]
    assert orders == ["as it is", "buffer of 2,048", "shuffled"]


POINTS = [
    {"data": "bursty", "order": "time", "b_16": 0.16, "loss": 0.021, "half_width": 0.011},
    {"data": "even", "order": "time", "b_16": 0.02, "loss": 0.0001, "half_width": 0.0008},
    {
        "data": "synthetic:zipf-1.8",
        "order": "time",
        "b_16": 0.05,
        "loss": 0.004,
        "half_width": 0.001,
    },
]


def orders(as_it_is: float, behind_buffer: float) -> list[dict[str, object]]:
    return [
        {"order": "as it is", "b_16": as_it_is},
        {"order": "buffer of 2,048", "b_16": behind_buffer},
    ]


def test_bursts_like_those_that_lost_are_shuffled_where_that_helps():
    """Drawn streams are no neighbours: 0.05 is nearer to 0.02 than to 0.16 in the logarithm."""
    assert "Train through a shuffle (buffer of 2,048: b(16) 0.060)" in " ".join(
        foresee.advice(orders(0.14, 0.06), POINTS)
    )
    assert "because the log is short" in " ".join(foresee.advice(orders(0.14, 0.13), POINTS))
    assert "Take hybrid up to tau 16" in " ".join(foresee.advice(orders(0.05, 0.05), POINTS))
    assert "no stored stream" in " ".join(foresee.advice(orders(0.05, 0.05), []))


def test_a_stream_stands_with_the_window_where_it_loses_most(tmp_path):
    """The end of a stream may gain where earlier windows lose; another task is not looked at."""
    head = "data,order,window,task,optimizer_start,rows_late,dense_late,rates,gap_to_sync,"
    head += "gap_to_sync_half_width_95,b_16"
    lines = [
        "a,time,test,click,0.0,16,0,of sync,0.0146,0.0075,0.06",
        "a,time,origin-1,click,0.0,16,0,of sync,-0.0151,0.0029,0.06",
        "a,time,origin-2,click,0.0,16,0,of sync,-0.0096,0.0041,0.06",
        "a,time,origin-2,view,0.0,16,0,of sync,-0.0400,0.0041,0.06",
        "a,time,origin-1,click,0.0,7,0,of sync,-0.0300,0.0029,0.06",
        "a,shuffled,test,click,0.0,16,0,of sync,-0.0010,0.0051,0.04",
    ]
    path = tmp_path / "lateness.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    points = foresee.study_points(path)
    assert [(point["order"], point["window"], point["loss"]) for point in points] == [
        ("time", "origin-1", 0.0151),
        ("shuffled", "test", 0.0010),
    ]
