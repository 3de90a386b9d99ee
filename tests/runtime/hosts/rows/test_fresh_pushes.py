"""Late and fresh tables of one batch at a server process: two pushes, one CLOSED, and what becomes
of them when a server is killed.

With SGD of rate 1 and gradients of one, minus the value of a row is the number of its pushes.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.wire.messages import Message, MessageKind
from runtime.stop import RunStopped
from tests.runtime.hosts.rows.test_failover import kill, may_come_back
from tests.runtime.hosts.served import SGD, batch_of, ones, served
from tests.runtime.hosts.test_faults import in_thread

LAYOUT = Layout(fields=(Field(name="a"), Field(name="b", table="items")))
TABLES = (SGD, replace(SGD, name="items"))
ROWS = tuple(range(12))
"""The ids of each table in each batch."""
RULES = ServerRules(ranks=2, tau=4, merges=False, fresh=("items",))


def served_both(rules: ServerRules = RULES, **changes):
    return served(rules, TABLES, layout=LAYOUT, **changes)


def batch() -> Batch:
    """Twelve samples, which have the same id in both fields."""
    one = batch_of(*ROWS)
    return replace(one, ids=np.repeat(one.ids, 2))


def looked_up(store, rank: int, step: int):
    handle = store.begin(rank, step, batch())
    store.look_up(handle)
    return handle


def one_step(store, rank: int, step: int) -> None:
    handle = looked_up(store, rank, step)
    store.bring_up_to_date(handle)
    store.give((handle, ones(handle)))


def one_step_of_all(store, step: int) -> None:
    """Both read, then both push: fresh rows of a step wait for all pushes of the one before."""
    handles = [looked_up(store, rank, step) for rank in (0, 1)]
    for handle in handles:
        store.bring_up_to_date(handle)
    for handle in handles:
        store.give((handle, ones(handle)))


def pushes_of(store, table: str) -> dict[int, int]:
    """Per id, how many pushes its row has had."""
    ids, values, _ = store.export()[table]
    return {int(i): int(-v[0]) for i, v in zip(ids, values, strict=True)}


def counted(store) -> list[list[tuple[int, int]]]:
    """Per server, of late tables and of fresh ones: pushes applied and lost."""
    groups = [(status, status["fresh"]) for status in store.statuses()]
    return [[(group["version"], group["lost"]) for group in both] for both in groups]


def test_a_batch_is_closed_when_both_its_pushes_are():
    """Late ones are applied on arrival; fresh ones wait for all ranks."""
    with served_both() as found:
        store = found.store
        closed: list[tuple[int, int]] = []
        store.on_closed(lambda rank, step: closed.append((rank, step)))
        handles = [looked_up(store, rank, 0) for rank in (0, 1)]
        for handle in handles:
            store.bring_up_to_date(handle)
        store.give((handles[0], ones(handles[0])))
        while counted(store) != [[(1, 0), (0, 0)]]:
            time.sleep(0.01)
        assert not closed and store._sent.keys() == {(0, 0), (1, 0)}
        store.give((handles[1], ones(handles[1])))
        store.drain()
        assert sorted(closed) == [(0, 0), (1, 0)]
        assert counted(store) == [[(2, 0), (2, 0)]]
        assert set(pushes_of(store, "rows").values()) == {2}
        assert set(pushes_of(store, "items").values()) == {2}


def test_fresh_tables_wait_for_no_late_rows_that_are_on_their_way():
    """Step 5 waits for the late pushes of step 0; meanwhile step 0 is brought up to date."""
    with served_both(replace(RULES, ranks=1)) as found:
        store = found.store
        handles = [store.begin(0, step, batch()) for step in range(6)]
        for handle in handles:
            store.ask(handle)
        for handle in handles[:5]:
            store.look_up(handle)
        for handle in handles[:5]:
            store.bring_up_to_date(handle)
            assert (handle.values["items"] == -handle.step).all()
            store.give((handle, ones(handle)))
        store.look_up(handles[5])
        store.bring_up_to_date(handles[5])
        store.give((handles[5], None))
        store.drain()
        assert counted(store) == [[(5, 1), (5, 1)]]


@pytest.mark.law13
def test_a_fresh_step_that_one_rank_knows_to_be_closed_is_lost_for_all_and_a_late_push_is_not():
    """Rank 0's late push was applied on arrival, so all of its step is closed; rank 1's was not."""
    with served_both() as found:
        may_come_back(found, RULES)
        store = found.store
        handles = [looked_up(store, rank, 0) for rank in (0, 1)]
        for handle in handles:
            store.bring_up_to_date(handle)
        sent = store._sent[1, 0]
        late = MessageKind.PUSH
        store.give((handles[0], ones(handles[0])))
        push = Message(MessageKind.FRESH_PUSH, 1, 0)
        sent.pushes = [push, Message(late, 1, 0)]
        sent.gradients.flat[:] = 1
        found.client.push(0, push, sent.given(0, push))
        while (0, 0) in store._sent:
            time.sleep(0.01)
        assert counted(store) == [[(1, 0), (2, 0)]]
        kill(found.processes, 0)
        store.drain()
        assert counted(store) == [[(1, 1), (0, 2)]]
        assert set(pushes_of(store, "rows").values()) == {1}
        assert not any(pushes_of(store, "items").values())


@pytest.mark.first_case
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.law13
def test_ranks_in_threads_go_on_over_deaths_at_any_instant(merges, seed):
    rules = replace(RULES, tau=3, merges=merges)
    steps, draw = 120, random.Random(seed)
    with served_both(rules, servers=2) as found:
        may_come_back(found, rules)
        done = [0, 0]

        def rank(number: int) -> None:
            for step in range(steps):
                time.sleep(draw.uniform(0, 0.004))
                one_step(found.store, number, step)
                done[number] = step + 1
            found.store.finish(number, steps)

        started = [in_thread(lambda number=number: rank(number)) for number in (0, 1)]
        failed = [errors for _, errors in started]
        for shard in (draw.randrange(2), draw.randrange(2)):
            at = min(done) + draw.randrange(5, 50)
            while min(done) < at and not any(failed):
                time.sleep(0.001)
            kill(found.processes, shard)
            life = found.client.at(shard).number
            while found.client.at(shard).number == life and not any(failed):
                time.sleep(0.01)
        for thread, errors in started:
            thread.join(120)
            assert not errors and not thread.is_alive()
        found.store.drain()

        # Per server and group, sent = applied + lost, and rows have what was applied.
        plans = found.store.begin(0, 10_000, batch()).plans
        for shard, groups in enumerate(counted(found.store)):
            for table, (applied, lost) in zip(("rows", "items"), groups, strict=True):
                assert applied + lost == 2 * steps
                of_rows = pushes_of(found.store, table)
                mine = plans[table].ids[plans[table].part(shard)].tolist()
                assert {of_rows.get(i, 0) for i in mine} <= {applied}
        assert sum(lost for groups in counted(found.store) for _, lost in groups) > 0


def test_a_fresh_push_is_refused_where_no_table_is_fresh(capfd):
    with served(ServerRules()) as found:
        store = found.store
        handle = store.begin(0, 0, batch_of(*ROWS))
        store.look_up(handle)
        found.client.push(0, Message(MessageKind.FRESH_PUSH, 0, 0))
        with pytest.raises(RunStopped):
            store.drain()
    assert "no table is fresh, and a FRESH_PUSH of step 0 came" in capfd.readouterr().err


def test_a_server_knows_whose_lookups_the_one_before_it_has_served():
    """In rank order rank 1 waits for rank 0's lookup, which a dead server has had."""
    rules = replace(RULES, sync_steps=9, in_rank_order=True, fresh_in_rank_order=True)
    with served_both(rules) as found:
        may_come_back(found, rules)
        store = found.store
        one_step_of_all(store, 0)
        store.drain()
        first = looked_up(store, 0, 1)
        store.bring_up_to_date(first)
        kill(found.processes, 0)
        second = looked_up(store, 1, 1)
        store.bring_up_to_date(second)
        for handle in (first, second):
            store.give((handle, ones(handle)))
        store.drain()
        assert counted(store) == [[(2, 2), (2, 2)]]
