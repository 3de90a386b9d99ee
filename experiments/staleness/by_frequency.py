"""The gap by how often the ids of a sample occur, and missed pushes of a row by how often it does.

Bins of counts grow by a factor of four. The pushes that reads of a row missed are those of the
recorded order; the model beside them is alpha of a batch times the missed steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.gaps import Setting
from experiments.staleness.missed import RowReads
from experiments.statistics import t_interval
from persia_sim.theory.alpha import of_batch

EDGES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 2**62)
"""Counts at which bins begin; 0: the id is in no training sample."""
LEAST_OF_EACH_LABEL = 100
"""Test samples of each label that a bin needs for an AUC."""

Scores = Mapping[tuple[Setting, int], np.ndarray]
"""float [B] by setting and seed: predictions of the first task on the same test samples."""


def gap_lines(
    labels: np.ndarray,
    scores: Scores,
    taus: Sequence[int],
    seeds: int,
    by: str,
    counts: np.ndarray | None,
) -> Iterator[dict[str, Any]]:
    """A line per bound and bin that has enough samples of both labels.

    ``labels``: [B]; ``counts``: [B], by which the samples are binned, or None for one bin of all,
    and ``by`` is what a line calls them. Gaps are hybrid minus sync, paired by seed.
    """
    from runtime.run.scores import auc, log_loss  # late: sklearn

    edges = EDGES if counts is not None else (EDGES[0], EDGES[-1])
    for low, high in pairwise(edges):
        here = slice(None) if counts is None else (counts >= low) & (counts < high)
        own = labels[here]
        if min(own.sum(), len(own) - own.sum()) < LEAST_OF_EACH_LABEL:
            continue
        for tau in taus:
            aucs, gaps, losses = [], [], []
            for seed in range(seeds):
                fresh = scores[("sync", 0), seed][here]
                late = scores[("hybrid", tau), seed][here]
                aucs.append(auc(own, fresh))
                gaps.append(auc(own, late) - aucs[-1])
                losses.append(log_loss(own, late) - log_loss(own, fresh))
            gap, loss = t_interval(gaps), t_interval(losses)
            yield {
                "tau": tau,
                "by": by,
                **_bin(low, high),
                "test_samples": len(own),
                "positives": int(own.sum()),
                "seeds": seeds,
                "auc_sync": float(np.mean(aucs)),
                "gap_to_sync": gap.mean,
                "gap_to_sync_half_width_95": gap.half_width,
                "log_loss_gap": loss.mean,
                "log_loss_gap_half_width_95": loss.half_width,
            }


def missed_lines(
    read: RowReads, *, tau: int, samples: int, batch: int, missed_steps: float
) -> Iterator[dict[str, Any]]:
    """A line per bin of rows: pushes of a row that a read of it missed, recorded and by the model.

    ``samples`` and ``batch``: of the run and of a step; ``missed_steps``: the mean of its lookups.
    """
    # Of the other samples: the one that reads a row is no push that it could have missed.
    others = (read.occurrences - 1) / (samples - 1)
    expected = missed_steps * of_batch(others, batch)
    for low, high in pairwise(EDGES[1:]):
        here = (read.occurrences >= low) & (read.occurrences < high)
        if not here.any():
            continue
        reads = read.reads[here]
        yield {
            "tau": tau,
            **_bin(low, high),
            "rows": int(here.sum()),
            "reads": int(reads.sum()),
            "missed_pushes": float(read.missed[here].sum() / reads.sum()),
            "missed_pushes_model": float((expected[here] * reads).sum() / reads.sum()),
            "missed_steps": missed_steps,
        }


def _bin(low: int, high: int) -> dict[str, Any]:
    return {"count_from": low, "count_below": high if high < EDGES[-1] else math.inf}
