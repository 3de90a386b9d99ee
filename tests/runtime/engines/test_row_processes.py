"""What the processes of a run are told of its options."""

from __future__ import annotations

import pytest

from runtime.engines import row_processes
from runtime.engines.row_processes import RowProcesses
from tests.runtime.worlds import ArraySource, config


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({"mode": "sync", "threads": 3}, 3),  # nobody else computes meanwhile
        ({"mode": "sync", "threads": 3, "ranks": 2}, 1),
        ({"mode": "hybrid", "threads": 3}, 1),
        ({"mode": "hybrid", "threads": 3, "server_threads": 4}, 4),
        ({"mode": "sync", "threads": 3, "server_threads": 1}, 1),
    ],
)
def test_kernels_of_a_server_have_the_threads_that_were_asked_for(options, threads, monkeypatch):
    monkeypatch.setattr(row_processes, "ServerProcesses", list)
    chosen = config(executor="concurrent", servers=2, **options)
    started = RowProcesses(chosen, ArraySource(1).layout, list(chosen.tables_apart().values()))
    assert [server.threads for server in started.servers] == [threads, threads]


def test_a_cluster_is_asked_for_the_cores_of_a_server():
    pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    from runtime.cluster.room import ResourcePlan

    chosen = config(executor="concurrent", servers=2, server_threads=4)
    assert ResourcePlan.of(chosen, 1, 2).servers == [{"CPU": 4.0}] * 2
    chosen = config(executor="concurrent", servers=2)
    assert ResourcePlan.of(chosen, 1, 2).servers == [{"CPU": 1.0}] * 2
