"""Random factors by counter: a draw depends on (seed, purpose, entity, step) and on nothing else.

So another mode, another entity or a longer run sees the same factors (common random numbers).
"""

from __future__ import annotations

from enum import IntEnum
from math import log1p, sqrt

import numpy as np


class Purpose(IntEnum):
    """What a stream of draws is for."""

    GPU = 1
    SERVER_LOOKUP = 2
    SERVER_UPDATE = 3
    WORKER_CHOICE = 4
    FAULT = 5
    ROWS = 6


def stream(seed: int, purpose: Purpose, entity: int, step: int = 0) -> np.random.Generator:
    """The generator of one entity for one purpose, at its own counter for each step."""
    key = np.array([seed, int(purpose) << 32 | entity], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, step]))


def lognormal_factors(generator: np.random.Generator, cv: float, size: int) -> np.ndarray:
    """Factors of mean 1 and coefficient of variation ``cv``, float64 [size]; ones for cv = 0."""
    if cv == 0:
        return np.ones(size)
    sigma = sqrt(log1p(cv * cv))
    return np.asarray(np.exp(sigma * generator.standard_normal(size) - sigma * sigma / 2))
