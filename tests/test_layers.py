"""Imports run one way: persia_sim <- runtime <- experiments; paper_figs imports none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "persia_sim": {"torch", "runtime", "experiments", "paper_figs"},
    "runtime": {"simpy", "experiments", "paper_figs"},
    "experiments": set(),
    "paper_figs": {"torch", "simpy", "persia_sim", "runtime", "experiments"},
}


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_layer_imports_only_what_lies_below(package):
    for file in (ROOT / package).rglob("*.py"):
        wrong = imports_of(file) & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import persia_sim, persia_sim.window, persia_sim.orders", "simpy torch pandas"),
        ("import runtime, runtime.config", "torch pandas simpy"),
        ("import runtime.training.concurrent, runtime.record", "simpy pandas"),
    ],
)
def test_importing_loads_nothing_of_these(statement, absent):
    probe = f"import sys; {statement}; print(sorted(set({absent.split()!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
