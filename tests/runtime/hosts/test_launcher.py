"""Ranks whose launcher is killed: the store that it held answers nobody."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime import stop as stop_module
from runtime.config import TrainConfig
from runtime.hosts import ranks
from runtime.hosts.dense.group import RankGroup
from runtime.hosts.rank_process import LegWatch
from runtime.hosts.torchrun import Launch
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
def lonely(monkeypatch):
    """A rank alone in its group, the store, and what stops its run."""
    monkeypatch.setattr(dist, "PrefixStore", lambda name, store: dist.HashStore())
    store, stop = Mortal(), Stop()
    group = RankGroup(0, 1, store, torch.device("cpu"), beat_s=600.0)
    group.attach(stop)
    group._closed.set()  # no signs of life: the test asks for itself
    yield group, store, stop
    dist.destroy_process_group()


@pytest.fixture
def orphan(lonely):
    """The rank and what stops its run, without the store's holder."""
    group, store, stop = lonely
    store.dead = True
    return group, stop


def waits(lonely, monkeypatch, looks_s: list[float]) -> list[str]:
    """What a wait for rank 1 gives, which is silent and speaks at last, when the seconds between
    two looks are these."""
    group, store, _ = lonely
    group.ranks, now_s, left = 2, [0.0], iter(looks_s)
    store.set("beat/1", "5 0 trains")

    def look(keys: list[str]) -> bool:
        if keys == ["cut/1"]:
            passes_s = next(left, None)
            if passes_s is None:
                store.set("cut/1", "there")
            now_s[0] += passes_s or 0.0
        return Mortal.check(store, keys)

    monkeypatch.setattr(store, "check", look)
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return group.gather("cut", "here")


def test_a_rank_that_slept_itself_forgives_the_silence_of_the_others(lonely, monkeypatch):
    """Ctrl-Z and fg: all were suspended, whoever wakes up first finds old signs of life."""
    assert waits(lonely, monkeypatch, [0.1] * 3 + [3600.0] + [0.1] * 3) == ["here", "there"]


@pytest.mark.parametrize(
    "ask", [lambda g: g.gather("cut", "1"), lambda g: g.say("end"), lambda g: g.is_announced("end")]
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


def test_threads_that_were_suspended_while_all_wait_are_no_deadlock(monkeypatch):
    """Each looks once a second; what is on its way arrives when they are awake again."""
    now_s = [0.0]
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    end, deadlocks = Stop(), []
    for passes_s in [1.0] * 15 + [3600.0] + [1.0] * 15:
        now_s[0] += passes_s
        deadlocks.append(end.nobody_works())
    assert not any(deadlocks)
    for _ in range(10):
        now_s[0] += 1.0
        deadlocks.append(end.nobody_works())
    assert any(deadlocks), "awake, nobody waits for longer than patience"


class Cable:
    """Between a rank and the store of all; what is sent while it is out arrives nowhere, and both
    ends keep their connection."""

    def __init__(self, port: int, passes: int) -> None:
        """``passes``: so many bytes to the store arrive before it is out."""
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port, self._passes, self._store = self._door.getsockname()[1], passes, port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        rank, _ = self._door.accept()
        store = socket.create_connection(("127.0.0.1", self._store))
        threading.Thread(target=self._pump, args=(rank, store), daemon=True).start()
        self._pump(store, rank)

    def _pump(self, source: socket.socket, drain: socket.socket) -> None:
        while data := source.recv(4096):
            if self._passes > 0:
                drain.sendall(data)
            self._passes -= len(data)


@pytest.mark.first_case
@pytest.mark.parametrize("passes", [1, 300, 3000])
def test_a_rank_that_is_cut_off_from_the_store_before_all_are_here_says_so(monkeypatch, passes):
    """It waited in torch's own call, for ever: no look at the clock, and no signal, got through.
    Who holds the store is alive, and another rank is still to come."""
    monkeypatch.setattr(ranks, "SILENCE_S", 1.0)
    monkeypatch.setattr(ranks, "JOIN_S", 2.0 if passes == 1 else 600.0)
    monkeypatch.setattr(ranks, "die_with_parent", lambda number: None)
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(held.port, passes)
    launch = Launch(rank=1, local_rank=0, ranks=2, ranks_here=1, host="127.0.0.1",
                    port=cable.port, agent_has_store=True)  # fmt: skip
    told: list[str] = []

    def start() -> None:
        with pytest.raises(PeerError) as refused, ranks.joined(TrainConfig(), launch):
            pass
        told.append(str(refused.value))

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(60.0)
    assert told, "it still waits"
    # Of a busy machine the silence may be over before the time to join is.
    silent = ["has not answered rank 1 for 1 s"] + ["which does not answer"] * (passes == 1)
    assert any(sentence in told[0] for sentence in silent), told[0]


HOLDER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
ASKER = f"""
import subprocess, sys
from runtime.process import enter_process
enter_process()
import torch.distributed as dist
held = subprocess.PIPE
holder = subprocess.Popen([sys.executable, "-c", {HOLDER!r}], stdin=held, stdout=held, text=True)
store = dist.TCPStore("127.0.0.1", int(holder.stdout.readline()), is_master=False)
store.set("here", "1")
holder.kill()
holder.wait()
try:
    store.get("here")
except dist.DistError:
    print("gone")
"""


@pytest.mark.long
@pytest.mark.multiproc
def test_torch_prints_no_stack_of_its_own_beside_that_sentence():
    """By default its warning of a store that does not answer is twenty lines of C++ frames."""
    found = subprocess.run([sys.executable, "-c", ASKER], capture_output=True, text=True)
    assert found.stdout == "gone\n" and found.stderr == ""
