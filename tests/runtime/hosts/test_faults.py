"""Processes that die or stop: noticed, told by name, and gone with whoever started them."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from persia_sim.base.vocabulary import Mode
from runtime import __main__ as commands
from runtime import stop
from runtime.embedding.server_rules import ServerRules
from runtime.executors.open import assemble_for
from runtime.executors.threads import ConcurrentRun
from runtime.hosts import row_processes
from runtime.hosts.launch.processes import ServerProcesses
from runtime.hosts.rows import client
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.served_shard import ServedShard
from runtime.hosts.wire import peers
from runtime.hosts.wire.peers import Peer, Peers
from runtime.stop import PeerError
from tests.runtime.hosts.served import SGD, batch_of, ones, served
from tests.runtime.worlds import ArraySource, config, on_engine, run

SOURCE = ArraySource(300)


def in_thread(work) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that does ``work``, and the error that it ends with."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread, errors


def lives(pid: int) -> bool:
    """Whether a process does anything still: it exists and is no zombie."""
    return _state(Path(f"/proc/{pid}/stat")) not in ("Z", None)


def until(holds) -> None:
    ends_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def suspend(pid: int) -> None:
    """Stop a process and all of its threads: the signal stops the one that the kernel chooses, and
    on a busy machine the others go on until that one has had its turn."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(lambda: not {_state(one) for one in threads.glob("*/stat")} & {"R", "S", "D"})


def _state(stat: Path) -> str | None:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it is read
        return None


def test_the_death_of_a_server_ends_a_wait_with_its_name_and_who_waited():
    with served(ServerRules(ranks=2, tau=0)) as found:
        handle = found.store.begin(0, 1, batch_of(7))  # step 0 was never pushed: it must wait
        thread, errors = in_thread(lambda: found.store.look_up(handle))
        until(lambda: found.client.waits.summary())
        pid = found.processes.pids[0]
        os.kill(pid, signal.SIGKILL)
        thread.join(60)
    assert isinstance(errors[0], PeerError | stop.RunStopped)
    told = str(found.client.stop.error or errors[0])
    assert told.startswith(
        f"embedding server 0 (pid {pid}) was killed by SIGKILL; rank 0 waits for"
    )
    assert re.search(r"the rows of step 1 from embedding server 0 since \d\d:\d\d:\d\d$", told)


@pytest.mark.parametrize("mode", [Mode.LOOKAHEAD])
def test_a_run_whose_server_dies_ends_in_a_sentence_and_leaves_no_process(mode):
    chosen = config(mode=mode, ranks=2, servers=2, executor="concurrent", latency_s=0.02)
    components = assemble_for(chosen, ArraySource(24 * 4000))
    pids = components.store._client.pids
    samples = []
    components.meter.start(on_samples=samples.append)
    threads = ConcurrentRun(components)
    thread, errors = in_thread(threads.run)
    until(lambda: len(samples) > 3)
    os.kill(pids[1], signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(errors[0], PeerError)
    assert f"embedding server 1 (pid {pids[1]}) was killed by SIGKILL" in str(errors[0])
    components.store.close()
    assert not any(map(lives, pids))


PATIENCES_S = (0.6, 4.0, 25.0)
"""Whoever is well is silent for longer than the first only where the machine is busy; then the next
one shows whether that was all."""


def test_a_stopped_server_is_told_from_a_slow_one(monkeypatch):
    monkeypatch.setattr(client, "BEATS_EVERY_S", 0.05)
    for patience_s in PATIENCES_S:
        monkeypatch.setattr(client, "STUCK_S", patience_s)
        with served(ServerRules(ranks=2, tau=0)) as found:
            handle = found.store.begin(0, 1, batch_of(7))
            thread, errors = in_thread(partial(found.store.look_up, handle))
            thread.join(2 * patience_s)
            waits = thread.is_alive()  # its server is well, and waits for rank 1
            pid = found.processes.pids[0]
            suspend(pid)
            thread.join(120)
            assert isinstance(errors[0], stop.RunStopped)
            told = str(found.client.stop.error)
            assert told.startswith(f"embedding server 0 (pid {pid}) has given no sign of life for")
            assert "it is stopped or stuck; rank 0 waits for the rows of step 1" in told
        assert not lives(pid)  # a stopped process goes, too
        if waits:
            return
    assert waits


class Clock:
    """Time as a test lets it pass, for whoever looks every 0.2 s."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def looks(self, look, seconds: float) -> list:
        found = []
        for _ in range(round(seconds / 0.2)):
            self.now_s += 0.2
            found.append(look())
        return found


def test_who_was_suspended_with_the_run_forgives_and_one_who_stays_silent_is_stuck(monkeypatch):
    """Ctrl-Z and fg after 25 s, at the server and at the rank that waits for a sign of life."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    clock, peers = Clock(monkeypatch), Peers(patience_s=20.0)
    peers["client"] = Peer(17, "rank 1")
    assert clock.looks(peers.stuck, 10.0) == [None] * 50
    clock.now_s += 25.0
    assert clock.looks(peers.stuck, 5.0) == [None] * 25
    stuck = clock.looks(peers.stuck, 6.0)[-1]
    assert stuck.startswith("rank 1 (pid 17) has given no sign of life for")
    peers.beat("client", idle=False)
    assert peers.stuck() is None
    waits = client.deadline(20.0, "server 0")
    clock.looks(waits, 10.0)
    clock.now_s += 25.0
    clock.looks(waits, 5.0)
    with pytest.raises(TimeoutError):
        clock.looks(waits, 6.0)


@pytest.mark.long
def test_a_rank_that_stops_is_told_to_the_ranks_that_wait_for_it(monkeypatch):
    """The other rank's process connects and then gives no sign of life, as one that is stopped."""
    for patience_s in PATIENCES_S:
        monkeypatch.setattr(client, "BEATS_EVERY_S", 0.05)
        with served(ServerRules(ranks=2, tau=0), ranks=[0], patience_s=patience_s) as found:
            monkeypatch.setattr(client.ServerClient, "_beat", lambda self, shard: None)
            other = ServerClient(found.processes.address, [1])
            monkeypatch.undo()
            handle = found.store.begin(0, 1, batch_of(7))
            with pytest.raises((PeerError, stop.RunStopped)) as raised:
                found.store.look_up(handle)
            told = str(found.client.stop.error or raised.value)
            other.close()
        if told.startswith("rank 1"):
            break
    assert re.match(rf"rank 1 \(pid {os.getpid()}\) has given no sign of life for \d+ s", told)
    assert "rank 0 waits for the rows of step 1 from embedding server 0" in told


def test_a_rank_that_dies_is_told_to_the_ranks_that_wait_for_it():
    with served(ServerRules(ranks=2, tau=0), ranks=[0]) as found:
        other = ServerClient(found.processes.address, [1])
        handle = found.store.begin(0, 1, batch_of(7))
        thread, errors = in_thread(lambda: found.store.look_up(handle))
        for channel in other._open:
            channel.close()  # as the kernel closes those of a killed process
        thread.join(60)
        told = str(found.client.stop.error or errors[0])
        assert "rank 1 (pid" in told
        assert "ended without a goodbye" in told


def test_a_wait_for_a_push_that_nobody_will_send_is_a_deadlock(monkeypatch):
    """The same sentence as among threads; the server asks whether anybody works."""
    monkeypatch.setattr(client, "BEATS_EVERY_S", 0.05)
    for patience_s in PATIENCES_S:
        monkeypatch.setattr(stop, "PATIENCE_S", patience_s)
        with served(ServerRules(ranks=2, tau=0), patience_s=patience_s) as found:
            handle = found.store.begin(0, 1, batch_of(7))
            with pytest.raises((RuntimeError, PeerError, stop.RunStopped)) as raised:
                found.store.look_up(handle)
        if isinstance(raised.value, RuntimeError):
            break  # else signs of life came late
    assert re.match("deadlock: the lookup of rank 0, step 1 waits at", str(raised.value))


@pytest.mark.long
def test_a_client_that_works_for_long_is_no_deadlock(monkeypatch):
    monkeypatch.setattr(client, "BEATS_EVERY_S", 0.05)
    for patience_s in PATIENCES_S:
        monkeypatch.setattr(stop, "PATIENCE_S", patience_s)
        with served(ServerRules(ranks=2, tau=0, merges=True), patience_s=patience_s) as found:
            store = found.store
            first = [store.begin(rank, 0, batch_of(7)) for rank in (0, 1)]
            for handle in first:
                store.look_up(handle)
            store.give((first[0], ones(first[0])))
            late = store.begin(0, 1, batch_of(7))
            with store._stop.working():
                thread, errors = in_thread(partial(store.look_up, late))
                thread.join(patience_s + 2.0)  # a server looks once a second
                if not errors:
                    store.give((first[1], ones(first[1])))
                thread.join(60)
            if not errors:
                assert late.values["rows"].tolist() == [[-2.0, -2.0]]
                return
            assert "deadlock" not in str(errors[0])  # but signs of life may have come late
    assert not errors


LAUNCHER = """
import sys, time
from tests.runtime.hosts.served import *
from runtime.hosts.wire.peers import *
with served(servers=2) as found:
    handle = found.store.begin(0, 0, batch_of(1, 2, 3))
    found.store.look_up(handle)
    print(*found.processes.pids, flush=True)
    time.sleep(60)
"""


def named_memory(pid: int) -> set[str]:
    """What a process has in /dev/shm, mapped or open."""
    place = Path(f"/proc/{pid}")
    held = (place / "maps").read_text().split()
    for descriptor in (place / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            held.append(os.readlink(descriptor))
    return {one for one in held if one.startswith("/dev/shm/")}


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped servers"])
def test_a_killed_launcher_leaves_no_process_and_no_file(stopped, tmp_path):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert all(map(lives, pids))
    if stopped:
        for pid in pids:
            suspend(pid)
    assert not set().union(*map(named_memory, (launcher.pid, *pids)))
    launcher.kill()
    launcher.wait()
    until(lambda: not any(map(lives, pids)))
    assert not list(tmp_path.iterdir())


def test_ctrl_c_at_the_terminal_reaches_the_launcher_and_not_its_servers():
    """It goes to the whole group of processes; the servers wait for what the launcher says."""
    with served() as found:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(found.processes.pids[0], number)
        handle = found.store.begin(0, 0, batch_of(7))
        found.store.look_up(handle)
        assert handle.values["rows"].tolist() == [[0.0, 0.0]]


@pytest.mark.first_case
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_hit_as_it_starts_ends_its_run_in_a_sentence_or_not(
    number, monkeypatch, tmp_path, capsys
):
    """SIGTERM goes to the whole group; it is for the launcher, from the first instant on."""
    spawn = ServerProcesses._spawn

    def hit(processes: ServerProcesses, shard: int) -> None:
        spawn(processes, shard)
        if shard == 1:
            os.kill(processes.pids[1], number)

    monkeypatch.setattr(ServerProcesses, "_spawn", hit)
    words = "--data.name synthetic --data.rows 600 --steps 2 --executor concurrent --servers 2"
    code = commands.main(["train", *words.split(), "--out", str(tmp_path / "run")])
    told = capsys.readouterr().err.splitlines()
    if number == signal.SIGTERM:
        assert code == 0, told
        return
    assert code == 2
    assert told[-1].startswith(
        "error: embedding server 1 was killed by SIGKILL before it was ready"
    )


def test_no_server_is_started_again_when_its_run_is_over():
    with served() as found:
        pass
    with pytest.raises(PeerError, match="is not started again: the run is over"):
        found.processes.restart(0)
    assert found.processes.pids == []


def test_servers_go_when_their_store_goes():
    processes = []

    def use() -> None:
        world = run(config(servers=2, executor="concurrent"), SOURCE)
        processes.extend(world.store._client.pids)
        assert all(map(lives, processes))

    use()
    gc.collect()
    assert not any(map(lives, processes))


def test_many_processes_on_few_cores_may_be_silent_for_longer(monkeypatch):
    """16 ranks and 64 servers on two cores: two minutes, also at the servers; a few: as ever."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (40.0, 0.0, 0.0))
    assert peers.crowding(4) == 5.0, "all others on the host count, too"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert [peers.crowding(n) for n in (1, 8, 12, 48, 80)] == [1.0, 1.0, 1.5, 6.0, 6.0]
    for servers, ranks, times in ((2, 2, 1.0), (64, 16, 6.0)):
        settings = config(mode="hybrid", tau=2, ranks=ranks, **on_engine("processes", servers))
        made, *_ = row_processes._server_configs(settings, ArraySource(1).layout, [SGD])
        shard = ServedShard(made)
        assert shard.peers.patience_s == shard.stop.patience_s == times * peers.STUCK_S

        # A host that becomes busy later: whoever waits looks at it again.
        with monkeypatch.context() as later:
            later.setattr(os, "getloadavg", lambda: (40.0, 0.0, 0.0))
            assert shard.peers.patience_s == max(times, 5.0) * peers.STUCK_S
