"""What is read of a run that a stranger has sent: read, or refused in one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tree import ROOT

CHUNK = 5_000
CHUNKS = [
    pytest.param(n * CHUNK, CHUNK, marks=[pytest.mark.long, pytest.mark.minutes]) for n in range(20)
]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("first", "count"), [(0, 90), pytest.param(90, 270, marks=pytest.mark.long), *CHUNKS]
)
def test_no_input_of_a_fuzzer_ends_the_process_or_takes_its_memory(first, count):
    """Of every file of a run: no signal, no other error, within 2 GiB and 20 s of CPU."""
    words = [sys.executable, "-m", "tests.runtime.fuzz_runs", "1", str(first), str(count)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    last = ended.stdout.rpartition("\r")[2]
    assert ended.returncode == 0, f"status {ended.returncode} at {last}\n{ended.stderr[-2000:]}"
    read, _, refused, _ = last.splitlines()[-1].replace(",", "").split()
    assert int(read) + int(refused) == count and int(read) > count / 50
