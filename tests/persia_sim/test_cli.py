"""The command: what it prints and writes, line by line, and errors in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from persia_sim.base.command_line import read_options
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, run, scenario_of
from persia_sim.cli.command import _shown
from persia_sim.engine.simulate import simulate
from persia_sim.report import measure
from persia_sim.report.measure import Estimate, throughput
from persia_sim.report.sensitivity import gains
from tests.persia_sim.hand_world import facts_on


def screen(options: SimulateOptions) -> dict[str, str]:
    """Every fact on the screen, by its name."""
    by_question = facts_on(run(options))
    return {name: told for facts in by_question.values() for name, told in facts.items()}


def figures(options: SimulateOptions) -> Any:
    """The JSON of a run."""
    return json.loads(run(replace(options, json=True)))


def test_a_run_writes_the_timeline_and_the_order_that_were_asked_for(tmp_path):
    timeline, trace = tmp_path / "window.json", tmp_path / "order.npz"
    told = screen(SimulateOptions(tau=4, steps=12, write_timeline=timeline, write_trace=trace))
    assert {"throughput", "staleness", "busy resources", "memory", "cost of an hour"} <= set(told)
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"lookup", "push", "dense_sync"}
    saved = Trace.load(trace)
    assert saved.meta["mode"] == "hybrid" and saved.meta["tau"] == 4
    assert saved.meta["batch_per_rank"] == 8192 and "batch" not in saved.meta


def test_rows_that_do_not_fit_are_refused_unless_evicted():
    with pytest.raises(ValueError, match="memory per server is 2,500 GiB on gcp-100t"):
        run(SimulateOptions(row_format="f32-adagrad", steps=2))
    told = figures(SimulateOptions(row_format="f32-adagrad", steps=12, evict=True))
    assert told["memory"]["evicted_rows"] > 0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "persia_sim", *arguments], capture_output=True, text=True
    )


def test_a_simulation_starts_without_heavy_packages():
    code = (
        "import sys; from persia_sim.cli import SimulateOptions, run;"
        "run(SimulateOptions(steps=2));"
        "heavy = {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reader_that_has_gone_ends_the_command_in_silence():
    """As `| head -1` does once it has its line."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "persia_sim", "--steps", "5"]
    found = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, "")


OPTIONS = {
    "cluster": "v100-2021-09", "workload": "taobao-ad", "mode": Mode.SYNC, "ranks": 2, "steps": 20,
    "gpu_cv": 0.0,
}  # fmt: skip


QUESTIONS = (
    "What is simulated?", "Does it fit?", "How fast?", "What binds?", "What would help?",
    "What does it cost?", "How late are the rows?", "Details",
)  # fmt: skip


def test_the_facts_of_memory_order_and_gains_are_those_of_the_options(tmp_path):
    trace, timeline = tmp_path / "order.npz", tmp_path / "window.json"
    options = SimulateOptions(
        **OPTIONS, write_trace=trace, write_timeline=timeline, sensitivity=True
    )
    by_question = facts_on(run(options))
    asked = [question for question in QUESTIONS if question in by_question]
    assert [*by_question] == asked and len(asked) > 5, "in the order in which one decides"
    told = {name: fact for facts in by_question.values() for name, fact in facts.items()}
    # 29 M / 16 rows of 16 numbers, each with Adagrad's, and 66 bytes more; ten servers of 440 GB
    assert told["memory"] == "33.5 MiB of 410 GiB on each server"
    assert told["size of a row"] == "194 B as f32-adagrad"
    assert told["rows on the servers"] == "1.81 M; 0 evicted"
    # Two lookups, one dense update and one merged push a step.
    assert told["order"].startswith(f"80 events in {trace}; to train in it:\n")
    assert len(Trace.load(trace)) == 80
    best = sorted(gains(scenario_of(options)).items(), key=lambda item: -item[1].mean)
    expected = [f"{name} {gain.mean:+.1%}" for name, gain in best if gain.mean > 5e-4]
    assert told["10 % faster"] == ", ".join(expected) and len(expected) > 3
    assert told["twice"].startswith("batch +")


def test_who_names_no_steps_gets_as_many_as_the_rate_needs():
    """From 100 on by doubling; a number that is typed is kept, and faults have their times."""
    words = ("--cluster", "v100-2021-09", "--workload", "taobao-ad", "--ranks", "2")
    assert read_options(SimulateOptions, [*words, "--steps", "20"], "persia-sim").precision is None
    asked = read_options(SimulateOptions, words, "persia-sim")
    assert asked.precision == 0.01 and screen(asked)["run"].startswith("100 steps")
    noisy = replace(asked, steps=20, gpu_cv=1.0, mode=Mode.SYNC, precision=0.05)
    told = figures(noisy)
    steps, rate = told["simulated"]["steps"], told["throughput"]
    assert steps in (40, 80, 160, 320, 640, 1280)
    assert rate["half_width"] <= 0.05 * rate["samples_per_s"]
    half = simulate(scenario_of(replace(noisy, steps=steps // 2)))
    assert throughput(half).relative > 0.05
    slow = read_options(SimulateOptions, [*words, "--slow", "rank:0x1.1"], "persia-sim")
    assert slow.precision is None and figures(slow)["simulated"]["steps"] == 100


def test_where_ranks_are_many_a_run_of_open_length_begins_with_few_steps(monkeypatch):
    """As many as 60 batches are: 30 steps of two ranks; not where steps are named otherwise."""
    monkeypatch.setattr(measure, "FIRST_BATCHES", 60)
    words = ("--cluster", "v100-2021-09", "--workload", "taobao-ad", "--ranks", "2")
    asked = read_options(SimulateOptions, [*words, "--precision", "50%"], "persia-sim")
    assert asked.precision == 0.5 and figures(asked)["simulated"]["steps"] == 30
    assert figures(replace(asked, steps=40))["simulated"]["steps"] == 40


@pytest.mark.long
def test_a_width_that_is_asked_for_and_not_reached_says_how_many_steps_it_takes():
    """A run of more than 800 steps is not doubled by itself."""
    base = {**OPTIONS, "mode": Mode.SYNC, "gpu_cv": 1.0, "steps": 900}
    said = screen(SimulateOptions(**base, precision=0.001))["its 95 % interval"]
    [(width, counted)] = re.findall(r"\+-([\d.]+) % of it, from (\d+) steps", said)
    [steps] = re.findall(r"0.1 % takes about --steps (\d+)", said)
    assert int(steps) == pytest.approx(int(counted) * (float(width) / 0.1) ** 2, rel=0.05)
    assert "takes about" not in screen(SimulateOptions(**base, precision=0.5))["its 95 % interval"]


def test_a_width_is_refused_where_the_run_has_its_times():
    asked = read_options(SimulateOptions, ["--precision", "1%", "--slow", "rank:0x3"], "persia-sim")
    rule = "precision is 0.01: --slow has its times, so the run does not go on; drop one of them"
    with pytest.raises(ValueError, match=rule):
        run(asked)


def test_the_timeline_holds_ten_steps_from_the_middle_or_those_asked_for(tmp_path):
    for asked, steps in ((None, range(10, 20)), ((3, 4), range(3, 5))):
        file = tmp_path / "window.json"
        told = screen(SimulateOptions(**OPTIONS, write_timeline=file, timeline_steps=asked))
        spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
        assert told["timeline"] == f"{len(spans)} spans in {file}"
        assert {e["args"]["step"] for e in spans} == set(steps)
        assert {e["pid"] for e in spans} == {0, 1}
    short = SimulateOptions(**OPTIONS | {"steps": 6}, write_timeline=file)
    run(short)
    spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans} == {3, 4, 5}


def test_misses_of_evicted_rows_reach_the_gains(monkeypatch):
    """The gains are those of the run that was reported, with its rows created again and again."""
    seen: list[float] = []
    import persia_sim.report.sensitivity as module

    def spy(scenario: object, miss_rate: float, *more: object) -> object:
        seen.append(miss_rate)
        return {"GPU": Estimate(0.05, 0.01, 20), "latency": Estimate(0.01, 0.02, 20)}

    monkeypatch.setattr(module, "gains", spy)
    told = screen(
        SimulateOptions(row_format="f32-adagrad", ranks=8, steps=6, evict=True, sensitivity=True)
    )
    [misses] = re.findall(r"([\d.]+) % of a batch", told["ids without a row"])
    assert [f"{100 * rate:.2f}" for rate in seen] == 2 * [misses] and seen[0] > 0
    assert told["10 % faster"] == (
        "GPU +5.0% +-1.0%, not decided at these steps: latency (+1.0% +-2.0%); use more --steps"
    )


def test_what_the_steps_leave_open_is_not_said_to_help_nothing():
    open_ = {"NICs": Estimate(0.36, 0.70, 20), "GPU": Estimate(0.0, 0.001, 20)}
    assert _shown(open_) == "not decided at these steps: NICs (+36.0% +-70.0%); use more --steps"
    assert _shown({"GPU": open_["GPU"]}) == "nothing helps alone"
    many = {f"r{n}": Estimate(0.0, 0.1, 20) for n in range(5)}
    assert " and 2 more; " in _shown(many)
