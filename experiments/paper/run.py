"""Runs the pieces that are missing, each as its own command in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.catalogue import Size, Study
from experiments.options import default_jobs
from experiments.paper.record import FILE, folder_of, is_done, keep
from experiments.processes import die_with_the_parent

LOG = "piece.log"
SHOWN_LINES = 12
"""Of the log of a failed piece, in the report."""
PATIENCE_S = 20.0
"""Until a piece that was asked to end is killed; a study ends its own processes in that time."""
ALMOST = 0.97
"""A bar of a piece that takes longer than was written down waits here."""

Plan = Mapping[Study, Sequence[str]]
"""Piece -> its arguments."""


def missing(plan: Plan, out: Path) -> dict[Study, Sequence[str]]:
    """What a run has to do."""
    return {piece: own for piece, own in plan.items() if not is_done(piece, out, own)}


def run_pieces(plan: Plan, size: Size, out: Path) -> dict[Study, str]:
    """Run what is missing; returns the pieces that failed, with the last lines of each.

    Raises KeyboardInterrupt on Ctrl-C after the running pieces have ended; what they had finished
    is kept by the studies themselves.
    """
    from tqdm import tqdm

    waiting = missing(plan, out)
    total = sum(piece.share_of_time(size) for piece in plan)
    done = total - sum(piece.share_of_time(size) for piece in waiting)
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(
        total=total, initial=done, desc="paper", bar_format=form, smoothing=0, disable=None
    ) as bar:
        return _Runner(waiting, size, out, bar, done).run()


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    piece: Study
    arguments: Sequence[str]
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.started


class _Runner:
    """Starts and reaps; as many pieces at a time as there are cores, or one that fills them."""

    def __init__(self, waiting: Plan, size: Size, out: Path, bar: Any, done: float) -> None:
        self._waiting, self._size, self._out = dict(waiting), size, out
        self._bar, self._done = bar, done
        self._running: list[_Running] = []
        self._failed: dict[Study, str] = {}
        self._cores = default_jobs()

    def run(self) -> dict[Study, str]:
        """Until all have ended."""
        try:
            while self._waiting or self._running:
                while (piece := self._next()) is not None:
                    self._start(piece)
                time.sleep(0.1)
                self._reap()
                self._show()
        finally:
            _end([one.process for one in self._running])
        return self._failed

    def _next(self) -> Study | None:
        """The first piece for which there is room."""
        if any(one.piece.fills_cores for one in self._running):
            return None
        room = self._cores - len(self._running)
        fits = (p for p in self._waiting if not (p.fills_cores and self._running))
        return next(fits, None) if room > 0 else None

    def _start(self, piece: Study) -> None:
        arguments = self._waiting.pop(piece)
        folder = folder_of(piece, self._out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(missing_ok=True)
        words = [sys.executable, "-u", "-m", "experiments", piece.name, *arguments]
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [*words, "--out", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to hand on
                preexec_fn=die_with_the_parent,
            )
        self._running.append(_Running(process, piece, arguments))
        self._tell(f"{piece.name}: started, some {piece.minutes_of(self._size):g} min")

    def _reap(self) -> None:
        for one in [r for r in self._running if r.process.poll() is not None]:
            self._running.remove(one)
            self._done += one.piece.share_of_time(self._size)
            why = _why(one, self._out)
            if why:
                self._failed[one.piece] = why
                self._tell(f"{one.piece.name}: FAILED; {folder_of(one.piece, self._out) / LOG}")
            else:
                self._tell(f"{one.piece.name}: done in {one.seconds():.0f} s")

    def _show(self) -> None:
        parts = (
            one.piece.share_of_time(self._size)
            * min(ALMOST, one.seconds() / 60 / one.piece.minutes_of(self._size))
            for one in self._running
        )
        names = ", ".join(one.piece.name for one in self._running)
        self._bar.set_description_str(names or "paper", refresh=False)
        self._bar.n = self._done + sum(parts)
        self._bar.refresh()

    def _tell(self, line: str) -> None:
        self._bar.write(line)
        sys.stdout.flush()


def _why(one: _Running, out: Path) -> str:
    """Why a piece has no result: its last lines; "" where it has one, which is written down."""
    folder, code = folder_of(one.piece, out), one.process.returncode
    if code == 0:
        try:
            keep(one.piece, folder, one.arguments, one.seconds())
            return ""
        except OSError as error:
            return f"it ended well, but left no {error.filename}"
    text = (folder / LOG).read_text(errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "\n".join([*lines, f"({end})"])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the running pieces to end, as Ctrl-C does, and kill those that do not."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
