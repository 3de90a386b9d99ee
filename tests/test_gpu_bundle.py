"""The bundle for a machine with a GPU, installed as there: no network, beside a given torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
CARRIED = ("simpy", "nanobind", "scikit_build_core", "packaging", "pathspec")
"""What the machine may lack: hidden from the fresh environment, as this project is."""


def bare_python(folder: Path, lacks: tuple[str, ...] = CARRIED) -> Path:
    """A Python of its own that sees what is installed here, but for this project and what it
    ``lacks``."""
    seen, hidden = folder / "seen", (*lacks, "pip", "_editable", "persia", "__pycache__")
    seen.mkdir(parents=True)
    for package in Path(torch.__file__).parents[1].iterdir():
        if not package.name.startswith(hidden) and package.suffix != ".pth":
            (seen / package.name).symlink_to(package)
    venv.create(folder / "env", with_pip=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "seen.pth").write_text(f"{seen}\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.long
def test_the_bundle_installs_without_network_and_runs_every_part_on_a_cpu(tmp_path):
    made = subprocess.run(
        ["make", "gpu-bundle", f"BUNDLE={tmp_path / 'bundle'}", f"PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode and "No matching distribution" in made.stderr:
        pytest.skip("the wheels cannot be fetched here")
    assert made.returncode == 0, made.stderr
    files = [file for file in (tmp_path / "bundle").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 64 * 2**20

    python = bare_python(tmp_path / "bare")
    assert subprocess.run([python, "-c", "import simpy"], capture_output=True).returncode
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHON": str(python), "PERSIA_SITE": str(tmp_path / "site")}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "OMP_NUM_THREADS": "1"}
    words = ["sh", str(tmp_path / "bundle" / "run.sh"), "--device", "cpu", "--out", "found"]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    records = [
        record
        for file in (tmp_path / "found").glob("*.json")
        for record in json.loads(file.read_text())["commands"]
    ]
    said = {record["name"]: record["outcome"] for record in records}
    assert len(records) == 9
    assert {outcome for outcome in said.values() if not outcome.startswith("skipped")} == {"passed"}
    left = [name for name, outcome in said.items() if outcome.startswith("skipped")]
    assert all(name.startswith("compute-sanitizer") for name in left), said
    about = "import torch, runtime; print(torch.__version__, runtime.__file__)"
    inside = {**environment, "PYTHONPATH": str(tmp_path / "site" / "packages")}
    version, place = subprocess.check_output(
        [python, "-c", about], env=inside, cwd=tmp_path, text=True
    ).split()
    assert version == torch.__version__ and place.startswith(str(tmp_path / "site"))
