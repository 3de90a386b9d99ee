"""Run folders as a registry: what is listed, and how two compare; none of it trains but for one
tiny run."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from experiments.registry.compare import comparison
from experiments.registry.runs import listing, read_run, runs_below
from runtime.config import DataConfig, EvaluationConfig, SyncConfig, TrainConfig
from runtime.run.folder import write_json
from runtime.run.record import run_into

BASE = TrainConfig(data=DataConfig(name="synthetic"), steps=4, batch=32,
                   evaluation=EvaluationConfig(test_rows=300, evaluate_every_steps=2))  # fmt: skip
LABELS = np.array([0, 1, 0, 1, 1, 0, 1, 0])[:, None]


def made(
    folder: Path, config: TrainConfig = BASE, auc: float | None = 0.7, **files: object
) -> Path:
    """A run folder written by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    about = {
        "commit": "0123456789abcdef", "modified": False, "started": "2026-01-02T03:04:05Z",
        "python": "3.11.0", "cpu": "a cpu", "cores": 2, "packages": {"torch": "1"},
    }  # fmt: skip
    write_json(folder / "env.json", about)
    if auc is not None:
        summary = {
            "mode": str(config.sync.mode), "tau": config.sync.tau, "seed": config.seed,
            "tasks": {"click": {"auc": auc, "log_loss": 0.5}}, "samples": 128,
            "staleness": {"mean_steps": 1.25, "max_steps": 2},
        }  # fmt: skip
        write_json(folder / "summary.json", summary)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(str(content))
    return folder


def hybrid(tau: int = 4, seed: int = 0) -> TrainConfig:
    return replace(BASE, sync=SyncConfig(mode="hybrid", tau=tau), seed=seed)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_into(folder, hybrid(), typed=["--mode", "hybrid"])
    return folder


def line_of(told: str, name: str) -> list[str]:
    return next(re.split(r"  +", x) for x in told.splitlines() if x.startswith(name))


def test_a_run_is_listed_by_what_its_files_say(real):
    summary = json.loads((real / "summary.json").read_text())
    told = line_of(listing(real.parent), "tiny")
    assert told[:7] == ["tiny", "hybrid", "4", "1", "synthetic", "0",
                        f"{summary['tasks']['click']['auc']:.4f}"]  # fmt: skip
    assert told[-1] == "done"


def test_states_are_told_apart_and_a_damaged_run_is_read_as_far_as_it_goes(tmp_path):
    run = read_run(made(tmp_path / "elsewhere" / "torn", hybrid(9), env_json="["))
    assert (run.state, run.mode, run.tau, run.commit) == ("damaged", "hybrid", 9, "-")
    tmp_path /= "runs"
    made(tmp_path / "good")
    made(tmp_path / "went", auc=None)
    made(tmp_path / "broke", auc=None, failed_txt="the disk is full\nmore")
    made(tmp_path / "ended", auc=None, ending_json='{"by": "SIGTERM"}')
    made(tmp_path / "torn", summary_json='{"mode": ')
    (tmp_path / "other").mkdir()
    told = listing(tmp_path)
    states = {name: line_of(told, name)[-1] for name in ("good", "went", "broke", "ended", "torn")}
    assert states == {"good": "done", "went": "unfinished", "broke": "failed",
                      "ended": "interrupted", "torn": "damaged"}  # fmt: skip
    assert "5 runs: 1 done" in told and "\nother" not in told
    assert "broke: the disk is full" in told and "torn: " in told
    assert line_of(told, "good")[5:9] == ["0", "0.7000", "2026-01-02 03:04:05", "01234567"]


def test_runs_inside_checkpoints_are_not_listed(tmp_path):
    made(tmp_path / "a")
    made(tmp_path / "a" / "checkpoints" / "b")
    made(tmp_path / "checkpoints" / "c")
    assert [run.folder.name for run in runs_below(tmp_path)] == ["a"]


def test_two_runs_show_the_options_in_which_they_differ(tmp_path):
    a = made(tmp_path / "a", hybrid(4), 0.7)
    b = made(tmp_path / "b", hybrid(16, seed=3), 0.71)
    told = comparison(a, b)
    assert line_of(told, "--tau") == ["--tau", "4", "16"]
    assert line_of(told, "--seed") == ["--seed", "0", "3"]
    assert not re.search(r"^--batch ", told, flags=re.M)
    assert line_of(told, "click AUC") == ["click AUC", "0.7000", "0.7100", "+10.00e-3"]
    assert "no DeLong test: a run keeps no predictions" in told


def test_two_runs_say_whether_their_data_and_predictions_are_the_same(real, tmp_path):
    told = comparison(real, real)
    sha256 = json.loads((real / "summary.json").read_text())["data"]["sha256"]
    assert f"the data are the same (sha256 {sha256[:12]})" in told
    assert "every prediction of the two is the same, to the last bit" in told
    other = tmp_path / "other"
    shutil.copytree(real, other)
    text = (other / "summary.json").read_text().replace(sha256, "0" * 64)
    (other / "summary.json").write_text(text)
    assert line_of(comparison(real, other), "sha256")[1:] == [sha256, "0" * 64]


def test_delong_is_told_where_both_were_tested_on_the_same_rows(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (400, 1)).astype(np.int8)
    scores = [labels + rng.normal(0, sd, (400, 1)) for sd in (1.0, 2.0)]
    folders = [made(tmp_path / name) for name in "ab"]
    for folder, own in zip(folders, scores, strict=True):
        np.savez(folder / "predictions.npz", labels=labels, predictions=own)
    told = comparison(*folders)
    a, b = (roc_auc_score(labels[:, 0], own[:, 0]) for own in scores)
    assert f"400 test samples: B - A = {1e3 * (b - a):+.2f}e-3" in told
    rows = [np.repeat(array, 2, axis=0) for array in (labels, *scores)]  # each twice, of one user
    users = np.repeat(np.arange(400), 2)
    for folder, own in zip(folders, rows[1:], strict=True):
        np.savez(folder / "predictions.npz", labels=rows[0], predictions=own, groups=users)
    by_user, error = (
        comparison(*folders),
        r"standard error (\d\d\.\d+)e-3 over test (samples|users)",
    )
    alone, twice = (re.search(error, text) for text in (told, by_user))
    assert (alone[2], twice[2]) == ("samples", "users")
    assert float(twice[1]) == pytest.approx(float(alone[1]), rel=0.01), "not smaller by root two"
    np.savez(folders[1] / "predictions.npz", labels=1 - rows[0], predictions=rows[2])
    assert "not tested on the same samples" in comparison(*folders)


def test_curves_are_compared_at_the_samples_that_both_have(real):
    told = comparison(real, real)
    lines = [json.loads(x) for x in (real / "metrics.jsonl").read_text().splitlines()]
    first = next(x for x in lines if x["samples"] == 64)["tasks"]["click"]["auc"]
    assert line_of(told, "64 ") == ["64", f"{first:.4f}", f"{first:.4f}", "+0.00e-3"]
    assert "every option is the same" in told


def npz(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def on(part: str, config: TrainConfig) -> TrainConfig:
    return replace(config, evaluation=replace(config.evaluation, eval_split=part))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_delong_names_the_rows_that_it_is_of(part, tmp_path):
    folders = [made(tmp_path / name, on(part, BASE)) for name in "ab"]
    for number, folder in enumerate(folders):
        scores = LABELS + np.arange(len(LABELS))[:, None] * (0.3 + number)
        (folder / "predictions.npz").write_bytes(npz(labels=LABELS, predictions=scores))
    told = comparison(*folders)
    assert f"click, 8 {part} samples: " in told and f"over {part} samples (DeLong)" in told
