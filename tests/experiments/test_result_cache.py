"""Finished points are computed once, whatever a crash has left of their file."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import result_cache
from experiments.result_cache import ResultCache, computed, settle_in, surroundings

ROWS = st.dictionaries(st.text(), st.lists(st.floats(allow_nan=False)), max_size=5)


def fail():
    raise AssertionError("computed again")


@given(rows=ROWS)
def test_what_was_added_is_there_for_whoever_opens_the_file_next(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("kept") / "deep" / "rows.jsonl"
    first = ResultCache(path)
    assert "x" not in first and not path.parent.exists(), "looking makes nothing"
    for label, row in rows.items():
        first.add(label, row)
    second = ResultCache(path)
    assert {label: second[label] for label in rows} == rows
    assert second.fill(dict.fromkeys(rows, fail), "rows") == list(rows.values())


@given(cut=st.integers(1, 200))
def test_a_line_cut_anywhere_costs_its_own_point_and_no_other(tmp_path_factory, cut):
    path: Path = tmp_path_factory.mktemp("kept") / "rows.jsonl"
    whole = ResultCache(path)
    whole.add("a", {"value": 1})
    kept_bytes = path.stat().st_size
    whole.add("b", {"value": 2})
    text = path.read_bytes()
    path.write_bytes(text[: max(kept_bytes, len(text) - cut)])
    after = ResultCache(path)
    assert after["a"] == {"value": 1}
    if cut > 1:  # more than its end of line
        assert "b" not in after
    after.fill({"b": lambda: {"value": 2}}, "rows")
    again = ResultCache(path)
    assert (again["a"], again["b"]) == ({"value": 1}, {"value": 2})


def test_lines_of_others_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = {"label": "a", "row": [1]}
    path.write_text(
        "\n".join(["[]", "3", '{"label": "b"}', '{"cut', "[" * 100_000, json.dumps(good)]) + "\n"
    )
    found = ResultCache(path)
    assert found["a"] == [1]
    assert "b" not in found


def test_rows_of_another_commit_are_told(tmp_path, capsys, monkeypatch):
    """They are not made anew: only who runs it knows whether the edit matters."""
    work = {str(n): partial(pow, n, 2) for n in range(3)}
    ResultCache(tmp_path / "rows.jsonl").fill(work, "powers")
    ResultCache(tmp_path / "rows.jsonl").fill(work, "powers")
    assert "commit" not in capsys.readouterr().out
    monkeypatch.setattr("experiments.result_cache._commit", lambda: "another")
    work["3"] = partial(pow, 3, 2)
    assert ResultCache(tmp_path / "rows.jsonl").fill(work, "powers") == [0, 1, 4, 9]
    assert "3 of the done points were made by another commit" in capsys.readouterr().out


@pytest.mark.multiproc
@pytest.mark.parametrize("jobs", [1, 2])
def test_only_what_is_missing_is_computed_here_or_in_processes_of_their_own(jobs, tmp_path):
    kept = ResultCache(tmp_path / "rows.jsonl")
    kept.add("2", "as it was")
    work = {str(n): partial(pow, n, 2) for n in range(1, 5)}
    assert kept.fill(work, "powers", jobs) == [1, "as it was", 9, 16]
    again = ResultCache(tmp_path / "rows.jsonl")
    assert again.fill(dict.fromkeys(work, fail), "powers", jobs) == [1, "as it was", 9, 16]


@pytest.mark.parametrize("here", [None, "/data of here"])
@pytest.mark.parametrize("at_its_start", [None, "/data of then"])
def test_a_process_of_a_point_has_the_variables_of_today(here, at_its_start, monkeypatch):
    """The server that it is forked from still has those of its own start."""
    monkeypatch.setattr(result_cache, "die_with_the_parent", lambda: None)
    given = dict.fromkeys(surroundings(), here)
    for name in given:
        monkeypatch.setenv(name, "of before")  # so that it is put back, also where there is none
        monkeypatch.delenv(name)
        if at_its_start is not None:
            monkeypatch.setenv(name, at_its_start)
    settle_in(given)
    assert len(given) >= 2 and surroundings() == given


@pytest.mark.multiproc
def test_who_is_interrupted_waits_for_no_piece():
    pieces = computed({str(k): partial(time.sleep, 300 * bool(k)) for k in range(9)}, jobs=2)
    assert next(pieces) == ("0", None)
    began_s = time.monotonic()
    pieces.close()
    assert time.monotonic() - began_s < 100
