"""What `python -m persia_sim` prints and writes, line by line, from the instants of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from persia_sim.cli import Options, run, scenario_of
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import Estimate
from persia_sim.insight.sensitivity import gains
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import Mode

OPTIONS = {
    "cluster": "v100-2021-09", "workload": "taobao-ad", "mode": Mode.SYNC, "ranks": 2, "steps": 20,
    "gpu_cv": 0.0,
}  # fmt: skip


def line(said: str, word: str) -> str:
    [found] = [line for line in said.splitlines() if line.startswith(word)]
    return found.removeprefix(word).strip()


def test_every_line_of_a_sync_run(tmp_path: Path) -> None:
    trace, timeline = tmp_path / "order.npz", tmp_path / "window.json"
    options = Options(**OPTIONS, trace=trace, timeline=timeline, sensitivity=True)  # type: ignore[arg-type]
    said = run(options)
    stamps = simulate(scenario_of(options)).stamps
    step = np.diff(stamps[Mark.UPDATED, 0])[5:].mean()  # the first five are the start
    rate = 2 * 512 / step
    assert line(said, "throughput").startswith(f"{rate / 1e3:.3g} ksamples/s")
    assert line(said, "step ").startswith(f"{step * 1e3:.2f} ms; bound ")
    bound = float(re.search(r"bound ([\d.]+) ms", said)[1])  # type: ignore[index]
    assert 0.9 * step * 1e3 < bound <= step * 1e3 + 0.01
    assert line(said, "staleness").startswith(
        "steps 0.00 (p99 0, oldest 0); pushes 0.0 (p99 0); by row 0.00 (fresh 100.0%, p50 0"
    )
    assert line(said, "in flight") == "at most 2 batches"
    # 29 M / 16 rows of 16 numbers, each with Adagrad's, and 66 bytes more; ten servers of 440 GB
    assert line(said, "memory").startswith(
        "33.5 MiB of 410 GiB a server, 194 B a row as f32-adagrad; resident 1.81e+06, evicted 0, "
        "misses 0.00%; "
    )
    compute = (stamps[Mark.BACKWARD_END] - stamps[Mark.START]).sum() / 2
    assert f"GPU {compute / 20 / step:.1%}" in line(said, "in use")
    gap = np.maximum(stamps[Mark.LOOKUP, :, 1:] - stamps[Mark.UPDATED, :, :-1], 0).mean()
    loaded = np.maximum(stamps[Mark.LOADED, :, 1:] - stamps[Mark.UPDATED, :, :-1], 0).mean()
    assert f"lookup task {(gap - loaded) * 1e3:.2f}" in line(said, "exposed, ms")
    # Two lookups, one dense update and one merged push a step.
    assert line(said, "order") == f"80 events in {trace}" and len(Trace.load(trace)) == 80
    best = sorted(gains(scenario_of(options)).items(), key=lambda item: -item[1].mean)
    expected = [f"{name} {gain.mean:+.1%}" for name, gain in best if gain.mean > 5e-4]
    assert line(said, "10 % faster") == ", ".join(expected) and len(expected) > 3
    assert line(said, "twice").startswith("batch +")


def test_the_timeline_holds_ten_steps_from_the_middle_or_those_asked_for(tmp_path: Path) -> None:
    for asked, steps in ((None, range(10, 20)), ((3, 4), range(3, 5))):
        file = tmp_path / "window.json"
        said = run(Options(**OPTIONS, timeline=file, timeline_steps=asked))  # type: ignore[arg-type]
        spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
        assert line(said, "timeline") == f"{len(spans)} spans in {file}"
        assert {e["args"]["step"] for e in spans} == set(steps)
        assert {e["pid"] for e in spans} == {0, 1}
    short = Options(**OPTIONS | {"steps": 6}, timeline=file)  # type: ignore[arg-type]
    run(short)
    spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans} == {3, 4, 5}


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_prints_its_report(mode: Mode) -> None:
    said = run(Options(**OPTIONS | {"mode": mode, "steps": 12}))  # type: ignore[arg-type]
    scenario = scenario_of(Options(**OPTIONS | {"mode": mode, "steps": 12}))  # type: ignore[arg-type]
    ends = simulate(scenario).stamps[Mark.UPDATED]
    assert line(said, "mode").startswith(str(mode))
    rate = float(line(said, "throughput").split()[0]) * 1e3
    whole = 2 * 512 * 11 / (ends.max(0)[-1] - ends.max(0)[0])
    assert rate == pytest.approx(whole, rel=0.25)  # the start is not cut off here


def test_misses_of_evicted_rows_reach_the_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gains are those of the run that was reported, with its rows created again and again."""
    seen: list[float] = []
    import persia_sim.insight.sensitivity as module

    def spy(scenario: object, miss_rate: float = 0.0, changes: object = None) -> object:
        seen.append(miss_rate)
        return {"GPU": Estimate(0.05, 0.01, 20), "latency": Estimate(0.01, 0.02, 20)}

    monkeypatch.setattr(module, "gains", spy)
    said = run(Options(rows="f32-adagrad", ranks=8, steps=6, evict=True, sensitivity=True))
    [misses] = re.findall(r"misses ([\d.]+)%", said)
    assert [f"{100 * rate:.2f}" for rate in seen] == 2 * [misses] and seen[0] > 0
    assert line(said, "10 % faster") == "GPU +5.0% +-1.0%"
