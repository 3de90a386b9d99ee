"""Frequency-weighted drift: what lookups miss of their rows, each row weighed by its lookups.

The bound puts the largest share of any row before the whole ||d||^2 of what is missed. The term
that it stands for is sum_id p_id ||d_id||^2: an expectation over samples, which can be measured on
any set of samples, and stays small where hot rows move little and cold rows are seldom late.
"""

from __future__ import annotations

import numpy as np


def drift(shares: np.ndarray, missed: np.ndarray) -> float:
    """sum_id p_id ||d_id||^2 of ``shares`` [U] and what a lookup misses of each row [U, d].

    ``shares``: how often a sample reads each row, so that the sum is one over a sample's rows.
    """
    return float(shares @ np.square(missed, dtype=np.float64).sum(axis=1))


def relative_drift(shares: np.ndarray, missed: np.ndarray, rows: np.ndarray) -> float:
    """The same over sum_id p_id ||row_id||^2: without unit, so that data sets compare."""
    size = drift(shares, rows)
    return drift(shares, missed) / size if size else 0.0
