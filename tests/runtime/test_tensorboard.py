"""What TensorBoard is told of a run; its writer is a stand-in that keeps what it hears."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from runtime.config import DataConfig, EvaluationConfig, ModelConfig, TrainConfig
from runtime.run.loggers import TensorBoard
from runtime.run.record import run_into

CONFIG = TrainConfig(
    data=DataConfig(name="synthetic"),
    model=ModelConfig(hidden=(4,)),
    evaluation=EvaluationConfig(evaluate_every_steps=4, test_rows=300),
    batch=32,
    steps=8,
)


class Writer:
    heard: list[Writer] = []  # noqa: RUF012

    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.folder, self.purge_step, self.scalars = folder, purge_step, {}
        Writer.heard.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def add_hparams(self, options: dict, finals: dict, run_name: str, global_step: int) -> None:
        self.options, self.finals, self.run_name = options, finals, run_name

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def heard(monkeypatch) -> list[Writer]:
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    monkeypatch.setattr(Writer, "heard", [])
    return Writer.heard


def test_tensorboard_hears_what_the_run_folder_keeps(heard, tmp_path):
    summary = run_into(tmp_path / "run", CONFIG, log=TensorBoard)
    (writer,) = heard
    assert writer.folder == str(tmp_path / "run" / "tensorboard")
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == [128, 256, 256]
    for line in lines:
        moment = "final" if line["drained"] else "snapshot"
        for task, scores in line["tasks"].items():
            for name, value in scores.items():
                assert writer.scalars[f"{task}/{name} ({moment})", line["samples"]] == value
    assert writer.scalars["staleness/mean_steps", 256] == summary["staleness"].mean_steps
    (task,) = summary["tasks"]
    assert writer.finals == {f"final/{task}": summary["tasks"][task]["auc"]}
    assert writer.options["sync.mode"] == "sync"
    assert writer.options["data.epochs"] == 1
    assert writer.run_name == ".", "no folder beside the run's own"


def test_tensorboard_that_is_not_there_is_a_sentence_before_anything_is_trained(
    monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="tensorboard is asked for and not installed; run `pip"):
        run_into(tmp_path / "run", CONFIG, log=TensorBoard)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    run_into(tmp_path / "without", CONFIG)
    assert not (tmp_path / "without" / "tensorboard").exists()
