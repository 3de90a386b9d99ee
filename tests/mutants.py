"""Mutation testing: small faults in one module, one at a time; which of them do the tests notice?

`make mutants MODULE=persia_sim.report.report` (CONTRIBUTING.md). cosmic-ray makes the faults; this
file chooses those that somebody could really write, works on a copy of the tree, runs the tests
there in forks of a process that has loaded the libraries, stops when the time is up and lists the
faults that no test noticed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Name

from tests.tree import ROOT, copy_of_the_tree

# Of cosmic-ray's replacements, those that a careless hand makes; a shift for a sum fools nobody.
_SWAPS = {
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Mul_Add", "Div_FloorDiv", "FloorDiv_Div",
    "Mod_FloorDiv", "Pow_Mul", "BitOr_BitAnd", "BitAnd_BitOr", "LShift_RShift",
    "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt",
    "GtE_Lt", "Is_IsNot", "IsNot_Is", "In_NotIn", "NotIn_In", "USub_UAdd",
}  # fmt: skip
_WHOLE = {
    "NumberReplacer", "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue",
    "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak", "ZeroIterationForLoop", "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
}  # fmt: skip
_TWINS = {
    "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "argmax": "argmin",
    "argmin": "argmax", "ceil": "floor", "floor": "ceil", "mean": "sum", "all": "any",
    "any": "all", "expm1": "exp", "log1p": "log", "std": "var", "var": "std", "insort": "print",
    "extend": "append", "sorted": "list",
}  # fmt: skip


_DO_NOT_SHRINK = """
from hypothesis import Phase  # the first example that fails will do

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
settings.load_profile("mutants")
"""
_FORKS = """
import os, signal, sys, time
import pytest

# What most tests load takes seconds: a fork has it at once.
for library in {libraries}:
    __import__(library)
sys.path.insert(0, os.getcwd())
for line in sys.stdin:
    seconds, keeps_compiled, *arguments = line.split()
    ends = time.monotonic() + float(seconds)
    pid = os.fork()
    if not pid:
        # The tests, in a group of their own; a module of the copy is compiled anew each time.
        os.setpgid(0, 0)
        log = os.open("pytest.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(descriptor, stream)
        sys.dont_write_bytecode = keeps_compiled == "0"
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1" if sys.dont_write_bytecode else ""
        os._exit(pytest.main(arguments))

    # Tests that hang notice the fault, too; what they have started goes with them.
    ended = 0
    while not ended and time.monotonic() < ends:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not ended:
        _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
_LIBRARIES = (
    "numpy", "pandas", "scipy.stats", "scipy.optimize", "pyarrow.parquet", "pyarrow.csv",
    "simpy", "hypothesis", "hypothesis.extra.numpy", "torch", "matplotlib.pyplot",
)  # fmt: skip
_NO_MATTER = {"frozen", "slots", "kw_only", "strict", "maxsize"}  # options that change no figure


class ReplaceByTwin(Operator):
    """A function by the one next to it: max by min, mean by sum, ceil by floor."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Every use of a name that has a twin."""
        if isinstance(node, Name) and node.value in _TWINS and not node.is_definition():
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The node with the other name."""
        node.value = _TWINS[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """None: the table above shows them."""
        return ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one token."""

    operator: Operator
    occurrence: int
    line: int
    what: str


def faults(path: Path, seed: int) -> list[Fault]:
    """All faults worth trying, in random order, but every line once before any line twice."""
    tree = get_ast_from_path(path)
    nodes = list(ast_nodes(tree))
    skipped = _no_behaviour(ast.parse(path.read_text()))
    operators: list[tuple[str, Operator]] = [("ReplaceByTwin", ReplaceByTwin())]
    for name in operator_names():
        short = name.rpartition("/")[2]
        if short in _WHOLE or "_".join(short.split("_")[-2:]) in _SWAPS:
            operators.append((short, get_operator(name)()))
    found: list[Fault] = []
    for name, operator in operators:
        positions = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(positions):
            if (line, column) not in skipped:
                found.append(Fault(operator, occurrence, line, name))
    random.Random(seed).shuffle(found)
    seen: Counter[int] = Counter()
    turns = []
    for fault in found:
        turns.append((seen[fault.line], fault))
        seen[fault.line] += 1
    return [fault for _, fault in sorted(turns, key=lambda turn: turn[0])]


def _no_behaviour(module: ast.Module) -> set[tuple[int, int]]:
    """Positions (line, column) in annotations and in the options of decorators: nothing runs."""
    skipped: set[tuple[int, int]] = set()
    for node in ast.walk(module):
        part: ast.expr | None = None
        if isinstance(node, ast.AnnAssign | ast.arg):
            part = node.annotation
        elif isinstance(node, ast.FunctionDef):
            part = node.returns
        elif isinstance(node, ast.keyword) and node.arg in _NO_MATTER:
            part = node.value
        if part is not None:
            for line in range(part.lineno, (part.end_lineno or part.lineno) + 1):
                first = part.col_offset if line == part.lineno else 0
                last = part.end_col_offset if line == part.end_lineno else None
                skipped.update((line, column) for column in range(first, last or 200))
    return skipped


def tests_of(module: str) -> list[str]:
    """The test files that import the module; where none does, those of its package."""
    package, _, last = module.rpartition(".")
    names = (f"from {module} import", f"import {module}", f"from {package} import {last}")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in files if any(name in path.read_text() for name in names)]
    found.sort(key=lambda path: last not in path.name)  # the first to fail ends the run
    if not found:
        found = sorted((ROOT / "tests" / module.split(".")[0]).rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found]


def main() -> int:
    """Parse, copy, try faults until the time is up, print the table; 1 if any fault survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("module", help="dotted name, as persia_sim.report.report")
    parser.add_argument("--tests", nargs="*", help="test files; default: those that import it")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all faults")
    parser.add_argument("--most", type=int, default=10**9, help="number of faults at most")
    parser.add_argument("--seed", type=int, default=0, help="which faults come first")
    given = parser.parse_args()
    try:
        spec = importlib.util.find_spec(given.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT):
        print(f"error: MODULE is {given.module}: no module of this project", file=sys.stderr)
        return 2
    path = Path(spec.origin).relative_to(ROOT)
    files = given.tests or tests_of(given.module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_of_the_tree(Path(folder))
        with Path(folder, "tests/conftest.py").open("a") as conftest:
            conftest.write(_DO_NOT_SHRINK)
        os.chdir(folder)  # cosmic-ray runs the tests in the present folder
        os.environ["PYTHONPATH"] = folder
        return try_faults(given.module, path, files, given.seconds, given.most, given.seed)


def _forks(files: list[str]) -> Callable[[float, bool], bool]:
    """Runs the test files in the present folder: whether they pass within so many seconds, and
    whether Python may keep what it compiles meanwhile."""
    command = [sys.executable, "-c", _FORKS.format(libraries=_LIBRARIES)]
    server = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    arguments = f"-x -q --assert=plain -p no:cacheprovider {' '.join(files)}"

    def passes(seconds: float, keeps_compiled: bool) -> bool:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(f"{seconds} {int(keeps_compiled)} {arguments}\n")
        server.stdin.flush()
        return int(server.stdout.readline()) == 0

    return passes


def try_faults(
    module: str, path: Path, files: list[str], seconds: float, most: int, seed: int
) -> int:
    """Try the module's faults in the present folder."""
    where = f"import importlib; print(importlib.import_module({module!r}).__file__)"
    run = subprocess.run([sys.executable, "-c", where], capture_output=True, text=True, check=True)
    if Path(run.stdout.strip()).resolve() != path.resolve():
        print(f"error: tests would import {run.stdout.strip()}, not the copy", file=sys.stderr)
        return 2
    passes = _forks(files)
    for turn in ("compile", "measure"):  # the first run leaves compiled files for all others
        began = time.monotonic()
        passed = passes(math.inf, turn == "compile")
        baseline = time.monotonic() - began
        if not passed:
            words = Path("pytest.log").read_text()[-2000:]
            print(f"error: tests fail without a fault ({turn}):\n{words}", file=sys.stderr)
            return 2
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()  # else a fault of the same second and size would not be read
    found = faults(path, seed)
    print(f"{module}: {len(found)} faults; tests: {' '.join(files)} ({baseline:.1f} s)")
    survivors: list[tuple[Fault, str]] = []
    tried = 0
    began = time.monotonic()
    for fault in found[:most]:
        if time.monotonic() - began > seconds:
            break
        with use_mutation(path, fault.operator, fault.occurrence) as (before, after):
            if after is None or after == before:
                continue
            tried += 1
            survived = passes(10 + 3 * baseline, False)
        if survived:
            changed = zip(before.splitlines(), after.splitlines(), strict=False)
            line = next((new for old, new in changed if old != new), "")
            survivors.append((fault, line.strip()))
            print(f"  survived: line {fault.line:<4} {fault.what:<36} {line.strip()}", flush=True)
    killed = tried - len(survivors)
    print(f"{module}: {killed} of {tried} noticed ({killed / max(tried, 1):.0%}),"
          f" {len(found) - tried} not tried")  # fmt: skip
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
