"""A world in which a row's value tells how many pushes were applied to it (law 13).

Every rank's batch holds every id once (in async, whose batches are as large as those of all ranks,
once for each rank), and the gradient of each row is 1 whatever the label. A row that starts at 0
and moves by `RATE` for each sample stands at ``-RATE * samples``, exactly, because the rate is a
power of two.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from persia_sim.words.files import atomic_write

RATE = 2.0**-6
IDS = 64
"""Rows, and samples of a rank's batch."""
EVALUATED_BATCHES = 3
"""Of an evaluation, so that one can be killed between two of them."""
TEST_ROWS = EVALUATED_BATCHES * 8192


def write_world(folder: Path, batches: int, seed: int = 0) -> Path:
    """Write the clicks of so many batches of `IDS` samples, and their schema, whose path it is."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    ids = np.concatenate([draw.permutation(IDS) for _ in range(batches)])
    lines = ["user,part,clicked"]
    lines += [f"u{i},train,{c}" for i, c in zip(ids, draw.integers(0, 2, len(ids)), strict=True)]
    lines += [f"u{k % IDS},test,{k % 2}" for k in range(TEST_ROWS)]
    with atomic_write(folder / "clicks.csv") as file:
        file.write("\n".join(lines).encode() + b"\n")
    schema = folder / "clicks.toml"
    with atomic_write(schema) as file:
        file.write(
            b'name = "counting"\nfile = "clicks.csv"\nlabels = ["clicked"]\n'
            b'split = { column = "part", test_equals = "test" }\n\n[[columns]]\nname = "user"\n'
        )
    return schema


def samples_applied(values: np.ndarray) -> np.ndarray:
    """int64 [U]: how many samples' gradients each row has had, from its value [U, d].

    Raises ValueError when the elements of a row differ, or are no whole number of samples: then a
    push was applied in part.
    """
    counts = -np.asarray(values, np.float64) / RATE
    whole = np.rint(counts)
    if (whole != counts).any() or (whole != whole[:, :1]).any():
        row = int(np.flatnonzero((whole != counts).any(1) | (whole != whole[:, :1]).any(1))[0])
        raise ValueError(f"row {row} stands at {values[row]}: a push was applied in part")
    return whole[:, 0].astype(np.int64)
