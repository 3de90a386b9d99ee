"""What a person types: the lists, the options, the mistakes, and a tiny demo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from experiments.commands import main

pytestmark = pytest.mark.multiproc


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PERSIA_DATA_DIR"}
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**clean, **environment},
    )


@pytest.mark.parametrize(
    "words",
    [
        ["runtime", "--help"],
        ["runtime", "train", "--help"],
        ["experiments", "list"],
        ["experiments", "staleness-sweep", "--help"],
        ["experiments", "demo", "--help"],
    ],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(words):
    probe = (
        "import sys, runpy\n"
        f"sys.argv = {words!r}\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "slow = {'torch', 'pandas', 'matplotlib', 'sklearn', 'scipy', 'pyarrow'}\n"
        "heavy = slow & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "usage" in found.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runtime", "trian"], "no command 'trian'; did you mean train?"),
        (["runtime", "train", "--tua", "3"], "--tau"),
        (["runtime", "train", "--mode", "hybird"], "hybrid"),
        (["runtime", "train", "--tau", "3"], "tau is not used by mode sync"),
        (["runtime", "train", "--data.name", "kuairand-pur"], "kuairand-pure"),
        (["runtime", "train", "--data.name", "nothing.toml"], "nothing.toml"),
        (["runtime", "train", "--data.name", "synthetic", "--model.name", "x"], "choose one of"),
        (["runtime", "train", "--data.name", "synthetic", "--executor", "replay", "--trace",
          "absent.npz"], "absent.npz does not exist"),
        (["experiments", "dmeo"], "did you mean demo?"),
        (["experiments", "demo", "--seeds", "1"], "seeds must be >= 2"),
        (["experiments", "demo", "--data-dir", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_gets_a_remedy_and_no_traceback(words, message):
    found = command(*words)
    assert found.returncode == 2
    assert message in found.stdout + found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--seeds", "1", "--seeds", "2"],
        ["staleness-sweep", "--out", "a", "--out=b", "--dry-run"],
        ["runs", "report", "here", "--out", "a", "--out", "b"],
    ],
)
def test_no_study_takes_an_option_twice(words, capsys):
    assert main(words) == 2
    assert "is typed twice, and only one of them can count; give it once" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(tmp_path):
    out = tmp_path / "sweep"
    words = ["experiments", "staleness-sweep", "--data.name", "synthetic", "--dry-run"]
    found = command(*words, "--out", str(out), "--row-lr", "0.05", "0.1")
    assert "70 points" in found.stdout, found.stdout + found.stderr
    assert "row_lr=0.1: 35 points" in found.stdout
    assert not out.exists()


def test_one_training_run_tells_its_result_and_replays(tmp_path):
    tiny = ["runtime", "train", "--data.name", "synthetic", "--steps", "20", "--test-rows", "500",
            "--mode", "hybrid", "--tau", "2", "--ranks", "2"]  # fmt: skip
    recorded = command(*tiny, "--executor", "concurrent", "--out", str(tmp_path / "a"))
    assert "best reachable AUC" in recorded.stdout, recorded.stderr
    trace = str(tmp_path / "a" / "trace.npz")
    replayed = command(
        *tiny, "--executor", "replay", "--trace", trace, "--out", str(tmp_path / "b")
    )
    assert replayed.returncode == 0, replayed.stderr
    same = [line for line in recorded.stdout.splitlines() if "test AUC" in line]
    assert same == [line for line in replayed.stdout.splitlines() if "test AUC" in line]
    again = command(*tiny, "--out", str(tmp_path / "a"))
    assert again.returncode == 2
    assert "holds a finished run" in again.stderr
    other = command(*tiny, "--seed", "7", "--executor", "replay", "--trace", trace)
    assert "trace" in other.stderr
    assert "seed: trace 0, this run 7" in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runtime", "train", "--device", "cuda", "--data.name", "synthetic"], "try --device cpu"),
        (["runtime", "train", "--model.hidden", "--data.name", "synthetic"], "one or more widths"),
        (["runtime", "train", "--rows.dtype", "float64"], "add it"),
        (["runtime", "train", "--seed", "99999999999999999999"], "seed must fit into 64 bits"),
        (["experiments", "staleness-sweep", "--jobs", "0"], "jobs must be >= 1, got 0"),
        (["experiments", "staleness-sweep", "--modes", "sync", "--taus", "3"], "taus is only used"),
        (["experiments", "staleness-sweep", "--match", "foo"], "update"),
        (["experiments", "bench-engines", "--rounds", "0"], "rounds must be >= 1, got 0"),
        (["experiments", "demo", "--samples", "-5"], "samples must be >= 1, got -5"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_odd_values_get_one_message(words, message):
    found = command(*words)
    assert found.returncode == 2
    assert message in found.stdout + found.stderr
    assert "Traceback" not in found.stderr


def test_a_mistyped_data_folder_is_no_reason_to_train_on_something_else():
    found = command("experiments", "demo", "--dry-run", PERSIA_DATA_DIR="/no/such/folder")
    assert found.returncode == 2
    assert "/no/such/folder" in found.stderr
