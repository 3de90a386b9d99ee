"""`python -m experiments runs`: list run folders, compare two, make a page about one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tyro

from persia_sim.words.rules import printable

USAGE = """usage: python -m experiments runs COMMAND [options]

  list [DIR]     the runs below a folder: mode, tau, ranks, data, seed, AUC, commit, state
  compare A B    two runs, or two sweeps paired by seed: options, scores, curves, DeLong
  report DIR     a page about one run or sweep, in one file
"""
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class List:
    """The runs below a folder, as a table."""

    folder: tyro.conf.Positional[Path] = Path("runs")
    """A run, a sweep, or any folder with runs below it."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Two runs beside each other, or two sweeps paired by seed."""

    first: tyro.conf.Positional[Path]
    """A run or a sweep: A."""
    second: tyro.conf.Positional[Path]
    """Another of the same kind: B."""


@dataclass(frozen=True, slots=True)
class Page:
    """One run or sweep as a page in one file."""

    folder: tyro.conf.Positional[Path]
    """A run or a sweep."""
    out: Path | None = None
    """File to write; else report.html in the folder."""


def main(arguments: list[str]) -> None:
    """Carry out one of them. Raises ValueError for a mistake of the user."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"runs has no command {name!r}; choose one of {', '.join(COMMANDS)}")
    COMMANDS[name](rest)


def _parsed(kind: type[Options], name: str, arguments: list[str]) -> Options:
    return tyro.cli(kind, args=arguments, prog=f"python -m experiments runs {name}")


def _list(arguments: list[str]) -> None:
    from experiments.registry.runs import listing

    print(printable(listing(_parsed(List, "list", arguments).folder), keep="\n"))


def _compare(arguments: list[str]) -> None:
    options = _parsed(Compare, "compare", arguments)
    from experiments.registry.compare import comparison  # late: numpy

    print(printable(comparison(options.first, options.second), keep="\n"))


def _report(arguments: list[str]) -> None:
    options = _parsed(Page, "report", arguments)
    from experiments.registry.report import write_page  # late: numpy

    print(write_page(options.folder, options.out or options.folder / "report.html"))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "list": _list,
    "compare": _compare,
    "report": _report,
}
