"""What a process that trains reports to who has started it: how many samples are trained.

On Ray the supervisor gives each rank a pipe. The rank writes a line of JSON into it every
`REPORTED_EVERY_S` while it trains, and one at the end.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.run.training import Training  # loads torch

PIPE = "PERSIA_TESTBED_REPORTS"
"""In the environment, the number of the pipe's descriptor. Without it nothing is reported."""
REPORTED_EVERY_S = 2.0


@contextmanager
def reporting(training: Training, total: int | None = None) -> Iterator[None]:
    """While this process trains, report it to who listens, if anybody does. ``total``: the samples
    that the run will train, where they are known."""
    # Nobody listens to most runs: then nothing is done.
    if PIPE not in os.environ:
        yield
        return
    pipe = int(os.environ[PIPE])
    is_over = threading.Event()

    # Only the leading rank counts the samples of all.
    def report() -> None:
        meter = training.components.meter
        counted = {"samples": meter.samples, "total": total} if training.leads else {}
        os.write(pipe, json.dumps({"trains": True, **counted}).encode() + b"\n")

    # A thread of its own, so that training waits for no reader.
    def report_all() -> None:
        while not is_over.wait(REPORTED_EVERY_S):
            report()
        report()

    thread = threading.Thread(target=report_all, name="reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
    thread.join()
