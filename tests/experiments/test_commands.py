"""What a person types: the lists, the options, the mistakes, and a tiny demo."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import experiments.__main__
import runtime.__main__
from experiments.catalogue import STUDIES
from tests.tree import ROOT

pytestmark = pytest.mark.multiproc
MAIN = {"runtime": runtime.__main__.main, "experiments": experiments.__main__.main}


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """A command in an empty folder: exit code, what it printed, what it complained of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERSIA_DATA_DIR", raising=False)

    def call(module: str, *words: str) -> tuple[int, str, str]:
        code = MAIN[module](list(words))
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    "words",
    [
        ["runtime", "--help"],
        ["runtime", "train", "--help"],
        ["experiments", "list"],
        ["experiments", "sweep", "--help"],
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
        (["experiments", "demo", "--set", "data.dir=/nowhere"], "/nowhere"),
        (["runtime", "train", "--device", "cuda", "--data.name", "synthetic"], "try --device cpu"),
        (["runtime", "train", "--model.hidden", "--data.name", "synthetic"], "one or more widths"),
        (["runtime", "train", "--seed", "99999999999999999999"], "seed must fit into 64 bits"),
        (["experiments", "sweep", "dmeo.toml"], "did you mean demo.toml?"),
        (["experiments", "sweep"], "FILE is missing"),
        (["experiments", "daily", "--data.name", "days.toml"], "did you mean --set data.name=...?"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_gets_a_remedy_and_no_traceback(words, message, command):
    code, told, complained = command(*words)
    assert code == 2 and message in told + complained
    assert "Traceback" not in complained


@pytest.mark.parametrize("words", [["runtime", "trian"], ["experiments", "dmeo"]])
def test_a_process_ends_with_the_code_of_its_command(words):
    found = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert found.returncode == 2 and "did you mean" in found.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--seeds", "1", "--seeds", "2"],
        ["sweep", "staleness.toml", "--out", "a", "--out=b", "--dry-run"],
    ],
)
def test_no_study_takes_an_option_twice(words, command):
    code, _, complained = command("experiments", *words)
    assert code == 2 and "is typed twice, and only one of them can count; give it" in complained


CLICKS = str(ROOT / "examples" / "clicks.toml")
PLANNED_WITH = {
    "sweep": ["staleness.toml", "--set", f"data.name={CLICKS}"],
    "tune": ["--set", f"data.name={CLICKS}"],
    "models": ["--set", f"data.name={CLICKS}"],
    "daily": ["--set", f"data.name={CLICKS}"],
    "lateness": ["--streams", "synthetic:zipf-1.1"],
}
"""What names data that are there, or makes the plan small."""


@pytest.mark.first_case
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_beforehand_how_long_it_takes_and_writes_nothing(name, command, tmp_path):
    words = [name, *PLANNED_WITH.get(name, []), "--dry-run", "--out", "out"]
    code, printed, complained = command("experiments", *words)
    assert code == 0, complained
    assert re.search(r"\b[\d.,]+ (?:s|min|minutes?|h|core-minutes)\b", printed), printed
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing(tmp_path, command):
    words = ["sweep", "staleness.toml", "--dry-run", "--out", "sweep"]
    typed = ["--set", "data.name=synthetic", "rows.optimizer.lr=0.05,0.1"]
    _, told, complained = command("experiments", *words, *typed)
    assert "70 points" in told, told + complained
    assert "0.1-hybrid-tau-4-seed0" in told
    assert not list(tmp_path.iterdir())


def test_one_training_run_tells_its_result_and_replays(tmp_path, command):
    tiny = ["runtime", "train", "--data.name", "synthetic", "--steps", "20", "--test-rows", "500",
            "--mode", "hybrid", "--tau", "2", "--ranks", "2"]  # fmt: skip
    _, recorded, complained = command(*tiny, "--executor", "concurrent", "--out", "a")
    assert "best reachable AUC" in recorded, complained
    trace = str(tmp_path / "a" / "trace.npz")
    code, replayed, complained = command(
        *tiny, "--executor", "replay", "--trace", trace, "--out", "b"
    )
    assert code == 0, complained
    same = [line for line in recorded.splitlines() if line.startswith("  AUC ")]
    assert same and same == [line for line in replayed.splitlines() if line.startswith("  AUC ")]
    code, _, complained = command(*tiny, "--out", "a")
    assert code == 2 and "holds a finished run" in complained
    _, _, complained = command(*tiny, "--seed", "7", "--executor", "replay", "--trace", trace)
    assert "trace" in complained and "seed: trace 0, this run 7" in complained


def test_a_mistyped_data_folder_is_no_reason_to_train_on_something_else(command, monkeypatch):
    monkeypatch.setenv("PERSIA_DATA_DIR", "/no/such/folder")
    code, _, complained = command("experiments", "demo", "--dry-run")
    assert code == 2 and "/no/such/folder" in complained
