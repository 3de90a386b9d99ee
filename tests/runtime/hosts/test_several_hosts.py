"""Ranks on two hosts, servers on both: nothing but a network between them, and the same bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from experiments.drilling.cable import ip
from persia_sim.base.staleness import staleness_in_pushes, summary_of
from persia_sim.base.trace import Trace
from runtime import __main__ as commands
from runtime.executors.open import assemble_for
from runtime.executors.threads import ConcurrentRun
from runtime.hosts.dense.group import RankGroup
from runtime.hosts.launch.processes import Address
from runtime.hosts.rank_process import GroupedRank
from runtime.hosts.torchrun import address_towards, interface_of
from runtime.stop import PeerError
from tests.persia_sim.oracles import mean_by_shard
from tests.runtime.hosts import namespaces
from tests.runtime.hosts.namespaces import ADDRESSES, enter, serving, start, two_hosts
from tests.runtime.hosts.test_rank_process import (
    EQUAL_TO_SYNC,
    LOST,
    SETTINGS,
    SOURCE,
    check_losses,
    check_replay,
    settings_of,
    state_in,
    train_all,
)
from tests.runtime.spawned import Processes
from tests.runtime.test_torchrun import MORTAL, path_with
from tests.runtime.worlds import ArraySource, changed, config, host_of_servers, run

pytestmark = pytest.mark.long  # its runs are made once, for all of its tests

LATE = ["merged", "on arrival", "losing", "async", "merged, workers"]
TRAINED = [*EQUAL_TO_SYNC, *LATE, "averaging"]


def on_a_host(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    """A rank of each run, which shares no memory with the other."""
    store, join, servers = place_in(rank, store, folder)
    train_all(rank, ranks, store, folder, TRAINED, join, **servers)
    done = dist.PrefixStore("done", store)
    done.set(str(rank), "")
    if rank == 0:  # who holds the store ends last
        done.wait([str(other) for other in range(ranks)])


def place_in(rank: int, store: dist.Store, folder: Path) -> tuple[dist.Store, Any, dict[str, Any]]:
    """From now on this process is on its host: the store, how it joins, where the servers are."""
    told = json.loads((folder / "hosts.json").read_text())
    towards = "127.0.0.1"
    if told["names"]:
        enter(told["names"][rank])
        towards = ADDRESSES[0]
        store = dist.TCPStore(towards, 29500, is_master=rank == 0, wait_for_workers=False)

    def join(rank: int, ranks: int, words: dist.Store) -> GroupedRank:
        device, patience = torch.device("cpu"), {"beat_s": 0.5, "silence_s": told["silence_s"]}
        group = RankGroup(rank, ranks, words, device, towards=towards, **patience)
        (folder / f"interface-{rank}").write_text(group.interface)
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "a later group may have another one"
        return GroupedRank(group, ranks_here=1)

    return store, join, {
        "servers_at": tuple(told["at"]), "servers_secret": Path(told["secret"])
    }  # fmt: skip


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as names, serving(names) as (at, secret):
        yield names, at, secret


ON_TWO_HOSTS = pytest.param("two hosts", marks=[pytest.mark.netns, namespaces.needed])


@pytest.fixture(scope="module", params=["loopback", ON_TWO_HOSTS])
def place(request):
    """Over TCP with servers of `serve`: on this host's loopback device, and between two hosts."""
    if request.param == "two hosts":
        return request.getfixturevalue("hosts")
    return ((), *host_of_servers())


def started(body, place, folder: Path, silence_s: float = 30.0) -> Processes:
    names, at, secret = place
    document = {"names": names, "at": at, "secret": str(secret), "silence_s": silence_s}
    (folder / "hosts.json").write_text(json.dumps(document))
    return Processes(2, body, folder)


@pytest.fixture(scope="module")
def found(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    started(on_a_host, place, folder).join_well()
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", EQUAL_TO_SYNC)
@pytest.mark.law1
@pytest.mark.law2
@pytest.mark.law12
def test_ranks_on_two_hosts_give_the_bytes_of_threads(name, found):
    """Laws 1, 2 and 12."""
    threads = run(config(ranks=2, model=settings_of(name).model), SOURCE)
    state = state_in(found / name)
    for key, array in threads.state().items():
        assert state[key].tobytes() == array.tobytes(), key
    told = json.loads((found / name / "told.json").read_text())
    assert told["losses"] == threads.meter.losses


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.law6
@pytest.mark.law9
@pytest.mark.law12
def test_a_run_of_two_hosts_replays_in_one_process(name, found):
    """Laws 6 and 9, in every kind of mode; dense weights and replicas, too."""
    check_replay(found, name, ranks=2)


@pytest.mark.parametrize("name", LATE)
@pytest.mark.law5
@pytest.mark.law7
@pytest.mark.law12
def test_between_hosts_the_window_holds_and_lateness_is_batches_in_flight(name, found):
    """Laws 5 and 7."""
    order = Trace.load(found / name / "trace.npz")
    assert 0 < summary_of(order).max_steps <= SETTINGS[name]["tau"]
    for missed, in_flight in mean_by_shard(staleness_in_pushes(order)).values():
        assert missed == in_flight > 0


@pytest.mark.law12
@pytest.mark.law13
def test_between_hosts_each_push_is_applied_or_counted_as_lost(found):
    """Law 13."""
    check_losses(found / "losing", {(rank, step) for rank, step in LOST if rank < 2}, ranks=2)


def test_gloo_takes_the_interface_between_the_hosts(found):
    names = json.loads((found / "hosts.json").read_text())["names"]
    expected = ["v0", "v1"] if names else ["lo", "lo"]
    assert [(found / f"interface-{k}").read_text() for k in (0, 1)] == expected


# A rank, or a host, that says nothing more.


def trains_for_long(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    """What ends it is written down."""
    store, join, servers = place_in(rank, store, folder)
    settings = changed(settings_of("sync"), ranks=ranks, servers=1, **servers)
    components = assemble_for(settings, ArraySource(24 * 20_000), rank=join(rank, ranks, store))
    components.meter.start(on_samples=lambda samples: (folder / "trains").touch())
    try:
        ConcurrentRun(components).run()
    except PeerError as error:
        (folder / f"told-{rank}.part").write_text(str(error))
        (folder / f"told-{rank}.part").rename(folder / f"told-{rank}")
        while True:  # it still holds the store
            time.sleep(1)


@contextmanager
def long_run(place, folder: Path, **more: float) -> Iterator[Processes]:
    """Two ranks that train already."""
    ranks = started(trains_for_long, place, folder, **more)
    try:
        wait_for(lambda: (folder / "trains").exists() or ranks.members[0].exitcode is not None)
        yield ranks
    finally:
        for member in ranks.members:
            member.kill()
            member.join()


def wait_for(holds) -> None:
    """pytest's own limit is the only one."""
    while not holds():
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.law12
def test_a_rank_that_is_stopped_on_its_host_is_named_by_the_other(place, tmp_path):
    with long_run(place, tmp_path, silence_s=6.0) as ranks:
        os.kill(ranks.members[1].pid, signal.SIGSTOP)
        wait_for(lambda: (tmp_path / "told-0").exists())
    stopped = rf"rank 1 \(pid {ranks.members[1].pid}"
    waits_for_gradients = (
        rf"rank 0 has waited \d+ s for the gradients of step \d+ of {stopped}, .+\): silent for \d"
        " s; the last that it said was: "
    )
    waits_for_rows = (
        rf"{stopped}\) has given no sign of life for \d+ s, since [\d:]+: .*; rank 0 waits for the"
        r" rows of step \d+ from embedding server 0 since [\d:]+"
    )
    told = (tmp_path / "told-0").read_text()
    assert re.match(f"{waits_for_gradients}|{waits_for_rows}", told), told


@pytest.mark.netns
@namespaces.needed
@pytest.mark.law12
def test_a_cable_that_stays_out_is_a_death_on_both_sides(tmp_path):
    """Both say who waited for whom since when; the server that is cut off ends itself."""
    with two_hosts() as names, serving(names) as (at, secret):
        idle = len(pids_on(names[1]))
        place = names, at[1:], secret
        with long_run(place, tmp_path):
            ip("-n", names[0], "link", "set", "v0", "down")
            wait_for(lambda: all((tmp_path / f"told-{k}").exists() for k in (0, 1)))
        told = [(tmp_path / f"told-{k}").read_text() for k in (0, 1)]
        since = r"given no sign of life for \d+ s, since [\d:]+|has (waited|not answered)"
        assert all(re.search(since, sentence) for sentence in told), told
        assert re.search(r"embedding server 0|of rank 1", told[0]), told
        assert re.search(r"rank 0 \(|launcher of rank 1", told[1]), told
        wait_for(lambda: len(pids_on(names[1])) == idle)


def pids_on(host: str) -> list[str]:
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    return found.stdout.split()


def torchrun(hosts, words, before=("", ""), **more) -> list[tuple[int, str, str]]:
    """Exit code and words of one torchrun on each host, with one rank each."""
    names, at, secret = hosts
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"]
    common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"]
    run = ["-m", "runtime", "train", *words, "--servers", "2", "--servers-at", *at]
    run += ["--servers-secret", str(secret)]
    with ExitStack() as ends:
        started = []
        for k, name in enumerate(names):
            own = ["--rdzv-conf", f"is_host={int(not k)}", "--local-addr", ADDRESSES[k]]
            line = ["-m", "torch.distributed.run", *common, *own, *run]
            one = start(name, *line, before=before[k].split(), **more)
            ends.callback(one.kill)
            started.append(one)
        told = [one.communicate(timeout=280) for one in started]
        return [(one.returncode, *words) for one, words in zip(started, told, strict=True)]


@pytest.mark.netns
@namespaces.needed
@pytest.mark.law11
@pytest.mark.law12
def test_a_rank_killed_on_its_host_costs_no_byte(hosts, tmp_path, monkeypatch):
    """Law 11 by two torchruns; a loader on one host serves both."""
    words = ["--data.name", "synthetic", "--steps", "60", "--batch", "64", "--test-rows", "500"]
    words += ["--model.name", "mortal:Net", "--threads", "2", "--checkpoint-every", "20"]
    (tmp_path / "mortal.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "run"
    more = ["--loaders", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": path_with(tmp_path), "RUN": str(out)}
    told = torchrun(hosts, [*words, *more], env=environment)
    assert [code for code, _, _ in told] == [0, 0], told
    assert len(json.loads((out / "summary.json").read_text())["resumed_at_samples"]) == 1
    threads = ["--ranks", "2", "--executor", "concurrent", "--out", str(tmp_path / "threads")]
    assert commands.main(["train", *words, *threads]) == 0
    given = [np.load(r / "predictions.npz")["predictions"] for r in (out, tmp_path / "threads")]
    assert given[0].tobytes() == given[1].tobytes()


def without(folder: Path) -> str:
    """Words before a command that has another folder of that name, with a run folder in it."""
    script = folder / "hide.sh"
    script.write_text(f'mount -t tmpfs none {folder} && mkdir {folder / "run"} && exec "$@"\n')
    return f"unshare --mount sh {script}"


@pytest.mark.netns
@namespaces.needed
def test_a_run_folder_that_a_server_does_not_see_is_refused_before_training(tmp_path):
    out = tmp_path / "run"
    with two_hosts() as names, serving(names, before=("", without(tmp_path))) as (at, secret):
        words = f"train --data.name synthetic --steps 30 --test-rows 500 --out {out} --servers 2"
        words += f" --executor concurrent --checkpoint-every end --servers-secret {secret}"
        one = start(names[0], "-m", "runtime", *words.split(), "--servers-at", *at)
        _, told = one.communicate(timeout=280)
    assert one.returncode == 2
    assert re.search(
        rf"error: embedding server 1 \(pid \d+\) on host .* cannot write its rows into the run"
        rf" folder {out} \(No such file or directory\): name a folder with --out that all", told
    ), told  # fmt: skip
    assert not (out / "config.json").exists(), "nothing has begun"


@pytest.mark.netns
@namespaces.needed
def test_a_run_folder_that_one_host_does_not_see_is_refused_before_training(hosts, tmp_path):
    out = tmp_path / "run"
    words = ["--data.name", "synthetic", "--steps", "30", "--batch", "64", "--test-rows", "500"]
    words += ["--checkpoint-every", "end", "--out", str(out)]
    told = torchrun(hosts, words, ("", without(tmp_path)))
    assert all(code for code, _, _ in told)
    sentence = (
        r"error: rank 1 \(pid \d+, .+\) does not see .*/run, the run folder of rank 0 \(pid \d+,"
        r" .+\), .* name a folder with --out that all hosts share"
    )
    assert all(re.search(sentence, words) for _, _, words in told), told


def test_an_address_for_other_hosts_is_read_with_the_secret_alone():
    address = Address(("10.0.0.1:7801",), ("of the run",), (7,))
    sealed = address.sealed("a secret for tests alone", "these ranks")
    assert Address.unsealed(sealed, "a secret for tests alone", "these ranks") == address
    assert b"of the run" not in bytes.fromhex(sealed)
    for text, secret, about in (
        (sealed, "another secret of tests", "these ranks"),
        (sealed, "a secret for tests alone", "the ranks of another start"),
        ("no hexadecimal", "a secret for tests alone", "these ranks"),
    ):
        with pytest.raises(PeerError, match="give all the same --servers-secret"):
            Address.unsealed(text, secret, about)


def test_the_interface_of_the_loopback_device_is_lo():
    assert interface_of(address_towards("127.0.0.1")) == "lo"
    with pytest.raises(OSError, match=r"no network interface of this host has .* 203.0.113.1"):
        interface_of("203.0.113.1")
