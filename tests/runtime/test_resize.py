"""A run under way goes on with another number of servers: the same bytes, and nothing is silent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.hosts.resize import WISH, Pause, WishListener, taken
from runtime.inference import open_model
from runtime.stop import Ending
from tests.runtime.spawned import SLOW, TORCHRUN


def line(*words: str) -> list[str]:
    return [sys.executable, "-m", "runtime", *words]


@pytest.mark.multiproc
@pytest.mark.law13
@pytest.mark.law18
@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["alone", "torchrun"])
@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_servers_that_change_while_a_run_trains_change_no_byte_and_lose_no_push(
    mode, launcher, tmp_path
):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["train", "--data.name", "synthetic", "--steps", "200", "--batch", "32", "--mode", mode]
    words += ["--test-rows", "200", "--model.name", "slow:Net", "--model.hidden", "8"]
    words += ["--executor", "concurrent", "--checkpoint-every", "end", "--servers", "2"]
    words += ["--ranks", "2"]
    started = [*launcher, "-m", "runtime", *words]
    process = subprocess.Popen(
        [sys.executable, *started, "--out", "resized"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "resized" / "metrics.jsonl").exists():  # it begins to train
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        subprocess.run(line("resize", "resized", "--servers", "3"), cwd=tmp_path, check=True)
        (tmp_path / "enough").touch()
        error = process.communicate()[1]
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert re.search(r"servers: 2 -> 3; the pause was \d+\.\d s$", error, re.MULTILINE)
    summary = json.loads((tmp_path / "resized" / "summary.json").read_text())
    assert (summary["samples"], summary["pushes_lost"]) == (200 * 32, 0)
    assert len(summary["pushes_lost_at"]) == 3 and len(summary["resumed_at_samples"]) == 1
    if mode == "sync":
        subprocess.run(line(*words, "--out", "undisturbed"), cwd=tmp_path, check=True)
        same_model(tmp_path / "undisturbed", tmp_path / "resized")


def same_model(one: Path, other: Path) -> None:
    sys.path.append(str(one.parent))
    try:
        models = [open_model(run, trust=True) for run in (one, other)]
    finally:
        sys.path.remove(str(one.parent))
    for table in models[0].tables:
        vectors = [model.lookup(table, np.arange(5000)).tobytes() for model in models]
        assert vectors[0] == vectors[1]


def test_a_wish_is_taken_once_or_answered(tmp_path):
    assert taken(tmp_path, lambda servers: "") is None
    (tmp_path / WISH).write_text('{"servers": 4}')
    assert taken(tmp_path, lambda servers: f"{servers} are too many") is None
    assert json.loads((tmp_path / WISH).read_text())["refused"] == "4 are too many"
    assert taken(tmp_path, lambda servers: "") is None  # it is answered
    (tmp_path / WISH).write_text('{"servers": 4}')
    assert taken(tmp_path, lambda servers: "") == 4
    assert not (tmp_path / WISH).exists()


def test_what_a_run_cannot_do_is_answered_in_a_sentence(tmp_path, capsys):
    (tmp_path / "config.json").touch()
    with WishListener(tmp_path, 2, Ending()).listening():
        assert main(["resize", str(tmp_path), "--servers", "2"]) == 2
    assert "it has 2 already" in capsys.readouterr().err
    assert not (tmp_path / WISH).exists()


def test_a_run_without_servers_has_nobody_who_listens(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"engine": {"servers": 0}}')
    assert main(["resize", str(tmp_path), "--servers", "2"]) == 2
    assert "its rows are in the process of its ranks" in capsys.readouterr().err
    assert not (tmp_path / WISH).exists()


def test_a_run_is_asked_to_end_when_a_wish_is_taken(tmp_path, capsys):
    (tmp_path / "config.json").touch()
    ending = Ending()
    listener = WishListener(tmp_path, 2, ending)
    with listener.listening():
        assert main(["resize", str(tmp_path), "--servers", "5"]) == 0
        while not ending:
            time.sleep(0.01)
    assert (listener.wanted, ending.why) == (5, "resize to 5 servers")


def test_where_nobody_listens_it_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("runtime.hosts.resize.TAKEN_WITHIN_S", 0.2)
    assert main(["resize", str(tmp_path), "--servers", "5"]) == 2
    assert "is no run that is under way" in capsys.readouterr().err
    for content in ("", "5", '{"engine": 5}', '{"engine": ["servers"]}'):
        (tmp_path / "config.json").write_text(content)
        assert main(["resize", str(tmp_path), "--servers", "5"]) == 2
        assert "nobody has taken it within 0 s" in capsys.readouterr().err
    assert not (tmp_path / WISH).exists() and threading.active_count() >= 1


def test_the_pause_is_told_at_the_first_step_behind_it(capsys):
    pause = Pause.begun_by(f"{time.monotonic() - 10} 2 3")
    pause.note()  # the samples of the checkpoint
    assert capsys.readouterr().err == ""
    pause.note()
    pause.note()
    assert re.fullmatch(r"servers: 2 -> 3; the pause was 1\d\.\d s\n", capsys.readouterr().err)
    Pause.begun_by("").note()
    assert capsys.readouterr().err == ""
