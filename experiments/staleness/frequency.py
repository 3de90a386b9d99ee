"""How often ids occur; alpha by field; the gap, and missed pushes of a row, by how often it does.

Bins of counts grow by a factor of four. The pushes that reads of a row missed are those of the
recorded order; the model beside them is alpha of a batch times the missed steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.gaps import Setting
from experiments.statistics import contrast, t_interval
from persia_sim.base.trace import ALL, Event, Kind
from persia_sim.theory import convergence as alpha
from persia_sim.theory.convergence import of_batch
from runtime.data.batch import Batch
from runtime.data.ids import VALUE_BITS
from runtime.data.source import Part, Source
from runtime.run.folder import Predictions

BATCHES = (128, 4096)
"""Batches for which alpha is computed: the demo's, and the paper's."""
_LEVELS = (*np.round(np.arange(0.05, 1.0, 0.05), 2).tolist(), 0.99, 0.999, 1.0)
_LEVELS_OF_A_FIELD = (0.5, 0.9, 0.99, 1.0)


def first_samples(source: Source, part: Part, samples: int | None) -> Batch:
    """The first samples of a part as one batch; None: all."""
    parts = []
    left = 2**62 if samples is None else samples
    for chunk in source.chunks(part):
        parts.append(chunk.rows(0, min(left, chunk.size)))
        left -= chunk.size
        if left <= 0:
            break
    return Batch.concat(parts)


def sample_of_each_id(batch: Batch) -> np.ndarray:
    """The number of the sample that each id of the batch belongs to, int64 [N]."""
    if batch.offsets is None:
        return np.repeat(np.arange(batch.size), len(batch.ids) // max(1, batch.size))
    fields = (len(batch.offsets) - 1) // max(1, batch.size)
    return np.repeat(np.arange(batch.size), np.diff(batch.offsets[::fields]))


def frequencies(batch: Batch) -> Any:
    """The number of samples of one batch in which each id stands, once or more: a pandas Series of
    int64 by id, sorted."""
    import pandas as pd  # late: a second to import

    ids, place = np.unique(batch.ids, return_inverse=True)
    if batch.offsets is not None:  # a bag may hold an id twice, and is one sample
        pairs = np.unique(sample_of_each_id(batch) * len(ids) + place)
        place = pairs % len(ids)
    return pd.Series(np.bincount(place, minlength=len(ids)), ids)


def rarest(occurrences: Any, batch: Batch) -> np.ndarray:
    """How often each sample's rarest id occurs by ``occurrences``, int64 [B]; 0 where it has no
    id."""
    least = np.full(batch.size, np.iinfo(np.int64).max)
    np.minimum.at(least, sample_of_each_id(batch), occurrences.reindex(batch.ids, fill_value=0))
    return np.where(least == np.iinfo(np.int64).max, 0, least)


def alpha_lines(name: str, samples: int, _sha256: str = "") -> list[dict[str, Any]]:
    """A line per field and level, over rows and over lookups, of the first training samples.

    A field of one value is a bias, and left out; ``_sha256`` tells an edited file from one kept.
    """
    from runtime.data.open import open_source  # late: a second to import

    # The share of samples that read each row; an id's upper bits are its field.
    source = open_source(name, rows=samples, keep=True)
    counted = first_samples(source, "train", samples)
    occurrences = frequencies(counted)
    shares = occurrences.to_numpy() / counted.size
    fields = source.layout.fields
    owner = (occurrences.index.to_numpy() >> np.uint64(VALUE_BITS)).astype(np.int64)
    varied = np.bincount(owner, minlength=len(fields))[owner] > 1

    lines = []
    for number in (None, *range(len(fields))):
        # All fields together first, then one by one.
        chosen = shares[varied if number is None else varied & (owner == number)]
        if not len(chosen):
            continue

        # Quantiles over rows, and over lookups: a row counts as often as it is read.
        of_rows = alpha.quantiles(chosen, _LEVELS)
        of_lookups = alpha.quantiles(chosen, _LEVELS, chosen)
        for n, level in enumerate(_LEVELS):
            if number is not None and level not in _LEVELS_OF_A_FIELD:
                continue
            in_batches = {
                f"of_lookups_in_batch_{b}": alpha.of_batch(float(of_lookups[n]), b) for b in BATCHES
            }
            lines.append(
                {
                    "data": name,
                    "field": "all" if number is None else fields[number].name,
                    "samples": counted.size,
                    "rows": len(chosen),
                    "level": level,
                    "share_of_rows": float(of_rows[n]),
                    "share_of_lookups": float(of_lookups[n]),
                    **in_batches,
                    "mean_met": alpha.met(chosen),
                }
            )
    return lines


EDGES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 2**62)
"""Counts at which bins begin; 0: the id is in no training sample."""
LEAST_OF_EACH_LABEL = 100
"""Test samples of each label that a bin needs for an AUC."""


def gap_lines(
    predictions: Mapping[tuple[Setting, int], Predictions],
    taus: Sequence[int],
    seeds: int,
    by: str,
    counts: np.ndarray | None,
) -> Iterator[dict[str, Any]]:
    """A line per bound and bin that has enough samples of both labels.

    ``predictions``: by setting and seed, of the same test samples, of which the first task counts.
    ``counts``: [B], by which the samples are binned, or None for one bin of all, and ``by`` is what
    a line calls them. Gaps are hybrid minus sync, paired by seed, their intervals over seeds and
    test samples (user by user), of log-losses over seeds alone.
    """
    from runtime.run.scores import auc, log_loss  # late: sklearn

    # All runs have the same test samples, so labels, users and weights are those of the first.
    first = next(iter(predictions.values()))
    labels = first.labels[:, 0].astype(np.float32)
    scores = {key: test.predictions[:, 0].astype(float) for key, test in predictions.items()}

    edges = EDGES if counts is not None else (EDGES[0], EDGES[-1])
    for low, high in pairwise(edges):
        # The samples of a bin; too few of a label have no AUC that says anything.
        here = ~np.isnan(labels)
        if counts is not None:
            here &= (counts >= low) & (counts < high)
        y = labels[here]
        if min(y.sum(), len(y) - y.sum()) < LEAST_OF_EACH_LABEL:
            continue
        users = None if first.groups is None else first.groups[here]
        w = None if first.weights is None else first.weights[here]

        # Hybrid under each bound against sync, seed by seed.
        for tau in taus:
            sync = [scores[("sync", 0), seed][here] for seed in range(seeds)]
            late = [scores[("hybrid", tau), seed][here] for seed in range(seeds)]
            gap = contrast(y, (sync, late), clusters=users, weights=w)
            losses = ([log_loss(y, one, w) for one in side] for side in (late, sync))
            loss = t_interval(np.subtract(*losses).tolist())
            yield {
                "tau": tau,
                "by": by,
                **_bin(low, high),
                "test_samples": len(y),
                "positives": int(y.sum()),
                "seeds": seeds,
                "auc_sync": float(np.mean([auc(y, one, w) for one in sync])),
                "gap_to_sync": gap.mean,
                "gap_to_sync_half_width_95": gap.half_width,
                "log_loss_gap": loss.mean,
                "log_loss_gap_half_width_95": loss.half_width,
            }


def missed_lines(
    rows: Any, *, tau: int, samples: int, batch: int, missed_steps: float
) -> Iterator[dict[str, Any]]:
    """A line per bin of rows: pushes of a row that a read of it missed, recorded and by the model.

    ``rows``: the table of `row_reads`; ``samples`` and ``batch``: of the run and of a step;
    ``missed_steps``: the mean of its lookups.
    """
    # By the model each missed step pushes the row with the probability that a batch holds it; the
    # sample that reads a row is none of those.
    occurrences, reads, missed = rows.to_numpy().T
    expected = missed_steps * of_batch((occurrences - 1) / (samples - 1), batch)
    for low, high in pairwise(EDGES[1:]):
        here = (occurrences >= low) & (occurrences < high)
        if not here.any():
            continue

        # Means over the reads of the bin's rows.
        yield {
            "tau": tau,
            **_bin(low, high),
            "rows": int(here.sum()),
            "reads": int(reads[here].sum()),
            "missed_pushes": float(missed[here].sum() / reads[here].sum()),
            "missed_pushes_model": float((expected * reads)[here].sum() / reads[here].sum()),
            "missed_steps": missed_steps,
        }


def _bin(low: int, high: int) -> dict[str, Any]:
    return {"count_from": low, "count_below": high if high < EDGES[-1] else math.inf}


def row_reads(
    order: Iterable[Event], batches: Sequence[Batch], bins: int
) -> tuple[Any, np.ndarray]:
    """How rows were read in a run of one rank in barrier mode on one shard; batch s is that of step
    s.

    First a pandas DataFrame by id, sorted: ``occurrences`` (samples' reads of the row, bags that
    hold it twice counted twice), ``reads`` (batches that read it), ``missed`` (pushes of it that
    these reads missed, added up). Then int64 [bins]: reads of any row by how many pushes of it were
    missed; more: the last bin. Raises ValueError for an order of other ranks.
    """
    import pandas as pd  # late: a second to import

    # The distinct rows of each batch, numbered over all batches.
    ids, place = np.unique(np.concatenate([b.ids for b in batches]), return_inverse=True)
    ends = np.cumsum([len(b.ids) for b in batches])
    rows = [np.unique(part) for part in np.split(place, ends[:-1])]

    # Replay the order: a lookup misses the pushes of its rows that are still on their way.
    pending = np.zeros(len(ids), np.int64)
    reads = np.zeros_like(pending)
    missed = np.zeros_like(pending)
    histogram = np.zeros(bins, np.int64)
    for event in order:
        if event.rank not in (0, ALL):
            raise ValueError(f"the order is of several ranks: it has rank {event.rank}")
        if event.kind == Kind.LOOKUP:
            touched = rows[event.step]
            here = pending[touched]
            reads[touched] += 1
            missed[touched] += here
            histogram += np.bincount(np.minimum(here, bins - 1), minlength=bins)
            pending[touched] += 1
        elif event.kind in (Kind.PUSH, Kind.LOST_PUSH):
            pending[rows[event.step]] -= 1

    occurrences = np.bincount(place, minlength=len(ids))
    columns = {"occurrences": occurrences, "reads": reads, "missed": missed}
    return pd.DataFrame(columns, ids), histogram


MEASURES = ("drift", "relative", "predictions")
"""Fields of `drift.Drift` by which losses may be ordered."""


def order_of_losses(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Spearman's rank correlation of each measure with the loss."""
    from scipy.stats import spearmanr  # late: a second to import

    losses = [-float(line["gap_to_sync"]) for line in lines]
    return {
        name: float(spearmanr([float(line[name]) for line in lines], losses).statistic)
        for name in MEASURES
    }
