"""Every source file of the packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("experiments", "runtime", "persia_sim", "paper_figs")
"""From top to bottom: imports run downwards."""


def sources() -> Iterator[Path]:
    """Python and C++ files of the packages, but for `__init__` and `__main__`."""
    for package in PACKAGES:
        files = [p for p in (ROOT / package).rglob("*") if p.suffix in (".py", ".cpp", ".hpp")]
        named = [p for p in files if not p.stem.startswith("__")]
        yield from sorted(named, key=lambda p: (p.parent, p.name))


@cache
def parsed(file: Path) -> ast.Module:
    """The file as Python reads it, once for all tests of a process; nobody may change it."""
    return ast.parse(file.read_text())
