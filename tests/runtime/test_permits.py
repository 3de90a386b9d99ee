"""Permits: a rank's batches in flight, from the start of their lookup to the end of their push."""

from __future__ import annotations

import threading

import pytest

from runtime.rank.stages import Permits
from runtime.stop import RunStopped, Stop


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_permit_is_free_when_every_server_has_closed_the_push_and_not_before(servers):
    """Two permits for each of two ranks; a third lookup of rank 1 waits for one of its own."""
    stop = Stop()
    permits = Permits(2, 2, servers, stop)
    for step in range(2):
        permits.take(0, step)
        permits.take(1, step)
    taken = threading.Event()

    def third() -> None:
        try:
            permits.take(1, 2)
            taken.set()
        except RunStopped:
            pass

    waits = threading.Thread(target=third)
    waits.start()
    try:
        # Rank 0's pushes, and those of rank 1 that one server has not closed yet, free none of it.
        for _ in range(servers):
            permits.give_back(0, 0)
        for _ in range(servers - 1):
            permits.give_back(1, 0)
            permits.give_back(1, 1)
        assert not taken.wait(0.1)
        permits.give_back(1, 1)
        assert taken.wait(30)
    finally:
        stop.set(None)
        waits.join(timeout=30)


def test_a_lookup_that_waits_for_a_permit_ends_with_the_run():
    stop = Stop()
    permits = Permits(1, 1, 1, stop)
    permits.take(0, 0)
    stop.set(None)
    with pytest.raises(RunStopped):
        permits.take(0, 1)
