"""A run ends where evaluations on the way are no better any more, as at the end of its data."""

from dataclasses import replace

import pytest

from persia_sim.words.rules import Refused
from runtime.commands import main
from runtime.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    TrainConfig,
)
from runtime.run.ending import Ending
from runtime.run.folder import read_metrics
from runtime.run.record import run_into
from runtime.run.session import Interrupted

STOP = EvaluationConfig(part="validation", evaluate_every_steps=10, stop_after=2, test_rows=400)
DATA = DataConfig(name="synthetic")


CONFIG = TrainConfig(
    data=DATA,
    evaluation=STOP,
    steps=400,
    batch=64,
    checkpoint=CheckpointConfig(checkpoint_every="end"),
)


def run(folder, executor="lag", resume=False):
    config = replace(CONFIG, engine=EngineConfig(executor=executor))
    return run_into(folder, config, resume=resume)


def first_task(line):
    return next(iter(line.tasks.values()))["auc"]


def after_the_best(scores):
    """Updates at which two in a row were no better than the best before."""
    best, since = 0.0, 0
    for updates, auc in scores:
        best, since = (auc, 0) if auc > best else (best, since + 1)
        if since == 2:
            return updates
    return None


@pytest.mark.parametrize("executor", ["lag", "concurrent"])
def test_two_evaluations_that_are_no_better_end_the_run(tmp_path, executor):
    summary = run(tmp_path, executor)
    lines = read_metrics(tmp_path)
    scores = [(line.updates, first_task(line)) for line in lines if not line.drained]
    stopped = after_the_best(scores)
    assert stopped is not None and summary["stopped_early"]
    assert stopped <= summary["updates"] < 400 and scores[-1][0] == stopped
    assert summary["notes"] == ["stopped early: 2 evaluations were no better"]
    assert summary["checkpoints_written"] == 1 and (tmp_path / "summary.json").exists()


def test_a_run_that_was_interrupted_counts_on(tmp_path):
    whole = run(tmp_path / "whole")
    ending, seen = Ending(), []

    def interrupt(samples):
        seen.append(samples)
        if sum(seen) >= 64 * (whole["updates"] - 5):
            ending.ask("a test")

    with pytest.raises(Interrupted):
        run_into(tmp_path / "cut", CONFIG, on_samples=interrupt, ending=ending)
    again = run(tmp_path / "cut", resume=True)
    assert again["updates"] == whole["updates"] and again["stopped_early"]
    assert again["tasks"] == whole["tasks"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"evaluate_every_steps": 10}, "--part validation"),
        ({"part": "validation"}, "--evaluate-every-steps"),
    ],
)
def test_the_test_part_never_decides_when_to_stop(options, sentence):
    with pytest.raises(Refused, match=sentence):
        EvaluationConfig(stop_after=2, **options)


def test_a_model_that_was_stopped_is_tested_afterwards(tmp_path, capsys):
    run(tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--test-rows", "500"]) == 0
    assert "500 evaluated" in capsys.readouterr().out
