"""Run folders that are damaged, and mistakes of who asks about them: a sentence each."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.registry.compare import comparison
from tests.experiments.test_registry import LABELS, line_of, made, npz


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "/no/such"], "/no/such is no folder"),
        (["lits"], "runs has no command 'lits'; choose one of list, compare"),
        (["compare", "/no/such", "."], "/no/such is no folder"),
        (["compare", "{run}", "{empty}"], "{empty} is no run: it holds no config.json"),
        (["compare", "{run}", "{torn}"], "is damaged and is not read further"),
        (["compare", "{run}", "{other}"], "no_such_option is not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(words, said, tmp_path, capsys):
    places = {name: tmp_path / name for name in ("empty", "torn", "run", "other")}
    places["empty"].mkdir()
    made(places["run"])
    made(places["torn"], env_json="[")
    made(places["other"])
    (places["other"] / "config.json").write_text('{"no_such_option": 1}')
    assert main(["runs", *(word.format(**places) for word in words)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert said.format(**places) in told


def test_words_of_a_failure_that_may_not_be_read_hide_no_other_run(tmp_path, monkeypatch, capsys):
    made(tmp_path / "good")
    for name, size in (("long", 5000), ("short", 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "failed.txt").write_text("x" * size)
    monkeypatch.setattr("experiments.sweeping.MOST_DOCUMENT_BYTES", 1000)
    assert main(["runs", "list", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    states = {name: line_of(told, name)[-1] for name in ("good", "long", "short")}
    assert states == {"good": "done", "long": "damaged", "short": "failed"}
    assert f"{tmp_path}/long/failed.txt has 5,000 bytes: it has at most 1,000" in told


SUMMARY = {"tasks": {"click": {"auc": 0.7, "log_loss": 0.5}}, "mode": "sync", "tau": 0, "seed": 0}


DAMAGES = {
    **{f"summary {number}": ("summary.json", json.dumps(content)) for number, content in enumerate([
        [], 5, None, "text", {}, {"tasks": []}, {"tasks": None}, {"tasks": 5}, {"tasks": {"t": 5}},
        {"tasks": {"t": []}}, {"tasks": {"t": {"auc": "high"}}}, {"tasks": {"t": {"auc": [1]}}},
        SUMMARY | {"seed": "x"}, SUMMARY | {"seed": [1]}, SUMMARY | {"tau": "x"},
        SUMMARY | {"mode": 5}, SUMMARY | {"samples": "x"}, SUMMARY | {"samples": -1},
        SUMMARY | {"staleness": 5}, SUMMARY | {"updates": 1.5},
        SUMMARY | {"training_loss": {"points": 5}},
    ])},
    **{f"{name} of {kind}": (name, text) for name in ("config.json", "env.json", "summary.json")
       for kind, text in {"bytes": b"\xff\xfe\x00", "half": '{"a"', "depth": "[" * 100_000,
                          "twice": '{"a": 1, "a": 2}', "nan": '{"a": NaN}'}.items()},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_named_with_its_file_and_hides_no_other(damage, tmp_path, capsys):
    made(tmp_path / "good")
    bad = made(tmp_path / "bad")
    name, text = DAMAGES[damage]
    (bad / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["runs", "list", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert line_of(told, "good")[-1] == "done" and line_of(told, "bad")[-1] == "damaged"
    assert f"bad: {bad / name}" in told
    assert main(["runs", "compare", str(bad), str(tmp_path / "good")]) == 2
    told = capsys.readouterr().err
    assert str(bad / name) in told and "Traceback" not in told


@pytest.mark.parametrize("name", ["config.json", "env.json", "summary.json", "failed.txt"])
def test_a_pipe_in_a_run_folder_is_never_waited_for(name, tmp_path, capsys):
    made(tmp_path / "good")
    bad = made(tmp_path / "bad")
    (bad / name).unlink(missing_ok=True)
    os.mkfifo(bad / name)
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert line_of(capsys.readouterr().out, "good")[-1] == "done"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b"[]\n"),
        ("metrics.jsonl", b'{"tasks": 5}\n'),
        ("metrics.jsonl", b"5\n"),
        ("metrics.jsonl", b'{"updates": 1, "samples": "x", "drained": true, "tasks": {}}\n'),
        ("metrics.jsonl", b'{"updates": 1, "samples": 1, "drained": true, "tasks": {"t": 5}}\n'),
        ("metrics.jsonl", b"\xff\xfe\n"),
        ("metrics.jsonl", None),
        ("predictions.npz", None),
        ("predictions.npz", b""),
        ("predictions.npz", b"PK\x03\x04 cut short"),
        ("predictions.npz", npz(labels=LABELS, predictions=LABELS)[:-40]),
        ("predictions.npz", npz(labels=LABELS)),
        ("predictions.npz", npz(labels=LABELS, predictions=LABELS[:5] / 2)),
        ("predictions.npz", npz(labels=LABELS[:, 0], predictions=LABELS[:, 0] / 2)),
        ("predictions.npz", npz(labels=LABELS, predictions=np.full(LABELS.shape, "x"))),
    ],
)  # fmt: skip
def test_what_is_damaged_for_a_comparison_is_named(name, content, tmp_path, capsys):
    """None: a named pipe."""
    good, bad = made(tmp_path / "good"), made(tmp_path / "bad")
    for folder in (good, bad):
        (folder / "predictions.npz").write_bytes(npz(labels=LABELS, predictions=LABELS / 2))
    (bad / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(bad / name)
    else:
        (bad / name).write_bytes(content)
    assert main(["runs", "compare", str(good), str(bad)]) == 2
    told = capsys.readouterr().err
    assert str(bad / name) in told and "Traceback" not in told


def test_predictions_that_are_no_numbers_are_told_instead_of_a_test_of_them(tmp_path):
    folders = [made(tmp_path / name) for name in "ab"]
    scores = np.linspace(0.1, 0.9, len(LABELS))[:, None]
    for folder in folders:
        (folder / "predictions.npz").write_bytes(npz(labels=LABELS, predictions=scores))
        scores = scores.copy()
        scores[2:4, 0] = np.nan, np.inf
    told = comparison(*folders)
    assert "click: no DeLong test, 2 of B's predictions are not finite numbers" in told
    assert "nan" not in told


@pytest.mark.long
def test_folders_of_any_depth_are_looked_through(tmp_path, capsys):
    """Deeper than Python's stack; and deeper than the system takes a path in one word."""
    made(tmp_path / "good")
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(2_300):
            os.mkdir("d", dir_fd=here)
            inner = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
        assert main(["runs", "list", str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert line_of(told, "good")[-1] == "done"
        assert "File name too long" in told
    finally:
        os.close(here)
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)
