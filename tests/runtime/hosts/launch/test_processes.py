"""Processes of a run on this host: how many of them start at a time."""

from __future__ import annotations

from runtime.embedding.server_rules import ServerRules
from runtime.hosts.launch import processes
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import ServerProcesses
from tests.runtime.hosts.served import SGD


def test_no_more_start_at_a_time_than_are_ready_soon(monkeypatch):
    """Where 24 started at once on two busy cores, none of them was ready within its time."""
    events = []
    monkeypatch.setattr(processes, "STARTING_AT_ONCE", 3)
    monkeypatch.setattr(ServerProcesses, "_spawn", lambda self, k: events.append(("start", k)))
    monkeypatch.setattr(
        ServerProcesses, "_wait_until_ready", lambda self, k: events.append(("ready", k))
    )
    configs = [
        ServerConfig(shard=k, shards=7, seed=0, tables=(SGD,), rules=ServerRules())
        for k in range(7)
    ]
    ServerProcesses(configs).close()
    assert sorted(events) == [*(("ready", k) for k in range(7)), *(("start", k) for k in range(7))]
    starting = 0
    most = 0
    for event, _ in events:
        starting += 1 if event == "start" else -1
        most = max(most, starting)
    assert most == 3
