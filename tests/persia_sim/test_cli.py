"""The command: what it prints and writes, line by line, and errors in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from persia_sim.cli import Options, run, scenario_of
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import Estimate
from persia_sim.insight.sensitivity import gains
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import Mode


def test_the_report_fits_one_screen(tmp_path: Path) -> None:
    timeline, trace = tmp_path / "window.json", tmp_path / "order.npz"
    said = run(Options(tau=4, steps=12, timeline=timeline, trace=trace))
    lines = said.splitlines()
    assert len(lines) <= 24
    for word in ("throughput", "staleness", "to blame", "exposed", "in use", "memory", "cost"):
        assert any(line.startswith(word) for line in lines), word
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"lookup", "push", "dense_sync"}
    saved = Trace.load(trace)
    assert saved.meta["mode"] == "hybrid" and saved.meta["tau"] == 4
    assert saved.meta["batch_per_rank"] == 8192 and "batch" not in saved.meta


def test_rows_that_do_not_fit_are_refused_unless_evicted() -> None:
    with pytest.raises(ValueError, match="memory per server is 2,500 GiB on gcp-100t"):
        run(Options(rows="f32-adagrad", steps=2))
    assert "evicted" in run(Options(rows="f32-adagrad", steps=12, evict=True))


def test_faults_are_told_on_the_command_line_and_reported() -> None:
    said = run(
        Options(
            steps=12, tau=4, ranks=8, gpu_cv=0.0, slow=("rank:0x1.5@0-1",),
            crash=("rank:1@0.3", "server:0@0.35"), detect_s=0.1, restart_s=0.2, load_s=0.1,
            checkpoint_every_s=0.2, checkpoint_s=0.05,
        )
    )  # fmt: skip
    [line] = [line for line in said.splitlines() if line.startswith("faults")]
    # Rank and server are away for 0.4 s each; only the rank's loop stands still for it.
    assert "1 slow, 2 crashes: out of service 0.80 s, training stopped 0.40 s" in line
    assert "checkpoints" in line


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "persia_sim", *arguments], capture_output=True, text=True
    )


def test_a_simulation_starts_without_heavy_packages() -> None:
    code = (
        "import sys; from persia_sim.cli import Options, run; run(Options(steps=2));"
        "heavy = {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [["--steps", "5"], ["--help"]])
def test_a_reader_that_has_gone_ends_the_command_in_silence(arguments: list[str]) -> None:
    """As `| head -1` does once it has its line."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "persia_sim", *arguments]
    found = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, "")


OPTIONS = {
    "cluster": "v100-2021-09", "workload": "taobao-ad", "mode": Mode.SYNC, "ranks": 2, "steps": 20,
    "gpu_cv": 0.0,
}  # fmt: skip


def line(said: str, word: str) -> str:
    [found] = [line for line in said.splitlines() if line.startswith(word)]
    return found.removeprefix(word).strip()


def test_the_lines_of_memory_order_and_gains_are_those_of_the_options(tmp_path: Path) -> None:
    trace, timeline = tmp_path / "order.npz", tmp_path / "window.json"
    options = Options(**OPTIONS, trace=trace, timeline=timeline, sensitivity=True)  # type: ignore[arg-type]
    said = run(options)
    # 29 M / 16 rows of 16 numbers, each with Adagrad's, and 66 bytes more; ten servers of 440 GB
    assert line(said, "memory").startswith(
        "33.5 MiB of 410 GiB a server, 194 B a row as f32-adagrad; resident 1.81e+06, evicted 0, "
        "misses 0.00%; "
    )
    # Two lookups, one dense update and one merged push a step.
    assert line(said, "order") == f"80 events in {trace}; to train in it:"
    assert len(Trace.load(trace)) == 80
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
