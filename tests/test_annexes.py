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


def done_by(core: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A module's command where only the core is; ``more``: variables of its environment."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
    )


def said_by(core: Path, *words: str) -> str:
    """What a module's command prints where only the core is; it fails with what went wrong."""
    done = done_by(core, *words)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_run_trains_without_the_annexes(core):
    run = ["train", "--data.name", "synthetic", "--steps", "20", "--mode", "hybrid", "--ranks", "2"]
    assert "AUC" in said_by(core, "runtime", *run, "--test-rows", "500", "--out", "run")


def test_a_plain_scenario_is_simulated_without_the_annexes(core):
    assert "samples/s" in said_by(core, "persia_sim", "--mode", "hybrid", "--steps", "20")


@pytest.mark.long
def test_studies_run_without_the_annexes(core):
    said_by(core, "experiments", "demo", "--dry-run")
    data = ["--data", "synthetic", "--cluster", "examples/cluster.toml", "--dry-run"]
    assert "simulations" in said_by(core, "experiments", "which-mode", *data)  # as `make demo`


TRAIN = "runtime train --data.name synthetic --steps 2 --test-rows 50 --executor concurrent"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("words", "variables", "lacks"),
    [
        (f"{TRAIN} --servers 2", {}, "runtime.hosts"),
        (TRAIN, {"WORLD_SIZE": "2", "RANK": "0"}, "runtime.hosts"),
        ("runtime data list", {}, "runtime.preparing"),
        ("runtime profile", {}, "runtime.profiling"),
        ("persia_sim size --samples-per-s 1e5", {}, "persia_sim.sharded"),
    ],
    ids=["servers", "torchrun", "data", "profile", "size"],
)
def test_what_was_left_out_is_named_in_a_sentence(words, variables, lacks, core):
    done = done_by(core, *words.split(), **variables)
    told = [line for line in done.stderr.splitlines() if line != "loading torch"]
    assert done.returncode == 2 and told[-1].startswith(f"error: this needs {lacks}"), done.stderr
    assert "Traceback" not in done.stderr and "install all of it" in told[-1]


@pytest.mark.long
@pytest.mark.parametrize("laws", ["equality", "staleness"])
def test_laws_1_to_6_hold_without_the_annexes(laws, core):
    marks = " or ".join(f"law{number}" for number in range(1, 7))
    test = f"tests/runtime/test_laws_of_{laws}.py"
    here = "not processes and not network and not workers"
    command = ["pytest", "-p", "no:cacheprovider", "-m", f"({marks}) and not long", "-k", here]
    said_by(core, *command, test)
