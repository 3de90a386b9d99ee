"""What a process that works for a study is told of its parent, and that it ends with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from runtime.data.catalogue import CACHE, DATA_DIR_VARIABLE


def computed(
    work: Mapping[str, Callable[[], Any]], jobs: int = 1, preloaded: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Labels with what their work returns, as it comes; with several ``jobs`` in processes of their
    own, for work that can be pickled, by a server that has imported these modules already."""
    if jobs == 1 or len(work) < 2:
        yield from ((label, compute()) for label, compute in work.items())
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    with ProcessPoolExecutor(
        min(jobs, len(work)), context, initializer=settle_in, initargs=(surroundings(),)
    ) as pool:
        running = {pool.submit(compute): label for label, compute in work.items()}
        for job in as_completed(running):
            yield running[job], job.result()


def surroundings() -> dict[str, str | None]:
    """What a point's process must be told of the environment: the server that it is forked from
    keeps that of its own start."""
    return {name: os.environ.get(name) for name in (DATA_DIR_VARIABLE, CACHE)}


def settle_in(environment: Mapping[str, str | None]) -> None:
    """Take over the `surroundings` of whoever started this process, and end with it."""
    die_with_the_parent()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def die_with_the_parent() -> None:
    """A killed sweep must leave no process behind whose work a second run would start again."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    sweep = multiprocessing.parent_process()
    if sweep is not None:  # then the kernel's parent is a server that forks, and outlives the sweep

        def watch() -> None:
            sweep.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="sweep", daemon=True).start()
