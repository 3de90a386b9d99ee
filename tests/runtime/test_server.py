"""The embedding server: its window, its merge, its order of lookups, its counts of updates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from persia_sim.base.trace import ALL, Kind, TraceRecorder
from persia_sim.base.vocabulary import Mode
from runtime import stop
from runtime.embedding.config import Admission, Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.sharded import ShardedStore
from runtime.hosts.wire.coroutines import LoopCondition
from runtime.rank.components import server_rules
from runtime.stop import Turns
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of, ones
from tests.runtime.hosts.test_faults import in_thread, until
from tests.runtime.worlds import ArraySource, assert_same_bytes, changed, config, run

SOURCE = ArraySource(300)


def store_of(
    rules: ServerRules,
    table: TableConfig = SGD,
    lock: Callable[[], Turns] | None = None,
    **options,
) -> ShardedStore:
    """``lock``: how requests wait, in place of threads."""
    store = NativeStore(LAYOUT, [table], rules=rules, **options)
    for server in store.servers if lock else ():
        server.lock = lock()
    return store


@pytest.fixture
def looks(monkeypatch):
    """Who has looked whether his wait is over, and what he saw, in turn."""
    found: list[tuple[str, bool]] = []

    wait_until = stop.Turns.wait_until

    def spied(changed, holds, end, who) -> None:
        def look() -> bool:
            found.append((who(), holds()))
            return found[-1][1]

        wait_until(changed, look, end, who)

    monkeypatch.setattr(stop.Turns, "wait_until", spied)
    return found


@pytest.mark.law5
def test_a_lookup_waits_for_all_ranks_pushes_and_only_as_far_back_as_tau(looks):
    store = store_of(ServerRules(ranks=2, tau=1, merges=True))
    server = store.servers[0]
    first = [store.begin(rank, 0, batch_of(7)) for rank in (0, 1)]
    for handle in first:
        server.look_up(handle)
    server.look_up(store.begin(0, 1, batch_of(7)))  # may miss step 0
    late = store.begin(0, 2, batch_of(7))
    waiting, _ = in_thread(lambda: server.look_up(late))
    until(lambda: not looks[-1][1])
    server.give((first[0], ones(first[0])))
    before = len(looks)
    until(lambda: len(looks) > before)
    assert not looks[-1][1]
    server.give((first[1], ones(first[1])))
    waiting.join(60)
    assert not waiting.is_alive()
    assert late.values["rows"].tolist() == [[-2.0, -2.0]]


@pytest.mark.law13
def test_a_lost_push_opens_the_window_and_is_recorded():
    recorder = TraceRecorder()
    store = store_of(ServerRules(ranks=2, tau=0, merges=True), recorder=recorder)
    handles = [store.begin(rank, 0, batch_of(7)) for rank in (0, 1)]
    for handle in handles:
        store.servers[0].look_up(handle)
    store.servers[0].give((handles[0], None))
    store.servers[0].give((handles[1], ones(handles[1])))
    after = store.begin(0, 1, batch_of(7))
    store.servers[0].look_up(after)
    assert after.values["rows"].tolist() == [[-1.0, -1.0]]
    kinds = [(Kind(e.kind), e.rank) for e in recorder.finish()]
    assert kinds[2:4] == [(Kind.LOST_PUSH, 0), (Kind.PUSH, ALL)]


def test_a_wait_with_nobody_at_work_is_a_deadlock_that_names_who_waits(monkeypatch):
    monkeypatch.setattr(stop, "PATIENCE_S", 0.5)
    store = store_of(ServerRules(ranks=2, tau=0))
    with pytest.raises(RuntimeError, match=r"deadlock: the lookup of rank 0, step 1 waits at"):
        store.servers[0].look_up(store.begin(0, 1, batch_of(7)))


def test_lookups_of_a_step_are_served_in_rank_order_where_the_order_decides(looks):
    recorder = TraceRecorder()
    rules = ServerRules(ranks=3, tau=0, merges=True, in_rank_order=True)
    store = store_of(rules, recorder=recorder)
    threads = []
    for rank in (2, 1, 0):
        handle = store.begin(rank, 0, batch_of(rank))
        threads.append(in_thread(lambda h=handle: store.servers[0].look_up(h))[0])
        waits = f"rank {rank}, step 0 waits for"
        until(lambda who=waits, last=rank == 0: last or any(who in said for said, _ in looks))
    for thread in threads:
        thread.join(60)
    assert [e.rank for e in recorder.finish()] == [0, 1, 2]


@pytest.mark.parametrize("through", [0, 1])
def test_a_rank_without_more_steps_is_not_waited_for_in_rank_order(through):
    rules = ServerRules(ranks=3, tau=0, merges=True, in_rank_order=True)
    store = store_of(rules, lock=LoopCondition)
    server = store.servers[0]
    handles = [store.begin(rank, 0, batch_of(7)) for rank in range(3)]
    for handle in handles:
        server.look_up(handle)
    for handle in handles:
        server.give((handle, ones(handle)))
    server.finish(through, 1)
    for rank in (one for one in range(3) if one != through):
        server.look_up(store.begin(rank, 1, batch_of(7)))  # NotReady where it would wait


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID])
@pytest.mark.law12
def test_exact_modes_in_server_processes_equal_sync_with_eviction_and_admission(mode):
    base = config(ranks=4, shards=2)
    capacity, admit = Capacity(rows=50), Admission(probability=0.6)
    base = replace(base, rows=replace(base.rows, capacity=capacity, admission=admit))
    bound = {"tau": 0} if mode.reads_late_rows else {}
    there = changed(base, mode=mode, executor="concurrent", shards=1, servers=2, **bound)
    assert_same_bytes(run(base, SOURCE), run(there, SOURCE))


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.HYBRID])
@pytest.mark.law4
def test_adam_counts_the_updates_applied_and_not_a_ranks_own_steps(mode, executor):
    """8 pushes of 8 ranks to one row move it as 8 steps of torch's SparseAdam, not as 8 first."""
    parameter = torch.nn.Parameter(torch.zeros(1, 2))
    adam = torch.optim.SparseAdam([parameter], lr=0.1)
    rule = RowOptimizer(kind="adam", lr=0.1)
    rules = ServerRules(ranks=8, tau=0, per_rank_window=mode.has_dense_server, updates_per_step=8)
    store = store_of(rules, replace(SGD, optimizer=rule))
    for rank in range(8):
        handle = store.begin(rank, 0, batch_of(7))
        gradient = np.full((1, 2), 1.0 + rank, np.float32)
        if executor == "constant_lag":
            store.servers[0].read(handle)
            store.servers[0].apply([(handle, {"rows": gradient})])
        else:
            store.servers[0].look_up(handle)
            store.servers[0].give((handle, {"rows": gradient}))
        index = torch.zeros(1, 1, dtype=torch.long)
        slope = torch.from_numpy(gradient)
        parameter.grad = torch.sparse_coo_tensor(index, slope, (1, 2), check_invariants=True)
        adam.step()
    found = store.export()["rows"][1]
    assert np.allclose(found, parameter.detach().numpy(), rtol=1e-6)


def test_one_of_every_rank_is_a_step_where_the_batch_is_shared_globally():
    """15 samples over 8 ranks are shares of 1 and 2: eight updates, not fifteen."""
    settings = config(mode=Mode.ASYNC, ranks=8, batch=15, match="global", steps=3)
    assert server_rules(settings, ArraySource(1).layout, [settings.rows]).updates_per_step == 8
    meter = run(settings, ArraySource(100)).meter
    assert (meter.samples, meter.updates) == (45, 24)


# A server that was started again with older rows.


def test_what_a_rank_knows_to_be_closed_and_the_rows_do_not_hold_is_lost():
    store = store_of(ServerRules(ranks=1, tau=1))
    server = store.servers[0]
    assert server.rejoin(0, 5, {3}) == 4  # steps 0, 1, 2 and 4
    assert server.lost == 4
    open_batch = store.begin(0, 3, batch_of(7))
    server.read(open_batch)
    server.give((open_batch, ones(open_batch)))
    server.look_up(store.begin(0, 5, batch_of(7)))  # the window stands behind step 4
    assert store.export()["rows"][1].tolist() == [[-1.0, -1.0]]
    assert server.version == 1


@pytest.mark.law13
def test_who_has_pushed_to_the_server_before_this_one_has_had_its_lookup_there():
    """In rank order: rank 1 reads the step that rank 0 has lost, and waits for nobody."""
    store = store_of(ServerRules(ranks=2, tau=2, sync_steps=9, in_rank_order=True))
    server = store.servers[0]
    assert server.rejoin(0, 1, set()) == 1
    reads = threading.Thread(
        target=lambda: server.look_up(store.begin(1, 0, batch_of(7))), daemon=True
    )
    reads.start()
    reads.join(30)
    assert not reads.is_alive()


@pytest.mark.law13
def test_a_merged_step_that_one_rank_knows_to_be_closed_is_lost_for_all():
    store = store_of(ServerRules(ranks=2, tau=3, merges=True))
    server = store.servers[0]
    waits, late = store.begin(1, 0, batch_of(7)), store.begin(1, 1, batch_of(7))
    server.read(waits)
    server.give((waits, ones(waits)))  # before rank 0 says what it knows
    assert server.rejoin(0, 2, set()) == 2
    assert server.has_closed(1, 0)
    server.read(late)
    server.give((late, ones(late)))
    assert server.has_closed(1, 1)
    assert server.lost == 4
    assert (server.version, server.updates) == (0, 0)
    assert not store.export()["rows"][1].any()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.law13
def test_each_merged_step_that_a_rank_has_lost_is_closed_for_those_who_wait_for_it(ranks, back):
    """All others have pushed three steps, which wait for the rank; then it says that it has begun
    three, and has none of them any more."""
    store = store_of(ServerRules(ranks=ranks, tau=3, merges=True))
    server = store.servers[0]
    closed: list[tuple[int, int]] = []
    store.on_closed(lambda rank, step: closed.append((rank, step)))
    others = [rank for rank in range(ranks) if rank != back]
    for rank in others:
        for step in range(3):
            store.look_up(handle := store.begin(rank, step, batch_of(7)))
            store.give((handle, ones(handle)))
    assert server.rejoin(back, 3, set()) == 3
    assert sorted(closed) == [(rank, step) for rank in others for step in range(3)]
    assert server.closed() == [[3]] * ranks
    assert (server.lost, server.version) == (3 * ranks, 0)
