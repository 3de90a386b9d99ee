"""Studies over several modes, places, tasks, factors and servers: each has its own figures."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.drilling import counting
from experiments.drilling.trial import RATE
from experiments.studies import ablation, convergence
from experiments.targets import target_lines
from persia_sim.base.vocabulary import Mode


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
