"""alpha, the share of samples that read a row: of batches, and over the rows of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Shares = TypeVar("Shares", float, np.ndarray)


def of_batch(share: Shares, draws: float) -> Shares:
    """1 - (1 - p)^B: the chance that a row read by a share ``p`` of samples is read by a batch.

    ``draws`` B: independent samples (or ids drawn) of a batch.

    >>> of_batch(0.5, 2)
    0.75
    >>> round(of_batch(1e-3, 4096), 3)
    0.983
    """
    found: Shares = -np.expm1(draws * np.log1p(-np.minimum(share, 1 - 1e-12)))
    return found if isinstance(share, np.ndarray) else float(found)


def met(shares: np.ndarray) -> float:
    """Mean share of the row that a lookup meets, sum p^2 / sum p; the largest p is never less.

    The bound takes the largest share for every row. A row's missed updates are as rare as its
    lookups, so that rows of share p weigh p times p: this mean is what one alpha stands for.
    """
    return float((shares * shares).sum() / shares.sum())


def quantiles(
    shares: np.ndarray, levels: Sequence[float], weights: np.ndarray | None = None
) -> np.ndarray:
    """The smallest share whose cumulated weight reaches each level; each row weighs 1, or these.

    With ``weights=shares`` the distribution is over lookups instead of rows.
    """
    order = np.argsort(shares)
    weight = np.ones(len(shares)) if weights is None else weights[order]
    reached = np.cumsum(weight) / weight.sum()
    places = np.searchsorted(reached, np.minimum(levels, reached[-1]) - 1e-12)
    found: np.ndarray = shares[order][np.minimum(places, len(shares) - 1)]
    return found
