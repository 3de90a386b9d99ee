"""The timeline of a window: every span inside its lane, every arrow with two ends."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from persia_sim.engine.simulate import simulate
from persia_sim.insight.timeline import timeline, write_timeline
from persia_sim.model.incidents import Crash, Target
from persia_sim.model.stamps import Mark
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.sim_configurations import small_scenario


def test_spans_of_a_lane_do_not_overlap_and_arrows_have_two_ends() -> None:
    run = simulate(small_scenario(tau=4))
    events = timeline(run, 3, 7)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 7 * 4 * 5
    lanes: dict[tuple[int, int], float] = {}
    for span in spans:
        key = span["pid"], span["tid"]
        assert span["ts"] >= lanes.get(key, 0.0) - 1e-6
        lanes[key] = span["ts"] + span["dur"]
    starts = Counter(e["id"] for e in events if e["ph"] == "s")
    ends = Counter(e["id"] for e in events if e["ph"] == "f")
    assert starts == ends and set(starts.values()) == {1} and len(starts) == 4 * 5
    counts = [e["args"]["in flight"] for e in events if e["ph"] == "C"]
    assert min(counts) >= 0 and max(counts) <= 5


def test_the_same_run_writes_the_same_compressed_bytes(tmp_path: Path) -> None:
    run = simulate(small_scenario())
    for name in ("a.json.gz", "b.json.gz"):
        assert write_timeline(run, tmp_path / name, 0, 2) == 7 * 4 * 3
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))["traceEvents"]


def test_a_window_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timeline steps is \(5, 99\): must be a range inside"):
        timeline(simulate(small_scenario()), 5, 99)


def test_simulated_spans_have_the_names_and_tracks_of_the_real_ones() -> None:
    """The runtime's own recorder is read by tests/runtime; here are its (track, stage) pairs."""
    real = {("lookup", "lookup"), ("dense", "forward"), ("dense", "backward"),
            ("dense", "dense_sync"), ("push", "push")}  # fmt: skip
    copies = {("copy in", "copy_in"), ("copy out", "copy_out")}
    for mode, changes in (
        (Mode.HYBRID, set()),
        (Mode.ASYNC, {("dense", "dense_pull"), ("dense", "dense_sync")}),
    ):
        run = simulate(small_scenario(mode))
        found = {(e["cat"], e["name"]) for e in timeline(run, 2, 3) if e["ph"] == "X"}
        assert found == (real | copies) ^ changes


def test_a_crash_is_marked_where_it_happens() -> None:
    quiet = simulate(small_scenario(tau=4))
    at_s = float(quiet.stamps[Mark.START, 0, 5])
    crash = Crash(target=Target.RANK, index=2, at_s=at_s, detect_s=0.01, restart_s=0.02)
    late = replace(crash, target=Target.SERVER, at_s=1e6)
    run = simulate(small_scenario(tau=4, disturbances=(crash, late)))
    [mark] = [e for e in timeline(run, 3, 7) if e["ph"] == "i"]
    assert (mark["name"], mark["pid"], mark["ts"]) == ("crash of rank 2", 2, at_s * 1e6)
