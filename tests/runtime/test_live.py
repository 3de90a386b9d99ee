"""What a watched run tells while it trains, what its metrics come to, and the dashboard of them."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from runtime.__main__ import main
from runtime.config import DataConfig, EngineConfig, EvaluationConfig, SyncConfig, TrainConfig
from runtime.run.live import LABELS, WATCHED, Totals, metrics
from runtime.run.record import run_into

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def config(**sync: object) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(name="synthetic"),
        evaluation=EvaluationConfig(test_rows=300),
        engine=EngineConfig(executor="concurrent", servers=2, latency_s=0.01),
        sync=SyncConfig(ranks=2, mode="hybrid", **sync),
        batch=32,
        steps=20,
    )


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, **sync: object) -> tuple[dict, dict]:
    """The summary of a run, and its metrics by name and labels as its last line has them."""
    heard, tells = os.pipe()
    monkeypatch.setenv(WATCHED, str(tells))
    summary = run_into(folder, config(**sync))
    os.close(tells)
    with open(heard) as lines:
        said = json.loads(list(lines)[-1])
    return summary, {(name, *labels.values()): value for name, labels, value in Totals().add(said)}


def test_how_many_samples_there_are_is_told_before_the_first_one(tmp_path, monkeypatch):
    """For the bar of a run on Ray, whose ranks have no terminal."""
    heard, tells = os.pipe()
    monkeypatch.setenv(WATCHED, str(tells))
    words = "--data.name synthetic --steps 20 --batch 32 --test-rows 300 --out"
    assert main(["train", *words.split(), str(tmp_path / "run")]) == 0
    os.close(tells)
    with open(heard) as lines:
        first, *_, last = map(json.loads, lines)
    assert first == {"total": 640} and last["run"]["samples"] == 640


@pytest.mark.multiproc
def test_the_last_line_of_a_watched_run_is_its_summary(tmp_path, monkeypatch):
    summary, told = watched(tmp_path / "run", monkeypatch, tau=1)
    for name, metric in metrics().items():
        if metric.of == "run" and metric.key in summary:
            assert told[name,] == summary[metric.key], name
    assert told["server_restarts_total",] == 0
    both = {name: [told[name, k] for k in "01"] for name, m in metrics().items()
            if m.of == "server"}  # fmt: skip
    assert sum(both["rows"]) == summary["rows"]
    assert sum(both["resident_bytes"]) == summary["resident_bytes"]
    assert both["lost_pushes_total"] == summary["pushes_lost_at"] == [0, 0]
    assert both["requests_total"] == [2 * 20 * 2] * 2  # a lookup and a push of each rank and step
    assert both["sent_bytes_total"] == both["received_bytes_total"] == [0, 0]  # memory is shared
    assert min(both["window_wait_seconds_total"]) > 0.01
    late = summary["row_staleness_histogram"]
    for le, count in ("0", late[0]), ("3", sum(late[:4])), ("+Inf", sum(late)):
        assert sum(told["missed_updates_bucket", shard, le] for shard in "01") == count
    assert min(told["row_wait_seconds_total", rank, shard] for rank in "01" for shard in "01") > 0


@pytest.mark.multiproc
def test_without_a_window_no_lookup_waits_for_it(tmp_path, monkeypatch):
    _, told = watched(tmp_path / "run", monkeypatch, tau=None)
    assert max(told["window_wait_seconds_total", shard] for shard in "01") < 0.01


@pytest.mark.multiproc
def test_a_run_that_nobody_watches_has_no_thread_for_it(tmp_path, monkeypatch):
    monkeypatch.delenv(WATCHED, raising=False)
    names = set[str]()
    run_into(
        tmp_path / "run", config(tau=1),
        on_samples=lambda n: names.update(t.name for t in threading.enumerate()),
    )  # fmt: skip
    assert "train-0" in names and "live" not in names


def told(totals: Totals, name: str, value: float, attempt: int = 1, life: int = 0) -> float:
    metric = metrics()[name]
    said = {"run": {metric.key: value}}
    if metric.of == "server":
        others = {other.key: 0 for other in metrics().values() if other.of == "server"}
        said = {
            "run": {},
            "servers": [others | {"incarnation": life, "row_staleness": []} | said["run"]],
        }
    (found,) = [total for one, _, total in totals.add(said, attempt) if one == name]
    return found


def test_what_is_trained_again_behind_a_restart_is_not_counted_again():
    totals = Totals()
    seen = [told(totals, "samples_total", *at) for at in ((0, 1), (500, 1), (300, 2), (900, 2))]
    assert seen == [0, 500, 500, 900]


def test_what_each_process_counts_anew_is_added_up():
    totals = Totals()
    name = "window_wait_seconds_total"
    first = [told(totals, name, value, life=life) for value, life in ((5, 0), (7, 0), (1, 1))]
    assert first == [5, 7, 8], "a server that came back"
    assert told(totals, name, 9, attempt=2) == 17, "all ranks, and so all servers, started anew"
    assert told(totals, "server_restarts_total", 1) == 1
    assert told(totals, "server_restarts_total", 0, attempt=2) == 1


def test_what_is_no_count_may_fall():
    totals = Totals()
    assert [told(totals, "rows", value) for value in (9, 4)] == [9, 4]


def test_only_what_is_said_is_told():
    assert list(Totals().add({"run": {"restarts": 2}})) == [("restarts_total", {}, 2.0)]


def test_names_are_those_of_prometheus():
    for name, metric in metrics().items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        ends = ("_total", "_bucket") if metric.kind != "now" else ("rows", "_bytes")
        assert name.endswith(ends), name
        assert metric.of in LABELS and metric.kind in ("kept", "anew", "now") and metric.help
        assert ("_s" in metric.key[-2:]) == ("_seconds" in name)


def test_the_dashboard_has_a_panel_for_each_metric_and_for_no_other():
    dashboard = json.loads(DASHBOARD.read_text())
    shown = set[str]()
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["targets"]
        for target in panel["targets"]:
            used = re.findall(r"ray_persia_(\w+)\{(.*?)\}", target["expr"])
            assert len(used) == target["expr"].count("ray_")
            for name, matched in used:
                assert name in metrics(), f"{panel['title']}: no metric is called {name}"
                assert 'run=~"$run"' in matched
                labels = {"run", *LABELS[metrics()[name].of]}
                grouped = re.findall(r"by \((.*?)\)", target["expr"])
                assert {label for text in grouped for label in text.split(", ")} <= labels
                shown.add(name)
    assert shown == metrics().keys()
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
