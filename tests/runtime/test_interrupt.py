"""A run that is stopped by its user, or whose reader goes away, ends quietly and soon."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from runtime.data.commands import listed

LATE = ["--executor", "concurrent", "--mode", "hybrid", "--ranks", "2", "--latency-s", "5"]


@pytest.mark.multiproc
@pytest.mark.parametrize("words", [[], LATE], ids=["lag", "latency"])
def test_ctrl_c_ends_a_run_in_one_line_within_ten_seconds(words, tmp_path):
    # Where a shell runs the tests in the background they ignore Ctrl-C, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime", "train", "--data.name", "synthetic", *words,
         "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)  # into the training itself
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode == 130
    [line] = [line for line in told.splitlines() if line.strip()]
    assert line.startswith("interrupted; ")


@pytest.mark.multiproc
@pytest.mark.parametrize("words", ["data list", "train --help", "--help"])
def test_a_reader_that_goes_away_is_no_error(words):
    """`| head -1`, with a reader that has gone before anything is written."""
    shell = f"set -o pipefail; {sys.executable} -m runtime {words} | true"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.multiproc
def test_the_first_line_of_the_data_sets_can_be_had_alone():
    shell = f"set -o pipefail; {sys.executable} -m runtime data list | head -1"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == listed(None).splitlines()[0] + "\n"
