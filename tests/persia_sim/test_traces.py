"""Orders of events: of one shard or each, kept in files, replayed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from zipfile import ZIP_BZIP2, ZipFile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import constant_lag
from persia_sim.cluster.scenario import Noise, Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.engine.world import EachShard
from tests.persia_sim.oracles import mean_by_shard
from tests.persia_sim.sim_configurations import small_scenario
from tests.persia_sim.test_laws import contended, traced
from tests.runtime.worlds import ArraySource, config, run


def by_shard(scenario: Scenario) -> Trace:
    run = simulate(replace(scenario, trace_shards=True), trace=True)
    assert run.trace is not None
    return run.trace


@settings(max_examples=15)
@given(contended())
@pytest.mark.law7
def test_littles_law_is_exact_at_every_shard(scenario):
    trace = by_shard(scenario)
    means = mean_by_shard(staleness_in_pushes(trace))
    assert set(means) == set(range(scenario.cluster.servers.processes))
    for missed, in_flight in means.values():
        assert missed == in_flight
        assert missed == 0 or scenario.mode.reads_late_rows
    late = staleness_in_steps(trace)
    if scenario.mode.reads_late_rows and scenario.window is not None:
        assert late.oldest_missing_steps.max() <= scenario.window


@pytest.mark.parametrize("merge", [True, False])
def test_versions_count_the_batches_applied_at_the_shard(merge):
    base = small_scenario(Mode.HYBRID, merge_pushes=merge, tau=2, noise=Noise(gpu_cv=0.3))
    for trace in (by_shard(base), traced(base)[1]):
        for shard in {e.shard for e in trace if e.kind == Kind.PUSH}:
            version = 0
            for event in trace:
                if event.shard == shard and event.kind in (Kind.LOOKUP, Kind.PUSH):
                    assert event.version == version
                    version += (4 if merge else 1) if event.kind == Kind.PUSH else 0
            assert version == 4 * base.steps
        means = mean_by_shard(staleness_in_pushes(trace)).values()
        assert all(missed == in_flight > 0 for missed, in_flight in means)


def test_servers_see_different_orders_of_the_same_batches():
    base = small_scenario(Mode.HYBRID, tau=4, noise=Noise(gpu_cv=0.3, server_cv=2.0))
    trace = by_shard(base)
    orders = {
        shard: [(e.kind, e.rank, e.step) for e in trace if e.shard == shard] for shard in range(8)
    }
    assert len({tuple(order) for order in orders.values()}) > 1
    assert len({tuple(sorted(order)) for order in orders.values()}) == 1
    assert set(Counter(orders[0]).values()) == {1}


def test_the_order_by_server_tells_of_the_same_run():
    base = small_scenario(Mode.HYBRID, noise=Noise(gpu_cv=0.1))
    whole, parts = (
        simulate(base, trace=True),
        simulate(replace(base, trace_shards=True), trace=True),
    )
    assert whole.stamps.tobytes() == parts.stamps.tobytes()
    assert whole.trace is not None and parts.trace is not None
    assert parts.trace.meta == whole.trace.meta | {"shards": 8}
    dense = [[e for e in t if e.kind == Kind.DENSE_UPDATE] for t in (whole.trace, parts.trace)]
    assert dense[0] == dense[1]


def test_every_row_of_a_batch_is_read_before_it_trains_and_written_after():
    trace = by_shard(small_scenario(Mode.RAW_HYBRID, tau=3, noise=Noise(server_cv=1.0)))
    updated = {e.step: k for k, e in enumerate(trace) if e.kind == Kind.DENSE_UPDATE}
    for k, event in enumerate(trace):
        if event.kind == Kind.LOOKUP:
            assert k < updated[event.step]
        elif event.kind == Kind.PUSH:
            assert k > updated[event.step]


def test_an_empty_order_is_a_trace():
    import simpy

    assert len(EachShard(simpy.Environment(), 3).finish(mode="sync")) == 0
    assert np.array_equal(EachShard(simpy.Environment(), 3).finish().events, np.zeros((0, 5)))


SHARDS = 8  # server processes of the small cluster


@pytest.mark.parametrize(
    ("mode", "merge"), [(Mode.HYBRID, True), (Mode.HYBRID, False), (Mode.LOOKAHEAD, True)]
)
def test_an_order_by_server_trains_and_its_versions_are_the_stores(mode, merge):
    noise = Noise(gpu_cv=0.3, server_cv=1.5)
    choice = {"merge_pushes": merge} if mode is Mode.HYBRID else {}
    base = small_scenario(mode, noise=noise, trace_shards=True, steps=20, **choice)
    order = simulate(base, trace=True).trace
    assert order is not None
    late = {"tau": base.tau, **choice} if mode is Mode.HYBRID else {}
    chosen = config(mode=mode, ranks=4, shards=SHARDS, steps=20, **late)
    world = run(chosen, ArraySource(600), order=order)
    simulated = mean_by_shard(staleness_in_pushes(order))
    trained = mean_by_shard(staleness_in_pushes(world.trace))
    assert set(trained) == set(simulated)
    for missed, in_flight in trained.values():
        assert missed == in_flight
    again = run(chosen, ArraySource(600), order=simulate(replace(base), trace=True).trace)
    assert again.state()["rows.values"].tobytes() == world.state()["rows.values"].tobytes()


META = {"mode": "hybrid", "ranks": 2, "shards": 2}
GOOD = [
    Event(Kind.LOOKUP, 0, 0, 0, 0),
    Event(Kind.LOOKUP, 1, 0, 0, 0),
    Event(Kind.DENSE_UPDATE, ALL, 0, ALL, 0),
    Event(Kind.PUSH, ALL, 0, 0, 0),
    Event(Kind.LOOKUP, 0, 1, 0, 2),
    Event(Kind.LOST_PUSH, 0, 1, 0, 2),
]


def write(path, events, meta=META, **columns):
    table = np.array(events, np.int64).reshape(-1, 5)
    arrays = dict(zip(Event._fields, table.T, strict=True)) | columns
    text = meta if isinstance(meta, str) else json.dumps(meta)
    np.savez(path, meta=np.array(text), **arrays)
    return path


def refused(path, events, meta=META, **columns) -> str:
    with pytest.raises(ValueError, match="trace") as caught:
        Trace.load(write(path, events, meta, **columns))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_trace_that_a_run_could_have_written_is_loaded(tmp_path):
    assert list(Trace.load(write(tmp_path / "t.npz", GOOD))) == GOOD
    assert len(Trace.load(write(tmp_path / "e.npz", []))) == 0


@pytest.mark.parametrize("mode", list(Mode))
def test_orders_of_every_mode_survive_their_file(mode, tmp_path):
    every = 3 if mode.averages_replicas else None
    events = list(constant_lag(mode, ranks=3, has_batch=lambda k: k < 40, tau=2 * mode.
                               reads_late_rows, average_every=every))  # fmt: skip
    Trace.of(events, mode=str(mode), ranks=3).save(tmp_path / "t.npz")
    assert list(Trace.load(tmp_path / "t.npz")) == events


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (1, {"rank": 2}, r"row 1: rank is 2: must be 0 to 1, or -1"),
        (1, {"rank": -2}, r"row 1: rank is -2: must be 0 to 1"),
        (1, {"rank": ALL}, r"row 1: rank is -1: must be 0 to 1, or -1 for a push or update of all"),
        (4, {"step": -1}, r"row 4: step is -1: must be 0 to 5"),
        (4, {"step": 10**12}, r"row 4: step is 1000000000000: must be 0 to 5"),
        (0, {"shard": 2}, r"row 0: shard is 2: must be -1 to 1"),
        (0, {"shard": -5}, r"row 0: shard is -5: must be -1 to 1"),
        (0, {"kind": 77}, r"row 0: kind is 77: mode hybrid has 0 lookup, 2 push"),
        (0, {"kind": Kind.REFRESH}, r"row 0: kind is 1: mode hybrid has"),
        (2, {"kind": Kind.DENSE_PULL, "rank": 0}, r"row 2: kind is 5: mode hybrid has"),
        (0, {"version": -9}, r"row 0: version is -9: must be >= 0"),
        (4, {"version": 5}, r"shard 0, row 4: version is 5 after 0 in row 3: it grows by a push"),
        (4, {"version": ALL}, r"row 4: version is -1, unknown"),
        (5, {"version": 3}, r"row 5: version is 3 after 2 in row 4"),
        (3, {"version": 1}, r"row 3: version is 1 after 0 in row 1"),
        (1, {"rank": 0}, r"row 1: lookup of rank 0, step 0, shard 0 is the event of row 0 again"),
    ],
)
def test_a_row_that_no_run_could_have_written_is_named(tmp_path, row, change, message):
    import re

    events = list(GOOD)
    events[row] = events[row]._replace(**change)
    found = refused(tmp_path / "t.npz", events)
    assert re.search(message, found), found
    assert "t.npz" in found


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ([1], "its facts are [1]: must be a JSON object"),
        (None, "its facts are None: must be a JSON object"),
        ({"ranks": 2}, "mode is None: must be one of sync"),
        (META | {"mode": "hybird"}, "mode is 'hybird': must be one of sync"),
        (META | {"mode": ["sync"]}, "mode is ['sync']: must be one of sync"),
        ({"mode": "hybrid"}, "ranks is None: must be a whole number >= 1"),
        (META | {"ranks": "2"}, "ranks is '2': must be a whole number >= 1"),
        (META | {"ranks": True}, "ranks is True: must be a whole number >= 1"),
        (META | {"ranks": 0}, "ranks is 0: must be a whole number >= 1"),
        (META | {"shards": 1.5}, "shards is 1.5: must be a whole number >= 1"),
        (META | {"updates": -3}, "updates is -3: must be a whole number >= 1"),
        (META | {"tau": -5}, "tau is -5: must be a whole number >= 0, or null: unbounded"),
        (META | {"tau": "2"}, "tau is '2': must be a whole number >= 0"),
        (META | {"tau": True}, "tau is True: must be a whole number >= 0"),
        (META | {"order": "recorded"}, "order is 'recorded': must be 'simulated', or not there"),
        (META | {"updates": 1}, "row 4: step is 1: must be 0 to 0"),
        (META | {"order": "simulated", "steps": 1}, "row 4: step is 1: must be 0 to 0"),
    ],
)
def test_facts_that_are_not_those_of_a_run_are_named(tmp_path, meta, message):
    assert message in refused(tmp_path / "t.npz", GOOD, meta)


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("rank", 3, 0), ("rank", 2, 1), ("shard", 2, 1), ("version", 2, 7), ("rank", 5, 1)],
)
def test_an_event_that_was_changed_in_a_file_is_noticed(column, row, value, tmp_path):
    """Also where a run could have written it: the file has a checksum of all that it says."""
    file = tmp_path / "t.npz"
    Trace.of(GOOD, **META).save(file)
    with np.load(file) as found:
        arrays = dict(found)
    arrays[column][row] = value
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=r"trace .*t.npz was changed since it was written"):
        Trace.load(file)


@pytest.mark.parametrize("fact", [{"tau": 3}, {"order": "simulated"}, {"seed": 1}, {"updates": 9}])
def test_a_fact_that_was_changed_in_a_file_is_noticed(fact, tmp_path):
    file = tmp_path / "t.npz"
    Trace.of(GOOD, **META, seed=0, tau=2, batch_per_rank=8).save(file)
    with np.load(file) as found:
        arrays = dict(found)
    arrays["meta"] = np.array(json.dumps(json.loads(str(arrays["meta"])) | fact))
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=r"trace .*t.npz was changed since it was written"):
        Trace.load(file)


def test_a_trace_has_the_facts_that_it_was_given_again(tmp_path):
    """In the words of JSON; the checksum is none of them."""
    facts = META | {"tables": ("a", "b"), "counts": {2: "two", 10: "ten"}, "tau": None}
    Trace.of(GOOD, **facts).save(tmp_path / "t.npz")
    found = Trace.load(tmp_path / "t.npz")
    assert found.meta == json.loads(json.dumps(facts))
    found.save(tmp_path / "again.npz")
    assert Trace.load(tmp_path / "again.npz").sha256() == found.sha256()


def test_an_archive_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path, monkeypatch):
    """Numbers of an order do not shrink to a thousandth."""
    file = tmp_path / "t.npz"
    zeros = dict.fromkeys(Event._fields, np.zeros(100_000, np.int64))
    np.savez_compressed(file, meta=np.array(json.dumps(META)), **zeros)
    with pytest.raises(ValueError, match="is the event of row 0 again"):
        Trace.load(file)
    monkeypatch.setattr("persia_sim.base.files.MOST_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"t.npz unpacks to 4,0\d\d,\d+ bytes, \d+ times its own"):
        Trace.load(file)
    Trace.of(GOOD * 0, **META).save(file)
    assert len(Trace.load(file)) == 0


def packed_by_bz2(file: Path) -> None:
    """Zipfile unpacks it whole, whatever size its entries claim."""
    with ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(file, "w", ZIP_BZIP2) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def with_another(file: Path) -> None:
    with ZipFile(file, "a") as archive:
        archive.writestr("evil.npy", b"")


def with_one_twice(file: Path) -> None:
    with ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("rank.npy", archive.read("rank.npy"))


def of_a_shape_that_is_not_there(file: Path) -> None:
    with ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    rank = entries["rank.npy"]
    entries["rank.npy"] = rank.replace(b"(6,), }       ", b"(9999999999,)}")
    assert entries["rank.npy"] != rank
    with ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (packed_by_bz2, "meta is packed in a way that numpy does not use"),
        (with_another, "it holds 'evil', which no run writes"),
        (with_one_twice, "it holds 'rank', which no run writes, or twice"),
        (of_a_shape_that_is_not_there, r"rank.npy is not as long as its shape \(9999999999,\)"),
    ],
)
def test_an_archive_that_is_not_what_a_run_writes_is_refused(change, why, tmp_path):
    file = write(tmp_path / "t.npz", GOOD)
    change(file)
    with pytest.raises(ValueError, match=rf"t.npz is damaged; record it again.*\({why}"):
        Trace.load(file)
    assert Trace.is_stored_in(file) == (change is of_a_shape_that_is_not_there)


def test_only_a_simulated_order_may_stand_for_batches_of_another_size():
    simulated = Trace.of(GOOD, **META, order="simulated", batch_per_rank=864)
    small = simulated.with_batch_per_rank(8)
    assert (small.events == simulated.events).all()
    assert small.meta == META | {
        "order": "simulated", "batch_per_rank": 8, "simulated_batch_per_rank": 864
    }  # fmt: skip
    assert simulated.meta["batch_per_rank"] == 864
    with pytest.raises(ValueError, match="only a simulated order"):
        Trace.of(GOOD, **META, batch_per_rank=864).with_batch_per_rank(8)


def test_steps_of_a_recorded_run_count_batches_and_do_not_bound_the_order(tmp_path):
    assert len(Trace.load(write(tmp_path / "t.npz", GOOD, META | {"steps": 1}))) == len(GOOD)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rank": np.zeros(6)}, "rank is float64 of shape (6,): must be a column of integers"),
        ({"step": np.array(["a"] * 6)}, "step is <U1 of shape (6,): must be a column of integers"),
        ({"shard": np.zeros((6, 2), int)}, "shard is int64 of shape (6, 2): must be a column"),
        ({"kind": np.zeros(5, int)}, "its columns have [5, 6] rows: must be equal"),
    ],
)
def test_columns_that_are_not_integers_of_one_length_are_named(tmp_path, columns, message):
    assert message in refused(tmp_path / "t.npz", GOOD, **columns)


def test_a_push_of_all_ranks_beside_one_of_a_rank_is_refused(tmp_path):
    events = [*GOOD, Event(Kind.PUSH, 1, 0, 0, 2)]
    assert "row 6: push of rank 1, step 0, shard 0" in refused(tmp_path / "t.npz", events)


@pytest.mark.parametrize("text", ["{", "", "nul", '{"mode": }'])
def test_facts_that_are_no_json_are_refused(tmp_path, text):
    assert "t.npz is damaged; record it again" in refused(tmp_path / "t.npz", GOOD, text)


@settings(max_examples=60, deadline=None)
@given(
    cells=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4),
                  st.sampled_from([-(2**63), -7, -1, 0, 1, 2, 3, 8, 2**31, 2**63 - 1])),
        min_size=1, max_size=3,
    )
)  # fmt: skip
def test_no_cell_of_a_trace_ends_in_anything_but_a_sentence(tmp_path_factory, cells):
    table = np.array(GOOD, np.int64)
    for row, column, value in cells:
        table[row, column] = value
    path = tmp_path_factory.mktemp("fuzz") / "t.npz"
    write(path, table)
    try:
        loaded = Trace.load(path)
    except ValueError as error:
        assert str(error).startswith(f"trace {path}")
    else:
        assert (loaded.events == table).all()
