"""Who listens serves all connections with the same few threads, and nobody holds up the others."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from runtime.embedding.server_rules import ServerRules
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.rows.server_process import Service
from runtime.hosts.wire import listener as listeners
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.listener import WORKERS, Listener
from runtime.hosts.wire.messages import Message, MessageKind
from runtime.hosts.wire.peers import connect, listen
from runtime.hosts.wire.tls import TLS
from tests.runtime.hosts.served import SGD, batch_of, ones, served
from tests.runtime.hosts.test_faults import in_thread, until

RANKS = 20
SECRET = "a secret for tests alone"
NAMES = ["unix", "127.0.0.1:0", "tls:127.0.0.1:0"]


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_threads_do_not_grow_with_connections_and_lookups_that_wait_hold_up_no_push():
    """62 connections; 19 ranks wait for the pushes of the step before, which come after."""
    rules = ServerRules(ranks=RANKS, tau=0, merges=True)
    with served(rules, ranks=range(RANKS)) as found:
        assert threads_of(found.processes.pids[0]) <= WORKERS + 3
        store = found.store
        first = [store.begin(rank, 0, batch_of(rank, 100)) for rank in range(RANKS)]
        for handle in first:
            store.look_up(handle)
        late = [store.begin(rank, 1, batch_of(rank, 100)) for rank in range(1, RANKS)]
        waiting = [in_thread(partial(store.look_up, handle)) for handle in late]
        until(lambda: len(found.client.waits.summary().split(";")) > RANKS - 1)
        for handle in first:
            store.give((handle, ones(handle)))
        for thread, errors in waiting:
            thread.join(60)
            assert not thread.is_alive() and not errors
        for handle in late:
            assert handle.values["rows"].tolist() == [[-1.0, -1.0], [-1.0 * RANKS] * 2]
        assert threads_of(found.processes.pids[0]) <= WORKERS + 3


@contextmanager
def embedding_server(at: str):
    """One with an open connection for rare requests."""
    sock, name = listen(at)
    tables, rules = (SGD,), ServerRules(ranks=RANKS)
    service = Service(ServerConfig(shard=0, shards=1, seed=0, tables=tables, rules=rules))
    is_encrypted = name.startswith(TLS)
    yield (
        Listener(
            sock, SECRET, service.serve, "server", tls=is_encrypted, condition=service.condition
        ),
        name,
    )


def hello(number: int) -> dict:
    return {"role": "control", "client": f"c{number}", "ranks": f"rank {number}", "pid": 1}


def connected(kind, name: str, number: int) -> Channel:
    channel = connect(name, "server", SECRET, hello(number))
    if kind is embedding_server:
        assert channel.receive()[0].kind is MessageKind.WELCOME
    return channel


@contextmanager
def listening(kind, at: str):
    own = f"\0test-listener-{os.getpid()}-{threading.get_native_id()}-{os.urandom(4).hex()}"
    before = set(threading.enumerate())
    with kind(own if at == "unix" else at) as (listener, name):
        thread = threading.Thread(target=listener.serve_all, daemon=True)
        thread.start()
        try:
            yield listener, name
        finally:
            listener.close()
            thread.join(60)
        assert not thread.is_alive()
    until(lambda: set(threading.enumerate()) <= before)


@contextmanager
def talker(at: str):
    """Answers at length."""

    def talks(channel: Channel, hello: Message, said: dict):
        while True:
            yield from channel.receiving()
            channel.send(Message(MessageKind.RESULT, body=b"y" * 60_000))

    sock, name = listen(at)
    yield Listener(sock, SECRET, talks, "talker", tls=name.startswith(TLS)), name


@pytest.mark.first_case
@pytest.mark.parametrize("at", NAMES)
def test_clients_that_take_no_answers_hold_up_nobody_and_are_let_go(at, monkeypatch):
    with listening(talker, at) as (listener, name):
        deaf = [connected(talker, name, number) for number in range(2 * WORKERS)]
        for channel in deaf:
            with suppress(TimeoutError):  # it is not heard any more
                for _ in range(400):
                    channel.send(Message(MessageKind.PING), within_s=0.5)
        until(lambda: sum(bool(task.channel.outbox) for task in listener._tasks) == len(deaf))
        for number in range(100, 104):
            channel = connected(talker, name, number)
            channel.send(Message(MessageKind.PING))
            assert len(channel.receive()[0].body) == 60_000
            channel.close()
        kept = max(len(task.channel.outbox.unsent) for task in listener._tasks)
        assert kept <= 2, f"{kept} answers wait, and who asked is still heard"
        monkeypatch.setattr(listeners, "RESUMED_WITHIN_S", 1.0)
        until(lambda: not any(task.channel.outbox for task in listener._tasks))
        for channel in deaf:
            channel.close()


def test_while_one_client_holds_a_server_nobody_changes_it_and_signs_of_life_are_heard():
    """A snapshot for which ranks wait: more of them than there are threads."""
    rules = ServerRules(ranks=RANKS, tau=None)
    with served(rules, ranks=range(RANKS)) as found:
        store = found.store
        handles = [store.begin(rank, 0, batch_of(rank)) for rank in range(RANKS)]
        for handle in handles:
            store.look_up(handle)
        with store.frozen():
            late = [store.begin(rank, 1, batch_of(rank)) for rank in range(RANKS)]
            waiting = [in_thread(partial(store.look_up, handle)) for handle in late]
            for handle in handles:
                store.give((handle, ones(handle)))
            assert store.export()["rows"][1].tolist() == [[0.0, 0.0]] * RANKS
            heart = found.client.at(0).channels["heartbeat", -1]
            heard = heart.received
            until(lambda: heart.received > heard + 2 or not heart.is_authenticated)
            assert found.client.call(0, ServerCalls.counters)["version"] == 0
        for thread, errors in waiting:
            thread.join(60)
            assert not errors
        for handle in late:
            store.give((handle, ones(handle)))
        store.drain()
        assert store.export()["rows"][1].tolist() == [[-2.0, -2.0]] * RANKS
