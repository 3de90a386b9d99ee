"""A connection that breaks is not a dead peer: it is made again, and nothing is lost or doubled.

Between client and server stands a proxy (`broken_cables.Proxy`) that knows where a message begins
and ends, and cuts the connection there or in its middle.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from experiments.drilling.cable import ip
from persia_sim.base.trace import TraceRecorder
from persia_sim.base.vocabulary import Mode
from runtime.config import SyncConfig, TrainConfig
from runtime.dense.rules import AsyncRule, StepGradients
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import SavedServer
from runtime.hosts.dense.async_weights import DenseServer, RemoteWeights
from runtime.hosts.launch import hosts
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import ServerProcesses
from runtime.hosts.rows import client, connections
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire import channel, peers
from runtime.hosts.wire.calls import call
from runtime.hosts.wire.messages import (
    Message,
    MessageKind,
    unpack_json,
)
from runtime.hosts.wire.peers import connect
from runtime.stop import PeerError, Stop
from tests.runtime.hosts import namespaces
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of, one_step
from tests.runtime.hosts.test_faults import in_thread, lives, until
from tests.runtime.hosts.wire.broken_cables import (
    FORWARDED,
    FRESH,
    HYBRID,
    LOOKAHEAD,
    SECRET,
    SYNC,
    AtByte,
    AtKinds,
    Flips,
    Kinds,
    Proxy,
    asks,
    no_cut,
    proxied,
    silent_at,
    store_behind,
)
from tests.runtime.worlds import TwoTables, assert_same_bytes, config, host_of_servers, run

SOURCE = TwoTables(300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        (SYNC, {Kinds.HELLO, Kinds.ACCEPTED, Kinds.WELCOME}),
        (SYNC, {Kinds.PUSH, Kinds.FINISH, Kinds.CALL, Kinds.RESULT}),
        (HYBRID, {Kinds.SEGMENT, Kinds.LOOK_UP, Kinds.ROWS, Kinds.PING, Kinds.PONG}),
        (LOOKAHEAD, {Kinds.LOOK_AHEAD, Kinds.BRING_UP_TO_DATE, Kinds.ROWS, Kinds.CLOSED}),
        (FRESH, {Kinds.LOOK_UP, Kinds.BRING_UP_TO_DATE, Kinds.FRESH_PUSH, Kinds.PUSH}),
        (FORWARDED, {Kinds.LEASE}),
    ],
    ids=["greeting", "sync", "hybrid", "lookahead", "fresh", "forwarded"],
)
@pytest.mark.law1
@pytest.mark.law2
@pytest.mark.law9
@pytest.mark.law13
def test_exact_modes_end_with_the_bytes_of_an_uncut_run(mode, kinds, monkeypatch):
    monkeypatch.setattr(client, "BEATS_EVERY_S", 0.02)
    expected = run(config(executor="concurrent", shards=2, **mode), SOURCE)
    cut = AtKinds(kinds)
    with proxied(monkeypatch, cut):
        found = run(config(executor="concurrent", servers=2, **mode), SOURCE)
        assert cut.cut == kinds
        assert_same_bytes(expected, found)
        assert [status["repeated_pushes"] for status in found.store.statuses()] == [0, 0]
        assert [status["lost"] for status in found.store.statuses()] == [0, 0]
        if kinds != {Kinds.LEASE}:  # nothing is recorded there
            assert _events(found) == _events(expected)
        found.store.close()


def _events(world) -> list[list[int]]:
    """What happened where, without the order between ranks."""
    return sorted(world.trace.events[:, :4].tolist())


@pytest.mark.long
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.law13
def test_wherever_connections_are_cut_each_push_is_applied_once(every):
    cut = AtByte([])
    rules = ServerRules(tau=2)
    with store_behind(cut, rules) as (store, _, _):
        cut._left = list(every)
        for step in range(20):
            one_step(store, 0, step, *range(12))
        store.drain()
        assert store.export()["rows"][1].tolist() == [[-20.0, -20.0]] * 12
        status = store.statuses()[0]
        assert (status["version"], status["lost"], status["repeated_pushes"]) == (20, 0, 0)


@pytest.mark.long
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=12))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.law13
def test_whatever_bit_is_damaged_each_push_is_applied_once_and_as_it_was_sent(every):
    """In headers, bodies and arrays, both ways, also of what is sent again; gradients differ, so
    that no damaged one could pass for another."""
    flips = Flips([])
    with store_behind(no_cut, ServerRules(tau=2), damage=flips) as (store, _, _):
        flips.left = list(every)
        expected = np.zeros((12, 2), np.float32)
        for step in range(20):
            handle = store.begin(0, step, batch_of(*range(12)))
            store.look_up(handle)
            gradients = np.random.default_rng(step).standard_normal((12, 2)).astype(np.float32)
            expected -= gradients
            store.give((handle, {"rows": gradients}))
        store.drain()
        assert store.export()["rows"][1].tolist() == expected.tolist()
        status = store.statuses()[0]
        assert (status["version"], status["lost"], status["repeated_pushes"]) == (20, 0, 0)
        assert flips.flips == len(every) - len(flips.left) > 0


def test_a_connection_that_is_made_again_twice_at_once_is_still_heard():
    """Its socket may have the number of the first one then, of which the kernel has forgotten that
    somebody listens."""
    with store_behind(lambda m, size: None, ServerRules(tau=2)) as (store, _, _):
        one_step(store, 0, 0, 7)
        channel = store._client.at(0).channels["pushes", 0]
        first, again, done = channel.fileno(), channel.await_reconnection, []

        def more_than_once(check):
            again(check)
            while channel.fileno() != first:
                channel.connection.cut()
                again(check)
            done.append(True)

        channel.await_reconnection = more_than_once
        channel.connection.cut()
        until(lambda: done)
        for step in range(1, 6):
            one_step(store, 0, step, 7)
        store.drain()
        assert store.export()["rows"][1].tolist() == [[-6.0, -6.0]]


@pytest.mark.long
@pytest.mark.law13
def test_wherever_a_connection_to_the_dense_weights_is_cut_each_push_counts_once():
    """Law 13 in async: the bytes of pulls and pushes that nobody has disturbed."""
    settings = TrainConfig(sync=SyncConfig(mode=Mode.ASYNC, ranks=2))
    draw, passed = np.random.default_rng(5), []

    def cut(message: Message, size: int) -> int | None:
        passed.append(message.kind)
        return int(draw.integers(0, size + 1)) if len(passed) % 7 == 3 else None

    def rule_of() -> AsyncRule:
        torch.manual_seed(1)
        return AsyncRule(settings, nn.Linear(300, 2), TraceRecorder(), lambda loss, samples: None)

    far, near, stop = rule_of(), rule_of(), Stop()
    server = DenseServer(far, stop, "127.0.0.1:0")
    proxy = Proxy(server.address.names[0], cut)
    address = replace(server.address, names=(proxy.name,))
    remote = RemoteWeights(address, 1, nn.Linear(300, 2), stop)
    for step in range(20):
        for rule in (remote, near):
            rule.begin_step(1, step)
            given = [torch.sin(p.detach() + step) for p in rule.model(1).parameters()]
            rule.end_step(StepGradients(1, step, given, 0.5, 8))
    remote.end_leg()
    remote.close()
    assert not stop and passed.count(MessageKind.HELLO) > 5
    for one, other in zip(far.model(0).parameters(), near.model(0).parameters(), strict=True):
        assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    assert (far.state_dict()["version"], near.state_dict()["version"]) == (20, 20)
    server.close()
    proxy.close()


def test_a_server_that_is_dead_is_not_waited_for(monkeypatch):
    """Who connects again is refused: within no time, so far below the patience with a network."""
    monkeypatch.setattr(channel, "RESUMED_WITHIN_S", 1e6)
    server = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))
    processes = ServerProcesses([server], "127.0.0.1")
    found = ServerClient(processes.address, [0], processes.how_it_ended)
    store = RemoteStore(LAYOUT, [SGD], found, seed=0, segments=2, close=processes.close)
    os.kill(processes.pids[0], signal.SIGKILL)
    until(lambda: bool(store._stop))
    assert "was killed by SIGKILL" in str(store._stop.error)
    store.close()


@pytest.mark.law13
def test_two_servers_of_one_shard_never_both_apply_pushes(monkeypatch):
    """The old one is cut off, and alive: the run goes on with a newer one, at another address. When
    the old one hears of that, it ends."""
    monkeypatch.setattr(channel, "RESUMED_WITHIN_S", 1.0)
    rules = ServerRules(tau=None)
    newer = []
    with store_behind(lambda m, size: None, rules) as (store, old, proxy):
        for step in range(5):
            one_step(store, 0, step, 7)
        store.drain()

        def elsewhere(shard: int) -> None:
            server = ServerConfig(
                shard=0, shards=1, seed=0, tables=(SGD,), rules=rules, incarnation=1
            )
            newer.append(ServerProcesses([server], "127.0.0.1"))
            store._client._address = newer[0].address

        told: list[str] = []
        store._client.failover = Failover(
            elsewhere, lambda k: [SavedServer(rules, [0])], told.append
        )
        proxy._target = "127.0.0.1", 1  # nobody listens there
        proxy.cut_all()
        for step in range(5, 10):
            one_step(store, 0, step, 7)
        store.drain()
        assert "5 pushes of rank 0 are lost with it" in told[0]
        assert store.export()["rows"][1].tolist() == [[-5.0, -5.0]]
        assert (store.statuses()[0]["version"], store.statuses()[0]["lost"]) == (5, 5)
        still = asks(old.address, incarnation=0)
        assert still.receive()[0].kind is MessageKind.WELCOME
        assert call(still, ServerCalls.status, lambda: None)["version"] == 5
        assert lives(old.pids[0])
        again = asks(old.address, incarnation=1)
        assert "a newer one has begun" in unpack_json(again.receive()[0].body)["sentence"]
        until(lambda: not lives(old.pids[0]))
    newer[0].close()


@pytest.mark.law13
def test_a_server_whose_run_is_cut_off_ends_itself(monkeypatch):
    """Between hosts the kernel notices within 25 s; here the connection to its host is cut."""
    monkeypatch.setattr(channel, "RESUMED_WITHIN_S", 1.0)
    server = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))
    proxy = Proxy(host_of_servers()[0][0], lambda m, size: None)
    processes = hosts.HostedProcesses([server], [proxy.name], SECRET)
    found = ServerClient(processes.address, [0], processes.how_it_ended)
    assert lives(found.pids[0])
    proxy._target = "127.0.0.1", 1  # nobody listens there
    proxy.cut_all()
    until(lambda: not lives(found.pids[0]))
    found.close()
    processes.close()
    proxy.close()


def test_a_connection_that_is_not_made_again_ends_the_run_in_a_sentence(monkeypatch):
    monkeypatch.setattr(channel, "RESUMED_WITHIN_S", 1.0)
    with store_behind(lambda m, size: None, ServerRules()) as (store, _, proxy):
        store._client.stop = stop = Stop()
        proxy._target = "127.0.0.1", 1  # nobody listens there
        proxy.cut_all()
        until(lambda: bool(stop))
        assert isinstance(stop.error, PeerError)
        assert "embedding server 0 (pid" in str(stop.error)


@pytest.mark.parametrize("kind", [Kinds.CALL], ids=["answer"])
@pytest.mark.law12
def test_what_takes_long_is_waited_for_no_longer_than_signs_of_life_come(kind, monkeypatch):
    """The writing of a checkpoint asks for no stop of the run, and over a connection of its own:
    of a server that is cut off meanwhile it must hear, too."""
    monkeypatch.setattr(peers, "START_WITHIN_S", 1e6)  # of 60 s, between two greetings
    monkeypatch.setattr(connections, "START_WITHIN_S", 1e6)
    with silent_at(monkeypatch, kind) as (store, stop):
        writing, errors = in_thread(lambda: store._client.call_apart(0, ServerCalls.status))
        writing.join(60)
        assert not writing.is_alive()
        assert "has given no sign of life" in str(errors[0]) and stop.error is not None


def test_an_address_that_drops_packets_is_not_waited_for_longer_than_a_broken_cable(
    monkeypatch, capsys
):
    """And meanwhile who waits is asked whether that is still wanted."""
    monkeypatch.setattr(peers, "CONNECTS_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as strangers:
        at = full.getsockname()
        for _ in range(3):  # the kernel drops whoever comes when the queue is full
            sock = strangers.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(at)
        asked: list[int] = []

        def check() -> None:
            asked.append(1)
            if len(asked) > 3:
                raise PeerError("not wanted any more")

        name = f"127.0.0.1:{at[1]}"
        with pytest.raises(PeerError, match="not wanted any more"):
            connect(name, "embedding server 0", SECRET, {}, check=check)
        monkeypatch.setattr(peers, "RESUMED_WITHIN_S", 1.0)
        monkeypatch.setattr(peers, "REPORTED_AFTER_S", 0.5)
        with pytest.raises(PeerError, match=r"server 0 cannot be reached: no answer from .* drops"):
            connect(name, "embedding server 0", SECRET, {})
        said = capsys.readouterr().err
        assert said.count(f"warning: embedding server 0: no answer from {name}: a firewall") == 1
        assert re.search(r"; tried \d+ times in \d+ s, for 1 s\n$", said)


def test_what_another_host_does_not_acknowledge_breaks_the_connection():
    """The kernel's own patience is a quarter of an hour, and longer than signs of life are missed:
    what these decide comes first."""
    with store_behind(lambda m, size: None, ServerRules()) as (store, _, _):
        for one in store._client.at(0).channels.values():
            told_ms = one.connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert client.STUCK_S * 1000 < told_ms <= 40_000


RUN = """
import hashlib, sys
from pathlib import Path
from persia_sim.base.vocabulary import Mode
from runtime.rank.progress import Meter
from tests.runtime.worlds import ArraySource, config, run
far = dict(servers=2, servers_at=(sys.argv[1],), servers_secret=Path(sys.argv[2]),
           tls=sys.argv[3] == "False") \\
    if len(sys.argv) > 2 else dict(shards=2)
start = Meter.start
Meter.start = lambda self: start(self, on_samples=lambda samples: print("trains", flush=True))
world = run(config(mode=Mode.SYNC, ranks=2, executor="concurrent", latency_s=0.01, **far),
            ArraySource(24 * 300))
digest = hashlib.sha256()
for name, array in sorted(world.state().items()):
    digest.update(name.encode() + array.tobytes())
print(digest.hexdigest(), len(world.trace.events), flush=True)
world.store.close()
"""


@pytest.mark.netns
@namespaces.needed
@pytest.mark.parametrize("more", [[], ["--no-tls"]], ids=["encrypted", "plain"])
@pytest.mark.law1
@pytest.mark.law12
def test_a_cable_that_is_out_for_five_seconds_changes_no_byte(more):
    line, plain = [sys.executable, "-c", RUN], str(bool(more))
    alone = subprocess.run(line, capture_output=True, text=True, check=True)
    with namespaces.two_hosts() as names, namespaces.serving(names, *more) as (at, secret):
        inside = ["ip", "netns", "exec", names[0], *line, at[1], str(secret), plain]
        with subprocess.Popen(
            inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as near:
            try:
                for _ in range(20):
                    assert near.stdout.readline() == "trains\n", near.stderr.read()
                ip("-n", names[0], "link", "set", "v0", "down")
                time.sleep(5.0)
                ip("-n", names[0], "link", "set", "v0", "up")
                told, failed = near.communicate(timeout=300)
            finally:
                near.kill()
        assert near.returncode == 0, failed
        assert told.splitlines()[-1] == alone.stdout.splitlines()[-1]
        assert ("warning: --no-tls" in failed) == bool(more)
