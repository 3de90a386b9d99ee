"""The drill's own instruments: a row that counts, an account that shows a loss, roles, a plan."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from experiments.drilling.cable import ADDRESSES, Cable
from experiments.drilling.counting import settle
from experiments.drilling.trial import (
    IDS,
    RATE,
    Account,
    Ending,
    Trial,
    alive,
    cut_one,
    processes_of,
    run_trial,
    samples_applied,
    write_world,
)
from experiments.studies import fault_drill
from experiments.studies.fault_drill import (
    EVALUATIONS,
    OF_CABLES,
    ROLES,
    Options,
    _decides,
    _table,
    command,
    plan,
    verdict,
)
from runtime.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
)
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.run.record import run_into
from tests.experiments.raw_runs import read_csv
from tests.runtime.hosts import namespaces

STEPS = 12


@pytest.fixture(scope="module", params=[("hybrid", 2), ("async", 2)], ids=str)
def counted(request, tmp_path_factory):
    """A finished run of the counting world, and its account's arguments."""
    mode, ranks = request.param
    folder = tmp_path_factory.mktemp("counted")
    schema = write_world(folder / "world", STEPS * ranks)
    merges = {"merge_pushes": False} if mode == "hybrid" else {}
    config = TrainConfig(
        sync=SyncConfig(mode=mode, ranks=ranks, tau=3, **merges),
        engine=EngineConfig(shards=2),
        checkpoint=CheckpointConfig(checkpoint_every=5),
        data=DataConfig(name=str(schema)),
        model=ModelConfig(name="experiments.drilling.counting:Counting"),
        rows=TableConfig(dim=3, initial_scale=0.0, optimizer=RowOptimizer(kind="sgd", lr=RATE)),
        batch=IDS * ranks,
    )
    run_into(folder / "run", config)
    return folder / "run", {"mode": mode, "ranks": ranks}


def test_every_push_of_an_undisturbed_run_is_applied(counted):
    run, world = counted
    account = settle(run, **world)
    pushes = 2 * STEPS * (world["ranks"] if world["mode"] == "hybrid" else 1)
    assert (account.sent, account.applied, account.lost, account.silent) == (pushes, pushes, 0, 0)


def test_a_loss_that_nobody_counted_and_a_count_without_a_loss_are_silent(counted):
    run, world = counted
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    for change, silent in (({"updates": STEPS + 1}, None), ({"pushes_lost_at": [0, 3]}, 3)):
        file.write_text(json.dumps(summary | change))
        found = settle(run, **world).silent
        assert found == (2 * (world["ranks"] if world["mode"] == "hybrid" else 1)
                         if silent is None else silent)  # fmt: skip
    file.write_text(json.dumps(summary))


def test_what_is_lost_at_one_server_does_not_make_up_for_what_is_counted_at_another(counted):
    """A step that was applied nowhere, and one server counts two for it, the other none."""
    run, world = counted
    file = run / "summary.json"
    whole = file.read_text()
    pushes = world["ranks"] if world["mode"] == "hybrid" else 1
    wrong = {"updates": STEPS + 1, "pushes_lost_at": [2 * pushes, 0]}
    try:
        file.write_text(json.dumps(json.loads(whole) | wrong))
        account = settle(run, **world)
    finally:
        file.write_text(whole)
    assert account.sent == account.applied + account.lost
    assert account.silent == 2 * pushes


def test_a_push_that_was_applied_in_part_is_refused():
    assert samples_applied(np.array([[-3 * RATE, -3 * RATE], [0.0, 0.0]])).tolist() == [3, 0]
    for value in ([-3 * RATE, -2 * RATE], [-2.5 * RATE, -2.5 * RATE]):
        with pytest.raises(ValueError, match="in part"):
            samples_applied(np.array([[0.0, 0.0], value]))


def test_roles_are_read_from_what_processes_run():
    module = "runtime.hosts.loading.loader_process"
    script = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c',"
    script += f" 'import time; time.sleep(60)', {module!r}]).pid, flush=True); input()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    try:
        ends_s = time.monotonic() + 60
        while "loader" not in (roles := processes_of(launcher.pid)):  # its words may come late
            assert time.monotonic() < ends_s
        assert roles == {"launcher": [launcher.pid], "loader": [child]}
        assert alive(child)
    finally:
        os.kill(child, 9)
        launcher.communicate("\n")
    assert not alive(launcher.pid)


def test_a_connection_that_is_cut_is_lost_at_both_ends_and_nobody_dies():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        script = f"import socket; one = socket.create_connection({listening.getsockname()})"
        script += "; print(one.recv(1))"
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        ours = listening.accept()[0]
        assert cut_one([child.pid], random.Random(0))
        assert ours.recv(1) == b""
        assert child.communicate()[0] == b"b''\n" and child.returncode == 0
        assert not cut_one([child.pid], random.Random(0))
        ours.close()


CABLES = {"engine": "hosts", "roles": tuple(OF_CABLES)}


@pytest.mark.parametrize(
    "more",
    [{}, {"engine": "cluster", "roles": tuple(ROLES)}, CABLES, {"roles": ("resize",)}],
    ids=str,
)
def test_the_plan_covers_every_mode_and_role_and_is_the_same_again(more, tmp_path):
    options = Options(kills=50, in_checkpoint=7, in_evaluation=12, learning=5, out=tmp_path, **more)
    trials = plan(options, None)
    assert trials == plan(options, None)
    assert {(t.mode, t.role) for t in trials} == {
        (m, r) for m in options.modes for r in options.roles
    }
    assert [t.in_checkpoint for t in trials] == [True] * 7 + [False] * 43
    evaluations = [t.in_evaluation for t in trials]
    assert None not in evaluations[7:19]
    assert set(evaluations[:7] + evaluations[19:]) == {None}
    assert EVALUATIONS in evaluations
    assert [t.world for t in trials] == ["counting"] * 45 + ["clicks"] * 5
    words = command(options, trials[0], tmp_path / "s.toml", tmp_path / "run")
    assert {"--servers", "--checkpoint-every"} <= set(words)


CALM = Ending(True, False, False, False, 0, 0, 1.0, "")


def test_a_hang_and_a_silent_loss_are_told_and_not_averaged_away():
    hung = Ending(True, True, True, True, 0, 1, 120.0, "")
    line = {"number": 0, "mode": "sync", "role": "server", "broken": "", "lost": None,
            "silent": None, "auc_gap": None}  # fmt: skip
    lines = [line | asdict(CALM), line | asdict(hung) | {"number": 1, "broken": "hangs"}]
    told = verdict(lines)
    assert "1 hang" in told
    assert "trial 1 (server, sync): hangs" in told
    cells = _table(lines).splitlines()[-1].split()
    assert cells[:8] == ["server", "sync", "2", "1", "1", "1", "0", "1"]


def test_finished_trials_are_kept_whole_and_for_the_same_options_only(tmp_path, monkeypatch):
    """And the first of them may have no account: it broke, or its world does not count."""
    options = Options(kills=2, in_checkpoint=0, in_evaluation=0, learning=1, out=tmp_path)
    monkeypatch.setattr(fault_drill, "plan", lambda *_: plan(options, None)[::-1])
    monkeypatch.setattr(fault_drill, "_undisturbed", lambda *_: (1.0, 0.5))
    monkeypatch.setattr(fault_drill, "run_trial", lambda *_, **__: CALM)
    monkeypatch.setattr(fault_drill, "read_summary", lambda _: {"tasks": {"click": {"auc": 0.75}}})
    monkeypatch.setattr(
        "experiments.drilling.counting.settle", lambda *_, **__: Account(8, 7, 1, 0)
    )
    fault_drill.run(options)
    table = (tmp_path / "fault_drill.csv").read_bytes()
    clicks, counting = read_csv(tmp_path / "fault_drill.csv")
    assert (clicks["auc_gap"], clicks["sent"]) == ("0.25", "")
    assert (counting["auc_gap"], counting["lost"]) == ("", "1")
    monkeypatch.setattr(fault_drill, "run_trial", None)
    fault_drill.run(options)
    assert (tmp_path / "fault_drill.csv").read_bytes() == table
    assert _decides(options) == _decides(replace(options, out=tmp_path / "other"))
    assert _decides(options) != _decides(replace(options, seed=1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "engine", "number"),
    [
        ("server", "threads", 1),
        ("server", "threads", EVALUATIONS),
        ("server", "cluster", 1),
        ("worker", "threads", 1),
        ("worker", "cluster", 1),
        ("loader", "cluster", 1),
    ],
    ids=[
        "on the way",
        "final",
        "on another host",
        "a worker",
        "a worker on another host",
        "a loader on another host",
    ],
)
@pytest.mark.law13
def test_who_dies_in_an_evaluation_does_not_hang_the_run(role, engine, number, tmp_path):
    options = Options(steps=16, engine="cluster" if engine == "cluster" else "host", out=tmp_path)
    schema = write_world(tmp_path / "world", options.steps * options.ranks)
    folder = tmp_path / "run"
    trial = Trial(0, "hybrid", role, engine, "counting", 0.0, False, number)
    ending = run_trial(
        trial, command(options, trial, schema, folder), [], folder, tmp_path / "log",
        undisturbed_s=0.0, patience_s=120.0, hosts=options.hosts,
    )  # fmt: skip
    assert (ending.killed, ending.in_evaluation) == (True, True)
    assert (ending.hung, ending.left_behind, ending.resumes) == (False, 0, 0)
    assert settle(folder, mode="hybrid", ranks=options.ranks).silent == 0


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"roles": ("cable",)}, "roles has cable, which need --engine hosts"),
        (
            {"engine": "cluster", "roles": ("resize",)},
            "roles has resize, which needs --engine host",
        ),
        ({"engine": "hosts"}, "roles must be of cable, one-way, long-cut with --engine hosts"),
        ({**CABLES, "ranks": 3}, "ranks must be even with --engine hosts"),
    ],
    ids=str,
)
def test_what_no_cable_can_do_is_refused(more, rule, tmp_path):
    with pytest.raises(ValueError, match=rule):
        Options(out=tmp_path, **more)


@pytest.mark.netns
@namespaces.needed
def test_a_cable_is_cut_both_ways_or_one_way_and_mended():
    """By datagrams, which nobody sends again."""
    with closing(Cable()) as cable:
        listens = [_echoes(cable, host) for host in (0, 1)]
        try:
            assert [_is_heard(cable, host) for host in (0, 1)] == [True, True]
            cable.cut(one_way=False)
            assert [_is_heard(cable, host) for host in (0, 1)] == [False, False]
            cable.mend()
            cable.cut(one_way=True, host=1)
            assert [_is_heard(cable, host) for host in (0, 1)] == [True, False]
            cable.mend()
            assert [_is_heard(cable, host) for host in (0, 1)] == [True, True]
        finally:
            for one in listens:
                one.kill()
                one.communicate()


def _echoes(cable: Cable, host: int) -> subprocess.Popen[bytes]:
    """Listens on a host, and says on its standard output what has come."""
    script = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
    script += f" s.bind(('{ADDRESSES[host]}', 9)); print(flush=True)\n"
    script += "while True: open(s.recv(99).decode(), 'w').close()"
    found = subprocess.Popen([*cable.on(host), sys.executable, "-c", script],
                             stdout=subprocess.PIPE)  # fmt: skip
    found.stdout.readline()
    return found


def _is_heard(cable: Cable, host: int) -> bool:
    """Whether what this host sends comes to the other one, which then makes a file."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "has-come")
        script = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        script += f" s.sendto(b'{mark}', ('{ADDRESSES[1 - host]}', 9))"
        for _ in range(5):
            line = [*cable.on(host), sys.executable, "-c", script]
            subprocess.run(line, capture_output=True)  # fails where no route is there
            time.sleep(0.3)
            if mark.exists():
                return True
        return False


@pytest.mark.netns
@namespaces.needed
@pytest.mark.parametrize("role", OF_CABLES)
@pytest.mark.law13
def test_a_cable_that_is_cut_while_a_checkpoint_is_written_ends_no_run(role, tmp_path):
    """For seconds: nobody notices. For a minute: it ends in a sentence, where this is the first
    one, or goes back to the one before, and comes in when the cable is there again."""
    options = Options(steps=120, engine="hosts", roles=(role,), out=tmp_path)
    trial = replace(plan(options, None)[0], after_s=0.0)
    schema = write_world(tmp_path / "world", options.steps * options.ranks)
    folder = tmp_path / "run"
    again = ["-m", "runtime", "train", "--resume", str(folder)]
    ending = run_trial(
        trial, command(options, trial, schema, folder), again, folder, tmp_path / "log",
        undisturbed_s=0.0, patience_s=240.0, hosts=options.hosts, apart=True,
    )  # fmt: skip
    assert (ending.killed, ending.in_checkpoint) == (True, True)
    assert (ending.hung, ending.left_behind) == (False, 0)
    assert ending.resumes <= (role == "long-cut"), ending.last_line
    account = settle(folder, mode=trial.mode, ranks=options.ranks)
    assert (account.silent, account.lost) == (0, 0)
