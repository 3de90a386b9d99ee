"""A run gives back what it opened when it ends: descriptors, threads, processes, segments."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path

import pytest

from runtime import __main__ as commands
from runtime.hosts.wire import segments
from tests.runtime.worlds import on_engine

WORDS = "--data.name synthetic --data.rows 600 --steps 4 --batch 64 --test-rows 100 --ranks 2"
OFTEN = "--checkpoint-every 2 --evaluate-every-steps 2"


def held() -> dict[str, int]:
    """What this process holds of the system; memory files count as segments, too."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the listing's own
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(files),
        "segments": sum("memfd:" in file for file in files),
        "mapped": sum("memfd:" in line for line in Path("/proc/self/maps").open()),
        "threads": threading.active_count(),
        "children": len(children),
    }


@pytest.mark.first_case
@pytest.mark.parametrize("engine", ["constant_lag", "threads", "processes"])
def test_four_runs_leave_as_much_as_one(engine, tmp_path):
    options = on_engine(engine, 2)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    gc.disable()  # what only the collector would give back is still here
    try:
        for number in range(4):
            out = ["--out", str(tmp_path / f"{number}")]
            how = ["--mode", "hybrid", *words, *OFTEN.split()]
            assert commands.main(["train", *WORDS.split(), *how, *out]) == 0
            if number == 0:
                after_one = held()
        assert held() == after_one
    finally:
        gc.enable()


def test_a_run_that_fails_leaves_no_server(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(segments, "room_bytes", lambda: 1000)
    how = ["--executor", "concurrent", "--servers", "2", "--out"]
    gc.disable()
    try:
        for number in range(3):
            assert commands.main(["train", *WORDS.split(), *how, str(tmp_path / f"{number}")]) == 2
            if number == 0:
                after_one = held()
        assert held() == after_one
    finally:
        gc.enable()
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: no room for a segment of 0\.\d MB of shared memory \(0 MB", told)
    assert told.endswith("lower --batch, --tau or --queue-batches, or run with --servers 0")
