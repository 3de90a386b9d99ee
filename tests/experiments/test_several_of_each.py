"""Studies over several modes, places, tasks, factors and servers: each has its own figures."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from experiments.drilling import counting
from experiments.drilling.trial import RATE
from experiments.registry.compare import comparison
from experiments.statistics import delong
from experiments.studies import ablation, convergence, sweep
from experiments.targets import target_lines
from persia_sim.base.vocabulary import Mode
from tests.experiments.test_registry import hybrid, made


def test_the_mean_over_windows_is_of_each_setting_task_and_value_of_a_factor():
    gaps = {
        (factors, mode, task): [0.001 * (1 + number) * k for k in (1, 2, 4)]
        for number, (factors, mode, task) in enumerate(
            product(("model.lr=0.1 ", "model.lr=0.2 "), ("hybrid", "async"), ("click", "buy"))
        )
    }
    records = [
        {"group": f"{factors}window={window + 1}", "line": mode, "mode": mode, "tau": 2,
         "rows_late": 2, "dense_late": 0, "lr": 0.1, "ranks": 2, "task": task, "seeds": 1,
         "versus": "sync", "gap": own[window]}
        for window in range(3)
        for (factors, mode, task), own in gaps.items()
    ]  # fmt: skip
    lines = sweep.over_windows(records)
    found = {(line["group"], line["mode"], line["task"]): line for line in lines}
    assert len(lines) == len(found) == 8
    for (factors, mode, task), own in gaps.items():
        line = found[factors.strip(), mode, task]
        assert [line[f"gap_{n}"] for n in (1, 2, 3)] == own
        assert line["gap"] == pytest.approx(np.mean(own))
        half = stats.t.ppf(0.975, 2) * stats.sem(own)
        assert line["gap_half_width_95"] == pytest.approx(half)


def test_delong_is_told_of_each_task_by_its_own_rows_weights_and_users(tmp_path):
    """A row of weight 3 counts as three rows of its user, in gap and error."""
    draw, n = np.random.default_rng(1), 300
    labels = draw.integers(0, 2, (n, 2)).astype(np.int8)
    scores = [labels + draw.normal(0, sd, (n, 2)) for sd in ((1.0, 2.0), (3.0, 1.0))]
    users, often = np.arange(n) // 2, 1 + np.arange(n) % 3
    folders = [made(tmp_path / name, hybrid()) for name in "ab"]
    for folder, own in zip(folders, scores, strict=True):
        summary = {"mode": "hybrid", "tau": 4, "seed": 0,
                   "tasks": {"click": {"auc": 0.7}, "buy": {"auc": 0.6}}}  # fmt: skip
        made(folder, hybrid(), None, summary_json=str(summary).replace("'", '"'))
        arrays = {"labels": labels, "predictions": own, "groups": users}
        np.savez(folder / "predictions.npz", **arrays, weights=often.astype(float))
    told = comparison(*folders)
    for number, task in enumerate(("click", "buy")):
        repeated = [np.repeat(a[:, number], often) for a in (labels, *scores)]
        gap, error, _ = delong(*repeated, np.repeat(users, often))
        says = f"B - A = {1e3 * gap:+.2f}e-3, standard error {1e3 * error:.2f}e-3 over test users"
        assert f"{task}, {n} test samples: {says}" in told


def test_each_place_of_the_ablation_is_held_against_its_own_base(tmp_path, monkeypatch):
    """Rates made up: of the cluster's servers and of the variant."""

    def rate(scenario):
        number = scenario.cluster.servers.processes + 7 * (scenario.mode is Mode.SYNC)
        return {"samples_per_s": 100.0 * number, "relative": 1e-4 * number, "binds": "x",
                "usd_per_million_samples": None}  # fmt: skip

    monkeypatch.setattr(ablation, "_rate", rate)
    places = ("Kwai", "100T")
    options = ablation.Options(places=places, ranks=2, steps=16, out=tmp_path)
    found = ablation.simulated(options)
    for place in places:
        servers = ablation.scenario_of(place, options).cluster.servers.processes
        own = {r["variant"]: r for r in found if r["where"] == f"{place}, 2 GPUs"}
        assert len(own) == len(ablation.VARIANTS)
        for variant, row in own.items():
            share = 1 + 7 / servers if variant == "neither (sync)" else 1.0
            assert row["difference"] == pytest.approx(share - 1)
            wide = np.hypot(1e-4 * servers * share, 1e-4 * servers) * share
            wide *= variant != ablation.ALL_ON
            assert row["difference_half_width_95"] == pytest.approx(wide)
    kwai, gcp = (ablation.scenario_of(p, options).cluster.servers.processes for p in places)
    assert kwai != gcp


def test_targets_of_a_data_set_are_of_its_own_runs_and_of_their_first_task():
    """Two sets whose clocks and curves are unlike, and a second task that learns faster."""
    draw = np.random.default_rng(2)
    records = []
    for number, data_set in enumerate(("taobao-ad", "criteo-ad")):
        for line, seed, task in product(("sync", "hybrid"), range(2), ("click", "buy")):
            for step in range(1, 4):
                auc = 0.5 + 0.05 * step + 0.01 * draw.random() + 0.2 * (task == "buy")
                records.append(
                    {"data_set": data_set, "line": line, "seed": seed, "task": task, "auc": auc,
                     "simulated_s": step * (1.0 + number + (line == "sync")),
                     "simulated_samples_per_s": 100.0 * (1 + number)}
                )  # fmt: skip
    options = SimpleNamespace(target=0.9, lines_of=lambda name: ["sync", "hybrid"])
    found = convergence._targets(records, ["taobao-ad", "criteo-ad"], options)
    for data_set, lines in found.items():
        own = [r for r in records if (r["data_set"], r["task"]) == (data_set, "click")]
        snapshots = [
            (r["line"], r["seed"], r["simulated_s"],
             r["simulated_s"] * r["simulated_samples_per_s"], r["auc"])
            for r in own
        ]  # fmt: skip
        expected = {one["mode"]: one for one in target_lines(snapshots, "sync", [0.9])}
        assert [one["mode"] for one in lines] == ["sync", "hybrid"]
        for line in lines:
            for name in ("seconds", "samples", "target_auc", "ratio_to_sync"):
                assert line[name] == pytest.approx(expected[line["mode"]][name]), name
    first, second = ([one["seconds"] for one in lines] for lines in found.values())
    assert first != pytest.approx(second)


def test_what_one_server_lost_and_another_counted_too_often_is_silent_twice(monkeypatch):
    """Of 12 pushes server 0 has applied 10 and counted 3, server 1 has applied 11 and counted 0."""
    ids = np.arange(40, dtype=np.uint64)
    owners = counting.shard_of(ids, 2)
    values = np.where(owners == 0, 10, 11)[:, None] * np.full((40, 3), -RATE)
    monkeypatch.setattr(
        counting, "read_summary", lambda _: {"updates": 6, "pushes_lost_at": [3, 0]}
    )
    monkeypatch.setattr(counting, "newest", lambda _: None)
    monkeypatch.setattr(counting, "rows_of", lambda _: (ids, values))
    account = counting.settle(None, mode="hybrid", ranks=2)
    assert (account.sent, account.applied, account.lost, account.silent) == (24, 21, 3, 2)
    values[owners == 1] *= 12 / 11
    values[np.flatnonzero(owners == 1)[-1]] *= 11 / 12
    with pytest.raises(ValueError, match=r"rows of server 1 had \[11, 12\] samples"):
        counting.settle(None, mode="hybrid", ranks=2)
