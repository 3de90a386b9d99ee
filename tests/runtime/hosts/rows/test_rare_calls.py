"""Rare calls go to all servers at once: what is waited for in turn does not grow with them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest

from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import SavedServer
from runtime.hosts.rows import connections
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.messages import MessageKind
from runtime.stop import PeerError, Stop
from tests.runtime.hosts.served import Served, batch_of, one_step, served
from tests.runtime.hosts.test_faults import until

RULES = ServerRules(tau=4)


def freeze_and_thaw(store: RemoteStore) -> None:
    with store.frozen():
        pass


def take_a_cut(store: RemoteStore) -> None:
    with store.consistent_cut():
        store.freeze_snapshots()
    store.drop_snapshots()


def begin_and_go_on(store: RemoteStore) -> None:
    store.begin_run(RULES, Stop())
    store.resume_run(RULES, store.server_counters())
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


@pytest.mark.first_case
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
                time.sleep(0.01)
        return connect(name, server, secret, hello, rank, check=check, **more)

    monkeypatch.setattr(connections, "connect", one_refuses)
    with pytest.raises(PeerError, match="server 2 cannot be reached: a cable"), served(servers=3):
        pass


def test_ctrl_c_ends_the_wait_for_servers(monkeypatch):
    waits = threading.Barrier(3)

    def never(name, server, secret, hello, rank=-1, *, check, **more):
        waits.wait(60)
        if server == "embedding server 0":
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            check()
            time.sleep(0.01)

    monkeypatch.setattr(connections, "connect", never)
    with pytest.raises(KeyboardInterrupt), served(servers=3):
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


@pytest.mark.first_case
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


BATCHES = [batch_of(*range(first, first + 12)) for first in range(8)]


def values_of(store: RemoteStore) -> list[list[float]]:
    """Of each batch the first number of every id's row, in the order of the ids."""
    found = []
    for handle in store.peek_all(BATCHES):
        ids = handle.plans["rows"].ids.tolist()
        rows = dict(zip(ids, handle.values["rows"][:, 0].tolist(), strict=True))
        found.append([rows[id_] for id_ in sorted(rows)])
    return found


def trained_once(store: RemoteStore) -> None:
    """Rows 0 to 11 have had a push each, rows above none."""
    one_step(store, 0, 0, *range(12))
    store.drain()


EXPECTED = [[-1.0 * (i < 12) for i in range(first, first + 12)] for first in range(8)]


def test_rows_of_later_batches_of_an_evaluation_are_on_their_way(monkeypatch):
    """Four batches at each server before the first answer is awaited, and as many from then on."""
    outstanding: list[int] = []
    with served(RULES, servers=2) as found:
        trained_once(found.store)
        control = found.client.at(1).channels["control", -1]
        on_way = [0]

        def sending(channel, message, *given, **more):
            on_way[0] += channel is control and message.kind is MessageKind.LOOK_AHEAD
            return send(channel, message, *given, **more)

        def receiving(channel, *given, **more):
            if channel is control:
                outstanding.append(on_way[0])
                on_way[0] -= 1
            return receive(channel, *given, **more)

        send, receive = Channel.send, Channel.receive
        monkeypatch.setattr(Channel, "send", sending)
        monkeypatch.setattr(Channel, "receive", receiving)
        assert values_of(found.store) == EXPECTED
        monkeypatch.undo()
    assert outstanding == [4, 4, 4, 4, 4, 3, 2, 1]
