"""`python -m tests.tree` writes docs/tree.md: every source file with its own first sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREE = ROOT / "docs" / "tree.md"
PACKAGES = ("experiments", "runtime", "persia_sim", "paper_figs")
"""From top to bottom: imports run downwards."""
HEAD = """# Every source file

Written by `python -m tests.tree` from the first sentence of each file; do not edit. Two files of
one name (`.hpp` and `.cpp`) share a line.
"""


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


def tree() -> str:
    """The text of docs/tree.md."""
    parts = [HEAD]
    for folder, files in groupby(sources(), key=lambda file: file.parent):
        parts.append(f"\n## {folder.relative_to(ROOT)}\n")
        for stem, same in groupby(files, key=lambda file: file.stem):
            pair = list(same)
            says = next((s for s in map(sentence, reversed(pair)) if s), "")
            names = ", ".join(f"`{file.name}`" for file in pair)
            parts.append(f"- {names}: {says}")
            assert says, f"{folder / stem} does not say what it is"
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TREE.write_text(tree())
