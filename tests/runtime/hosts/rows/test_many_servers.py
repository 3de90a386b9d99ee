"""Many servers: the bytes of one, and the open files they need."""

from __future__ import annotations

import resource

import pytest

from runtime.hosts.rows import connections
from runtime.stop import PeerError
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, on_engine, run


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.law1
@pytest.mark.law12
def test_eight_ranks_on_many_server_processes_end_with_the_bytes_of_one_server():
    """200 steps of hybrid at tau 0, in which each rank asks each of 24 servers, and sync by one
    thread on one shard."""
    source = ArraySource(200 * 32, ids_per_field=300)
    settings = {"ranks": 8, "batch": 32}
    late = {"mode": "hybrid", "tau": 0, "merge_pushes": True}
    many = run(config(**settings, **late, **on_engine("processes", 24)), source)
    try:
        assert many.meter.updates == 200
        assert [status["version"] for status in many.store.statuses()] == [200 * 8] * 24
        one = run(config(**settings, mode="sync", **on_engine("constant_lag")), source)
        assert_same_bytes(one, many)
    finally:
        many.store.close()


@pytest.fixture
def limits(monkeypatch):
    """Those of this process, as the kernel would have them."""
    found = {"limits": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: found["limits"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.update(limits=limits))
    return found


def test_open_files_are_allowed_as_far_as_the_hard_limit_goes(limits):
    connections.allow_descriptors(700)
    assert limits["limits"] == (1024, 4096)
    connections.allow_descriptors(2560)
    assert limits["limits"] == (2816, 4096)
    with pytest.raises(PeerError, match="5,120 connections to servers need 5,376 open files"):
        connections.allow_descriptors(5120)
    limits["limits"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    connections.allow_descriptors(10**6)
