"""Tables on a terminal and as CSV."""

from __future__ import annotations

import pytest

from experiments.tables import aligned, write_csv


def test_the_first_column_leans_left_and_the_others_right():
    text = aligned(["mode", "AUC"], [["hybrid", "0.7"], ["sync", "0.71"]])
    assert text.splitlines() == [
        "mode     AUC",
        "------  ----",
        "hybrid   0.7",
        "sync    0.71",
    ]


def test_a_csv_has_a_line_per_row_and_a_failed_one_leaves_the_old(tmp_path):
    path = tmp_path / "new" / "t.csv"
    write_csv(path, [{"a": 1, "b": "x,y"}, {"a": None, "b": 2.5}])
    assert path.read_text().splitlines() == ["a,b", '1,"x,y"', ",2.5"]
    with pytest.raises(ValueError):
        write_csv(path, [{"a": 1}, {"c": 2}])
    assert path.read_text().splitlines()[0] == "a,b"
    assert [p.name for p in path.parent.iterdir()] == ["t.csv"]
