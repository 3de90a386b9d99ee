"""Ranks on two hosts, servers on both: nothing but a network between them, and the same bytes."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from persia_sim.words.staleness import staleness_in_pushes, summarize
from persia_sim.words.trace import Trace
from runtime import commands
from runtime.dense.group import RankGroup
from runtime.engines.processes.launch import Address
from runtime.engines.processes.ranks import ProcessRank
from runtime.stop import PeerError
from runtime.torchrun import address_towards, interface_of
from tests.persia_sim.oracles import mean_by_shard
from tests.runtime.processes import namespaces
from tests.runtime.processes.namespaces import ADDRESSES, enter, serving, start, two_hosts
from tests.runtime.processes.test_ranks import (
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
from tests.runtime.worlds import config, host_of_servers, run

TRAINED = [*EQUAL_TO_SYNC, "merged", "on arrival", "losing", "async", "averaging"]
LATE = ["merged", "on arrival", "losing", "async"]


def on_a_host(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    """A rank of each run, which shares no memory with the other."""
    told = json.loads((folder / "hosts.json").read_text())
    away = bool(told["names"])
    if away:
        enter(told["names"][rank])
        store = dist.TCPStore(ADDRESSES[0], 29500, is_master=rank == 0, wait_for_workers=False)

    def join(rank: int, ranks: int, words: dist.Store) -> ProcessRank:
        towards = ADDRESSES[0] if away else "127.0.0.1"
        group = RankGroup(rank, ranks, words, torch.device("cpu"), towards=towards)
        return ProcessRank(group, local_rank=0, ranks_here=1)

    servers = {"servers_at": tuple(told["at"]), "servers_secret": Path(told["secret"])}
    train_all(rank, ranks, store, folder, TRAINED, join, **servers)
    (folder / f"interface-{rank}").write_text(os.environ["GLOO_SOCKET_IFNAME"])
    done = dist.PrefixStore("done", store)
    done.set(str(rank), "")
    if rank == 0:  # who holds the store ends last
        done.wait([str(other) for other in range(ranks)])


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as names, serving(names) as (at, secret):
        yield names, at, secret


ON_TWO_HOSTS = pytest.param("two hosts", marks=[pytest.mark.netns, namespaces.needed])


@pytest.fixture(scope="module", params=["loopback", ON_TWO_HOSTS])
def found(request, tmp_path_factory):
    """Over TCP with servers of `serve`: on this host's loopback device, and between two hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    names, (at, secret) = (), host_of_servers()
    if request.param == "two hosts":
        names, at, secret = request.getfixturevalue("hosts")
    document = {"names": names, "at": at, "secret": str(secret)}
    (folder / "hosts.json").write_text(json.dumps(document))
    Processes(2, on_a_host, folder).join_well()
    return folder


@pytest.mark.parametrize("name", EQUAL_TO_SYNC)
def test_ranks_on_two_hosts_give_the_bytes_of_threads(name, found):
    """Laws 1, 2 and 12."""
    threads = run(config(ranks=2, model=settings_of(name).model), SOURCE)
    state = state_in(found / name)
    for key, array in threads.state().items():
        assert state[key].tobytes() == array.tobytes(), key
    told = json.loads((found / name / "told.json").read_text())
    assert told["losses"] == threads.meter.losses


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_of_two_hosts_replays_in_one_process(name, found):
    """Laws 6 and 9, in every kind of mode; dense weights and replicas, too."""
    check_replay(found, name, ranks=2)


@pytest.mark.parametrize("name", LATE)
def test_between_hosts_the_window_holds_and_lateness_is_batches_in_flight(name, found):
    """Laws 5 and 7."""
    order = Trace.load(found / name / "trace.npz")
    assert 0 < summarize(order).max_steps <= SETTINGS[name]["tau"]
    for missed, in_flight in mean_by_shard(staleness_in_pushes(order)).values():
        assert missed == in_flight > 0


def test_between_hosts_each_push_is_applied_or_counted_as_lost(found):
    """Law 13."""
    check_losses(found, {(rank, step) for rank, step in LOST if rank < 2}, ranks=2)


def test_gloo_takes_the_interface_between_the_hosts(found):
    names = json.loads((found / "hosts.json").read_text())["names"]
    expected = ["v0", "v1"] if names else ["lo", "lo"]
    assert [(found / f"interface-{k}").read_text() for k in (0, 1)] == expected


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
def test_a_rank_killed_on_its_host_costs_no_byte(hosts, tmp_path, monkeypatch):
    """Law 11 by two torchruns; loaders on each host."""
    words = ["--data.name", "synthetic", "--steps", "60", "--batch", "64", "--test-rows", "500"]
    words += ["--model.name", "mortal:Net", "--threads", "2", "--checkpoint-every", "20"]
    (tmp_path / "mortal.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "run"
    more = ["--dense-sum", "gather", "--loaders", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": path_with(tmp_path), "RUN": str(out)}
    told = torchrun(hosts, [*words, *more], env=environment)
    assert [code for code, _, _ in told] == [0, 0], told
    assert len(json.loads((out / "summary.json").read_text())["resumed_at_samples"]) == 1
    threads = ["--ranks", "2", "--executor", "concurrent", "--out", str(tmp_path / "threads")]
    assert commands.main(["train", *words, *threads]) == 0
    given = [np.load(r / "predictions.npz")["predictions"] for r in (out, tmp_path / "threads")]
    assert given[0].tobytes() == given[1].tobytes()


@pytest.mark.netns
@namespaces.needed
def test_a_run_folder_that_one_host_does_not_see_is_refused_before_training(hosts, tmp_path):
    out = tmp_path / "run"
    script = tmp_path / "hide.sh"
    script.write_text(f'mount -t tmpfs none {tmp_path} && mkdir {out} && exec "$@"\n')
    words = ["--data.name", "synthetic", "--steps", "30", "--batch", "64", "--test-rows", "500"]
    words += ["--checkpoint-every", "end", "--out", str(out)]
    told = torchrun(hosts, words, ("", f"unshare --mount sh {script}"))
    assert all(code for code, _, _ in told)
    sentence = (
        r"error: rank 1 \(pid \d+, .+\) does not see .*/run, the run folder of rank 0 \(pid \d+,"
        r" .+\), .* name a folder with --out that all hosts share"
    )
    assert all(re.search(sentence, words) for _, _, words in told), told


def test_an_address_for_other_hosts_is_read_with_the_secret_alone():
    address = Address(("10.0.0.1:7801",), ("of the run",), (7,))
    sealed = address.sealed("a secret for tests alone")
    assert Address.unsealed(sealed, "a secret for tests alone") == address
    assert b"of the run" not in bytes.fromhex(sealed)
    changed = sealed[:-2] + f"{int(sealed[-2:], 16) ^ 1:02x}"
    for text, secret in (
        (sealed, "another secret of tests"),
        (changed, "a secret for tests alone"),
    ):
        with pytest.raises(PeerError, match="give all the same --servers-secret"):
            Address.unsealed(text, secret)


def test_the_interface_of_the_loopback_device_is_lo():
    assert interface_of(address_towards("127.0.0.1")) == "lo"
    with pytest.raises(OSError, match=r"no network interface of this host has .* 203.0.113.1"):
        interface_of("203.0.113.1")
