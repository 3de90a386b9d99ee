"""The paper, reproduced: every piece run, then each claim beside what was found."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass

from experiments.catalogue import Size, Study, chosen
from experiments.options import Planned
from experiments.result_cache import die_with_the_parent, ends_in_time, sole_writer

PATIENCE_S = 20.0
"""Seconds until a piece that must end is killed; a study ends its own processes in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Run every piece, then print the claims with their numbers; a failed piece stops no other."""

    size: Size = "quick"
    """quick: under 20 minutes on 2 cores; full: hours."""
    only: tuple[str, ...] = ()
    """These pieces (names of studies), such as demo scale; else all."""

    def _check(self) -> None:
        chosen(self.only)  # names those that it does not know


def run(options: Options) -> None:
    """Run the pieces one after the other, and print the claims. Raises ValueError on failures."""
    from experiments.paper.claims import answers, screen  # late: the runs' file takes a second

    pieces = chosen(options.only)
    if options.dry_run:
        print(_plan(pieces, options))
        return
    with sole_writer(options.out):
        failed = [piece.name for piece in pieces if _run(piece, options) != 0]

    # The claims are there even where pieces failed; the exit code says that they did.
    print(f"\n{screen(answers(options.out))}")
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(pieces)} pieces failed ({', '.join(failed)}); what each said"
            f" stands above, and --only {' '.join(failed)} runs them again"
        )


def _plan(pieces: list[Study], options: Options) -> str:
    total = sum(piece.minutes_of(options.size) for piece in pieces)
    lines = [
        f"  {piece.minutes_of(options.size):5.1f} min  {' '.join(_words(piece, options))}"
        for piece in pieces
    ]
    head = f"{len(pieces)} pieces, some {total:.0f} minutes on 2 cores; results in {options.out}"
    return "\n".join([head, *lines])


def _words(piece: Study, options: Options) -> list[str]:
    """The command of a piece, as a person types it."""
    folder = options.out / piece.name
    return ["persia-experiments", piece.name, *piece.arguments(options.size), "--out", str(folder)]


def _run(piece: Study, options: Options) -> int:
    """The exit code of a piece, in a process of its own; what it prints is shown as it comes.

    A study does only what is missing where it trains, so a second run goes on.
    """
    words = _words(piece, options)
    print(f"\n$ {' '.join(words)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "experiments", *words[1:]],
        start_new_session=True,  # Ctrl-C is ours to hand on, once
        preexec_fn=die_with_the_parent,
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        ends_in_time(process, PATIENCE_S)
        raise
