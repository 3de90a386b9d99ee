"""A server that is killed while a run goes on: it comes back, and every push is accounted for.

With SGD of rate 1 and gradients of one, minus the value of a row is the number of its pushes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from persia_sim.base.trace import Kind
from runtime.checkpoint.rows import load, take
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import SavedServer
from runtime.hosts.launch.processes import ServerProcesses
from runtime.hosts.rows import client
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.stop import PeerError, RunStopped
from tests.runtime.hosts.served import (
    LAYOUT,
    SGD,
    Served,
    batch_of,
    kill_as_it_writes,
    one_step,
    ones,
    served,
)
from tests.runtime.hosts.test_faults import in_thread, suspend, until

IDS = tuple(range(12))


def may_come_back(found: Served, rules: ServerRules, **changes) -> list[str]:
    told: list[str] = []
    saved = changes.pop("saved", lambda shard: [SavedServer(rules, [0] * rules.ranks)])
    restart = partial(found.processes.restart, awaits_rows=True)
    found.client.failover = Failover(restart, saved, told.append)
    return told


def kill(processes: ServerProcesses, shard: int) -> None:
    os.kill(processes.pids[shard], signal.SIGKILL)


def counts(store) -> dict[int, int]:
    """Per id, how many pushes its row has had."""
    ids, values, _ = store.export()["rows"]
    return {int(i): int(-v[0]) for i, v in zip(ids, values, strict=True)}


def lost_at(store) -> list[int]:
    return [status["lost"] for status in store.statuses()]


@pytest.mark.law13
def test_pushes_before_the_death_are_lost_and_counted_and_those_after_it_applied():
    """Of two ranks, whose numbers differ: what is told is the sum."""
    rules = ServerRules(ranks=2, tau=4, merges=False)
    with served(rules, servers=2) as found:
        told = may_come_back(found, rules)
        for rank, steps in enumerate((5, 3)):
            for step in range(steps):
                one_step(found.store, rank, step, *IDS)
        found.store.drain()
        before = counts(found.store)
        assert set(before.values()) == {8}
        kill(found.processes, 1)
        for step in range(3, 12):
            for rank in (0, 1)[step < 5 :]:
                one_step(found.store, rank, step, *IDS)
        found.store.drain()
        mine = [set(plan) for plan in _ids_by_server(found.store)]
        after = counts(found.store)
        assert {after[i] for i in mine[0]} == {24}
        assert {after[i] for i in mine[1]} == {16}
        assert lost_at(found.store) == [0, 8]
        assert len(told) == 1
        assert "was killed by SIGKILL" in told[0]
        assert "and 8 pushes of ranks 0, 1 are lost" in told[0]


def _ids_by_server(store) -> list[list[int]]:
    plan = store.begin(0, 10_000, batch_of(*IDS)).plans["rows"]
    return [plan.ids[plan.part(k)].tolist() for k in range(store.shards)]


def test_rows_of_a_checkpoint_are_there_again_and_only_what_came_after_it_is_lost(tmp_path):
    """The newest file is damaged: the server that comes back reads the one before."""
    rules = ServerRules(tau=4)
    with served(rules, servers=1) as found:
        here = NativeStore(LAYOUT, [SGD], rules=rules)
        for step in range(3):
            one_step(here, 0, step, *IDS)
        for folder in ("old", "new"):
            take(here).write(tmp_path / folder)
        (newest,) = (tmp_path / "new").glob("*.rows")
        newest.write_bytes(newest.read_bytes()[:-1] + b"x")
        counters = here.servers[0].counters()
        saved = [
            SavedServer(rules, [steps], counters, str(tmp_path / folder))
            for steps, folder in ((4, "new"), (3, "old"))
        ]
        may_come_back(found, rules, saved=lambda shard: saved)
        for step in range(8):
            one_step(found.store, 0, step, *IDS)
        found.store.drain()
        kill(found.processes, 0)
        one_step(found.store, 0, 8, *IDS)
        found.store.drain()
        assert set(counts(found.store).values()) == {3 + 1}
        assert lost_at(found.store) == [5]


@pytest.mark.law5
@pytest.mark.law13
def test_all_that_is_unanswered_at_a_death_is_asked_again_in_its_order():
    """What is new comes behind it: before, it would wait there for a window that those open."""
    rules = ServerRules(tau=2)
    with served(rules, servers=2) as found:
        may_come_back(found, rules)
        store = found.store
        handles = [store.begin(0, step, batch_of(*IDS)) for step in range(8)]
        for handle in handles[:6]:  # from 3 on they wait for their window
            store.ask(handle)
        store.look_up(handles[0])
        kill(found.processes, 0)
        asked = {handle.step: threading.Event() for handle in handles[6:]}

        def ask_later() -> None:
            for handle in handles[6:]:
                store.ask(handle)
                asked[handle.step].set()

        _, errors = in_thread(ask_later)
        store.give((handles[0], ones(handles[0])))
        for handle in handles[1:]:
            # Each is looked up as soon as it was asked for, as in a run: where 6 was asked for
            # before the death was heard of, 7 waits until 6 is looked up.
            assert handle.step not in asked or asked[handle.step].wait(60)
            store.look_up(handle)
            store.give((handle, ones(handle)))
        store.drain()
        read = [[e[2] for e in at.tolist() if e[0] == Kind.LOOKUP] for at in store.recorded()]
        assert not errors and read[1] == list(range(8))
        assert read[0] == sorted(set(read[0])) and read[0][-1] == 7
        for status in store.statuses():
            assert status["version"] + status["lost"] == 8


@pytest.mark.first_case
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.law13
def test_ranks_in_threads_go_on_over_deaths_at_any_instant(merges, seed):
    rules = ServerRules(ranks=2, tau=3, merges=merges)
    steps, draw = 120, random.Random(seed)
    with served(rules, servers=2) as found:
        may_come_back(found, rules)
        failed: list[BaseException] = []
        done = [0, 0]

        def rank(number: int) -> None:
            try:
                for step in range(steps):
                    time.sleep(draw.uniform(0, 0.004))
                    one_step(found.store, number, step, *IDS)
                    done[number] = step + 1
                found.store.finish(number, steps)
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in (0, 1)]
        for thread in threads:
            thread.start()
        for shard in (draw.randrange(2), draw.randrange(2)):
            # Some steps on, so that pushes are lost; where within a step is chance.
            at = min(done) + draw.randrange(5, 50)
            while min(done) < at and not failed:
                time.sleep(0.001)
            kill(found.processes, shard)
            life = found.client.at(shard).number
            while found.client.at(shard).number == life and not failed:
                time.sleep(0.01)
        for thread in threads:
            thread.join(120)
        assert not failed
        assert not any(thread.is_alive() for thread in threads)
        found.store.drain()
        mine, after, lost = _ids_by_server(found.store), counts(found.store), lost_at(found.store)
        for server, ids in enumerate(mine):
            applied = {after.get(i, 0) for i in ids}
            assert applied == {2 * steps - lost[server]}  # sent = applied + lost
        assert sum(lost) > 0


@pytest.mark.parametrize("dies", ["before it writes", "as it writes"])
def test_a_checkpoint_under_way_fails_with_the_server_and_the_next_one_is_whole(
    dies, tmp_path, monkeypatch
):
    rules = ServerRules(tau=4)
    with served(rules, servers=2, run_folder=tmp_path) as found:
        may_come_back(found, rules)
        one_step(found.store, 0, 0, *IDS)
        found.store.drain()
        taken = take(found.store)
        if dies == "before it writes":
            kill(found.processes, 0)
            one_step(found.store, 0, 1, *IDS)
            found.store.drain()
        else:
            kill_as_it_writes(monkeypatch, 0, lambda: kill(found.processes, 0))
        with pytest.raises(OSError, match="server 0 died before its rows of the checkpoint"):
            taken.write(tmp_path / "first")
        assert not list((tmp_path / "first").iterdir()), "nor the file of the other server"
        take(found.store).write(tmp_path / "second")
        again = NativeStore(LAYOUT, [SGD], shards=1)
        load(again, tmp_path / "second")
        assert counts(again) == counts(found.store)


def test_an_evaluation_goes_on_over_the_death_of_a_server():
    rules = ServerRules(tau=4)
    with served(rules, servers=2) as found:
        may_come_back(found, rules)
        one_step(found.store, 0, 0, *IDS)
        found.store.drain()
        suspend(found.processes.pids[1])
        peeked: list = []
        evaluates = threading.Thread(
            target=lambda: peeked.append(found.store.peek(batch_of(*IDS))), daemon=True
        )
        evaluates.start()
        until(lambda: "server 1" in found.client.waits.summary())
        kill(found.processes, 1)
        evaluates.join(60)
        assert peeked, "the evaluation hangs"
        mine = _ids_by_server(found.store)
        plan = peeked[0].plans["rows"]
        rows = dict(zip(plan.ids.tolist(), peeked[0].values["rows"][:, 0].tolist(), strict=True))
        assert {rows[i] for i in mine[0]} == {-1.0}
        assert {rows[i] for i in mine[1]} == {0.0}  # it came back empty


def test_a_server_that_is_not_to_come_back_ends_the_run_with_its_name():
    with served(ServerRules(tau=4)) as found:
        one_step(found.store, 0, 0, *IDS)
        kill(found.processes, 0)
        with pytest.raises((PeerError, RunStopped)):
            for step in range(1, 1000):
                one_step(found.store, 0, step, *IDS)
        ends_s = time.monotonic() + 120
        while not found.client.stop and time.monotonic() < ends_s:
            time.sleep(0.01)  # whoever notices first raises, the heart tells the run
        error = found.client.stop.error
        assert isinstance(error, PeerError)
        assert "embedding server 0" in str(error)
        assert "was killed by SIGKILL" in str(error)


@pytest.mark.first_case
@pytest.mark.law13
@pytest.mark.parametrize("deaths", [2, 4])
def test_a_server_that_dies_again_before_it_knows_what_is_open_comes_back_again(
    deaths, monkeypatch
):
    """As often as one may, after a pause that grows, the first time without one; then the run ends
    and names it, not the socket that broke: behind a `PeerError` it goes back to its last
    checkpoint."""
    monkeypatch.setattr(client, "MOST_FAILOVERS", 3)
    pauses: list[int] = []
    monkeypatch.setattr(client, "pause_before", lambda number: pauses.append(number) or 0.0)
    rules = ServerRules(tau=4)
    with served(rules) as found:
        told = may_come_back(found, rules)
        one_step(found.store, 0, 0, *IDS)
        found.store.drain()
        handle = found.store.begin(0, 1, batch_of(*IDS))
        found.store.look_up(handle)
        call_on, rejoined = found.client.call_on, []

        def dies_behind_rejoin(channel, life, method, **arguments):
            answered = call_on(channel, life, method, **arguments)
            if method is ServerCalls.rejoin and len(rejoined) < deaths - 1:
                rejoined.append(life.number)
                kill(found.processes, 0)
                found.processes.how_it_ended(0)
            return answered

        monkeypatch.setattr(found.client, "call_on", dies_behind_rejoin)
        kill(found.processes, 0)
        until(lambda: bool(found.client.stop or told))
        if deaths == 4:
            assert pauses == [1, 2]
            assert rejoined == [1, 2, 3] and isinstance(found.client.stop.error, PeerError)
            assert "embedding server 0" in str(found.client.stop.error)
            return
        found.store.give((handle, ones(handle)))
        found.store.drain()
        assert set(counts(found.store).values()) == {1} and lost_at(found.store) == [1]
        assert pauses == [1]
        assert rejoined == [1] and len(told) == 1 and "1 pushes of rank 0 are lost" in told[0]
