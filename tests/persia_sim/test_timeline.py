"""The timeline of a window: every span inside its lane, every arrow with two ends."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.scenario import Noise
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.report.timeline import timeline, write_timeline
from tests.persia_sim.hand_world import hand_scenario
from tests.persia_sim.sim_configurations import small_scenario


def test_spans_of_a_lane_do_not_overlap_and_arrows_have_two_ends():
    run = simulate(small_scenario(tau=4))
    events = timeline(run, 3, 7)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 8 * 4 * 5
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


def test_the_same_run_writes_the_same_compressed_bytes(tmp_path):
    run = simulate(small_scenario())
    for name in ("a.json.gz", "b.json.gz"):
        assert write_timeline(run, tmp_path / name, 0, 2) == 8 * 4 * 3
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))["traceEvents"]


def test_a_window_outside_the_run_is_refused():
    run = simulate(small_scenario())
    for first, last in ((5, 99), (-1, 3), (4, 3), (11, 12)):
        message = rf"timeline steps is \({first}, {last}\): must be a range inside \[0, 11\]"
        with pytest.raises(ValueError, match=message):
            timeline(run, first, last)
    assert timeline(run, 0, 0) and timeline(run, 11, 11)


def test_simulated_spans_have_the_names_and_tracks_of_the_real_ones():
    """The runtime's own recorder is read by tests/runtime; here are its (track, stage) pairs."""
    real = {("load", "load"), ("lookup", "lookup"), ("dense", "forward"), ("dense", "backward"),
            ("dense", "dense_sync"), ("push", "push")}  # fmt: skip
    copies = {("copy in", "copy_in"), ("copy out", "copy_out")}
    for mode, changes in (
        (Mode.HYBRID, set()),
        (Mode.LOOKAHEAD, {("lookup", "refresh")}),
        (Mode.ASYNC, {("dense", "dense_pull"), ("dense", "dense_sync")}),
    ):
        run = simulate(small_scenario(mode))
        found = {(e["cat"], e["name"]) for e in timeline(run, 2, 3) if e["ph"] == "X"}
        assert found == (real | copies) ^ changes


def test_a_file_read_back_holds_every_stage_of_every_batch_at_its_instants(tmp_path):
    run = simulate(small_scenario(tau=4, noise=Noise(gpu_cv=0.3)))
    file = tmp_path / "new folder" / "window.json"
    count = write_timeline(run, file, 3, 5)
    document = json.loads(file.read_text())
    assert document["displayTimeUnit"] == "ms"
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert count == len(spans)
    places = {
        "lookup": (Mark.LOOKUP, Mark.ROWS), "copy_in": (Mark.COPY_IN, Mark.ON_GPU),
        "dense_sync": (Mark.BACKWARD_END, Mark.UPDATED), "push": (Mark.PUSH, Mark.APPLIED),
        "copy_out": (Mark.COPY_OUT, Mark.COPIED_OUT),
    }  # fmt: skip
    for name, (begin, end) in places.items():
        found = {
            (e["pid"], e["args"]["step"]): (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
            for e in spans
            if e["name"] == name
        }
        assert found == {
            (r, s): pytest.approx((run.stamps[begin, r, s], run.stamps[end, r, s]), rel=1e-12)
            for r in range(4)
            for s in range(3, 6)
        }
    named = {(e["pid"], e["args"]["name"]) for e in document["traceEvents"] if e["ph"] == "M"}
    assert {(r, f"rank {r}") for r in range(4)} | {(r, "push") for r in range(4)} <= named


def test_arrows_and_counters_by_hand():
    """tau = 1: lookups at 23, 46, 127, 150; pushes begin 63 s later and end after 104."""
    run = simulate(hand_scenario(Mode.HYBRID, tau=1, steps=4))
    events = timeline(run, 1, 2)
    arrows = {(e["ph"], e["id"]): e["ts"] / 1e6 for e in events if e["ph"] in "sf"}
    assert arrows == {("s", "0/1"): 46, ("f", "0/1"): 109, ("s", "0/2"): 127, ("f", "0/2"): 190}
    levels = [(e["ts"] / 1e6, e["args"]["in flight"]) for e in events if e["ph"] == "C"]
    # At 127 and 150 a push ends and a lookup begins; step 2's push ends the window at 231.
    assert levels == [(46, 2), (127, 1), (127, 2), (150, 1), (150, 2), (231, 1)]
