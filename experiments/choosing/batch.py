"""At which batch a log is trained, and on which window of it, so that its lateness means something.

Lateness counts updates, and an update has as many samples as a batch: a log must have enough
updates for each late one, and enough of them in all, or its gap tells of the start of training
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

UPDATES_PER_LATE = 20
"""Updates that a log must have for each one that rows are late."""
LEAST_UPDATES = 500
"""Updates of a run, where the log has them at the least batch: the shortest stream of the study of
lateness has a few more. A model of fewer has hardly begun to learn, however little is late."""
LEAST_BATCH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is trained for a mode: how many updates its reads miss, of rows and of dense weights."""

    rows_late: int
    dense_late: int

    @property
    def late(self) -> int:
        """The larger of both."""
        return max(self.rows_late, self.dense_late)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is late."""
        return self.late == 0

    @property
    def name(self) -> str:
        """In words, as a line of a study."""
        if self.is_exact:
            return "sync"
        words = [f"rows {self.rows_late} late"] if self.rows_late else []
        words += [f"dense weights {self.dense_late} late"] if self.dense_late else []
        return ", ".join(words)


EXACT = Cell(rows_late=0, dense_late=0)
"""Sync."""


def samples_for(cell: Cell, batch: int = LEAST_BATCH) -> int:
    """Training samples that a cell needs at a batch.

    >>> samples_for(Cell(rows_late=16, dense_late=0))
    40960
    """
    return UPDATES_PER_LATE * cell.late * batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, at which batch, on how many of the last samples."""

    cells: tuple[Cell, ...]
    """The late cells, the least late first."""
    too_late: tuple[Cell, ...]
    """Those for which the log is too short at the least batch."""
    no_time: tuple[Cell, ...]
    """Those that the budget does not hold."""
    batch: int
    samples: int
    """The last of the training part."""


def batch_for(cells: Sequence[Cell], samples: int, of_cluster: int) -> int:
    """The cluster's batch where the log then has 20 updates for each late one, and 500 in all; else
    the largest power of two for which it has, 128 at least.

    >>> cells = [Cell(rows_late=16, dense_late=0)]
    >>> [batch_for(cells, samples, 16_384) for samples in (80_000, 1_100_000, 10_000_000)]
    [128, 2048, 16384]
    """
    late = max([cell.late for cell in cells], default=1)
    most = samples // max(LEAST_UPDATES, UPDATES_PER_LATE * late)
    if most >= of_cluster:
        return of_cluster
    return max(LEAST_BATCH, 1 << max(0, most.bit_length() - 1))


def planned(
    cells: Sequence[Cell],
    samples: int,
    of_cluster: int,
    most_samples: float,
    most_cells: int,
    longest: float = math.inf,
) -> Plan:
    """What a budget and a log hold of the cells that are wanted.

    ``samples``: of the training part; ``of_cluster``: the cluster's batch. ``most_samples``: what
    the budget trains in all runs of a first look together, two seeds of each cell and of sync. The
    log is cut to its last window where it is longer, ``longest`` at most; where even the shortest
    window is too long, the latest cells stay empty.
    """
    late = sorted(
        {cell for cell in cells if not cell.is_exact}, key=lambda c: (c.late, c.rows_late)
    )
    too_late = [cell for cell in late if samples_for(cell) > samples]
    wanted = [cell for cell in late if cell not in too_late]
    no_time = wanted[most_cells:]
    wanted = wanted[:most_cells]

    # A window must hold what its latest cell needs, and what a model needs that learns: leave that
    # cell out until the budget holds it.
    least = min(samples, LEAST_UPDATES * LEAST_BATCH)
    while wanted and (
        samples_for(wanted[-1]) > longest
        or max(least, samples_for(wanted[-1])) * _runs(wanted) > most_samples
    ):
        no_time.insert(0, wanted.pop())
    window = max(UPDATES_PER_LATE * LEAST_BATCH, int(most_samples / _runs(wanted)))
    window = int(min(samples, longest, window))
    return Plan(
        cells=tuple(wanted),
        too_late=tuple(too_late),
        no_time=tuple(no_time),
        batch=batch_for(wanted, window, of_cluster),
        samples=window,
    )


def _runs(cells: Sequence[Cell]) -> int:
    """Runs of the first look."""
    return 2 * (1 + len(cells))
