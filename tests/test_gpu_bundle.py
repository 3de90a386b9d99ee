"""The bundle for a machine with a GPU, installed as there: no network, beside a given torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from experiments.benching import gpu
from persia_sim.presets.profile import read_profile
from runtime.embedding.native.extension import native

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
    """A minute of compiling is left out where `make install` has just done it, and parts whose
    command another part has, too (tests/experiments run what is different in them)."""
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
    if not compiles:
        environment["SKBUILD_WHEEL_CMAKE"] = "false"

    def run(*more: str) -> str:
        words = ["sh", str(tmp_path / "bundle" / "run.sh"), "--device", "cpu", "--out", "found"]
        found = subprocess.run(
            [*words, *more], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
        return found.stdout

    planned = run("--dry-run")
    assert all(part in planned for part in gpu.PARTS) and not (tmp_path / "found").exists()
    kernels = Path("runtime/embedding/native") / Path(native.__file__).name
    if not compiles:
        shutil.copy(native.__file__, tmp_path / "site" / "packages" / kernels)
    some = ("tests", "feed", "profile", "stages")
    run(*([] if compiles else ["--only", *some]))
    lines = (tmp_path / "found" / gpu.RECORDS).read_text().splitlines()
    found = [json.loads(line)["row"] for line in lines]
    said = {f"{record['part']}, {record['name']}": record["outcome"] for record in found}
    assert len(said) == len(found) == (9 if compiles else len(some))
    left = {name for name, outcome in said.items() if outcome.startswith("skipped")}
    assert all("compute-sanitizer" in name for name in left), said
    assert {said[name] for name in said.keys() - left} == {"passed"}, said
    tables = {name: rows for record in found for name, rows in record["tables"].items()}
    feed = {row["name"] for row in tables["bench_feed"]}
    assert {"fetch, 2 threads", "push, 1 threads", "pageable to device"} <= feed
    for row in tables["profile_small"]:
        assert 0 < float(row["busy_share"]) < 2 and float(row["wall_s"]) > 0
    assert list((tmp_path / "found").glob("trace_*.json.gz"))
    assert read_profile(tmp_path / "found" / gpu.PROFILE).laws
    about = "from importlib.util import find_spec as find\n"
    about += "print(find('torch').origin, find('runtime').origin)"
    inside = {**environment, "PYTHONPATH": str(tmp_path / "site" / "packages")}
    given, own = subprocess.check_output(
        [python, "-c", about], env=inside, cwd=tmp_path, text=True
    ).split()
    assert Path(given).resolve() == Path(torch.__file__).resolve(), "the torch that was there"
    assert own.startswith(str(tmp_path / "site"))
