"""Rare calls go to all servers at once: what is waited for in turn does not grow with them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest

from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import SavedServer
from runtime.engines.rows import connections
from runtime.engines.rows.client import ServerClient
from runtime.engines.rows.failover import Failover
from runtime.engines.rows.remote_store import RemoteStore
from runtime.engines.rows.server_calls import ServerCalls
from runtime.engines.wire.channel import Channel
from runtime.stop import PeerError, Stop
from tests.runtime.engines.served import Served, one_step, served
from tests.runtime.engines.test_faults import until

RULES = ServerRules(tau=4)


def freeze_and_thaw(store: RemoteStore) -> None:
    with store.frozen():
        pass


def take_a_cut(store: RemoteStore) -> None:
    with store.consistent_cut():
        store.freeze_snapshots(only_changed=False, track=False)
    store.settle_snapshots(are_safe=False)


def begin_and_go_on(store: RemoteStore) -> None:
    store.begin_run(RULES, Stop())
    store.go_on(RULES, store.server_counters())
    store.begin_leg([0])


RARE: dict[str, Callable[[RemoteStore], object]] = {
    "evaluation": freeze_and_thaw,
    "checkpoint": take_a_cut,
    "start": begin_and_go_on,
    "order": RemoteStore.recorded,
    "figures": RemoteStore.statuses,
    "closed": lambda store: store.wait_until_closed(0),
}


@contextmanager
def turns_counted(found: Served, monkeypatch):
    """How often somebody sends to a server after an answer has been awaited: what the wire's
    latency is paid for."""
    controls = [found.client.at(k).channels["control", -1] for k in range(found.client.servers)]
    order: list[str] = []

    def noting(name: str, method):
        def noted(channel, *given, **more):
            if channel in controls:
                order.append(name)
            return method(channel, *given, **more)

        return noted

    with monkeypatch.context() as patch:
        for name in ("send", "receive"):
            patch.setattr(Channel, name, noting(name, getattr(Channel, name)))
        yield lambda: sum(pair == ("send", "receive") for pair in pairwise(order))


@pytest.mark.parametrize("name", RARE)
def test_four_servers_take_as_many_turns_as_one(name, monkeypatch):
    turns = []
    for servers in (1, 4):
        with served(RULES, servers=servers) as found:
            one_step(found.store, 0, 0, *range(12))
            found.store.drain()
            with turns_counted(found, monkeypatch) as counted:
                RARE[name](found.store)
                turns.append(counted())
    assert turns[0] == turns[1] > 0


def test_all_servers_are_connected_to_at_once(monkeypatch):
    all_here = threading.Barrier(3)
    connect = connections.connect

    def met(*given, **more):
        if given[3]["role"] == "control":
            all_here.wait(timeout=20)
        return connect(*given, **more)

    monkeypatch.setattr(connections, "connect", met)
    with served(RULES, servers=3) as found:
        assert [status["lost"] for status in found.store.statuses()] == [0, 0, 0]


def test_who_cannot_reach_one_server_does_not_wait_for_the_others(monkeypatch):
    connect = connections.connect
    waits = threading.Event()

    def one_refuses(name, server, secret, hello, rank=-1, *, check, **more):
        if server == "embedding server 2":
            assert waits.wait(20)
            raise PeerError("embedding server 2 cannot be reached: a cable")
        if server == "embedding server 0":
            waits.set()
            while True:
                check()
        return connect(name, server, secret, hello, rank, check=check, **more)

    monkeypatch.setattr(connections, "connect", one_refuses)
    with pytest.raises(PeerError, match="server 2 cannot be reached: a cable"), served(servers=3):
        pass


def dies_in_the_call(name: str, pid: int, servers: int, patch) -> None:
    """In the next call of that name the server has the request, and dies before it answers."""
    sent: list[int] = []
    begin = ServerClient._begin_call

    def spied(client, shard, method, arguments):
        is_named = method.__name__ == name
        if is_named and not sent:
            os.kill(pid, signal.SIGSTOP)
        begun = begin(client, shard, method, arguments)
        sent.extend([shard] * is_named)
        if is_named and len(sent) == servers:
            os.kill(pid, signal.SIGKILL)
        return begun

    patch.setattr(ServerClient, "_begin_call", spied)


@pytest.mark.law13
@pytest.mark.parametrize("call", ["freeze", "closed", "thaw", "counters"])
def test_a_server_that_dies_in_the_middle_of_a_call_to_all_is_called_again(call, monkeypatch):
    with served(RULES, servers=3) as found:
        told: list[str] = []
        restart = partial(found.processes.restart, awaits_rows=True)
        saved = [SavedServer(RULES, [0])]
        found.client.failover = Failover(restart, lambda shard: saved, told.append)
        one_step(found.store, 0, 0, *range(12))
        found.store.drain()

        dies_in_the_call(call, found.processes.pids[1], 3, monkeypatch)
        if call == "counters":
            assert len(found.store.server_counters()) == 3
        else:
            with found.store.consistent_cut():
                pass
        until(lambda: told)
        assert len(told) == 1 and "1 pushes of rank 0 are lost" in told[0]

        # What follows is answered by all: no answer stands in for another one.
        one_step(found.store, 0, 1, *range(12))
        found.store.drain()
        assert [status["lost"] for status in found.store.statuses()] == [0, 1, 0]


def test_after_an_error_of_one_server_the_answers_of_the_others_are_passed_over():
    with served(RULES, servers=3) as found:
        wrong = {k: {"table": "rows" if k else "none"} for k in range(3)}
        with pytest.raises(RuntimeError, match="none"):
            found.client.call_all(ServerCalls.export, wrong)
        assert [status["lost"] for status in found.store.statuses()] == [0, 0, 0]
