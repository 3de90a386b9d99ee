"""A copy of the tree to put faults into."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
