"""The command: what it prints and writes, line by line, and errors in one line."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from persia_sim.base.command_line import read_options
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import Options, run, scenario_of
from persia_sim.cli.command import _shown
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.report import measure
from persia_sim.report.measure import Estimate, throughput
from persia_sim.report.sensitivity import gains
from tests import browser


def brief(options: Options) -> str:
    """The short screen, whose lines are those of one run."""
    return run(replace(options, brief=True))


def test_the_short_report_fits_a_small_terminal(tmp_path):
    timeline, trace = tmp_path / "window.json", tmp_path / "order.npz"
    said = brief(Options(tau=4, steps=12, write_timeline=timeline, write_trace=trace))
    lines = said.splitlines()
    assert len(lines) <= 24
    for word in ("throughput", "staleness", "to blame", "exposed", "in use", "memory", "cost"):
        assert any(line.startswith(word) for line in lines), word
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"lookup", "push", "dense_sync"}
    saved = Trace.load(trace)
    assert saved.meta["mode"] == "hybrid" and saved.meta["tau"] == 4
    assert saved.meta["batch_per_rank"] == 8192 and "batch" not in saved.meta


def test_rows_that_do_not_fit_are_refused_unless_evicted():
    with pytest.raises(ValueError, match="memory per server is 2,500 GiB on gcp-100t"):
        run(Options(row_format="f32-adagrad", steps=2))
    assert "evicted" in brief(Options(row_format="f32-adagrad", steps=12, evict=True))


def test_faults_are_told_on_the_command_line_and_reported():
    said = brief(
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


def test_a_simulation_starts_without_heavy_packages():
    code = (
        "import sys; from persia_sim.cli import Options, run; run(Options(steps=2));"
        "heavy = {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [["--steps", "5"], ["--help"]])
def test_a_reader_that_has_gone_ends_the_command_in_silence(arguments):
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


def test_the_lines_of_memory_order_and_gains_are_those_of_the_options(tmp_path):
    trace, timeline = tmp_path / "order.npz", tmp_path / "window.json"
    options = Options(**OPTIONS, write_trace=trace, write_timeline=timeline, sensitivity=True)
    said = brief(options)
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


QUESTIONS = (
    "What is simulated?", "Does it fit?", "How fast?", "What binds?", "What would help?",
    "What does it cost?", "How late are the rows?", "Details",
)  # fmt: skip


def facts_of(said: str) -> dict[str, dict[str, str]]:
    """The whole screen, read back: question -> fact -> what it says, line by line."""
    found: dict[str, dict[str, str]] = {}
    columns = set()
    for block in said.split("\n\n"):
        question, *lines = block.splitlines()
        facts = found.setdefault(question, {})
        for line in lines:
            if named := re.match(r"  (\S.*?)  +", line):
                columns.add(named.end())
                facts[named[1]] = line[named.end() :]
            else:
                facts[list(facts)[-1]] += f"\n{line.strip()}"
    assert len(columns) == 1, f"the facts begin in several columns: {columns}"
    return found


def test_lines_and_sections_stand_in_the_order_in_which_one_decides(tmp_path):
    """On the screen and on the page, which says the same and needs nothing beside itself."""
    page = tmp_path / "page.html"
    said = run(Options(ranks=8, steps=12, html=page, sensitivity=True))
    told = facts_of(said)
    assert tuple(told) == QUESTIONS
    assert list(told["What would help?"]) == ["10 % faster", "twice"]
    assert told["Details"].pop("page") == str(page)
    text = page.read_text()
    places = [text.index(f"<h2>{question}</h2>") for question in QUESTIONS]
    assert places == sorted(places)
    pairs = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", html.unescape(text), flags=re.S))
    shown = {name: re.sub(r"\n +", "\n", value).strip() for name, value in pairs.items()}
    assert shown == {name: value for facts in told.values() for name, value in facts.items()}
    assert text.count('src="data:image/svg+xml;base64,') == 2 and "Not asked" not in text
    assert not re.search(r'(?:src|href)="(?!data:|#)|<script|url\((?!data:)|@import', text)
    widths = browser.measured(page, (400, 1300), tmp_path)
    for width, found in widths.items():
        assert found["content"] <= width and found["outside"] == [] and found["blank"] == 0


def test_names_from_files_are_text_on_the_page(tmp_path):
    evil, page = "<script>alert(1)</script>", tmp_path / "page.html"
    (tmp_path / "w.toml").write_text(f'base = "taobao-ad"\nname = "{evil}"\n')
    options = {**OPTIONS, "workload": str(tmp_path / "w.toml"), "row_format": "f32-sgd"}
    run(Options(**options, html=page))
    text = page.read_text()
    assert "<script" not in text and html.escape(evil) in text and "Not asked" in text


def test_who_names_no_steps_gets_as_many_as_the_rate_needs():
    """From 100 on by doubling; a number that is typed is kept, and faults have their times."""
    words = ("--cluster", "v100-2021-09", "--workload", "taobao-ad", "--ranks", "2")
    assert read_options(Options, [*words, "--steps", "20"], "persia-sim").precision is None
    asked = read_options(Options, words, "persia-sim")
    assert asked.precision == 0.01 and "; 100 steps" in line(brief(asked), "mode")
    noisy = replace(asked, steps=20, gpu_cv=1.0, mode=Mode.SYNC, precision=0.05)
    said = brief(noisy)
    [steps] = re.findall(r"; ([\d,]+) steps", line(said, "mode"))
    steps = steps.replace(",", "")
    [width] = re.findall(r"\+-([\d.]+)%", line(said, "throughput"))
    assert int(steps) in (40, 80, 160, 320, 640, 1280) and float(width) <= 5
    half = simulate(scenario_of(replace(noisy, steps=int(steps) // 2)))
    assert throughput(half).relative > 0.05
    slow = read_options(Options, [*words, "--slow", "rank:0x1.1"], "persia-sim")
    assert slow.precision is None and "; 100 steps" in line(brief(slow), "mode")


def test_where_ranks_are_many_a_run_of_open_length_begins_with_few_steps(monkeypatch):
    """As many as 60 batches are: 30 steps of two ranks; not where steps are named otherwise."""
    monkeypatch.setattr(measure, "FIRST_BATCHES", 60)
    words = ("--cluster", "v100-2021-09", "--workload", "taobao-ad", "--ranks", "2")
    asked = read_options(Options, [*words, "--precision", "50%"], "persia-sim")
    assert asked.precision == 0.5 and "; 30 steps" in line(brief(asked), "mode")
    assert "; 40 steps" in line(brief(replace(asked, steps=40)), "mode")


def test_a_width_that_is_asked_for_and_not_reached_says_how_many_steps_it_takes():
    """A run of more than 800 steps is not doubled by itself."""
    base = {**OPTIONS, "mode": Mode.SYNC, "gpu_cv": 1.0, "steps": 900}
    said = line(brief(Options(**base, precision=0.001)), "throughput")
    more = re.findall(r"\+-([\d.]+)% \(95 %, (\d+) steps.*; 0.1 % takes about --steps (\d+)", said)
    [(width, counted, steps)] = more
    assert int(steps) == pytest.approx(int(counted) * (float(width) / 0.1) ** 2, rel=0.05)
    assert "takes about" not in line(brief(Options(**base, precision=0.5)), "throughput")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--slow", "rank:0x3"), "slow"),
        (("--crash", "rank:0@1"), "crash"),
        (("--checkpoint-every-s", "1"), "checkpoint-every-s"),
    ],
)
def test_a_width_is_refused_where_the_run_has_its_times(words, name):
    asked = read_options(Options, ["--precision", "1%", *words], "persia-sim")
    rule = f"precision is 0.01: --{name} has its times, so the run does not go on; drop one of them"
    with pytest.raises(ValueError, match=rule):
        run(asked)


def test_the_timeline_holds_ten_steps_from_the_middle_or_those_asked_for(tmp_path):
    for asked, steps in ((None, range(10, 20)), ((3, 4), range(3, 5))):
        file = tmp_path / "window.json"
        said = brief(Options(**OPTIONS, write_timeline=file, timeline_steps=asked))
        spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
        assert line(said, "timeline") == f"{len(spans)} spans in {file}"
        assert {e["args"]["step"] for e in spans} == set(steps)
        assert {e["pid"] for e in spans} == {0, 1}
    short = Options(**OPTIONS | {"steps": 6}, write_timeline=file)
    run(short)
    spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans} == {3, 4, 5}


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_prints_its_report(mode):
    said = brief(Options(**OPTIONS | {"mode": mode, "steps": 12}))
    scenario = scenario_of(Options(**OPTIONS | {"mode": mode, "steps": 12}))
    ends = simulate(scenario).stamps[Mark.UPDATED]
    assert line(said, "mode").startswith(str(mode))
    rate = float(line(said, "throughput").split()[0]) * 1e3
    whole = 2 * 512 * 11 / (ends.max(0)[-1] - ends.max(0)[0])
    assert rate == pytest.approx(whole, rel=0.25)  # the start is not cut off here


def test_misses_of_evicted_rows_reach_the_gains(monkeypatch):
    """The gains are those of the run that was reported, with its rows created again and again."""
    seen: list[float] = []
    import persia_sim.report.sensitivity as module

    def spy(scenario: object, miss_rate: float, *more: object) -> object:
        seen.append(miss_rate)
        return {"GPU": Estimate(0.05, 0.01, 20), "latency": Estimate(0.01, 0.02, 20)}

    monkeypatch.setattr(module, "gains", spy)
    said = brief(Options(row_format="f32-adagrad", ranks=8, steps=6, evict=True, sensitivity=True))
    [misses] = re.findall(r"misses ([\d.]+)%", said)
    assert [f"{100 * rate:.2f}" for rate in seen] == 2 * [misses] and seen[0] > 0
    faster = line(said, "10 % faster")
    assert faster == (
        "GPU +5.0% +-1.0%, not decided at these steps: latency (+1.0% +-2.0%); use more --steps"
    )


def test_what_the_steps_leave_open_is_not_said_to_help_nothing():
    open_ = {"NICs": Estimate(0.36, 0.70, 20), "GPU": Estimate(0.0, 0.001, 20)}
    assert _shown(open_) == "not decided at these steps: NICs (+36.0% +-70.0%); use more --steps"
    assert _shown({"GPU": open_["GPU"]}) == "nothing helps alone"
    many = {f"r{n}": Estimate(0.0, 0.1, 20) for n in range(5)}
    assert " and 2 more; " in _shown(many)
