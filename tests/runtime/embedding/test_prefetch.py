"""Where rows are fetched to is measured once, or said; it changes no byte and no result."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

_LEVEL = "from runtime.embedding.native.extension import native as n; print(n.prefetch_level())"
_BOTH = _LEVEL + "; print(*n.prefetch_probe_ns())"
_ROWS = """
import sys
import numpy as np
from runtime.embedding.native.extension import native
from tests.runtime.embedding.conftest import OneTable
table = OneTable(dim=16)
for step in range(4):
    table.push(table.look_up(np.arange(500) * 7 % 900, step))
sys.stdout.buffer.write(table.store.export()["rows"][1].tobytes())
"""


def run(code: str, level: str | None) -> subprocess.CompletedProcess[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != "PERSIA_PREFETCH"}
    if level is not None:
        environment["PERSIA_PREFETCH"] = level
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)


def test_the_level_that_was_faster_here_is_taken():
    level, times = run(_BOTH, None).stdout.decode().splitlines()
    first, second = (float(word) for word in times.split())
    assert min(first, second) > 0
    assert level == ("l1" if first < 0.95 * second else "l2")


@pytest.mark.parametrize("level", ["l1", "l2"])
def test_a_level_that_is_said_is_not_measured(level):
    said, times = run(_BOTH, level).stdout.decode().splitlines()
    assert said == level
    assert times.split() == ["0.0", "0.0"]


def test_another_word_is_refused_with_what_to_do():
    last = run(_LEVEL, "l3").stderr.decode().splitlines()[-1]
    assert last == (
        "ValueError: PERSIA_PREFETCH must be l1 or l2, got 'l3'; leave it away to let the engine"
        " measure"
    )


def test_both_levels_give_the_same_bytes():
    one, other = (run(_ROWS, level) for level in ("l1", "l2"))
    assert one.stdout == other.stdout, one.stderr
    assert np.frombuffer(one.stdout, np.float32).any()
