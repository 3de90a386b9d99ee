"""`python -m experiments runs`: list run folders, compare two, make a page about one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tyro
from tyro.conf import Positional

from persia_sim.words.rules import printable

USAGE = """usage: python -m experiments runs COMMAND [options]

  list [DIR]     the runs below a folder: mode, tau, ranks, data, seed, AUC, commit, state
  compare A B    two runs, or two sweeps paired by seed: options, scores, curves, DeLong
  report DIR     a page about one run or sweep, in one file
"""


def main(arguments: list[str]) -> None:
    """Carry out one of them. Raises ValueError for a mistake of the user."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"runs has no command {name!r}; choose one of {', '.join(COMMANDS)}")
    work = tyro.cli(COMMANDS[name], args=rest, prog=f"python -m experiments runs {name}")
    print(printable(work(), keep="\n"))


Work = Callable[[], object]
"""What remains once the words are understood; what it returns is printed."""


def _list(folder: Positional[Path] = Path("runs")) -> Work:
    """The runs below a folder, as a table.

    Args:
        folder: A run, a sweep, or any folder with runs below it.
    """
    from experiments.registry.runs import listing

    return lambda: listing(folder)


def _compare(first: Positional[Path], second: Positional[Path]) -> Work:
    """Two runs beside each other, or two sweeps paired by seed.

    Args:
        first: A run or a sweep: A.
        second: Another of the same kind: B.
    """
    from experiments.registry.compare import comparison  # late: numpy

    return lambda: comparison(first, second)


def _report(folder: Positional[Path], out: Path | None = None) -> Work:
    """One run or sweep as a page in one file.

    Args:
        folder: A run or a sweep.
        out: File to write; else report.html in the folder.
    """
    from experiments.registry.report import write_page  # late: numpy

    return lambda: write_page(folder, out or folder / "report.html")


COMMANDS: dict[str, Callable[..., Work]] = {"list": _list, "compare": _compare, "report": _report}
