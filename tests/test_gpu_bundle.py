"""The bundle for a machine with a GPU, installed as there: no network, beside a given torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from persia_sim.presets.profile import read_profile
from runtime.embedding.native.extension import native
from tests.experiments.raw_runs import read_csv

ROOT = Path(__file__).parent.parent
CARRIED = ("simpy", "nanobind", "scikit_build_core", "packaging", "pathspec")
"""What the machine may lack: hidden from the fresh environment, as this project is."""


def bare_python(folder: Path, lacks: tuple[str, ...] = CARRIED) -> Path:
    """A Python of its own that sees what is installed here, but for this project and what it
    ``lacks``."""
    seen, hidden = folder / "seen", (*lacks, "_editable", "persia", "__pycache__")
    seen.mkdir(parents=True)
    for package in Path(torch.__file__).parents[1].iterdir():
        if not package.name.startswith(hidden) and package.suffix != ".pth":
            (seen / package.name).symlink_to(package)
    venv.create(folder / "env")
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "seen.pth").write_text(f"{seen}\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.minutes)])
def test_the_bundle_installs_without_network_and_runs_every_part_on_a_cpu(tmp_path, compiles):
    """A minute of compiling is left out where `make install` has just done it."""
    made = subprocess.run(
        ["make", "gpu-bundle", f"BUNDLE={tmp_path / 'bundle'}", f"PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode and "No matching distribution" in made.stderr:
        pytest.skip("the wheels cannot be fetched here")
    assert made.returncode == 0, made.stderr
    files = [file for file in (tmp_path / "bundle").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 64 * 2**20

    # A Python that lacks what the bundle carries, and an index that nobody answers at.
    python = bare_python(tmp_path / "bare")
    assert subprocess.run([python, "-c", "import simpy"], capture_output=True).returncode
    packages = tmp_path / "site" / "packages"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHON": str(python), "PERSIA_SITE": str(packages.parent)}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "OMP_NUM_THREADS": "1"}
    if not compiles:
        environment["SKBUILD_WHEEL_CMAKE"] = "false"
    words = ["sh", str(tmp_path / "bundle" / "run.sh"), "--device", "cpu", "--out", "found"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    # Without kernels every part fails, and none keeps another from its turn.
    ran = run()
    if not compiles:
        assert ran.returncode == 1
        assert all(f"{part} failed:" in ran.stdout for part in ("tests", "profile", "speeds"))
        kernels = packages / "runtime/embedding/native"
        shutil.copy(native.__file__, kernels)
        ran = run()
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = tmp_path / "found"

    # Every part has left its result.
    assert "skipped" in (found / "tests.txt").read_text()
    assert read_profile(found / "profile.json").laws
    names = {row["name"] for row in read_csv(found / "bench_peers.csv")}
    assert names == {"dense-only", "ours sync", "ours hybrid"}
    about = "from importlib.util import find_spec as find\n"
    about += "print(find('torch').origin, find('runtime').origin)"
    inside = {**environment, "PYTHONPATH": str(packages)}
    given, own = subprocess.check_output(
        [python, "-c", about], env=inside, cwd=tmp_path, text=True
    ).split()
    assert Path(given).resolve() == Path(torch.__file__).resolve(), "the torch that was there"
    assert own.startswith(str(packages))
