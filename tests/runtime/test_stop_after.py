"""What the validation part decides: where a run ends, and which checkpoint is the best one."""

from dataclasses import replace

import pytest

from persia_sim.base.rules import Refused
from runtime.__main__ import main
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import best, find_checkpoint, newest, read_checkpoint
from runtime.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
    read_config,
)
from runtime.executors.open import source_of
from runtime.run.evaluate import HeldOut, evaluate
from runtime.run.folder import read_metrics
from runtime.run.record import run_into
from runtime.run.session import Interrupted, train
from runtime.run.training import Training
from runtime.serving.trained import open_trained
from runtime.stop import Ending

STOP = EvaluationConfig(
    eval_split="validation", evaluate_every_steps=10, stop_after=2, test_rows=400
)
DATA = DataConfig(name="synthetic")


CONFIG = TrainConfig(
    data=DATA,
    evaluation=STOP,
    steps=400,
    batch=64,
    checkpoint=CheckpointConfig(checkpoint_every="end"),
)


def run(folder, executor="constant_lag", resume=False):
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


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
def test_two_evaluations_that_are_no_better_end_the_run(tmp_path, executor):
    summary = run(tmp_path, executor)
    lines = read_metrics(tmp_path)
    scores = [(line.updates, first_task(line)) for line in lines if not line.drained]
    stopped = after_the_best(scores)
    assert stopped is not None and summary["stopped_early"]
    assert stopped <= summary["updates"] < 400 and scores[-1][0] == stopped
    assert summary["notes"][0] == "stopped early: 2 evaluations were no better"
    assert summary["checkpoints_written"] == 1 and (tmp_path / "summary.json").exists()


def test_that_the_last_model_is_kept_and_another_was_better_is_noted(tmp_path):
    """From Python, where nobody asks for the best one: the command does."""
    summary = run_into(tmp_path, CONFIG)
    *before, last = ((line.updates, first_task(line)) for line in read_metrics(tmp_path))
    updates, best_auc = max(before, key=lambda score: score[1])
    assert best_auc > last[1]
    (note,) = [text for text in summary["notes"] if "keep-best" in text]
    assert f"AUC {last[1]:.4f}" in note and f"AUC {best_auc:.4f} after {updates} updates" in note
    assert note.endswith("--keep-best auc keeps the best one")


def test_a_better_score_of_a_batch_that_was_under_way_does_not_take_the_end_back(monkeypatch):
    """Lookahead trains what it has fetched: the summary said that such a run was not stopped."""
    first = {10: 3.0, 20: 2.0, 30: 1.0}
    note = Training.note_score
    monkeypatch.setattr(
        Training,
        "note_score",
        lambda self, score, most: note(self, first.get(self.components.meter.updates, 4.0), most),
    )
    ahead = SyncConfig(mode="lookahead", ahead=20)
    found = train(replace(CONFIG, sync=ahead, checkpoint=CheckpointConfig()))
    assert found.figures.updates == 50 and len(found.curve) == 5
    assert found.figures.stopped_early


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


def keeping(by, keep, dense_lag=0):
    checkpoint = CheckpointConfig(checkpoint_every=10, keep_checkpoints=keep, keep_best=by)
    judged = EvaluationConfig(eval_split="validation", test_rows=400)
    late = SyncConfig(mode="hybrid", tau=3, ranks=2, dense_lag=dense_lag)
    fast = ModelConfig(hidden=(16,), lr=0.05)  # gets worse soon
    return replace(
        CONFIG, checkpoint=checkpoint, evaluation=judged, sync=late, model=fast, steps=60
    )


def judged_again(found, by):
    trained = open_trained(found)
    validation = HeldOut(source_of(trained.config), 400, "validation")
    again = evaluate(trained.learner, trained.learner.model, trained.worker, validation)
    return getattr(next(iter(again.tasks.values())), by)


@pytest.mark.parametrize(("by", "choose"), [("auc", max), ("log_loss", min)])
def test_the_best_checkpoint_stays_and_is_taken(tmp_path, by, choose):
    run_into(tmp_path / "all", keeping(by, keep=100))
    states = [read_checkpoint(f).state for f in complete_checkpoints(tmp_path / "all")]
    assert [state.samples for state in states] == [640 * n for n in range(1, 7)]
    first = choose(states[:-1], key=lambda state: state.score)
    assert choose(states, key=lambda state: state.score) is first  # else it would stay anyway
    summary = run_into(tmp_path / "few", keeping(by, keep=1))
    stayed = [int(folder.name) for folder in complete_checkpoints(tmp_path / "few")]
    assert stayed == [first.samples, states[-1].samples]
    assert int(summary["best_checkpoint"].name) == first.samples
    found = find_checkpoint(tmp_path / "few")
    assert (found.state.samples, found.state.score) == (first.samples, first.score)
    assert newest(tmp_path / "few").state.samples == states[-1].samples
    assert judged_again(found, by) == first.score


def test_judging_checkpoints_changes_nothing_that_is_trained(tmp_path):
    judged = run_into(tmp_path / "judged", keeping("auc", 1, 2))
    plain = run_into(tmp_path / "plain", keeping(None, 1, 2))
    assert judged["tasks"] == plain["tasks"] and plain["best_checkpoint"] is None


def test_the_test_part_never_decides_which_checkpoint_stays():
    judged = CheckpointConfig(checkpoint_every=10, keep_best="auc")
    with pytest.raises(Refused, match="--eval-split validation"):
        TrainConfig(checkpoint=judged)
    with pytest.raises(Refused, match=r"writes? none.*--checkpoint-every end"):
        CheckpointConfig(keep_best="auc")


EARLY = (
    "--data synthetic --batch 64 --steps 400 --eval-split validation --test-rows 400"
    " --evaluate-every-steps 10 --stop-after 2"
)


@pytest.mark.parametrize("words", ["", "--checkpoint-every end --keep-best auc"])
def test_the_model_of_the_best_evaluation_stays(tmp_path, capsys, words):
    """As the docs type it, without a word of checkpoints, and where only the end asks for one."""
    out = tmp_path / "run"
    assert main(f"train {EARLY} {words} --mode hybrid --tau 3 --ranks 2 --out {out}".split()) == 0
    on_the_way = [(line.updates, first_task(line)) for line in read_metrics(out)]
    best_at, best_auc = max(on_the_way, key=lambda one: one[1])
    assert best_at < on_the_way[-1][0], "the last evaluation is not the best one"
    folder = best(out, read_config(out / "config.json").checkpoint.keep_best)
    assert read_checkpoint(folder).state.updates == best_at
    assert f"  {folder}, which evaluate takes\n" in capsys.readouterr().out
    # On the way the push of the very update is still in flight; a checkpoint has it applied.
    score, last = read_checkpoint(folder).state.score, complete_checkpoints(out)[-1]
    assert score == pytest.approx(best_auc, abs=0.01)
    assert score > read_checkpoint(last).state.score
    assert find_checkpoint(out).folder == folder
