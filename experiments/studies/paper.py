"""The paper, reproduced: every piece run, its claims judged, one page about all of it."""

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

from experiments.catalogue import PIECES, Size, Study, chosen
from experiments.kept import die_with_the_parent, sole_writer
from experiments.options import Planned, default_jobs
from experiments.paper.record import FILE, command, folder_of, is_done, keep, store
from experiments.tables import Column, table, write_csv


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Run what is missing, then write report.html and claims.csv; a failed piece stops no other."""

    size: Size = "quick"
    """quick: under 20 minutes on 2 cores; full: hours."""
    only: tuple[str, ...] = ()
    """These pieces (names of studies); else all."""
    measurements: Path | None = None
    """Folder with rows*.csv, workloads.csv and systems.csv as of `predict-published`; without it
    that piece is left out."""
    store: bool = False
    """Run nothing: copy the finished tables to docs/results and the pictures to paper_figs/out."""

    def check(self) -> None:
        """That the pieces are known, with what they read."""
        for piece in chosen(self.only):
            piece.arguments(self.size, self.measurements)  # names what the folder lacks
        if self.store and self.dry_run:
            raise ValueError("store and dry_run contradict each other; give one of them")


CLAIM_COLUMNS: dict[str, Column] = {
    "claim": "{says}",
    "own plots": lambda claim: claim.plots_verdict.short,
    "independent evidence here": lambda claim: claim.verdict.short,
}


def run(options: Options) -> None:
    """Run the missing pieces, judge the claims, write the page. Raises ValueError on failures."""
    from experiments.paper.claims import claim_records, claims
    from experiments.paper.page import Report, write_report

    plan, left_out = planned(options)
    if options.dry_run:
        print(_plan(plan, left_out, options))
        return
    with sole_writer(options.out):
        if options.store:
            names = store(list(plan), options.out)
            print(f"stored {len(names)} tables: {', '.join(names)}")
            return
        asked = {piece: plan[piece] for piece in chosen(options.only) if piece in plan}
        failed = run_pieces(asked, options.size, options.out)
        found = claims(options.out)
        write_csv(options.out / "claims.csv", claim_records(found))
        report = Report(
            size=options.size,
            out=options.out,
            plan=plan,
            left_out=left_out,
            failed=failed,
            claims=found,
        )
        path = write_report(report, options.out / "report.html")
    print(table(found, CLAIM_COLUMNS))
    print(f"claims: {options.out / 'claims.csv'}\nreport: {path}")
    if failed:
        names = ", ".join(piece.name for piece in failed)
        raise ValueError(
            f"{len(failed)} of {len(asked)} pieces failed ({names}); the report shows their last"
            " lines, and a second run does only these"
        )


def planned(options: Options) -> tuple[dict[Study, tuple[str, ...]], dict[Study, str]]:
    """The pieces of a report with their arguments, and the others with the reason."""
    plan, left_out = {}, {}
    for piece in PIECES:
        own = piece.arguments(options.size, options.measurements)
        if own is not None:
            plan[piece] = own
        else:
            left_out[piece] = "it predicts measurements; name their folder with --measurements"
    return plan, left_out


def _plan(plan: dict[Study, tuple[str, ...]], left_out: dict[Study, str], options: Options) -> str:
    asked = {piece: plan[piece] for piece in chosen(options.only) if piece in plan}
    waiting = missing(asked, options.out)
    lines = [
        f"  {'to run' if piece in waiting else 'done':<7}"
        f" {piece.minutes_of(options.size):5.1f} min  {command(piece.name, own)}"
        for piece, own in asked.items()
    ]
    lines += [f"  left out: {piece.name}: {why}" for piece, why in left_out.items()]
    total = sum(piece.share_of_time(options.size) for piece in waiting)
    head = f"{len(asked)} pieces, {len(waiting)} to run, some {total:.0f} minutes on 2 cores"
    return "\n".join([f"{head}; results in {options.out}", *lines])


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
