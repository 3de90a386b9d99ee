"""The command `persia-sim` and those behind it: sharded, calibrate, size, init, lists of names."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persia_sim.base.command_line import read_options
from persia_sim.base.files import (
    MORE_FILES,
    NO_FOLDER,
    TOO_MANY_OPEN,
    flush_output,
    interrupts_held,
    usual_streams,
)
from persia_sim.base.rules import left_out, printable, require
from persia_sim.base.vocabulary import with_unbounded
from persia_sim.cli import SimulateOptions, run

_INIT_USAGE = """usage: persia-sim init [FOLDER]

Write commented examples of the files that describe clusters, workloads and models (TOML) into
FOLDER (default: the current one). A file that is there is left as it is, and the command ends."""


def main() -> int:
    """Parse, simulate, print; a user's mistake is one line on stderr."""
    usual_streams()

    # A folder that was removed gives no relative paths.
    try:
        os.getcwd()
    except FileNotFoundError:
        print(f"error: {NO_FOLDER}", file=sys.stderr)
        return 2
    try:
        print(printable(_answer(sys.argv[1:]), keep="\n"), flush=True)

    # Mistakes of users are a sentence, never a traceback.
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `| head` does
        os._exit(0)  # and nothing is left to be flushed
    except ValueError as error:
        print(f"error: {printable(error, keep=chr(10))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (reason := left_out(error)) is None:
            raise
        print(f"error: {reason}", file=sys.stderr)
        return 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space and run again" if full else "name another place"
        remedy = MORE_FILES if error.errno in TOO_MANY_OPEN else remedy
        where = f"{error.filename}: " if error.filename else ""
        print(printable(f"error: {where}{error.strerror or error}; {remedy}"), file=sys.stderr)
        flush_output()  # if it was this that the disk did not take
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


def load_numpy_random() -> None:
    """Import `numpy.random`, which every run needs; its compiled modules would swallow a Ctrl-C."""
    with interrupts_held():
        import numpy.random  # noqa: F401


_LISTS = "machines", "clusters", "workloads"


def _listed(what: str, words: list[str]) -> str:
    """The names of a kind that files and options accept."""
    from persia_sim.cli import listing

    answers: dict[str, tuple[type, Callable[[Any], str]]] = {
        "machines": (listing.MachineOptions, listing.listed_machines),
        "clusters": (listing.ClusterOptions, listing.listed_clusters),
        "workloads": (listing.WorkloadOptions, listing.listed_workloads),
    }
    record, answer = answers[what]
    words = words[1:] if words[:1] == ["list"] else words
    return answer(read_options(record, words, f"persia-sim {what} list"))


def _answer(words: list[str]) -> str:
    # `init` writes examples, other commands and lists have options; all else is a scenario.
    if words[:1] == ["init"]:
        if {"-h", "--help"} & set(words):
            return _INIT_USAGE
        from persia_sim.cli.example import write_examples  # parses sources: only here

        takes = "it takes one folder, or none"
        for word in words[1:]:
            if word.startswith("-"):
                raise ValueError(f"init has no option {word}: {takes}")
        if len(words) > 2:
            raise ValueError(f"init is given {words[1:]}: {takes}")
        if words[1:] == [""]:
            raise ValueError("init is given an empty name: name a folder, or leave it out")
        paths = write_examples(Path(words[1] if words[1:] else "."))
        return f"wrote {', '.join(map(str, paths))}; edit and name them"
    if words[:1] == ["sharded"]:
        from persia_sim.sharded.command import ShardedOptions, run_sharded

        sharded = read_options(ShardedOptions, words[1:], "persia-sim sharded")
        load_numpy_random()
        return run_sharded(sharded)
    if words[:1] == ["calibrate"]:
        from persia_sim.sharded.calibrate_command import CalibrateOptions, run_calibrate

        return run_calibrate(read_options(CalibrateOptions, words[1:], "persia-sim calibrate"))
    if words[:1] == ["size"]:
        from persia_sim.sharded.size_command import SizeOptions, run_size

        size = read_options(SizeOptions, words[1:], "persia-sim size")
        load_numpy_random()
        return run_size(size)
    if words[:1] and words[0] in _LISTS:
        return _listed(words[0], words[1:])

    # The scenario: a tau that is typed where the mode reads none was not meant.
    words = with_unbounded(words)
    options = read_options(SimulateOptions, words, "persia-sim")
    tau = next((word for word in words if word.split("=")[0] == "--tau"), None)
    late = options.mode.reads_late_rows
    rule = f"{options.mode} does not read it"
    require(tau is None or late or options.tau == 0, "tau", options.tau, rule, "drop it")
    load_numpy_random()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
