"""Runs the points of a sweep in processes of their own; a killed one loses that point only."""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from experiments.gaps import Run, finished
from experiments.points import Point, expected_samples
from experiments.result_cache import say_older, settle_in, sole_writer, surroundings
from persia_sim.base.files import (
    MOST_DOCUMENT_BYTES,
    atomic_write,
    read_document,
    read_regular,
)
from persia_sim.base.rules import counted
from runtime.config import TrainConfig
from runtime.process import fork_server
from runtime.run.folder import plain, take_over_versions, versions
from runtime.stop import Ending

K = TypeVar("K")
FAILED = "failed.txt"
LEFT_OUT = "left out"
"""Why a point has no result that was not to begin."""
PRELOADED = ["runtime.run.record", __name__, "pyarrow.parquet", "pandas"]
"""Imported once and then forked: torch and what a run needs, at seconds a point, and this module,
which starts it; pyarrow loads pandas as soon as it makes an array."""
DISK_FULL_EXIT = 28  # errno.ENOSPC: no sense in starting further points


def print_plan(points: Sequence[Point], root: Path, jobs: int) -> None:
    """Print what will run, what is done, and where it goes."""
    done = [p for p in points if p.is_done(root)]
    print(
        f"{len(points)} points ({len(done)} done, {len(points) - len(done)} to run),"
        f" {jobs} at a time; results in {root}"
    )
    say_older([_commit_of(p.folder(root)) for p in done])


def print_points(points: Sequence[Point], root: Path) -> None:
    """Print each point with its folder, and whether it is done."""
    width = max(len(point.label) for point in points)
    for point in points:
        state = "done" if point.is_done(root) else "to run"
        print(f"    {point.label:<{width}} {state:<7} {point.folder(root)}")


MEASURED_STEPS = 30
START_S = 0.15
"""Seconds that one point takes to start: its process, its data and its folder (source: points of
20 steps took 0.16 s of a core each, all in all; 20 of them, two cores, 2026-11-30)."""


def minutes_left(points: Sequence[Point], root: Path, jobs: int) -> str:
    """In words, how long the points that are not done will train, as fast as a few steps of the
    first one are now; evaluations come on top."""
    left = [point for point in points if not point.is_done(root)]
    if not left:
        return "nothing is left to run"
    speed = measured_speed(left[0].config)

    # A run ends with its data, so a point has no more samples than its passes over them.
    rows = speed.train_rows or math.inf
    samples = sum(min(expected_samples(p.config), rows * p.config.data.epochs) for p in left)

    # All points at that rate, so many at a time.
    expected_s = (samples / speed.samples_per_s + START_S * len(left)) / jobs
    duration = f"{expected_s / 60:,.2g} minutes" if expected_s >= 60 else f"{expected_s:.0f} s"
    return (
        f"about {duration} of training, as {speed.steps} steps of the first point did, and of"
        f" starting {counted(len(left), 'process')}"
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """What a few steps of a run showed."""

    samples_per_s: float
    steps: int
    train_rows: int | None
    """Samples of the training part, where they are counted."""


def measured_speed(config: TrainConfig) -> Speed:
    """How fast a run trains here and now: a few steps of it, with hardly any evaluation."""
    from runtime.run.record import run_into  # late: torch

    steps = min(MEASURED_STEPS, config.steps or MEASURED_STEPS)
    evaluation = replace(
        config.evaluation, evaluate_every_steps=None, stop_after=None, test_rows=64
    )
    with tempfile.TemporaryDirectory() as folder:
        short = replace(config, steps=steps, evaluation=evaluation)
        summary = plain(run_into(Path(folder), short, ending=Ending(quiet=True)))
    rate = summary["samples_per_s"] or math.inf
    return Speed(rate, steps, summary["data"]["train_rows"])


def trained(
    groups: Mapping[K, Sequence[Point]], options: Any, root: Path | None = None
) -> dict[K, list[Run]] | None:
    """The runs of each group: prints the plan, runs what is missing; None of a dry run, which
    prints how long that takes.

    ``options``: a study's; ``root`` in place of its folder. Errors are those of `run_points`.
    """
    root = root or options.out
    all_points = [point for points in groups.values() for point in points]
    print_plan(all_points, root, options.jobs)
    if options.dry_run:
        if all_points:
            print(f"  {minutes_left(all_points, root, options.jobs)}")
        return None
    if all_points:
        run_points(all_points, root, options.jobs)
    return {key: finished(points, root) for key, points in groups.items()}


@dataclass(slots=True)
class Whole:
    """The points of a study that runs them part by part, for one bar over all parts."""

    expected: int
    """Points that are known before; a search may want more."""
    ended: int = 0
    """Points of the parts before that have ended."""


def run_points(
    points: Sequence[Point],
    root: Path,
    jobs: int,
    samples_per_point: int | None = None,
    on_result: Callable[[Point], None] | None = None,
    whole: Whole | None = None,
    begins: Callable[[Point], bool] = lambda point: True,
) -> None:
    """Run every point that has no summary yet; points of equal config run once.

    ``on_result`` is called with each point that has its summary, as soon as it is there.
    ``begins`` is asked before each that has none, in their order: the first that it refuses is left
    out, and all behind it.

    Raises ValueError naming the points that failed, after all others have run; at once, when
    another sweep is writing into ``root``. The progress bar is in points, of the ``whole`` study
    where these are a part of it; ``samples_per_point`` (an estimate) lets it move within one.
    """
    whole = whole or Whole(0)
    samples_per_point = samples_per_point or expected_samples(points[0].config)
    with sole_writer(root):
        # Points of one folder have the same config and data, so one run serves them all.
        distinct = list({p.folder(root): p for p in points}.values())
        waiting = [p for p in distinct if not p.is_done(root)]
        completed: list[Path] = []

        def complete(point: Point) -> None:
            completed.append(point.folder(root))
            if on_result is not None:
                on_result(point)

        # The caller sees results of earlier runs first.
        for point in distinct:
            if point not in waiting:
                complete(point)
        if not waiting:
            return

        # Ctrl-C ends the sweep with a count of what is done: a second run does the rest.
        already = len(distinct) - len(waiting)
        try:
            reasons = _carried_out(
                waiting, already, jobs, samples_per_point, complete, whole, root, begins
            )
        except KeyboardInterrupt as stop:
            done = sum(p.folder(root) in completed or p.is_done(root) for p in distinct)
            raise type(stop)(f"interrupted: {done} of {len(distinct)} points done") from None
        whole.ended += len(distinct)

        failures = [
            f"  {p.label}: {reasons.get(number, 'not started')}"
            for number, p in enumerate(waiting)
            if p.folder(root) not in completed and reasons.get(number) != LEFT_OUT
        ]

    # All others have run by now, so one error can name every point that failed.
    if failures:
        lines = "\n".join(failures)
        raise ValueError(
            f"{len(failures)} of {len(distinct)} points have no result; the others are kept and a"
            f" second run does only these:\n{lines}"
        )


def _commit_of(folder: Path) -> str | None:
    try:
        environment = read_document(folder / "env.json")
    except (OSError, ValueError):
        return None
    return environment.get("commit") if isinstance(environment, dict) else None


def _carried_out(
    waiting: Sequence[Point],
    already: int,
    jobs: int,
    samples_per_point: int,
    complete: Callable[[Point], None],
    whole: Whole,
    root: Path,
    begins: Callable[[Point], bool],
) -> dict[int, str]:
    """Start, watch and reap a process for each point, until all have ended.

    Returns why points have no result, by their places in ``waiting``. ``already``: points that have
    one, for the bar, beside those of the ``whole`` study; ``complete`` is called with each that has
    one now.
    """
    from persia_sim.base.progress import Progress

    # The server imports torch once; each point is then a cheap fork of it.
    context = fork_server(PRELOADED)

    # Every process counts its samples in one place of a shared array, for the bar.
    samples: Any = context.Array("q", len(waiting), lock=False)
    running: dict[int, ForkServerProcess] = {}
    not_started = deque(range(len(waiting)))
    reasons: dict[int, str] = {}

    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} points [{elapsed}<{remaining}]"
    already += whole.ended
    total = max(whole.expected, already + len(waiting))
    with Progress(total=total, initial=already, desc="training", bar_format=form) as bar:
        try:
            while running or not_started:
                # Start points until as many run as may at a time.
                while not_started and len(running) < jobs:
                    if not begins(waiting[not_started[0]]):
                        reasons |= dict.fromkeys(not_started, LEFT_OUT)
                        bar.total = total = total - len(not_started)
                        not_started.clear()
                        break
                    number = not_started.popleft()
                    point = waiting[number]
                    known = surroundings(), versions()
                    arguments = (point, point.folder(root), samples, number, *known)
                    process = context.Process(target=_work, args=arguments, name=point.label)
                    process.start()
                    running[number] = process

                # Take note of those that have ended; on a full disk none is started any more.
                time.sleep(0.1)
                for number in [n for n, process in running.items() if not process.is_alive()]:
                    process = running.pop(number)
                    process.join()
                    samples[number] = samples_per_point
                    if process.exitcode:
                        reasons[number] = _why(waiting[number].folder(root), process.exitcode)
                    if process.exitcode == DISK_FULL_EXIT:
                        not_started.clear()
                    if waiting[number].is_done(root):
                        complete(waiting[number])

                # The bar moves within a point, too.
                done = sum(min(1.0, count / samples_per_point) for count in samples)
                bar.n = min(total, already + done)
                bar.refresh()
        finally:
            # Whatever ended the sweep, no process outlives it.
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.join()
    return reasons


def _why(folder: Path, code: int) -> str:
    """The reason why a point has no result whose process ended with this code."""
    if code == DISK_FULL_EXIT:
        return "the disk is full: free some space and run again"
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    return words_of_failure(folder) or f"exit code {code}"


def words_of_failure(folder: Path) -> str | None:
    """What a failed point has written down; None of any other. Raises OSError or ValueError for
    what no point writes there."""
    try:
        content = read_regular(folder / FAILED, MOST_DOCUMENT_BYTES)
    except FileNotFoundError:
        return None
    return content.decode(errors="replace").strip()


def _work(
    point: Point,
    folder: Path,
    samples: Any,
    number: int,
    environment: Mapping[str, str | None],
    known: Mapping[str, Any],
) -> None:
    """Run one point: the body of its process."""
    from runtime.checkpoint.places import complete_checkpoints
    from runtime.run.record import run_into

    # The parent hears Ctrl-C and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle_in(environment)
    take_over_versions(known)

    def count(more: int) -> None:
        samples[number] += more

    try:
        # A killed sweep's process may live a moment longer; it must not write beside this one.
        with sole_writer(folder, wait=True):
            (folder / FAILED).unlink(missing_ok=True)
            resume = bool(complete_checkpoints(folder))
            run_into(folder, point.config, count, resume=resume, ending=Ending(quiet=True))
    except Exception as error:
        # The sweep reads the sentence from the folder; a defect leaves its traceback beside it.
        if getattr(error, "errno", None) == DISK_FULL_EXIT:
            sys.exit(DISK_FULL_EXIT)
        texts = {FAILED: f"{error}\n"}
        if not isinstance(error, ValueError | OSError):
            texts["traceback.txt"] = traceback.format_exc()
        for name, text in texts.items():
            with atomic_write(folder / name) as file:  # a link in its place is not followed
                file.write(text.encode())
        sys.exit(1)
