"""lookahead `forwarded`: rows on lease at the worker, and still the bytes of sync (laws 2, 15)."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.base.vocabulary import Mode
from runtime.data.source import rebatch
from runtime.embedding.config import Admission, Capacity, RowOptimizer
from runtime.executors.threads import ConcurrentRun
from runtime.rank.components import assemble
from runtime.run.session import train
from tests.runtime.worlds import (
    ENGINES,
    ArraySource,
    assert_same_bytes,
    changed,
    config,
    on_engine,
    run,
)

SOURCE = ArraySource(480, ids_per_field=90)
AHEAD = {"mode": Mode.LOOKAHEAD, "lookahead": "forwarded"}
FORWARDED = {"executor": "concurrent", **AHEAD}
LEASING = [engine for engine in ENGINES if engine != "workers"]
"""Workers apart are refused: they keep no rows."""


@pytest.mark.long
@settings(max_examples=7, deadline=None)
@given(
    ahead=st.integers(1, 9),
    ranks=st.integers(1, 4),
    shards=st.integers(1, 3),
    kind=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]),
    latency_s=st.sampled_from([0.0, 0.004]),
    engine=st.sampled_from(LEASING),
)
@pytest.mark.law2
def test_forwarded_lookahead_equals_sync(ahead, ranks, shards, kind, latency_s, engine):
    rule = RowOptimizer(kind=kind, lr=0.1)
    sync = run(config(ranks=ranks, shards=shards, optimizer=rule), SOURCE)
    chosen = config(ahead=ahead, ranks=ranks, optimizer=rule, latency_s=latency_s, **AHEAD,
                    **on_engine(engine, shards))  # fmt: skip
    assert_same_bytes(sync, run(chosen, SOURCE))


def test_rows_with_state_go_on_lease_whole():
    base = config(ranks=2, optimizer=RowOptimizer(kind="adam", lr=0.1))
    assert_same_bytes(run(base, SOURCE), run(changed(base, **FORWARDED, ahead=3), SOURCE))


def test_the_lease_ends_when_the_window_has_passed():
    """12,000 ids go by; behind the last step the worker keeps those of the last two."""
    source = ArraySource(2400, ids_per_field=4000)
    components = assemble(config(ahead=2, **FORWARDED), source)
    components.meter.start()
    threads = ConcurrentRun(components)
    threads.run()
    copies = threads._team.copies
    assert copies is not None and len(components.store) > 3000
    batches = list(rebatch(source.chunks("train"), 24))
    last = np.unique(np.concatenate([batch.ids for batch in batches[-2:]]))
    assert np.array_equal(np.sort(copies.export()["rows"][0]), last)


@pytest.mark.parametrize("engine", LEASING)
def test_a_forwarded_run_is_recorded_as_what_it_computes_and_replays(engine):
    chosen = config(ahead=3, ranks=3, latency_s=0.003, **AHEAD, **on_engine(engine, 2))
    recorded = run(chosen, SOURCE)
    assert staleness_in_pushes(recorded.trace).missed_pushes.max() == 0
    assert staleness_in_steps(recorded.trace).missing_steps.max() == 0
    replayed = run(config(mode=Mode.LOOKAHEAD, ahead=3, ranks=3, shards=2), SOURCE,
                   order=recorded.trace)  # fmt: skip
    assert_same_bytes(recorded, replayed)


def test_snapshots_on_the_way_are_those_of_sync():
    """The servers are behind; a snapshot waits until they know what the weights know."""
    curves = []
    for changes in ({}, {"ahead": 4, "latency_s": 0.01, **FORWARDED}):
        chosen = config(ranks=2, evaluate_every_steps=5, **changes)
        found = train(chosen, SOURCE)
        curves.append([p.evaluation.predictions.tobytes() for p in found.curve])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 4


@pytest.mark.law15
def test_ahead_and_one_steps_share_two_messages():
    """Law 15: (2 L + C) / (ahead + 1) against 2 L + C; asked for is a factor of two of nine."""
    steps = 24
    source = ArraySource(24 * steps)
    for latency_s in (0.03, 0.3, 3.0):  # the longer ones on a busy machine only
        began = time.monotonic()
        run(config(ahead=8, ranks=2, latency_s=latency_s, **FORWARDED), source)
        took_s = time.monotonic() - began
        assert steps * 2 * latency_s / 9 <= took_s
        if took_s < 0.5 * steps * 2 * latency_s:
            return
    assert took_s < 0.5 * steps * 2 * latency_s


@pytest.mark.parametrize(
    "feature",
    [
        {"capacity": Capacity(rows=50)},
        {"capacity": Capacity(expire_after_steps=5)},
        {"admission": Admission(probability=0.5)},
    ],
)
def test_tables_that_forget_rows_are_refused_by_name(feature):
    base = config(**FORWARDED)
    base = replace(base, rows=replace(base.rows, **feature))
    with pytest.raises(ValueError, match=r"tables \['rows'\] evict, expire or refuse rows"):
        run(base, SOURCE)


def test_a_lost_push_is_lost_at_the_worker_and_at_the_servers():
    lost = {"lose_push": lambda rank, step: rank == 0 and step % 4 == 1}
    sync = run(config(ranks=2, executor="concurrent"), SOURCE, **lost)
    forwarded = run(config(ranks=2, ahead=3, **FORWARDED), SOURCE, **lost)
    assert sync.meter.pushes_lost == forwarded.meter.pushes_lost == 5
    assert_same_bytes(sync, forwarded)


def test_values_on_lease_are_those_of_the_server_when_the_run_ends():
    components = assemble(config(ahead=3, **FORWARDED), SOURCE)
    components.meter.start()
    threads = ConcurrentRun(components)
    threads.run()
    ids, values, state = threads._team.copies.export()["rows"]
    all_ids, all_values, all_state = components.store.export()["rows"]
    where = np.searchsorted(all_ids, ids)
    assert (all_ids[where] == ids).all()
    assert (all_values[where] == values).all()
    assert (all_state[where] == state).all()
