"""The commands of `persia-runtime`; heavy imports wait until a command needs them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from persia_sim.base.files import interrupts_held
from persia_sim.base.schema import nearest
from runtime.guarded import guarded, run_as_process

USAGE = """usage: persia-runtime COMMAND [options]

  train      train one model and write its run folder     (train --help all: every option)
  evaluate   judge a trained model again, on its test part or on other data
  predict    score the rows of a table with a trained model
  export     write a trained model as files: rows as parquet, the network as data
  serve      start embedding servers on this host for runs of other hosts
  resize     have a run that is under way go on with another number of embedding servers
  profile    measure what each stage costs here, for the simulator
  describe   write a run's model and data as a file for the simulator
  data list  the data sets, and where each was found
  data schema, data check   guess what a table's columns are; hold a table against its schema
  data get   download a data set from its publisher

  persia-experiments list shows the studies built on this; the README tells the words.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; the exit code is 0, 2 for a mistake of the user, 130 after Ctrl-C, 75 for a
    run that a signal has ended and that can be started again, and 3 for a trained model that was to
    be kept and could not be written."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return guarded(lambda: print(USAGE, end=""))
    name = arguments[0]
    rest = list(arguments[1:])
    if name == "--version":
        print(f"persia-testbed {_version()}")
        return 0
    if name not in COMMANDS:
        print(f"error: no command {name!r}; {nearest(name, COMMANDS)}", file=sys.stderr)
        return 2

    if name in LOAD_TORCH and sys.stderr.isatty() and not {"-h", "--help"} & set(rest):
        print("loading torch", file=sys.stderr, flush=True)  # seconds, and nothing else is said
    return guarded(lambda: _carry_out(COMMANDS[name], rest))


def _carry_out(command: str, arguments: list[str]) -> None:
    module, function = command.split(":")
    with interrupts_held():
        carry_out = getattr(importlib.import_module(f"runtime.{module}"), function)
    carry_out(arguments)


def _version() -> str:
    from importlib import metadata  # late: only --version needs it

    try:
        return metadata.version("persia-testbed")
    except metadata.PackageNotFoundError:
        return "(not installed: runs from its source folder)"


COMMANDS = {
    "train": "train_command:run_command",
    "evaluate": "model_commands:evaluate",
    "predict": "model_commands:predict",
    "export": "model_commands:export",
    "serve": "hosts.launch.hosts:run",
    "resize": "hosts.resize:resize",
    "profile": "profiling.command:profile",
    "describe": "describe_command:describe",
    "data": "preparing.download:run",
}
"""Module and function of each."""
LOAD_TORCH = {"train", "evaluate", "predict", "export", "profile", "describe"}


def run() -> NoReturn:
    """Carry out the command line and end the process; the console script calls this too."""
    run_as_process(main)


if __name__ == "__main__":
    run()
