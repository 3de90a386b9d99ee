"""A run folder that somebody damaged or wrote by hand: told in a sentence, and never waited for."""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import json
import os
import shutil
import socket
import threading
from contextlib import ExitStack

import pytest
import torch

from runtime.__main__ import main
from runtime.checkpoint.places import complete_checkpoints
from runtime.config import DataConfig
from runtime.files import write_sealed
from runtime.run.folder import OF_A_RUN, claimed, wait_until_free, write_json
from runtime.run.record import run_into
from tests.runtime.worlds import config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run with one checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    run_into(folder, config(mode="hybrid", tau=2, checkpoint_every="end", test_rows=200, steps=6,
                            data=DataConfig(name="synthetic")))  # fmt: skip
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "run")


def cut_of(run):
    return complete_checkpoints(run)[-1]


COMMANDS = {
    "resume": ["train", "--steps", "9", "--resume"],
    "evaluate": ["evaluate"],
    "export": [
        "export",
        "--out",
        "never",
    ],
}
FILES = ["dense.pt", "trace.npz", "rows/manifest.json", "rows/*.rows", "state.json"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_of_a_checkpoint_is_refused(run, name, command, refused):
    (file,) = cut_of(run).glob(name)
    file.unlink()
    os.mkfifo(file)
    said = refused(*COMMANDS[command], str(run))
    assert file.name in said and "it is not a regular file but a named pipe" in said


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "command.json", "config.json"])
@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a folder"])
def test_what_is_no_file_is_refused_by_a_resume(run, name, kind, refused, monkeypatch):
    (run / name).unlink(missing_ok=True)
    if kind == "a named pipe":
        os.mkfifo(run / name)
    elif kind == "a folder":
        (run / name).mkdir()
    else:
        monkeypatch.chdir(run)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(name)
    said = refused(*COMMANDS["resume"], str(run))
    assert str(run) in said and (name in said)


def test_a_checkpoint_folder_that_is_a_link_loses_the_link_alone(run, tmp_path):
    """Somebody moved it to a larger disk."""
    moved = tmp_path / "moved"
    place = cut_of(run)
    shutil.move(place, moved)
    place.symlink_to(moved)
    before = {f: f.read_bytes() for f in moved.rglob("*") if f.is_file()}
    words = ["--keep-checkpoints", "1", "--checkpoint-every", "1"]
    assert main([*COMMANDS["resume"], str(run), *words]) == 0
    assert not place.is_symlink() and len(complete_checkpoints(run)) == 1
    assert {f: f.read_bytes() for f in moved.rglob("*") if f.is_file()} == before


FILES = [name for name in OF_A_RUN if name != "summary.json"]
"""Where that one lies, a finished run does; where env.json lies, one that failed."""


@pytest.mark.parametrize("name", [name for name in FILES if name != "env.json"])
def test_a_run_takes_the_place_of_no_file_that_is_of_no_run(name, tmp_path):
    """Such as the trace of another one, which a replay is to follow."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name} is not of a run here"), claimed(tmp_path):
        pass
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / name).unlink()
    with claimed(tmp_path):
        pass


@pytest.mark.parametrize("written", [0, 2])
def test_a_run_that_ends_between_its_first_files_can_begin_again(written, tmp_path, monkeypatch):
    """A disk that is full, or a kill: whichever of the files it has written before the first step,
    the same command starts anew."""
    words = ["train", "--data.name", "synthetic", "--steps", "2", "--out", str(tmp_path / "run")]
    left = [written]

    def full(*what: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(*what)

    with monkeypatch.context() as patch:
        patch.setattr("runtime.run.record.write_json", full)
        assert main(words) == 2
    there = [name for name in OF_A_RUN if (tmp_path / "run" / name).exists()]
    assert len(there) == written
    assert main(words) == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_lock_is_held_by_one_run_alone(tmp_path):
    with claimed(tmp_path / "run"):
        refused = []

        def another():
            try:
                with claimed(tmp_path / "run"):
                    pass
            except ValueError as error:
                refused.append(str(error))

        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert "another run is filling" in refused[0]
    with claimed(tmp_path / "run"):
        pass


def test_a_run_that_was_started_again_waits_for_the_one_before_to_write_itself_down(tmp_path):
    with ExitStack() as before:
        before.enter_context(claimed(tmp_path / "run"))
        wait_until_free(tmp_path / "run", within_s=0.2)  # it gives up: `claimed` says why
        waiting = threading.Thread(target=wait_until_free, args=(tmp_path / "run", 600.0))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join()
    with claimed(tmp_path / "run"):
        pass


def changed_state(run, where, value):
    """Another value in state.json, sealed as a run seals it; None takes the key away."""
    file = cut_of(run) / "state.json"
    state = json.loads(file.read_text())
    del state["digest"]
    *path, last = where.split(".")
    inside = state
    for key in path:
        inside = inside[int(key) if key.isdigit() else key]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    write_sealed(file, state)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("samples", "x"), ("samples", -5), ("samples", 10**18), ("samples", 10), ("samples", 1.5),
        ("updates", "x"), ("updates", -1), ("updates", [1]), ("facts", {}), ("facts", []),
        ("facts.ranks", "two"), ("facts.data_sha256", 5), ("servers", "x"), ("servers", []),
        ("servers", [{}, {}, {}]), ("servers.0.version", "x"), ("servers.0.updates", -1),
        ("servers.0.row_staleness", [1]), ("servers.0.row_staleness", "x"),
        ("learner", {}),
        ("learner", 5), ("learner.drew_unseeded", "x"),
        ("learner.rows", {"a": 5}), ("meter", {}), ("meter", "x"), ("meter.losses.sums", ["x"]),
        ("meter.instants.last", [1]), ("meter.instants.kept", [[1, 2, 3]]), ("history", {"x": 1}),
        ("history", {"wall_s": "x"}), ("history.checkpoints_written", -1), ("files", {}),
        ("files", {"dense.pt": 5}), ("config", 5), ("config", {"x": 1}), ("tables", []),
        ("tables", {"rows": 5}), ("layout", 5), ("layout", {"fields": 5}), ("staleness", {}),
        ("staleness", "x"), ("format", 5), ("samples", None), ("more", 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_a_sealed_state_of_other_types_is_told_in_a_sentence(run, where, value, command, refused):
    changed_state(run, where, value)
    if command == "evaluate" and where.startswith("history"):
        assert main(["evaluate", str(run)]) == 0  # what only a resume asks for
        return
    said = refused(*COMMANDS[command], str(run))
    assert "state.json" in said or "history" in said


@pytest.mark.parametrize(
    "content",
    ["text", 5, [], {"model": {}}, {"model": 5, "optimizers": []}, {"optimizers": []},
     {"model": {"x": "y"}, "optimizers": [], "generators": {}},
     "no optimiser", "optimiser of text", "generators of text", "weights of text"],
    ids=str,
)  # fmt: skip
def test_sealed_weights_of_other_types_are_told_in_a_sentence(run, content, refused):
    file = cut_of(run) / "dense.pt"
    whole = copy.deepcopy(torch.load(file, weights_only=True))
    if content == "no optimiser":
        content = whole | {"optimizers": []}
    elif content == "optimiser of text":
        content = whole | {"optimizers": ["text"]}
    elif content == "generators of text":
        content = whole | {"generators": {"cpu": "text"}}
    elif content == "weights of text":
        content = whole | {"model": dict.fromkeys(whole["model"], "text")}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    file.write_bytes(buffer.getvalue())
    digest = hashlib.blake2b(buffer.getvalue(), digest_size=32).hexdigest()
    state = json.loads((cut_of(run) / "state.json").read_text())
    changed_state(run, "files", state["files"] | {"dense.pt": digest})
    assert "dense.pt" in refused(*COMMANDS["resume"], str(run))
