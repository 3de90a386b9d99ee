"""Runs the points of a sweep in processes of their own; a killed one loses that point only."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from experiments.gaps import Run, finished
from experiments.kept import say_older, settle_in, sole_writer, surroundings
from experiments.points import Point, expected_samples
from persia_sim.words.files import read_document
from runtime.run.folder import plain

K = TypeVar("K")
FAILED = "failed.txt"
PRELOADED = ["runtime.run.record", "pyarrow.parquet", "pandas"]
"""Imported once and then forked: torch and what a run needs, at seconds a point; pyarrow loads
pandas as soon as it makes an array."""
DISK_FULL_EXIT = 28  # errno.ENOSPC: no sense in starting further points


def print_plan(points: Sequence[Point], root: Path, jobs: int) -> None:
    """What will run, what is done, and where it goes."""
    done = [p for p in points if p.is_done(root)]
    print(
        f"{len(points)} points ({len(done)} done, {len(points) - len(done)} to run),"
        f" {jobs} at a time; results in {root}"
    )
    say_older([_commit_of(p.folder(root)) for p in done])


def print_points(points: Sequence[Point], root: Path) -> None:
    """Each with its folder, and whether it is done."""
    width = max(len(point.label) for point in points)
    for point in points:
        state = "done" if point.is_done(root) else "to run"
        print(f"    {point.label:<{width}} {state:<7} {point.folder(root)}")


MEASURED_STEPS = 30


def minutes_left(points: Sequence[Point], root: Path, jobs: int) -> str:
    """In words, how long the points that are not done will train, as fast as a few steps of the
    first one are now; evaluations come on top."""
    from runtime.run.record import run_into  # late: torch

    if not (left := [point for point in points if not point.is_done(root)]):
        return "nothing is left to run"
    first = left[0].config
    steps = min(MEASURED_STEPS, first.steps or MEASURED_STEPS)
    judged = replace(first.evaluation, evaluate_every_steps=None, stop_after=None, test_rows=64)
    with tempfile.TemporaryDirectory() as folder:
        found = plain(run_into(Path(folder), replace(first, steps=steps, evaluation=judged)))
    rate, rows = found["samples_per_s"] or math.inf, found["data"]["train_rows"] or math.inf
    samples = sum(min(expected_samples(p.config), rows * p.config.data.passes) for p in left)
    took_s = samples / rate / jobs
    told = f"{took_s / 60:,.2g} minutes" if took_s >= 60 else f"{took_s:.0f} s"
    return f"about {told} of training, as {steps} steps of the first point did"


def trained(
    groups: Mapping[K, Sequence[Point]], options: Any, root: Path | None = None
) -> dict[K, list[Run]] | None:
    """The runs of each group: prints the plan, runs what is missing; None of a dry run.

    ``options``: a study's; ``root`` in place of its folder. Errors are those of `run_points`.
    """
    every, root = [p for points in groups.values() for p in points], root or options.out
    print_plan(every, root, options.jobs)
    if options.dry_run:
        return None
    if every:
        run_points(every, root, options.jobs)
    return {key: finished(points, root) for key, points in groups.items()}


def run_points(
    points: Sequence[Point],
    root: Path,
    jobs: int,
    samples_per_point: int | None = None,
    on_result: Callable[[Point], None] | None = None,
) -> None:
    """Run every point that has no summary yet; points of equal config run once.

    ``on_result`` is called with each point that has its summary, as soon as it is there.

    Raises ValueError naming the points that failed, after all others have run; at once, when
    another sweep is writing into ``root``. The progress bar is in points; ``samples_per_point`` (an
    estimate) lets it move within one.
    """
    samples_per_point = samples_per_point or expected_samples(points[0].config)
    with sole_writer(root):
        distinct = list({p.folder(root): p for p in points}.values())
        waiting = [p for p in distinct if not p.is_done(root)]
        completed: list[Path] = []

        def complete(point: Point) -> None:
            completed.append(point.folder(root))
            if on_result is not None:
                on_result(point)

        for point in distinct:
            if point not in waiting:
                complete(point)
        if not waiting:
            return
        already = len(distinct) - len(waiting)
        try:
            why = _carried_out(waiting, already, root, jobs, samples_per_point, complete)
        except KeyboardInterrupt:
            done = sum(p.folder(root) in completed or p.is_done(root) for p in distinct)
            raise KeyboardInterrupt(f"interrupted: {done} of {len(distinct)} points done") from None
        failures = [
            f"  {p.label}: {why.get(number, 'not started')}"
            for number, p in enumerate(waiting)
            if p.folder(root) not in completed
        ]
    if failures:
        told = "\n".join(failures)
        raise ValueError(
            f"{len(failures)} of {len(distinct)} points have no result; the others are kept and a"
            f" second run does only these:\n{told}"
        )


def _commit_of(folder: Path) -> str | None:
    try:
        found = read_document(folder / "env.json")
    except (OSError, ValueError):
        return None
    return found.get("commit") if isinstance(found, dict) else None


def _carried_out(
    waiting: Sequence[Point],
    already: int,
    root: Path,
    jobs: int,
    samples_per_point: int,
    complete: Callable[[Point], None],
) -> dict[int, str]:
    """Starts, watches and reaps a process for each point, until all have ended; says why those, by
    their places, that have none have no result. ``already``: points that have one, for the bar;
    ``complete`` is called with each that has one now."""
    from tqdm import tqdm

    context: ForkServerContext = multiprocessing.get_context("forkserver")
    # The server imports torch once; each point is then a cheap fork of it.
    context.set_forkserver_preload(PRELOADED)
    samples: Any = context.Array("q", len(waiting), lock=False)
    running: dict[int, ForkServerProcess] = {}
    not_started, why = deque(range(len(waiting))), {}
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} points [{elapsed}<{remaining}]"
    total = already + len(waiting)
    with tqdm(total=total, initial=already, desc="training", bar_format=form, disable=None) as bar:
        try:
            while running or not_started:
                while not_started and len(running) < jobs:
                    number = not_started.popleft()
                    point = waiting[number]
                    given = (point, point.folder(root), samples, number, surroundings())
                    process = context.Process(target=_work, args=given, name=point.label)
                    process.start()
                    running[number] = process
                time.sleep(0.1)
                for number in [n for n, process in running.items() if not process.is_alive()]:
                    process = running.pop(number)
                    process.join()
                    samples[number] = samples_per_point
                    if process.exitcode:
                        why[number] = _why(waiting[number].folder(root), process.exitcode)
                    if process.exitcode == DISK_FULL_EXIT:
                        not_started.clear()
                    if waiting[number].is_done(root):
                        complete(waiting[number])
                done = sum(min(1.0, own / samples_per_point) for own in samples)
                bar.n = min(total, already + done)
                bar.refresh()
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.join()
    return why


def _why(folder: Path, code: int) -> str:
    """What a point said whose process ended with this code."""
    if code == DISK_FULL_EXIT:
        return "the disk is full: free some space and run again"
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    failed = folder / FAILED
    return failed.read_text().strip() if failed.is_file() else f"exit code {code}"


def _work(
    point: Point, folder: Path, samples: Any, number: int, environment: Mapping[str, str | None]
) -> None:
    """The body of a point's process."""
    from runtime.checkpoint.whole import complete_checkpoints
    from runtime.run.record import run_into
    from runtime.stop import Ending

    settle_in(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends us

    def count(more: int) -> None:
        samples[number] += more

    try:
        # A killed sweep's process may live a moment longer; it must not write beside this one.
        with sole_writer(folder, wait=True):
            (folder / FAILED).unlink(missing_ok=True)
            resume = bool(complete_checkpoints(folder))
            run_into(folder, point.config, count, resume=resume, ending=Ending(quiet=True))
    except Exception as error:
        if getattr(error, "errno", None) == DISK_FULL_EXIT:
            sys.exit(DISK_FULL_EXIT)
        (folder / FAILED).write_text(f"{error}\n")
        if not isinstance(error, ValueError | OSError):
            (folder / "traceback.txt").write_text(traceback.format_exc())
        sys.exit(1)
