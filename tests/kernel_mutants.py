"""Small faults in the kernels, one at a time; which of them do the tests notice?

`make mutants-kernels` (CONTRIBUTING.md). The faults stand in kernel_mutants.toml beside this file:
realistic slips of one line, written by hand, since no tool for C++ knows which of them matter. Each
is compiled in a copy of the tree and the named test files are run there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.tree import ROOT, copy_of_the_tree

KERNELS = Path("runtime/embedding/native/kernels")
TESTS = Path("tests/runtime/embedding")
LIST = Path(__file__).with_suffix(".toml")
_NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("first", phases=[Phase.explicit, Phase.generate])
settings.load_profile("first")
"""  # that a test fails is enough, the smallest example for it takes a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One line of a kernel, as it is and as a slip would have it."""

    file: str
    old: str
    new: str
    tests: list[str]
    """Names of the test files that should notice, without test_ and .py."""
    argued: str = ""
    """Why no test can notice it, where none can."""


def replacements() -> list[Replacement]:
    """The list, each `old` standing exactly once in its file."""
    found = [Replacement(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]
    for one in found:
        times = (ROOT / KERNELS / one.file).read_text().count(one.old)
        if times != 1:
            raise ValueError(
                f"{LIST.name}: {one.old!r} stands {times} times in {one.file}, not once"
            )
    return found


def build(tree: Path, where: Path) -> bool:
    """Compile the kernels of a tree into it; False if they do not compile."""
    configure = ["cmake", "-S", str(tree / KERNELS), "-B", str(where), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_ROOT_DIR={sys.prefix}"]
    for command in (configure, ["cmake", "--build", str(where), f"-j{os.cpu_count() or 1}"]):
        if subprocess.run(command, capture_output=True).returncode:
            return False
    for library in where.glob("_kernels*.so"):
        shutil.copy2(library, tree / KERNELS.parent)
    return True


def passes(tree: Path, tests: list[str]) -> bool:
    """Whether the test files pass in a tree; one that hangs does not."""
    files = [str(TESTS / f"test_{name}.py") for name in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no_shrinking", *files]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=180)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def main() -> int:
    """Try the faults, print what became of each and the rate; 1 if one survived unargued."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel_mutants", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose file or text contains this")
    given = parser.parse_args()
    if find_spec("nanobind") is None:
        print("error: nanobind is missing (pip installs it for its own build only): run")
        print(f"  {sys.executable} -m pip install 'nanobind>=2.4'")
        return 2
    chosen = [one for one in replacements() if given.only in one.file + one.old + one.new]
    survived = caught = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, where = Path(folder) / "tree", Path(folder) / "build"
        copy_of_the_tree(tree)
        (tree / "no_shrinking.py").write_text(_NO_SHRINKING)
        recipe = tree / KERNELS / "CMakeLists.txt"  # the same results in a third of the time
        recipe.write_text(recipe.read_text().replace("-O3", "-O1"))
        all_tests = sorted({name for one in chosen for name in one.tests})
        if not build(tree, where) or not passes(tree, all_tests):
            print("error: the kernels do not build or their tests fail without a fault")
            return 2
        for one in chosen:
            began = time.monotonic()
            path = tree / KERNELS / one.file
            whole = path.read_text()
            path.write_text(whole.replace(one.old, one.new))
            if not build(tree, where):
                result = "does not compile"
            elif not passes(tree, one.tests):
                result, caught = "noticed", caught + 1
            elif one.argued:
                result = "survived, argued"
            else:
                result, survived = "SURVIVED", survived + 1
            path.write_text(whole)
            seconds = time.monotonic() - began
            change = f"{one.old.strip()} -> {one.new.strip()}".replace("\n", " ")
            print(f"{result:<16} {seconds:5.1f} s  {one.file}: {change}", flush=True)
    tried = caught + survived
    print(f"{caught} of {tried} faults noticed ({caught / max(tried, 1):.0%})")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
