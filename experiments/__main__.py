"""The list of studies and how one is started; a study's module is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

from experiments.catalogue import BENCHES, STUDIES
from experiments.result_cache import ensure_writable
from persia_sim.base.command_line import POSITIONAL, read_options
from persia_sim.base.files import interrupts_held
from persia_sim.base.rules import printable
from persia_sim.base.schema import nearest
from runtime.guarded import guarded, run_as_process

RUNS = "runs"
"""Command that is no study: it shows what lies in run folders."""
RUNS_USAGE = """usage: persia-experiments runs COMMAND [options]

  list [DIR]     the runs below a folder: mode, tau, ranks, data, seed, AUC, commit, state
  compare A B    two runs: options, scores, curves, DeLong
"""


def module_of(name: str) -> str:
    """The module of a study or bench.

    >>> module_of("which-mode"), module_of("demo")
    ('experiments.studies.which_mode', 'experiments.studies.sweep')
    """
    if name in STUDIES and STUDIES[name].file:
        return "experiments.studies.sweep"
    room = "studies" if name in STUDIES else "benching"
    return f"experiments.{room}.{name.replace('-', '_')}"


def main(arguments: Sequence[str]) -> int:
    """Run one study; the exit code is 0, 2 for a mistake or failed points, 130 on Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help", "list"):
        return guarded(_print_list)
    name = arguments[0]
    rest = list(arguments[1:])
    if name == RUNS:
        return guarded(lambda: _run_folders(rest))
    names = [*STUDIES, *BENCHES, RUNS]
    if name not in names:
        print(f"error: no study {name!r}; {nearest(name, names)}", file=sys.stderr)
        return 2
    return guarded(lambda: _run(name, rest))


def _run(name: str, arguments: list[str]) -> None:
    with interrupts_held():
        module = importlib.import_module(module_of(name))
    if name in STUDIES and (file := STUDIES[name].file):
        name, arguments = "sweep", [file, *arguments]
    options = read_options(module.Options, arguments, f"persia-experiments {name}")
    if not getattr(options, "dry_run", False):
        ensure_writable(options.out)
    try:
        module.run(options)
    except KeyboardInterrupt as stop:
        rest = "; the same command does the rest"
        raise KeyboardInterrupt((str(stop) or "interrupted") + rest) from None


def _print_list() -> None:
    everything = STUDIES | BENCHES
    width = max(map(len, everything))
    print("usage: persia-experiments STUDY [options]    (STUDY --help lists them)\n")
    for name, study in everything.items():
        took = f" ({study.minutes:g} min on 2 cores)" if study.minutes else ""
        print(f"  {name:<{width}}  {study.says}{took}")
    print(f"\n  {RUNS:<{width}}  run folders: list DIR, compare A B ({RUNS} --help)")
    sys.stdout.flush()  # here, where a reader that has gone (`| head`) is no error


@dataclass(frozen=True, kw_only=True)
class RunsList:
    """The runs below a folder, as a table."""

    folder: Annotated[Path, POSITIONAL] = Path(RUNS)
    """A run, a sweep, or any folder with runs below it."""


@dataclass(frozen=True, kw_only=True)
class RunsCompare:
    """Two runs beside each other."""

    first: Annotated[Path, POSITIONAL]
    """A run: A."""
    second: Annotated[Path, POSITIONAL]
    """Another: B."""


RUNS_COMMANDS: dict[str, tuple[type[Any], str, str]] = {
    "list": (RunsList, "runs", "listing"),
    "compare": (RunsCompare, "compare", "comparison"),
}
"""By command: its options, and the function that takes their fields: its module in
experiments/registry, and its name."""


def _run_folders(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(RUNS_USAGE, end="")
        return
    name, *words = arguments
    if name not in RUNS_COMMANDS:
        raise ValueError(f"runs has no command {name!r}; choose one of {', '.join(RUNS_COMMANDS)}")
    kind, module, function = RUNS_COMMANDS[name]
    options = read_options(kind, words, f"persia-experiments runs {name}")
    carry_out = getattr(importlib.import_module(f"experiments.registry.{module}"), function)
    result = carry_out(*(getattr(options, field.name) for field in fields(options)))
    print(printable(str(result), keep="\n"))


def run() -> NoReturn:
    """Carry out the command line and end the process; the console script calls this too."""
    run_as_process(main)


if __name__ == "__main__":
    run()
