"""The list of studies and how one is started; a study's module is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from experiments.catalogue import BENCHES, STUDIES
from experiments.kept import ensure_writable
from persia_sim.words.rules import refuse_doubled
from runtime.guarded import guarded

RUNS = "runs"
"""No study: what lies in run folders."""


def module_of(name: str) -> str:
    """The module of a study or bench.

    >>> module_of("time-to-auc")
    'experiments.studies.time_to_auc'
    """
    room = "studies" if name in STUDIES else "benching"
    return f"experiments.{room}.{name.replace('-', '_')}"


def main(arguments: Sequence[str]) -> int:
    """Run one study; the exit code is 0, 2 for a mistake or failed points, 130 on Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help", "list"):
        return guarded(_print_list)
    name, rest = arguments[0], list(arguments[1:])
    if name == RUNS:
        return guarded(lambda: _run_folders(rest))
    known = [*STUDIES, *BENCHES, RUNS]
    if name not in known:
        import difflib  # late: only a misspelling needs it

        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        print(f"error: no study {name!r}; {hint}", file=sys.stderr)
        return 2
    return guarded(lambda: _run(name, rest))


def _run(name: str, arguments: list[str]) -> None:
    import tyro

    refuse_doubled(arguments)
    module = importlib.import_module(module_of(name))
    options = tyro.cli(
        module.Options,
        args=arguments,
        prog=f"python -m experiments {name}",
        config=(tyro.conf.EnumChoicesFromValues,),
    )
    if not getattr(options, "dry_run", False):
        ensure_writable(options.out)
    try:
        module.run(options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command does the rest") from None


def _run_folders(arguments: list[str]) -> None:
    from experiments.registry.command import main as run_folders

    refuse_doubled(arguments)
    run_folders(arguments)


def _print_list() -> None:
    everything = STUDIES | BENCHES
    width = max(map(len, everything))
    print("usage: python -m experiments STUDY [options]    (STUDY --help lists them)\n")
    for name, study in everything.items():
        minutes = "any" if study.minutes is None else f"{study.minutes:g}"
        print(f"  {name:<{width}}  {study.says} ({minutes} min on 2 cores)")
    print(f"\n  {RUNS:<{width}}  run folders: list DIR, compare A B, report DIR ({RUNS} --help)")
    sys.stdout.flush()  # here, where a reader that has gone (`| head`) is no error
