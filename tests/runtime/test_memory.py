"""Long runs need bounded memory: traces in blocks or none, staleness and losses as they come."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections import deque
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base import trace as trace_module
from persia_sim.base.staleness import (
    SLACK_STEPS,
    StalenessCounter,
    StalenessSummary,
    staleness_in_pushes,
    staleness_in_steps,
    summary_of,
)
from persia_sim.base.trace import ALL, Event, Kind, Trace, TraceRecorder
from persia_sim.base.vocabulary import Mode
from runtime.rank import progress
from runtime.rank.progress import BlockMeans, Meter, Thinned
from runtime.run.session import train
from tests.runtime.spawned import FORK
from tests.runtime.worlds import ArraySource, changed, config, run


def by_tables(trace) -> StalenessSummary:
    """The figures from all events at once."""
    steps, pushes = staleness_in_steps(trace), staleness_in_pushes(trace)
    late, oldest = steps.missing_steps, steps.oldest_missing_steps
    mean_pushes = float(pushes.missed_pushes.mean())
    return StalenessSummary(float(late.mean()), int(late.max()), int(oldest.max()), mean_pushes)


def assert_equal_figures(one: StalenessSummary, other: StalenessSummary) -> None:
    assert (one.max_steps, one.oldest_steps) == (other.max_steps, other.oldest_steps)
    assert one.mean_steps == pytest.approx(other.mean_steps, abs=1e-12)
    assert one.mean_pushes == pytest.approx(other.mean_pushes, abs=1e-12)


STREAMED = {
    "sync": {},
    "lookahead": {"mode": Mode.LOOKAHEAD},
    "merged": {"mode": Mode.HYBRID, "tau": 3},
    "on arrival": {"mode": Mode.RAW_HYBRID, "tau": 2, "merge_pushes": False},
    "async": {"mode": Mode.ASYNC, "tau": 2},
    "averaging": {"mode": Mode.ASYNC_AVERAGING, "tau": 1},
}


@pytest.mark.first_case
@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.parametrize("name", STREAMED)
def test_staleness_counted_on_the_way_is_that_of_the_whole_trace(name, executor):
    """300 samples of 5 a step: 60 steps, so that most are counted before the end."""
    chosen = config(ranks=3, shards=2, batch=5, executor=executor, **STREAMED[name])
    lossy = {}
    if executor == "concurrent":
        lossy = {"lose_push": lambda rank, step: (rank + step) % 11 == 0}
    trace = run(chosen, ArraySource(300), **lossy).trace
    assert_equal_figures(summary_of(trace), by_tables(trace))


def test_the_counter_forgets_what_is_closed():
    trace = run(config(mode=Mode.HYBRID, tau=3, ranks=2, batch=4), ArraySource(1200)).trace
    counter = StalenessCounter(Mode.HYBRID, 2)
    held = []
    for event in trace:
        counter.note(event)
        held.append(len(counter._read))
    assert max(held) <= SLACK_STEPS + 6 < 300 == trace.events[:, 2].max() + 1


def test_a_run_without_a_push_has_no_staleness():
    assert StalenessCounter(Mode.SYNC, 1).summary() == StalenessSummary(0.0, 0, 0, None)
    assert summary_of(Trace.of([], mode="sync", ranks=1)) == StalenessSummary(0.0, 0, 0, None)


def test_a_trace_takes_twenty_bytes_an_event():
    recorder, events = TraceRecorder(), 100_000
    tracemalloc.start()
    for step in range(events):
        recorder.record(Kind.LOOKUP, 1, step, 2, 3)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 40 bytes each for the block that is still open, at most 8,192 events of it
    assert held < 20 * events + 2 * 40 * 8192
    table = recorder.finish().events
    assert np.array_equal(table[:, 2], np.arange(events))
    assert np.array_equal(table[-1], [Kind.LOOKUP, 1, events - 1, 2, 3])


def test_numbers_beyond_32_bits_survive_in_their_place():
    recorder = TraceRecorder()
    versions = [1, 2**40, 3, *range(20_000)]
    for step, version in enumerate(versions):
        recorder.record(Kind.PUSH, ALL, step, 0, version)
    assert recorder.finish().events[:, 4].tolist() == versions
    assert recorder.finish(a=1).events[:, 2].tolist() == list(range(len(versions)))


def test_a_recorder_that_keeps_nothing_tells_its_listeners_and_cannot_be_replayed():
    recorder, heard = TraceRecorder(keep=False), []
    recorder.listen(heard.append)
    recorder.record(Kind.PUSH, ALL, 3, 1, 7)
    assert heard == [Event(Kind.PUSH, ALL, 3, 1, 7)]
    trace = recorder.finish(mode="sync")
    assert len(trace) == 0
    assert trace.meta["not_replayable"] == "its run did not keep the order of events"


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(-10, 10) | st.just(math.nan), max_size=120),
    most=st.integers(1, 9),
)
def test_block_means_are_the_means_of_blocks(values, most):
    series = BlockMeans(most)
    for value in values:
        series.append(value)
    width = series.values_per_point
    blocks = [values[k : k + width] for k in range(0, len(values), width)]
    expected = [np.nanmean(b) if not np.isnan(b).all() else math.nan for b in blocks]
    assert series.points == pytest.approx(expected, nan_ok=True, abs=1e-12)
    assert len(series.points) <= 2 * most
    if len(values) <= 2 * most:
        assert width == 1


@settings(max_examples=40)
@given(length=st.integers(1, 200), most=st.integers(1, 9), number=st.integers(0, 199))
def test_thinned_points_are_the_nearest_kept_before(length, most, number):
    kept = Thinned(most)
    for k in range(length):
        kept.append(10 * k, k / 2)
    number = min(number, length - 1)
    total, at_s = kept.at(number)
    assert total == 20 * at_s
    assert len(kept) == length
    assert 0 <= number - total // 10 <= max(0, 2 * length // most)
    assert kept.last == (10 * (length - 1), (length - 1) / 2)
    assert len(kept._points) <= 2 * most


def test_speed_leaves_out_the_first_tenth_and_the_evaluations(monkeypatch):
    """Ten slow updates of 1 s, then ninety of 0.1 s; an evaluation of 50 s counts for nothing."""
    clock = [0.0]
    monkeypatch.setattr("runtime.rank.progress.time.perf_counter", lambda: clock[0])
    meter, told = Meter(), []

    def evaluate(updates, samples, model):
        clock[0] += 50
        told.append((updates, samples))

    meter.start(every=50, evaluate=evaluate, on_samples=told.append)
    for update in range(1, 101):
        clock[0] += 1.0 if update <= 10 else 0.1
        meter.update(update, 8, float(update), lambda: None)
    assert meter.samples_per_s() == pytest.approx(8 * 90 / 9.0)
    assert meter.samples_per_s(0) == pytest.approx(8 * 100 / 19.0)
    assert math.isnan(meter.samples_per_s(100))
    assert told == [8] * 50 + [(50, 400)] + [8] * 50 + [(100, 800)]
    assert (meter.updates, meter.samples, meter.losses[-1]) == (100, 800, 100.0)


def test_a_meter_of_many_updates_keeps_few_points():
    meter = Meter()
    meter.start()
    for update in range(1, 100_001):
        meter.update(update, 1, 2.0, lambda: None)
    held = [value for value in vars(meter).values() if isinstance(value, list | deque)]
    held += [meter.losses, meter._losses._counts, meter._instants._points]
    assert max(map(len, held)) <= 2 * progress.MOST_POINTS
    assert meter.updates_per_loss == 4
    assert meter.losses == [2.0] * 25_000


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
def test_a_run_without_its_trace_has_the_same_figures_and_no_replay(executor, tmp_path):
    chosen = config(mode=Mode.HYBRID, tau=2, ranks=2, executor=executor)
    source = ArraySource(300)
    bare = train(changed(chosen, trace_order=False), source)
    assert len(bare.trace) == 0
    assert bare.staleness.oldest_steps <= 2
    assert bare.figures.samples == 300
    if executor == "constant_lag":
        kept = train(chosen, source)
        assert bare.losses == kept.losses
        assert_equal_figures(bare.staleness, kept.staleness)
        assert len(kept.trace) > 0
    bare.trace.save(tmp_path / "t.npz")
    again = config(mode=Mode.HYBRID, ranks=2, executor="replay", trace=tmp_path / "t.npz")
    with pytest.raises(ValueError, match="cannot be replayed: its run did not keep the order"):
        train(again, source)


LIMIT = 200_000


@pytest.fixture
def small_limit(monkeypatch):
    """Events go to disk from two blocks on."""
    monkeypatch.setattr(trace_module, "MOST_BYTES_IN_MEMORY", LIMIT)


def recorded(events: int) -> TraceRecorder:
    recorder = TraceRecorder()
    for step in range(events):
        recorder.record(Kind.LOOKUP, step % 3, step, 2, 7)
    return recorder


def test_a_trace_that_was_gone_on_from_goes_to_disk_too(small_limit):
    before = recorded(30_000).finish()
    recorder = TraceRecorder()
    recorder.resume(before.events)
    recorder.record(Kind.PUSH, ALL, 7, 0, 1)
    found = recorder.finish().events
    assert (found[:-1] == before.events).all() and found[-1].tolist() == [Kind.PUSH, ALL, 7, 0, 1]


def test_a_disk_too_small_for_the_trace_is_told_with_a_remedy(small_limit, monkeypatch):
    def no_space(self, block):
        raise OSError(28, "No space left on device")

    recorder = TraceRecorder()
    full = type("Full", (), {"write": no_space})
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: full())
    with pytest.raises(OSError, match="set TMPDIR to a larger disk"):
        for step in range(30_000):
            recorder.record(Kind.LOOKUP, 1, step, 2, 3)


def bytes_of_a_step_more() -> float:
    """Of a run of 8 ranks on 4 shards, in a process where nothing else allocates."""
    trace_module.MOST_BYTES_IN_MEMORY, trace_module._BLOCK_EVENTS = 1, 64
    for kept in (progress.BlockMeans, progress.Thinned):
        kept.__init__.__defaults__ = (16,)
    chosen = config(ranks=8, shards=4, batch=8, mode=Mode.HYBRID, tau=2, fuse_ranks=True)
    at: dict[int, int] = {}
    steps = 0

    def note(samples: int) -> None:
        nonlocal steps
        steps += 1
        if steps in (50, 450, 850):
            gc.collect()
            at[steps], _ = tracemalloc.get_traced_memory()

    tracemalloc.start()
    outcome = train(chosen, ArraySource(8 * 860), on_samples=note)
    assert len(outcome.trace) == 860 * 37
    # What is made once is in one of them; objects that torch and numpy keep for later, in both.
    return min(at[450] - at[50], at[850] - at[450]) / 400


@pytest.mark.long
@pytest.mark.multiproc
def test_a_step_more_takes_no_memory():
    """37 events a step are 740 bytes, were they kept in memory."""
    with ProcessPoolExecutor(1, FORK) as alone:
        assert alone.submit(bytes_of_a_step_more).result() < 60


def test_a_long_curve_keeps_scores_only(monkeypatch):
    monkeypatch.setattr("runtime.run.session.MOST_WHOLE_SNAPSHOTS", 2)
    told: list[int] = []
    chosen = config(evaluate_every_steps=2, steps=10)
    outcome = train(
        chosen, ArraySource(240), on_snapshot=lambda p: told.append(len(p.evaluation.predictions))
    )
    assert told == [64] * 5
    assert [len(p.evaluation.predictions) for p in outcome.curve] == [64, 64, 0, 0, 0]
    assert all(0 < p.evaluation.tasks["click"].auc < 1 for p in outcome.curve)
