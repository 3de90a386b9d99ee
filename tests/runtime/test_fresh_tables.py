"""Law 19: tables named fresh are exact beside late ones, for the same bytes in every engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persia_sim.base.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import constant_lag
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import read_checkpoint
from runtime.embedding.config import Admission, Capacity, RowOptimizer
from runtime.rank.components import fresh_tables
from runtime.run.saver import Saving
from runtime.run.session import train
from tests.runtime.worlds import (
    ENGINES,
    TwoTables,
    World,
    assert_same_bytes,
    changed,
    config,
    on_engine,
    run,
)

SOURCE = TwoTables(300)
"""Tables: rows (of user and tags), items (of item)."""
ORDERS = ["constant_lag", "ordered"]
EVERY_ENGINE = ["threads"]
EVERY_ENGINE += [pytest.param(one, marks=pytest.mark.long) for one in ENGINES[1:]]


def hybrid(**changes):
    return config(**{"mode": Mode.HYBRID, "tau": 3, "ranks": 2, "shards": 2} | changes)


def run_by(engine, settings, source=SOURCE, **others):
    """On one engine of this process; ``ordered`` is the constant lag, event by event."""
    if engine != "ordered":
        return run(settings, source, **others)
    sync = settings.sync
    batches = -(-300 // settings.batch)
    order = constant_lag(
        sync.mode,
        ranks=sync.ranks,
        has_batch=lambda k: k < batches,
        tau=sync.window or 0,
        merge_pushes=sync.merges,
        fresh=bool(sync.fresh),
        sync_steps=sync.sync_steps,
    )
    return run(settings, source, order=order)


@pytest.mark.law19
@pytest.mark.parametrize("engine", ORDERS)
@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("limits", [{}, {"capacity": Capacity(rows=20)}])
def test_all_tables_fresh_give_the_bytes_of_lookahead_and_sync(engine, merges, limits):
    rows = config(optimizer=RowOptimizer(kind="adam", lr=0.05)).rows
    rows = replace(rows, admission=Admission(probability=0.5), **limits)
    fresh = run_by(engine, hybrid(fresh=("all",), merge_pushes=merges, rows=rows))
    for exact in (Mode.SYNC, Mode.LOOKAHEAD):
        assert_same_bytes(run(config(mode=exact, ranks=2, shards=2, rows=rows), SOURCE), fresh)


@pytest.mark.law19
@pytest.mark.parametrize("engine", [*ORDERS, *ENGINES])
def test_at_tau_0_fresh_tables_change_nothing(engine):
    adam = {"optimizer": RowOptimizer(kind="adam", lr=0.05)}
    options = {} if engine in ORDERS else on_engine(engine, 2)
    fresh = run_by(engine, hybrid(tau=0, fresh=("item",), **adam, **options))
    assert_same_bytes(run(config(ranks=2, shards=2, **adam), SOURCE), fresh)


def test_the_loop_and_the_order_of_events_give_the_same_bytes():
    for options in ({}, {"merge_pushes": False}, {"delay_compensation": 0.5, "sync_steps": 4}):
        settings = hybrid(fresh=("item",), **options)
        assert_same_bytes(run(settings, SOURCE), run_by("ordered", settings))


@pytest.mark.parametrize("merges", [True, False])
def test_the_order_of_a_step_is_lookups_update_fresh_push_late_push(merges):
    late = [ALL] if merges else [0, 1]
    order = constant_lag(
        Mode.HYBRID, ranks=2, has_batch=lambda k: k < 3, tau=1, merge_pushes=merges, fresh=True
    )

    def step(number):
        reads = [(kind, r, number) for kind in (Kind.LOOKUP, Kind.REFRESH) for r in (0, 1)]
        return [*reads, (Kind.DENSE_UPDATE, ALL, number), (Kind.FRESH_PUSH, ALL, number)]

    def late_push(number):
        return [(Kind.PUSH, rank, number) for rank in late]

    assert [event[:3] for event in order] == [
        *step(0),
        *step(1),
        *late_push(0),
        *step(2),
        *late_push(1),
        *late_push(2),
    ]
    recorded = run(hybrid(tau=1, fresh=("item",), shards=1, merge_pushes=merges), SOURCE).trace
    known = constant_lag(
        Mode.HYBRID, ranks=2, has_batch=lambda k: k < 13, tau=1, merge_pushes=merges, fresh=True
    )
    assert [event[:3] for event in recorded] == [event[:3] for event in known]


@pytest.mark.law19
@pytest.mark.parametrize("merges", [True, False])
def test_fresh_tables_miss_nothing_and_late_ones_tau_updates(merges):
    world = run(hybrid(fresh=("item",), merge_pushes=merges), SOURCE)
    late = staleness_in_steps(world.trace)
    assert np.array_equal(late.missing_steps, np.minimum(late.step, 3))
    exact = staleness_in_steps(world.trace.of_fresh_tables())
    assert len(exact.step) == len(late.step) and not exact.missing_steps.any()
    assert not staleness_in_pushes(world.trace.of_fresh_tables()).missed_pushes.any()
    for server in world.store.servers:
        assert server.row_staleness[1:].any() and not server.fresh.row_staleness[1:].any()
        assert server.fresh.row_staleness[0] and server.fresh.updates == 13
        assert server.updates == (13 if merges else 26)


def test_delay_compensation_acts_on_late_tables_alone():
    plain, compensated = (
        run(hybrid(fresh=("all",), delay_compensation=strength), SOURCE) for strength in (0.0, 9.0)
    )
    assert_same_bytes(plain, compensated)
    assert_same_bytes(
        run(hybrid(fresh=("all",), lr_by_staleness=True), SOURCE),
        run(config(ranks=2, shards=2), SOURCE),
    )


def test_a_field_means_its_table_and_a_name_that_the_data_lack_is_refused():
    layout = SOURCE.layout
    assert fresh_tables(("tags",), layout) == ("rows",)
    assert fresh_tables(("items", "rows"), layout) == ("items", "rows")
    assert fresh_tables(("all",), layout) == ("items", "rows")
    with pytest.raises(ValueError, match=r"'films'.*user, item, tags"):
        train(hybrid(fresh=("films",)), SOURCE)


SLOW_PUSHES = {
    "merged": {},
    "on arrival": {"merge_pushes": False},
    "permits": {"permits": 2},
    "half": {"wire": "half"},
}


def of_groups(world: World) -> list[tuple[dict, dict]]:
    """What each server has counted of its late tables, and of its fresh ones."""
    return [(status, status["fresh"]) for status in world.store.statuses()]


@pytest.mark.law12
@pytest.mark.law19
@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("name", SLOW_PUSHES)
def test_a_concurrent_run_replays_to_its_bytes_and_reads_its_fresh_tables_exactly(
    name, engine, tmp_path
):
    options = {"fresh": ("item",), **SLOW_PUSHES[name]}
    concurrent = on_engine(engine, 2) | {"latency_s": 0.003, "ranks": 3, **options}
    world = run(hybrid(**concurrent), SOURCE)
    world.trace.save(tmp_path / "trace.npz")
    options.pop("permits", None)
    again = run(hybrid(ranks=3, **options), SOURCE, order=Trace.load(tmp_path / "trace.npz"))
    assert_same_bytes(world, again)
    assert (world.trace.events == again.trace.events).all()

    # Fresh tables miss nothing, the others at most tau steps (law 5).
    assert not staleness_in_steps(world.trace.of_fresh_tables()).missing_steps.any()
    assert staleness_in_steps(world.trace).oldest_missing_steps.max() <= 3
    for late, fresh in of_groups(world):
        assert any(late["row_staleness"][1:]) and not any(fresh["row_staleness"][1:])
        assert (late["version"], fresh["version"]) == (3 * 13, 3 * 13)


@pytest.mark.law19
@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("limits", [{}, {"capacity": Capacity(rows=20)}])
def test_a_concurrent_run_with_all_tables_fresh_gives_the_bytes_of_sync(limits, engine):
    rows = replace(config().rows, admission=Admission(probability=0.5), **limits)
    fresh = hybrid(fresh=("all",), rows=rows, merge_pushes=False, **on_engine(engine, 2))
    assert_same_bytes(run(config(ranks=2, shards=2, rows=rows), SOURCE), run(fresh, SOURCE))


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("merges", [True, False])
def test_lost_pushes_of_both_groups_are_counted_and_hold_nobody_up(merges, engine):
    world = run(
        hybrid(fresh=("item",), merge_pushes=merges, **on_engine(engine, 2)),
        SOURCE,
        lose_push=lambda rank, step: rank == 1 and step % 5 == 0,
    )
    lost = [(1, step) for step in (0, 5, 10) for _ in range(2)]  # at two servers
    for kind in (Kind.LOST_PUSH, Kind.FRESH_LOST_PUSH):
        assert sorted((r, s) for _, _, r, s, _, _ in world.trace.of_kind(kind).tolist()) == lost
    assert world.meter.pushes_lost == 3
    for groups in of_groups(world):
        for group in groups:
            assert (group["lost"], group["version"] + group["lost"]) == (3, 2 * 13)


@pytest.mark.law11
@pytest.mark.parametrize("engine", ["constant_lag", *EVERY_ENGINE])
def test_a_run_that_was_cut_goes_on_with_the_counters_of_both_groups(engine, tmp_path: Path):
    """Adam's correction counts updates of a group, so a forgotten count shows in the bytes."""
    adam = RowOptimizer(kind="adam", lr=0.05)
    fresh = ("item",) if engine == "constant_lag" else ("all",)  # others: what has no timing
    chosen = hybrid(fresh=fresh, optimizer=adam, checkpoint_every=4, **on_engine(engine, 2))
    whole = train(chosen, SOURCE, saving=Saving(tmp_path / "whole"))
    cut = read_checkpoint(complete_checkpoints(tmp_path / "whole")[0])
    servers = "servers" if chosen.engine.servers else "shards"
    for number in (2, 3):
        settings = changed(chosen, **{servers: number})
        folder = tmp_path / f"{number}"
        resumed = train(settings, SOURCE, saving=Saving(folder, cut))
        assert_same_bytes(whole, resumed)


@pytest.mark.parametrize("mode", [mode for mode in Mode if not mode.may_merge])
def test_other_modes_refuse_fresh_tables(mode):
    with pytest.raises(ValueError, match=r"sync\.fresh"):
        config(mode=mode, fresh=("item",))


def test_forwarded_is_refused_with_fresh_tables():
    with pytest.raises(ValueError, match=r"sync\.lookahead"):
        hybrid(fresh=("item",), executor="concurrent", lookahead="forwarded")


def test_a_replay_refuses_a_trace_whose_fresh_tables_differ(tmp_path: Path):
    def recorded(name, **changes):
        outcome = train(hybrid(**changes), SOURCE)
        outcome.trace.save(tmp_path / name)
        return outcome

    fresh = recorded("fresh.npz", fresh=("item",))
    late = recorded("late.npz")
    assert fresh.trace.meta["fresh"] == ["items"] and "fresh" not in late.trace.meta

    def replayed(name, **changes):
        return train(hybrid(executor="replay", trace=tmp_path / name, **changes), SOURCE)

    assert_same_bytes(fresh, replayed("fresh.npz", fresh=("items",)))
    for name, changes in (("fresh.npz", {}), ("late.npz", {"fresh": ("item",)})):
        with pytest.raises(ValueError, match="fresh"):
            replayed(name, **changes)
    with pytest.raises(ValueError, match="fresh"):
        replayed("fresh.npz", fresh=("user",))


@pytest.mark.parametrize("kinds", [{Kind.FRESH_PUSH}, {Kind.PUSH}, {Kind.PUSH, Kind.FRESH_PUSH}])
@pytest.mark.law13
def test_a_summary_counts_what_is_lost_of_late_and_of_fresh_tables(kinds, tmp_path: Path):
    chosen = hybrid(ranks=1, fresh=("item",), merge_pushes=False)
    trace = train(chosen, SOURCE).trace
    lost = {Kind.PUSH: Kind.LOST_PUSH, Kind.FRESH_PUSH: Kind.FRESH_LOST_PUSH}
    events = [
        event._replace(kind=lost[event.kind], rank=0, version=ALL)
        if event.kind in kinds and (event.step, event.shard) == (3, 1)
        else event._replace(version=ALL)
        for event in trace
    ]
    Trace.of(events, **trace.meta).save(tmp_path / "t.npz")
    replay = changed(chosen, executor="replay", trace=tmp_path / "t.npz")
    assert train(replay, SOURCE).figures.pushes_lost_at == [0, len(kinds)]


def test_a_trace_of_impossible_fresh_events_is_refused(tmp_path: Path):
    def saved(events, **meta):
        Trace.of(events, mode="hybrid", ranks=1, shards=1, **meta).save(tmp_path / "trace.npz")
        return Trace.load(tmp_path / "trace.npz")

    reads = [Event(Kind.LOOKUP, 0, 0, 0), Event(Kind.REFRESH, 0, 0, 0)]
    push = Event(Kind.FRESH_PUSH, ALL, 0, 0)
    assert len(saved([*reads, push], fresh=["items"])) == 3
    with pytest.raises(ValueError, match="kind"):
        saved([*reads, push])
    with pytest.raises(ValueError, match="happens once"):
        lone = Event(Kind.FRESH_PUSH, 0, 0, 0)
        saved([*reads, push, lone], fresh=["items"])
    with pytest.raises(ValueError, match="list of names"):
        saved(reads, fresh="items")
