"""What only several processes and hosts need, and systems with their tables on GPUs, may be left
out: a copy of the project without these folders trains, simulates and holds laws 1 to 6."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.embedding.native.extension import native
from tests.house import ANNEXES
from tests.tree import ROOT

LEFT_OUT = (*ANNEXES, "experiments/published")
ONLY_THIS_COPY = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
"""
"""A `sitecustomize`: the finder of an installation in place would find its own checkout."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project without its annexes."""
    folder = tmp_path_factory.mktemp("core")
    for name in ("runtime", "persia_sim", "experiments", "paper_figs", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(native.__file__, folder / "runtime" / "embedding" / "native")
    (folder / "sitecustomize.py").write_text(ONLY_THIS_COPY)
    for name in LEFT_OUT:
        place = folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return folder


def said_by(core: Path, *words: str) -> str:
    """What a module's command prints where only the core is; it fails with what went wrong."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_run_trains_and_is_evaluated_without_the_annexes(core):
    run = ["train", "--data.name", "synthetic", "--steps", "20", "--mode", "hybrid", "--ranks", "2"]
    end = ["--test-rows", "500", "--checkpoint-every", "end", "--out", "run"]
    assert "AUC" in said_by(core, "runtime", *run, *end)
    assert "AUC" in said_by(core, "runtime", "evaluate", "run")


def test_a_plain_scenario_is_simulated_without_the_annexes(core):
    assert "samples/s" in said_by(core, "persia_sim", "--mode", "hybrid", "--steps", "20")


def test_a_study_runs_without_the_annexes(core):
    said_by(core, "experiments", "demo", "--dry-run")


@pytest.mark.long
@pytest.mark.parametrize("laws", ["equality", "staleness"])
def test_laws_1_to_6_hold_without_the_annexes(laws, core):
    marks = " or ".join(f"law{number}" for number in range(1, 7))
    test = f"tests/runtime/test_laws_of_{laws}.py"
    here = "not processes and not network and not workers"
    command = ["pytest", "-p", "no:cacheprovider", "-m", f"({marks}) and not long", "-k", here]
    said_by(core, *command, test)
