"""Stage times from spans, and laws from points, by numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.profiling.laws import LawPoint, fit_law
from runtime.profiling.stage_times import TimedSpan, measured_stages, parts_of, spread_of

MS = 1e-3


def test_a_law_is_found_from_eight_exact_points():
    helds = [
        {"one": 1.0, "shards": shards, "distinct": ids, "distinct_floats": ids * dim}
        for ids in (640, 2560, 10240, 40960) for dim, shards in ((16, 1), (32, 2))
    ]  # fmt: skip
    points = [
        LawPoint(q, 4e-6 * q["shards"] + 3e-9 * q["distinct"] + 2e-10 * q["distinct_floats"])
        for q in helds
    ]
    law = fit_law(("one", "shards", "distinct", "distinct_floats"), points)
    assert law.terms["shards"] == pytest.approx(4e-6) and law.terms["one"] == 0
    assert law.terms["distinct"] == pytest.approx(3e-9)
    assert law.terms["distinct_floats"] == pytest.approx(2e-10)
    assert law.spread < 1e-9
    assert law({"one": 1.0, "shards": 1, "distinct": 1000, "distinct_floats": 20_000}) == (
        pytest.approx(4e-6 + 3e-6 + 4e-6)
    )


def test_measured_stages_leave_out_waiting_and_warm_up():
    """Each span lasts twice its CPU time; between spans a thread works 0.1 ms and waits 5 ms."""
    spans: list[TimedSpan] = []
    work = {"load": 1, "lookup": 2, "forward": 3, "backward": 4, "dense_sync": 0.5, "push": 2}
    for rank in (0, 1):
        at = cpu = 0.0
        for step, factor in ((0, 100), (1, 1)):
            for stage, ms in work.items():
                waits = 9.0 if (stage, rank) == ("dense_sync", 0) else 0.0  # for rank 1
                wall = (2 * ms * factor + waits) * MS
                spans.append(
                    TimedSpan(rank, stage, step, rank, at, at + wall, cpu, cpu + ms * factor * MS)
                )
                at, cpu = at + wall + 5 * MS, cpu + (ms * factor + 0.1) * MS
    of_rows = [
        ("read", 0, 1e3, 1e3), ("read", 1, 0.12, 0.04), ("read", 1, 0.2, 0.06),
        ("update", 0, 1e3, 1e3), ("update", 1, 1.0, 0.6),  # merged: of both ranks
    ]  # fmt: skip
    for stage, step, wall_ms, cpu_ms in of_rows:  # they lie within spans, and end none
        spans.append(TimedSpan(0, stage, step, 0, 0.0, wall_ms * MS, 0.0, cpu_ms * MS))
    found = measured_stages(spans, first=1, prefetches=False)
    close = {"rel": 1e-9, "abs": 1e-12}
    assert found.cpu == pytest.approx({
        "load": 1.1 * MS + 0.05 * MS, "read": 0.05 * MS, "pool": 2 * MS,
        "forward": 3.1 * MS, "backward": 4.1 * MS, "check": 0.1 * MS, "update": 1 * MS,
        "scatter": 2.1 * MS - 0.3 * MS, "push": 0.3 * MS, "refresh": 0.0, "pull": 0.0,
        "served": 0.0, "renewed": 0.0,
    }, **close)  # fmt: skip
    assert found.wall == pytest.approx({
        "load": 2.1 * MS + 0.05 * MS, "read": 0.16 * MS, "pool": 4 * MS,
        "forward": 6.1 * MS, "backward": 8.1 * MS, "check": 5 * MS, "update": 1 * MS,
        "scatter": 4.1 * MS - 0.5 * MS, "push": 0.5 * MS, "refresh": 0.0, "pull": 0.0,
        "served": 0.0, "renewed": 0.0,
    }, **close)  # fmt: skip
    assert found.dense_cv == 0
    assert parts_of(found.cpu)["lookup"] == pytest.approx(2.05 * MS)


def test_a_spread_is_that_of_normal_times_and_hardly_of_a_long_step():
    random = np.random.default_rng(1)
    times = {(r, s): random.normal(10, 1) for r in (0, 1, 2) for s in range(900)}
    assert spread_of(times) == pytest.approx(0.1, rel=0.08)  # three standard errors
    assert spread_of({key: t for key, t in times.items() if key[0] == 0}) == pytest.approx(
        0.1, rel=0.1
    )
    assert spread_of(times | {(0, 5): 100.0}) < 0.12 < np.std([*times.values(), 300.0]) / 10
