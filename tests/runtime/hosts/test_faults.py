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
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from persia_sim.base.vocabulary import Mode
from runtime import stop
from runtime.embedding.server_rules import ServerRules
from runtime.executors.open import assemble_for
from runtime.executors.threads import ConcurrentRun
from runtime.hosts import row_processes
from runtime.hosts.dense.group import SILENCE_S, RankGroup
from runtime.hosts.rows import client
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.served_shard import ServedShard
from runtime.hosts.wire import peers
from runtime.stop import PeerError
from tests.runtime.hosts.served import SGD, batch_of, served
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


def test_a_run_whose_server_dies_ends_in_a_sentence_and_leaves_no_process():
    there = {"servers": 2, "executor": "concurrent", "latency_s": 0.02}
    chosen = config(mode=Mode.LOOKAHEAD, ranks=2, **there)
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


def test_servers_go_when_their_store_goes():
    processes = []

    def use() -> None:
        world = run(config(servers=2, executor="concurrent"), SOURCE)
        processes.extend(world.store._client.pids)
        assert all(map(lives, processes))

    use()
    gc.collect()
    assert not any(map(lives, processes))


def test_a_rank_on_a_busy_host_may_be_silent_for_longer(monkeypatch):
    """40 s without a sign of life: missing, but not where forty wait for two cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    group = object.__new__(RankGroup)
    group.rank, group.places, group._ranks_here, group._silence_s = 1, {}, 1, SILENCE_S
    monkeypatch.setattr(group, "_sign_of", lambda rank: "")
    seen = {0: ("", SimpleNamespace(look=lambda: 40.0))}
    for load, is_missing in ((0.0, True), (40.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        told = pytest.raises(PeerError, match="rank 0: silent for 30 s") if is_missing else None
        with told or nullcontext():
            group._refuse_silent("gradients of step 3", time.monotonic(), [0], seen)


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
