"""Every source file of the packages, and what it says of itself."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
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


def copy_of_the_tree(place: Path) -> None:
    """Every file that git knows or would take, and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    names = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    for name in names:
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    kernels = importlib.util.find_spec("runtime.embedding.native._kernels")
    if kernels is not None and kernels.origin is not None:  # an install in place has them elsewhere
        shutil.copy2(kernels.origin, place / "runtime" / "embedding" / "native")
    # An editable install would import the original instead of the copy.
    (place / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]\n"
    )
