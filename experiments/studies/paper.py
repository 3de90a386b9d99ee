"""The paper, reproduced: every piece run, its claims judged, one page about all of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.catalogue import PIECES, Size, Study, chosen
from experiments.options import Planned, default_jobs
from experiments.paper.record import FILE, command, folder_of, is_done, store, write_record
from experiments.result_cache import die_with_the_parent, ends_in_time, sole_writer
from experiments.tables import Column, table, write_csv


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Run what is missing, then write report.html and claims.csv; a failed piece stops no other."""

    size: Size = "quick"
    """quick: under 20 minutes on 2 cores; full: hours."""
    only: tuple[str, ...] = ()
    """These pieces (names of studies), such as demo scale-workers; else all."""
    measurements: Path | None = None
    """Folder, such as examples, with rows*.csv, workloads.csv and systems.csv as of
    `predict-published`; without it that piece is left out."""
    store: bool = False
    """Run nothing: copy the finished tables to docs/results and the pictures to paper_figs/out."""

    def _check(self) -> None:
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
        # Copy what an earlier run left, into the repository.
        if options.store:
            names = store(list(plan), options.out)
            print(f"stored {len(names)} tables: {', '.join(names)}")
            return

        # Run what is missing, then judge the claims by all tables that are there.
        wanted = {piece: plan[piece] for piece in chosen(options.only) if piece in plan}
        failed = run_pieces(wanted, options.size, options.out)
        judged = claims(options.out)
        write_csv(options.out / "claims.csv", claim_records(judged))
        report = Report(
            size=options.size,
            out=options.out,
            plan=plan,
            left_out=left_out,
            failed=failed,
            claims=judged,
        )
        path = write_report(report, options.out / "report.html")

    # The page is there even where pieces failed; the exit code says that they did.
    print(table(judged, CLAIM_COLUMNS))
    print(f"claims: {options.out / 'claims.csv'}\nreport: {path}")
    if failed:
        names = ", ".join(piece.name for piece in failed)
        raise ValueError(
            f"{len(failed)} of {len(wanted)} pieces failed ({names}); the report shows their last"
            " lines, and a second run does only these"
        )


def planned(options: Options) -> tuple[dict[Study, tuple[str, ...]], dict[Study, str]]:
    """The pieces of a report with their arguments, and the others with the reason."""
    plan = {}
    left_out = {}
    for piece in PIECES:
        arguments = piece.arguments(options.size, options.measurements)
        if arguments is not None:
            plan[piece] = arguments
        else:
            left_out[piece] = "it predicts measurements; name their folder with --measurements"
    return plan, left_out


def _plan(plan: dict[Study, tuple[str, ...]], left_out: dict[Study, str], options: Options) -> str:
    wanted = {piece: plan[piece] for piece in chosen(options.only) if piece in plan}
    waiting = missing(wanted, options.out)
    lines = [
        f"  {'to run' if piece in waiting else 'done':<7}"
        f" {piece.minutes_of(options.size):5.1f} min  {command(piece.name, arguments)}"
        for piece, arguments in wanted.items()
    ]
    lines += [f"  left out: {piece.name}: {why}" for piece, why in left_out.items()]
    total = sum(piece.share_of_time(options.size) for piece in waiting)
    head = f"{len(wanted)} pieces, {len(waiting)} to run, some {total:.0f} minutes on 2 cores"
    return "\n".join([f"{head}; results in {options.out}", *lines])


LOG = "piece.log"
SHOWN_LINES = 12
"""Lines of the log of a failed piece, in the report."""
PATIENCE_S = 20.0
"""Seconds until a piece that must end is killed; a study ends its own processes in that time."""
ALMOST = 0.97
"""A bar of a piece that takes longer than was written down waits here."""

Plan = Mapping[Study, Sequence[str]]
"""Piece -> its arguments."""


def missing(plan: Plan, out: Path) -> dict[Study, Sequence[str]]:
    """The pieces that have no result yet with these arguments."""
    return {
        piece: arguments for piece, arguments in plan.items() if not is_done(piece, out, arguments)
    }


def run_pieces(plan: Plan, size: Size, out: Path) -> dict[Study, str]:
    """Run what is missing, as many pieces at a time as there are cores, or one that fills them;
    returns those that failed, with the last lines of each.

    Raises KeyboardInterrupt on Ctrl-C after the running pieces have ended; what they had finished
    is kept by the studies themselves.
    """
    from tqdm import tqdm

    waiting = missing(plan, out)
    done = sum(piece.share_of_time(size) for piece in plan if piece not in waiting)
    total = sum(piece.share_of_time(size) for piece in plan)
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    running: dict[Study, tuple[subprocess.Popen[bytes], float]] = {}
    failed: dict[Study, str] = {}
    with tqdm(
        total=total, initial=done, desc="paper", bar_format=form, smoothing=0, disable=None
    ) as bar:

        def tell(piece: Study, what: str) -> None:
            bar.write(f"{piece.name}: {what}")
            sys.stdout.flush()

        try:
            not_started = dict(waiting)
            while not_started or running:
                # Start pieces while there are cores; one that fills them runs alone.
                while len(running) < default_jobs() and not any(p.fills_cores for p in running):
                    fits = [p for p in not_started if not (p.fills_cores and running)]
                    if not fits:
                        break
                    piece = fits[0]
                    del not_started[piece]
                    running[piece] = _started(piece, waiting[piece], out), time.monotonic()
                    tell(piece, f"started, some {piece.minutes_of(size):g} min")

                # Take note of those that have ended.
                time.sleep(0.1)
                took_s = {p: time.monotonic() - began_s for p, (_, began_s) in running.items()}
                for piece in [p for p in running if running[p][0].poll() is not None]:
                    process, _ = running.pop(piece)
                    done += piece.share_of_time(size)
                    why = _why(piece, process.returncode, waiting[piece], took_s[piece], out)
                    if why:
                        failed[piece] = why
                        tell(piece, f"FAILED; {folder_of(piece, out) / LOG}")
                    else:
                        tell(piece, f"done in {took_s[piece]:.0f} s")

                # The bar moves by the minutes that are written down for each piece.
                bar.set_description_str(", ".join(p.name for p in running) or "paper", False)
                bar.n = done + sum(
                    p.share_of_time(size) * min(ALMOST, took_s[p] / 60 / p.minutes_of(size))
                    for p in running
                )
                bar.refresh()
        finally:
            # Interrupt the pieces that still run, as Ctrl-C does, and kill those that do not end.
            for process, _ in running.values():
                process.send_signal(signal.SIGINT)
            until = time.monotonic() + PATIENCE_S
            for process, _ in running.values():
                ends_in_time(process, max(0.0, until - time.monotonic()))
    return failed


def _started(piece: Study, arguments: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    folder = folder_of(piece, out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (FILE, LOG):
        (folder / name).unlink(missing_ok=True)
    words = [sys.executable, "-u", "-m", "experiments", piece.name, *arguments]
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [*words, "--out", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to hand on
            preexec_fn=die_with_the_parent,
        )


def _why(piece: Study, code: int, arguments: Sequence[str], seconds: float, out: Path) -> str:
    """Why a piece has no result: its last lines; "" where it has one, which is written down."""
    folder = folder_of(piece, out)
    if code == 0:
        try:
            write_record(piece, folder, arguments, seconds)
            return ""
        except OSError as error:
            return f"it ended well, but left no {error.filename}"
    text = (folder / LOG).read_text(errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "\n".join([*lines, f"({end})"])
