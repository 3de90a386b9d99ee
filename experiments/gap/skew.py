"""How unevenly ids come: two shares that a reader can measure on data of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from runtime.config import TrainConfig
from runtime.data.batch import Batch

BATCHES = 64
"""Of the start of the stream; shares move little with more."""
HOT = 0.01
"""Share of the distinct ids that count as hot."""


@dataclass(frozen=True, slots=True)
class Skew:
    """Shares between 0 and 1."""

    hot_share: float
    """Of all lookups, those of the most frequent hundredth of the distinct ids."""
    rows_of_the_step_before: float
    """Of the distinct rows of a batch, those that the batch before has written, too: what a lookup
    one step late reads late. Mean over the batches."""


def skew_of(batches: Iterable[Batch]) -> Skew:
    """Counted over the batches; the second share needs two of them, else it is NaN.

    >>> two = [Batch(np.array(ids, np.uint64), None, np.empty((2, 0)), np.zeros((2, 1)))
    ...        for ids in ([1, 2, 1, 3], [1, 4, 1, 5])]
    >>> skew_of(two)
    Skew(hot_share=0.5, rows_of_the_step_before=0.3333333333333333)
    """
    everything: list[np.ndarray] = []
    again: list[float] = []
    before: np.ndarray | None = None
    for batch in batches:
        distinct = np.unique(batch.ids)
        if before is not None and len(distinct):
            again.append(float(np.isin(distinct, before, assume_unique=True).mean()))
        everything.append(batch.ids)
        before = distinct
    _, counts = np.unique(np.concatenate(everything), return_counts=True)
    hot = max(1, round(HOT * len(counts)))
    share = float(np.sort(counts)[-hot:].sum() / counts.sum())
    return Skew(share, float(np.mean(again)) if again else float("nan"))


def skew_of_run(config: TrainConfig) -> Skew:
    """Over the first batches that a run would train on."""
    from runtime.data.open import open_source  # late: torch, pyarrow
    from runtime.rank.feed import training_stream

    data = config.data
    source = open_source(data.name, data.dir, data.rows, keep=True)
    return skew_of(islice(training_stream(config, source), BATCHES))
