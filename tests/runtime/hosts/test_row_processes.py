"""What the processes of a run are told of its options."""

from __future__ import annotations

import pytest

from runtime.hosts import row_processes
from runtime.hosts.row_processes import RowProcesses
from tests.runtime.worlds import ArraySource, config


def test_kernels_of_a_server_have_the_threads_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(row_processes, "ServerProcesses", list)
    chosen = config(executor="concurrent", servers=2, threads=3)
    started = RowProcesses(chosen, ArraySource(1).layout, list(chosen.tables_apart().values()))
    assert [server.threads for server in started.servers] == [3, 3]


def test_a_cluster_is_asked_for_the_cores_of_a_server():
    pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    from runtime.hosts.ray.room import ResourcePlan

    chosen = config(executor="concurrent", servers=2, threads=4)
    assert ResourcePlan.of(chosen, 1, 2).servers == [{"CPU": 4.0}] * 2
    chosen = config(executor="concurrent", servers=2)
    assert ResourcePlan.of(chosen, 1, 2).servers == [{"CPU": 1.0}] * 2
