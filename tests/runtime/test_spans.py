"""The timeline of a run against a clock that the test turns."""

from __future__ import annotations

import pytest

from persia_sim.words.chrome import Span
from runtime.rank.progress import SpanRecorder


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("runtime.rank.progress.time.perf_counter", lambda: now[0])
    return now


def test_a_span_lasts_from_the_start_of_its_body_to_its_end(clock):
    spans = SpanRecorder(enabled=True)
    clock[0] = 101.5
    with spans.span("dense", "forward", 2, 7):
        clock[0] = 104.0
        with spans.span("push", "push", 1, 6):
            clock[0] = 104.25
    assert spans.spans == [
        Span(1, "push", "push", 6, 4.0, 4.25),
        Span(2, "dense", "forward", 7, 1.5, 4.25),
    ]


def test_a_span_whose_body_fails_is_kept(clock):
    spans = SpanRecorder(enabled=True)
    with pytest.raises(OSError, match="gone"), spans.span("dense", "backward", 0, 0):
        clock[0] = 103.0
        raise OSError("gone")
    assert spans.spans == [Span(0, "dense", "backward", 0, 0.0, 3.0)]


def test_nothing_is_kept_that_nobody_asked_for(clock):
    spans = SpanRecorder(enabled=False)
    with spans.span("dense", "forward", 0, 0):
        clock[0] = 200.0
    assert spans.spans == []
