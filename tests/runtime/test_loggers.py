"""A logger of the user's own hears what the run folder keeps, and no file can ask for one."""

from __future__ import annotations

import json
import sys

import pytest

from runtime.__main__ import main
from runtime.run.loggers import logger_class

LOGGER = """
heard = []

class Logger:
    def __init__(self, folder, options):
        heard.append(("init", folder.name, options["sync.mode"]))
    def scores(self, samples, tasks, *, drained):
        heard.append(("scores", samples, tasks["click"]["auc"], drained))
    def end(self, summary):
        heard.append(("end", summary["samples"]))
"""
WORDS = ["train", "--data.name", "synthetic", "--batch", "32", "--steps", "8", "--test-rows", "300"]
WORDS += ["--model.hidden", "4", "--evaluate-every-steps", "4"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_logger.py").write_text(LOGGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_logger:Logger"
    sys.modules.pop("my_logger", None)


def test_a_logger_hears_each_evaluation_and_the_end(mine, tmp_path):
    run = tmp_path / "run"
    assert main([*WORDS, "--log", mine, "--out", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    heard = sys.modules["my_logger"].heard
    assert heard[0] == ("init", "run", "sync") and heard[-1] == ("end", 256)
    assert heard[1:-1] == [
        ("scores", line["samples"], line["tasks"]["click"]["auc"], line["drained"])
        for line in lines
    ]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("my_logger", "name tensorboard, or a class of yours, as my_module:Logger"),
        ("my_logger:heard", "is no class"),
        ("json:JSONDecoder", "json is a module of Python itself"),
        ("nowhere_at_all:Logger", "cannot be imported"),
    ],
)
def test_what_is_no_logger_is_refused_before_anything_is_trained(mine, name, rule):
    with pytest.raises(ValueError, match=rule):
        logger_class(name)


def test_a_file_cannot_name_a_logger(mine, tmp_path, capsys):
    (tmp_path / "c.toml").write_text(f'steps = 2\nlog = "{mine}"\n')
    assert main(["train", "--config", str(tmp_path / "c.toml")]) == 2
    assert "log is not known" in capsys.readouterr().err
    assert "my_logger" not in sys.modules


def test_code_of_a_run_is_no_logger(mine, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert main([*WORDS, "--out", str(run)]) == 0
    (run / "hers.py").write_text(LOGGER)
    monkeypatch.syspath_prepend(str(run))
    with pytest.raises(ValueError, match="code is never taken from there"):
        logger_class("hers:Logger")
