"""Every source file of the packages, and what it says of itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def sentence(file: Path) -> str:
    """What a file says of itself: its first paragraph, as one line; empty where it says nothing."""
    text = file.read_text()
    if file.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = text.splitlines()
        count = next((n for n, line in enumerate(lines) if not line.startswith("//")), len(lines))
        words = "\n".join(line.removeprefix("//").strip() for line in lines[:count])
    return " ".join(words.split("\n\n")[0].split())
