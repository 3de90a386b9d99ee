"""The list of studies and how one is started; a study's module is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from experiments.catalogue import BENCHES, STUDIES
from experiments.result_cache import ensure_writable
from persia_sim.base.command_line import read_options
from persia_sim.base.files import interrupts_held
from persia_sim.base.schema import nearest
from runtime.guarded import guarded, run_as_process
from runtime.stop import Ending, Interrupted


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
    """Run one study; the exit code is 0, 2 for a mistake or failed points, 130 on Ctrl-C, 75 where
    another signal has ended it."""
    if not arguments or arguments[0] in ("-h", "--help", "list"):
        return guarded(_print_list)
    name = arguments[0]
    rest = list(arguments[1:])
    names = [*STUDIES, *BENCHES]
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

    # A signal ends it where it is; a short run of this process hears it first.
    ending = Ending(at_once=True)
    rest = f"; what is done is in {options.out}, and the same command does the rest"
    try:
        with ending.listening(), ending.watched():
            module.run(options)
    except Interrupted as stop:
        raise Interrupted(f"interrupted{rest}", stop.by) from None
    except KeyboardInterrupt as stop:
        raise type(stop)(f"{str(stop) or 'interrupted'}{rest}") from None


def _print_list() -> None:
    everything = STUDIES | BENCHES
    width = max(map(len, everything))
    print("usage: persia-experiments STUDY [options]    (STUDY --help lists them)\n")
    for name, study in everything.items():
        took = f" ({study.minutes:g} min on 2 cores)" if study.minutes else ""
        print(f"  {name:<{width}}  {study.says}{took}")
    sys.stdout.flush()  # here, where a reader that has gone (`| head`) is no error


def run() -> NoReturn:
    """Carry out the command line and end the process; the console script calls this too."""
    run_as_process(main)


if __name__ == "__main__":
    run()
