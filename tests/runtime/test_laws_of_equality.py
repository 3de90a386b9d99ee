"""Laws 1, 2, 3 and 6: which runs give the same numbers."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim import __main__ as simulator
from persia_sim.base.trace import Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import updates_missed
from runtime.embedding.config import Admission, Capacity
from runtime.executors.replayable import DECIDES_NO_BYTE, refuse_other_run, trace_meta
from runtime.executors.threads import CARRIES
from runtime.rank.components import tables_of
from tests.runtime.worlds import (
    ENGINES,
    OPTIONS,
    TUNED,
    ArraySource,
    assert_same_bytes,
    changed,
    config,
    difference,
    on_engine,
    run,
    with_another,
)

SOURCE = ArraySource(300)


@settings(max_examples=6, deadline=None)
@given(
    mode=st.sampled_from([Mode.HYBRID, Mode.RAW_HYBRID]),
    ranks=st.integers(1, 5),
    shards=st.integers(1, 3),
    engine=st.sampled_from(["constant_lag", *ENGINES]),
)
@pytest.mark.law1
def test_bound_zero_with_merged_pushes_equals_sync(mode, ranks, shards, engine):
    sync = run(config(ranks=ranks, shards=shards), SOURCE)
    other = run(config(mode=mode, tau=0, ranks=ranks, **on_engine(engine, shards)), SOURCE)
    assert_same_bytes(sync, other)


@settings(max_examples=6, deadline=None)
@given(
    ahead=st.integers(1, 12),
    ranks=st.integers(1, 4),
    engine=st.sampled_from(["constant_lag", *ENGINES]),
)
@pytest.mark.law2
def test_lookahead_equals_sync(ahead, ranks, engine):
    sync = run(config(ranks=ranks, shards=2), SOURCE)
    other = run(
        config(mode=Mode.LOOKAHEAD, ahead=ahead, ranks=ranks, **on_engine(engine, 2)), SOURCE
    )
    assert_same_bytes(sync, other)
    assert sum(s["rows_replaced"] for s in other.store.statuses()) > 0


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(ranks=st.integers(1, 8), tau=st.integers(0, 4), shards=st.integers(1, 2))
@pytest.mark.law16
def test_async_is_hybrid_with_rows_and_dense_weights_as_many_updates_late(ranks, tau, shards):
    late = updates_missed(Mode.ASYNC, tau, ranks=ranks)
    shared = {"batch": 6, "shards": shards, "model": TUNED}
    one = run(config(mode=Mode.ASYNC, tau=tau, ranks=ranks, **shared), SOURCE)
    hybrid = config(
        mode=Mode.HYBRID, tau=late.rows, dense_lag=late.dense, merge_pushes=False, **shared
    )
    assert_same_bytes(one, run(hybrid, SOURCE))


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.parametrize("mode", [mode for mode in Mode if mode.rules in CARRIES])
@pytest.mark.law4
def test_decay_and_dropout_are_the_same_in_every_mode(mode, executor):
    """One rank without lateness computes in every mode what it computes in sync."""
    model = replace(TUNED, dropout=0.3)
    late = {"tau": 0} if mode.reads_late_rows else {}
    if mode.averages_replicas:  # the mean of one replica moves it by zero
        late |= {"average_every_steps": 3} if executor == "constant_lag" else {}
    one = run(config(mode=mode, model=model, executor=executor, **late), SOURCE)
    assert_same_bytes(run(config(model=model), SOURCE), one)


@pytest.mark.law3
def test_ranks_with_equal_shares_equal_one_rank_in_float64_after_100_steps():
    source = ArraySource(2400)
    one = run(config(dtype="float64", steps=100), source)
    four = run(config(dtype="float64", steps=100, ranks=4), source)
    assert difference(one, four)[0] < 1e-10


@pytest.mark.law3
def test_ranks_with_equal_shares_equal_one_rank_in_float32_after_10_steps():
    one, four = run(config(steps=10), SOURCE), run(config(steps=10, ranks=4), SOURCE)
    assert difference(one, four)[1] < 1e-6


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ASYNC, Mode.ASYNC_AVERAGING])
@pytest.mark.law6
def test_same_seed_and_order_give_the_same_bytes(mode):
    chosen = config(mode=mode, tau=2, ranks=3, shards=2)
    first, second = run(chosen, SOURCE), run(chosen, SOURCE)
    assert_same_bytes(first, second)
    assert (first.trace.events == second.trace.events).all()
    other_seed = run(config(mode=mode, tau=2, ranks=3, shards=2, seed=1), SOURCE)
    assert first.state()["rows.values"].tobytes() != other_seed.state()["rows.values"].tobytes()


@pytest.mark.law6
def test_swapping_two_conflicting_records_changes_the_loss():
    chosen = config(mode=Mode.HYBRID, tau=1, ranks=2, merge_pushes=False)
    straight = run(chosen, SOURCE)
    events = list(straight.trace)
    reads = [k for k, e in enumerate(events) if e.kind == Kind.LOOKUP and e.step == 3]
    writes = [k for k, e in enumerate(events) if e.kind == Kind.PUSH and e.step == 1]
    events[reads[0]], events[writes[-1]] = events[writes[-1]], events[reads[0]]
    swapped = run(chosen, SOURCE, order=[e._replace(version=-1) for e in events])
    assert straight.meter.losses[:3] == swapped.meter.losses[:3]
    assert straight.meter.losses != swapped.meter.losses


def test_replay_refuses_an_order_longer_than_the_data():
    with pytest.raises(ValueError, match="the data ended before"):
        run(config(), SOURCE, order=[Event(Kind.LOOKUP, 0, 0), Event(Kind.LOOKUP, 0, 999)])


def test_the_number_of_shards_changes_no_byte():
    """Law 10, and one lock or many: rows are a function of ids and pushes alone."""
    assert_same_bytes(run(config(ranks=2), SOURCE), run(config(ranks=2, shards=5), SOURCE))


@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_a_simulated_order_trains_the_real_model(mode, tmp_path, monkeypatch):
    """The road from the simulator to the runtime: a file."""
    trace = tmp_path / "simulated.npz"
    words = ["--cluster", "v100-paper", "--workload", "criteo-ad", "--mode", mode, "--ranks", "4"]
    per_rank = 24 if mode == "async" else 6
    words += [
        "--tau",
        "3",
        "--batch-per-rank",
        str(per_rank),
        "--steps",
        "12",
        "--write-trace",
        str(trace),
    ]
    monkeypatch.setattr(sys, "argv", ["persia_sim", *words])
    assert simulator.main() == 0
    order = Trace.load(trace)
    chosen = config(mode=mode, ranks=4, steps=48 if mode == "async" else 12)
    world = run(chosen, ArraySource(2000), order=order)
    assert world.meter.samples == 12 * 24 * (1 if mode != "async" else 4)
    same = {"mode": mode, "ranks": 4, "batch_per_rank": per_rank}
    refuse_other_run(order, same, "")
    with pytest.raises(ValueError, match="ranks: trace 4, this run 2"):
        refuse_other_run(order, same | {"ranks": 2}, "t.npz")
    with pytest.raises(ValueError, match=f"batch_per_rank: trace {per_rank}, this run 7"):
        refuse_other_run(order, same | {"batch_per_rank": 7}, "t.npz")
    refuse_other_run(order.with_batch_per_rank(5), same | {"batch_per_rank": 5}, "")
    updates = 48 if mode == "async" else 12
    refuse_other_run(order, same | {"steps": updates}, "")
    with pytest.raises(ValueError, match=f"orders {updates} dense updates, but steps is 60; sim"):
        refuse_other_run(order, same | {"steps": 60}, "t.npz")


@pytest.mark.parametrize("probability", [1.0, 0.6])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.law1
@pytest.mark.law2
def test_lookahead_and_tau_0_equal_sync_with_eviction_and_admission(probability, ranks):
    """120 ids and room for 50: rows come and go all the time; a prefetch must not disturb that."""
    admit = Admission(probability=probability)
    base = config(ranks=ranks, shards=2)
    rows = replace(base.rows, capacity=Capacity(rows=50), admission=admit)
    base = replace(base, rows=rows)
    sync = run(base, SOURCE)
    assert len(sync.store) <= 50
    for ahead in (1, 4, 9):
        other = run(changed(base, mode=Mode.LOOKAHEAD, ahead=ahead), SOURCE)
        assert_same_bytes(sync, other)
    assert_same_bytes(sync, run(changed(base, mode=Mode.HYBRID, tau=0), SOURCE))

    # So do the orders of threads that race for the rows.
    for late in ({"mode": Mode.LOOKAHEAD, "ahead": 4}, {"mode": Mode.HYBRID, "tau": 0}):
        recorded = run(changed(base, executor="concurrent", **late), SOURCE)
        replayed = run(changed(base, **late), SOURCE, order=recorded.trace)
        assert_same_bytes(sync, recorded)
        assert_same_bytes(sync, replayed)


@pytest.mark.law3
def test_ranks_are_weighted_by_their_share_of_a_short_last_batch():
    """31 samples, 24 a step, 5 ranks: shares of 5, 5, 4, ... and of 1 and 2 in the last step."""
    source = ArraySource(31)
    one = run(config(dtype="float64"), source)
    five = run(config(dtype="float64", ranks=5), source)
    assert difference(one, five)[0] < 1e-12


@pytest.mark.parametrize("samples", [97, 98, 99])
def test_a_rank_without_samples_in_the_last_step_is_replayed(samples):
    source = ArraySource(samples)
    recorded = run(config(ranks=4, shards=2, executor="concurrent"), source)
    assert_same_bytes(recorded, run(config(ranks=4, shards=2), source, order=recorded.trace))


def test_replay_refuses_to_train_on_rows_that_were_not_read():
    events = [e for e in run(config(shards=3), SOURCE).trace]
    first = next(k for k, e in enumerate(events) if e.kind == Kind.LOOKUP and e.shard == 1)
    with pytest.raises(ValueError, match=r"before it reads shards \[1\]"):
        run(config(shards=3), SOURCE, order=events[:first] + events[first + 1 :])


@pytest.mark.parametrize("event", [Event(99, 0, 0), Event(Kind.DENSE_PULL, 0, 0)])
def test_replay_refuses_events_of_another_world(event):
    with pytest.raises(ValueError, match=r"event 0 of the order is not one of this run: Event\("):
        run(config(shards=2), SOURCE, order=[event])


@pytest.mark.parametrize(("as_list", "enough"), [(False, 8), (True, 3)])
def test_replay_of_an_order_by_servers_names_the_shards_to_give(as_list, enough):
    """As many as the whole order has; of a list, whose rest nobody has seen, as this event has."""
    events = [Event(Kind.LOOKUP, 0, 0, shard) for shard in (1, 2, 7)]
    order = events if as_list else Trace.of(events, order="simulated")
    told = f"event 1 of the order .* of shard 2, and the run has 2; give --shards {enough}$"
    with pytest.raises(ValueError, match=told):
        run(config(shards=2), SOURCE, order=order)


def _meta(chosen, tables=None):
    return trace_meta(chosen, SOURCE, tables or tables_of(chosen, SOURCE.layout, {}))


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in DECIDES_NO_BYTE])
@pytest.mark.law6
def test_a_real_trace_is_refused_for_any_setting_that_decides_a_byte(option):
    """Of all options there are: one that is added must be refused, or say why it need not."""
    recorded = config(mode=Mode.HYBRID, ranks=2, test_rows=None)
    trace = Trace.of([], **_meta(recorded, {"rows": recorded.rows}))
    refuse_other_run(trace, _meta(recorded, {"rows": recorded.rows}), "t.npz")
    other = with_another(recorded, option)
    fact = "rows.rows" if option.startswith("rows.") else option.replace("merge-", "merge_")
    with pytest.raises(ValueError, match=f"{re.escape(fact)}: "):
        refuse_other_run(trace, _meta(other, {"rows": other.rows}), "t.npz")


@pytest.mark.parametrize("option", DECIDES_NO_BYTE)
def test_what_decides_no_byte_is_an_option_and_another_value_of_it_is_taken(option):
    recorded = config(mode=Mode.HYBRID, ranks=2, test_rows=None)
    other = with_another(recorded, option)
    if option != "servers":  # as many as there were shards
        refuse_other_run(Trace.of([], **_meta(recorded)), _meta(other), "t.npz")
    assert len(DECIDES_NO_BYTE[option]) > 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "other"}, "data: trace 'array', this run 'other'"),
        ({"sha256": "1"}, "data_sha256: trace '0', this run '1'"),
        ({"schema": {"columns": [{"name": "a", "log": False}]}}, "column a: log was true, is"),
        (
            {"schema": {"columns": [{"name": "b", "log": True}]}},
            "column a is gone; column b is new",
        ),
    ],
)
def test_a_real_trace_is_refused_for_other_data(change, said):
    before = replace(SOURCE.provenance(), schema={"columns": [{"name": "a", "log": True}]})
    chosen = config(ranks=2)
    sources = [
        SimpleNamespace(layout=SOURCE.layout, provenance=lambda now=now: now)
        for now in (before, replace(before, **change))
    ]
    facts = [trace_meta(chosen, source, {"rows": chosen.rows}) for source in sources]
    refuse_other_run(Trace.of([], **facts[0]), facts[0], "t.npz")
    with pytest.raises(ValueError, match=said):
        refuse_other_run(Trace.of([], **facts[0]), facts[1], "t.npz")


class Histories(ArraySource):
    """The third field keeps its ids in order."""

    @property
    def layout(self):
        *others, tags = super().layout.fields
        history = replace(tags, pooling="sequence", max_length=2)
        return replace(super().layout, fields=(*others, history))


@pytest.mark.first_case
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD])
@pytest.mark.law12
def test_ids_in_order_are_the_same_in_every_engine(mode, engine):
    sync = run(config(ranks=2, shards=2), Histories(300))
    assert_same_bytes(sync, run(config(mode=mode, ranks=2, **on_engine(engine, 2)), Histories(300)))
