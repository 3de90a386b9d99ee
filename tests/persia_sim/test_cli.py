"""The command: one screen, errors in one line, and a quick start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from persia_sim.cli import Options, run, scenario_of
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "gcp"}, "--cluster is 'gcp': did you mean gcp-100t."),
        ({"workload": "taobao"}, "--workload is 'taobao'"),
        ({"mode": Mode.SYNC, "tau": 3}, "tau is 3: sync does not read it; drop it"),
        ({"mode": Mode.SYNC, "permits": 3}, "permits is 3: sync does not read it"),
        ({"ahead": 2}, "ahead is 2: hybrid does not read it"),
        ({"average_every_s": 1.0}, "hybrid does not read it"),
        ({"mode": Mode.ASYNC, "merge_pushes": True}, "async has no step to merge over"),
        ({"tau": -1}, "tau is -1: must be >= 0"),
        ({"batch_per_rank": 70_000}, r"batch_per_rank is 70000: must lie in \[1, 65535\]"),
        ({"ranks": 0}, "ranks is 0: must be >= 1"),
        ({"gpu_cv": -0.1}, r"noise.gpu_cv is -0\.1"),
    ],
)
def test_a_wrong_option_names_value_rule_and_remedy(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scenario_of(Options(**options))  # type: ignore[arg-type]


def test_rows_that_do_not_fit_are_refused_unless_evicted() -> None:
    with pytest.raises(ValueError, match="memory per server is 2,500 GiB on gcp-100t"):
        run(Options(rows="f32-adagrad", steps=2))
    assert "evicted" in run(Options(rows="f32-adagrad", steps=12, evict=True))


def test_timeline_steps_without_a_file_are_an_error() -> None:
    with pytest.raises(ValueError, match="--timeline-steps is set but --timeline is not"):
        run(Options(timeline_steps=(1, 2)))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"crash": ("rank3",)},
            "'rank3': KIND is rank, worker, server; write KIND:INDEX@SECONDS",
        ),
        (
            {"slow": ("rank:0",)},
            "'rank:0': KIND is rank, worker, server; write KIND:INDEXxFACTOR",
        ),
        ({"detect_s": 1.0}, "--detect-s is set but --crash is not"),
        ({"checkpoint_s": 1.0}, "--checkpoint-s is set but --checkpoint-every-s is not"),
        ({"full_recovery": True, "crash": ("rank:0@1",)}, "--crash names no server"),
        ({"crash": ("rank:64@1",)}, "index of rank is 64: the cluster has 64"),
        ({"checkpoint_every_s": 0.0}, "checkpoints.interval_s is 0.0: must be > 0"),
    ],
)
def test_a_wrong_fault_names_value_and_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario_of(Options(**options))  # type: ignore[arg-type]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "persia_sim", *arguments], capture_output=True, text=True
    )


def test_a_mistake_is_one_line_and_exit_code_two() -> None:
    done = command("--mode", "sync", "--tau", "1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: tau is 1: sync does not read it; drop it\n"
    assert command("--no-such-option", "1").returncode == 2


def test_a_simulation_starts_without_heavy_packages() -> None:
    code = (
        "import sys; from persia_sim.cli import Options, run; run(Options(steps=2));"
        "heavy = {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_this_host_is_a_cluster() -> None:
    said = run(Options(cluster="this-host", workload="taobao-ad", steps=12, rows="f32-adagrad"))
    assert said.startswith("this-host: 1 x one CPU core")


def test_the_commands_defaults_are_those_of_the_words() -> None:
    hybrid, lookahead = scenario_of(Options()), scenario_of(Options(mode=Mode.LOOKAHEAD))
    assert (hybrid.window, hybrid.merges, lookahead.window) == (4, True, 4)
    assert scenario_of(Options(tau=None)).window is None
    assert scenario_of(Options(mode=Mode.ASYNC_AVERAGING)).rounds.period_s == 0.5
    assert not scenario_of(Options(merge_pushes=False)).merges
    with pytest.raises(ValueError, match="merge_pushes is False: sync always merges; drop it"):
        scenario_of(Options(mode=Mode.SYNC, merge_pushes=False))


@pytest.mark.parametrize("arguments", [["--steps", "5"], ["--help"]])
def test_a_reader_that_has_gone_ends_the_command_in_silence(arguments: list[str]) -> None:
    """As `| head -1` does once it has its line."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "persia_sim", *arguments]
    found = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, "")
