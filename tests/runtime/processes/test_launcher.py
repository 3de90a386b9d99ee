"""Ranks whose launcher is killed: the store that it held answers nobody."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from runtime.dense.group import RankGroup
from runtime.engines.processes.leg_watch import LegWatch
from runtime.stop import PeerError, Stop


class Mortal:
    """A store that can be asked until its holder dies."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self.dead = False

    def _alive(self) -> None:
        if self.dead:
            raise dist.DistNetworkError("Broken pipe")

    def set(self, key: str, value: str) -> None:
        self._alive()
        self._words[key] = value

    def get(self, key: str) -> bytes:
        self._alive()
        return self._words[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._alive()
        return all(key in self._words for key in keys)


class NoFeed:
    """Batches that are never asked for."""


@pytest.fixture
def orphan(monkeypatch):
    """A rank alone in its group, the store, and what stops its run."""
    monkeypatch.setattr(dist, "PrefixStore", lambda name, store: dist.HashStore())
    store, stop = Mortal(), Stop()
    group = RankGroup(0, 1, store, torch.device("cpu"), beat_s=600.0)
    group.attach(stop)
    group._closed.set()  # no signs of life: the test asks for itself
    store.dead = True
    yield group, stop
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "ask", [lambda g: g.gather("cut", "1"), lambda g: g.say("end"), lambda g: g.is_said("end")]
)
def test_who_asks_the_store_of_a_launcher_that_is_gone_is_told_so_with_a_remedy(orphan, ask):
    with pytest.raises(PeerError, match=r"the launcher of rank 0 is gone.*start torchrun again"):
        ask(orphan[0])


def test_the_thread_that_ends_legs_ends_the_run_with_that_sentence_and_no_traceback(
    orphan, monkeypatch
):
    group, stop = orphan
    loud: list[object] = []
    monkeypatch.setattr(threading, "excepthook", loud.append)
    watch = LegWatch(group, 1, NoFeed(), lambda: False)
    watch._thread.join(60)
    assert loud == []
    assert "the launcher of rank 0 is gone" in str(stop.error)
