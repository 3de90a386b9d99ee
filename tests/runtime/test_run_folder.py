"""What a run folder says, recomputed from its raw files alone."""

from __future__ import annotations

import json
import os
import re
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch

from persia_sim.base.trace import Kind, Trace
from persia_sim.base.vocabulary import DEFAULT_TAU
from runtime.config import DataConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.files import BrokenFileError, digest_of, read_dense
from runtime.run.folder import claimed, read_predictions
from runtime.run.record import run_into, unreached
from tests.runtime.test_evaluate import auc_by_ranks, log_loss_by_torch
from tests.runtime.worlds import config

STEPS, BATCH, RANKS, TEST_ROWS = 30, 60, 3, 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hybrid run of 30 steps over threads, evaluated every 10."""
    path = tmp_path_factory.mktemp("runs") / "hybrid"
    run_into(path, settings())
    return path


def settings(**changes):
    base = {"mode": "hybrid", "tau": 3, "executor": "concurrent", "ranks": RANKS, "seed": 5}
    base |= {"steps": STEPS, "batch": BATCH, "test_rows": TEST_ROWS, "evaluate_every_steps": 10}
    model = ModelConfig(hidden=(16,), lr=0.01)
    return config(data=DataConfig(name="synthetic"), model=model, **base | changes)


def read(path, name):
    return json.loads((path / name).read_text())


def test_scores_are_those_of_the_predictions_beside_them(folder):
    summary = read(folder, "summary.json")
    arrays = np.load(folder / "predictions.npz")
    labels, predictions = arrays["labels"][:, 0], arrays["predictions"][:, 0].astype(np.float64)
    source = open_source("synthetic")
    expected = np.concatenate([b.labels[:, 0] for b in first_rows(source, TEST_ROWS)])[:TEST_ROWS]
    assert np.array_equal(labels, expected)
    (task,) = summary["tasks"].values()
    rate = labels.mean()
    # What is stored is rounded to float32, which ties pairs and turns none round.
    ones, zeros = predictions[labels == 1], predictions[labels == 0]
    tied = (ones[:, None] == zeros).mean() / 2
    assert task["auc"] == pytest.approx(auc_by_ranks(labels, predictions), abs=tied + 1e-9)
    assert task["log_loss"] == pytest.approx(log_loss_by_torch(labels, predictions), abs=1e-6)
    assert task["label_rate"] == pytest.approx(rate, abs=1e-6)
    always = log_loss_by_torch(labels, np.full(TEST_ROWS, rate))
    assert task["trivial_log_loss"] == pytest.approx(always, abs=1e-6)


def test_each_of_two_tasks_has_the_figures_of_its_own_labels_and_predictions(tmp_path):
    """Half of the items are clicked and a quarter bought, and those bought say nothing of clicks:
    where labels, predictions or names of tasks change places, rates and AUC are others."""
    items = np.random.default_rng(1).integers(0, 8, 3000)
    truth = {"click": items < 4, "buy": items % 4 == 0}
    rows = zip(items, *(labels.astype(int) for labels in truth.values()), strict=True)
    lines = ["item,is_click,is_buy", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "shop.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "shop.toml").write_text(
        'name = "shop"\nfile = "shop.csv"\ncolumns = ["item"]\n'
        'labels = ["is_click", "is_buy"]\ntasks = ["click", "buy"]\n'
        "split = { test_fraction = 0.2 }\n"
    )
    data = DataConfig(name=str(tmp_path / "shop.toml"))
    model = ModelConfig(hidden=(16,), lr=0.02)
    run_into(tmp_path / "run", config(data=data, model=model, batch=20, seed=1, test_rows=600))
    tasks = read(tmp_path / "run", "summary.json")["tasks"]
    arrays = np.load(tmp_path / "run" / "predictions.npz")
    assert list(tasks) == list(truth)
    for column, (task, labels) in enumerate(truth.items()):
        predicted, held_out = arrays["predictions"][:, column], labels[-600:]
        assert np.array_equal(arrays["labels"][:, column], held_out)
        assert predicted[held_out].min() > predicted[~held_out].max()
        assert tasks[task]["auc"] == 1
        assert tasks[task]["label_rate"] == pytest.approx(held_out.mean(), abs=1e-6)
        loss = log_loss_by_torch(held_out.astype(np.float32), predicted.astype(np.float64))
        assert tasks[task]["log_loss"] == pytest.approx(loss, abs=1e-6)


def test_what_each_row_counts_and_whose_it_is_stand_beside_its_predictions(tmp_path):
    """Intervals and tests of a difference are made of these; all in the order of the test part."""
    draw = np.random.default_rng(2)
    users, items = draw.integers(0, 9, (2, 200))
    often = draw.integers(1, 6, 200) / 2
    rows = zip(users, items, often, draw.integers(0, 2, 200), strict=True)
    lines = ["user,item,often,label", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "shop.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "shop.toml").write_text(
        'name = "shop"\nfile = "shop.csv"\ncolumns = ["user", "item"]\nlabels = ["label"]\n'
        'weight = "often"\ngroup = "user"\nsplit = { test_fraction = 0.4 }\n'
    )
    data = DataConfig(name=str(tmp_path / "shop.toml"))
    run_into(tmp_path / "run", config(data=data, batch=40, steps=2, test_rows=80))
    kept = read_predictions(tmp_path / "run")
    assert kept.weights.tolist() == often[-80:].tolist()
    _, whose = np.unique(kept.groups, return_inverse=True)
    assert (whose[:, None] == whose).tolist() == (users[-80:, None] == users[-80:]).tolist()
    (task,) = read(tmp_path / "run", "summary.json")["tasks"].values()
    assert task["label_rate"] == pytest.approx(
        np.average(kept.labels[:, 0], weights=often[-80:]), abs=1e-9
    )


def first_rows(source, rows):
    for batch in source.chunks("test"):
        yield batch
        rows -= batch.size
        if rows <= 0:
            return


def test_metrics_are_a_line_a_snapshot_and_the_drained_figure_last(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(x["updates"], x["samples"], x["drained"]) for x in lines] == [
        (10, 600, False), (20, 1200, False), (30, 1800, False), (30, 1800, True)
    ]  # fmt: skip
    summary = read(folder, "summary.json")
    assert lines[-1]["tasks"] == summary["tasks"]
    for task, best in summary["best_auc_on_the_way"].items():
        assert best == max(x["tasks"][task]["auc"] for x in lines)


def test_counts_are_those_of_the_config_and_the_trace(folder):
    summary, told = read(folder, "summary.json"), read(folder, "config.json")
    trace = Trace.load(folder / "trace.npz")
    assert summary["updates"] == len(trace.of_kind(Kind.DENSE_UPDATE)) == STEPS
    assert summary["samples"] == STEPS * BATCH == told["steps"] * told["batch"]
    assert (summary["ranks"], summary["seed"], summary["tau"]) == (RANKS, 5, 3)
    assert (summary["mode"], summary["executor"]) == ("hybrid", "concurrent")
    assert (summary["batches_skipped"], summary["pushes_lost"]) == (0, 0)
    assert summary["samples_per_s"] > 0
    # All but warm-up, a tenth; the time of the whole run is longer, for the evaluations are in it.
    assert 0.9 * summary["samples"] / summary["wall_s"] < summary["samples_per_s"]
    assert trace.meta["data_sha256"] == summary["data"]["sha256"]


def test_staleness_is_counted_from_the_trace_by_brute_force(folder):
    """Every lookup against every push, row by row of the table."""
    events = list(Trace.load(folder / "trace.npz"))
    pushed = {e.step: seq for seq, e in enumerate(events) if e.kind == Kind.PUSH}
    missed, versions, behind = [], {}, []
    for seq, event in enumerate(events):
        if event.kind == Kind.LOOKUP:
            late = [s for s in range(event.step) if pushed[s] > seq]
            missed.append((len(late), event.step - min(late, default=event.step)))
            versions[event.rank, event.step] = event.version
        elif event.kind == Kind.PUSH:
            behind += [event.version - versions[rank, event.step] for rank in range(RANKS)]
    found = read(folder, "summary.json")["staleness"]
    assert found["mean_steps"] == pytest.approx(np.mean([m for m, _ in missed]))
    assert found["max_steps"] == max(m for m, _ in missed)
    assert found["oldest_steps"] == max(o for _, o in missed) <= 3
    assert found["mean_pushes"] == pytest.approx(np.mean(behind))


def test_row_staleness_counts_every_row_of_every_push_once(folder):
    """The histogram's mass is the number of distinct rows over all pushes."""
    histogram = read(folder, "summary.json")["row_staleness_histogram"]
    source, rows = open_source("synthetic"), 0
    left = STEPS * BATCH
    waiting = []
    for chunk in source.chunks("train"):
        waiting.append(chunk.rows(0, min(left, chunk.size)))
        left -= chunk.size
        if left <= 0:
            break
    everything = Batch.concat(waiting)
    for start in range(0, STEPS * BATCH, BATCH // RANKS):
        rows += len(np.unique(everything.rows(start, start + BATCH // RANKS).ids))
    assert sum(histogram) == rows


def test_rows_and_bytes_are_those_of_the_distinct_ids(folder):
    summary = read(folder, "summary.json")
    source, left, ids = open_source("synthetic"), STEPS * BATCH, []
    for chunk in source.chunks("train"):
        ids.append(chunk.rows(0, min(left, chunk.size)).ids)
        left -= chunk.size
        if left <= 0:
            break
    assert summary["rows"] == len(np.unique(np.concatenate(ids)))
    assert summary["resident_bytes"] >= summary["rows"] * 4 * settings().rows.dim


def test_a_replay_of_the_folders_trace_gives_the_folders_figures(folder, tmp_path):
    again = run_into(
        tmp_path / "again",
        settings(executor="replay", trace=folder / "trace.npz", tau=DEFAULT_TAU),
    )
    summary = read(folder, "summary.json")
    assert again["tasks"] == summary["tasks"]
    assert again["tau"] == 3
    assert again["samples"] == summary["samples"]


# Options that a run was too short for are said, and those that it came to are not.


def told(updates: int = 32, samples: int = 4096, whole: bool = True, **sync: Any) -> list[str]:
    config = TrainConfig(sync=SyncConfig(**sync))
    return unreached(config, updates, samples, updates, whole=whole)


@pytest.mark.parametrize(
    ("sync", "reached", "says"),
    [
        ({"mode": "hybrid", "tau": 32}, 33, "tau 32 was never reached: the run has 32 updates"),
        ({"mode": "async", "tau": 8, "ranks": 4}, 33, "tau 8 .* each rank has 8 updates"),
        ({"mode": "hybrid", "sync_steps": 32}, 33, "--sync-steps 32 outlasted the run of 32"),
        ({"mode": "sync", "dense_lag": 32}, 33, "--dense-lag 32 was never reached: 32 dense"),
        (
            {"mode": "async_averaging", "ranks": 2, "tau": 2, "average_every_steps": 17},
            33,
            "--average-every-steps 17 was never reached: each rank has 16",
        ),
    ],
)
def test_a_bound_is_said_until_the_run_is_long_enough(sync, reached, says):
    (note,) = told(**sync)
    assert re.search(says, note), note
    assert told(updates=reached, **sync) == []


def test_who_claims_a_folder_removes_what_killed_runs_left_half_written(tmp_path):
    left = [tmp_path / f"{name}.4242.0123abcd.tmp" for name in ("trace.npz", "summary.json")]
    for file in left:
        file.touch()
        os.utime(file, (0, 0))
    (tmp_path / "mine.tmp").touch()
    with claimed(tmp_path):
        assert not any(file.exists() for file in left)
    assert (tmp_path / "mine.tmp").exists()


def test_predictions_that_unpack_to_gigabytes_are_not_unpacked(tmp_path, monkeypatch):
    arrays = {"labels": np.zeros((100_000, 1), np.int8), "predictions": np.zeros((100_000, 1))}
    np.savez_compressed(tmp_path / "predictions.npz", **arrays)
    assert read_predictions(tmp_path).labels.shape == (100_000, 1)
    monkeypatch.setattr("persia_sim.base.files.MOST_UNPACKED_BYTES", 1 << 16)
    with pytest.raises(ValueError, match=r"predictions.npz unpacks to 900,\d+ bytes, \d+ times"):
        read_predictions(tmp_path)


def test_a_dense_network_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path, monkeypatch):
    """torch unpacks members of its archive that are packed, though it packs none."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    state = {"model": {"w": torch.zeros(100_000)}, "optimizers": []}
    torch.save(state, plain)
    with ZipFile(plain) as archive, ZipFile(packed, "w", ZIP_DEFLATED) as out:
        for name in archive.namelist():
            out.writestr(name, archive.read(name))
    assert read_dense(packed, digest_of(packed))["model"]["w"].shape == (100_000,)
    monkeypatch.setattr("persia_sim.base.files.MOST_UNPACKED_BYTES", 1 << 16)
    with pytest.raises(BrokenFileError, match=r"packed.pt unpacks to 40\d,\d+ bytes, \d+ times"):
        read_dense(packed, digest_of(packed))
