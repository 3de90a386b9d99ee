"""Work of this host that is timed in a loop, by itself: what no stage of a run shows alone.

Additions of dense gradients, rounding, copies of the dense weights, and sleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from runtime.profiling.laws import LawPoint

NUMBERS = tuple(2**exponent for exponent in (14, 16, 18, 20, 21))
ASKED_S = (0.001, 0.002, 0.005, 0.01, 0.02)
_TIMES = 15


def additions() -> list[LawPoint]:
    """Times of the addition of a further rank's dense gradient."""
    import torch

    return _by_size("dense_params", lambda n: (n, partial(torch.zeros(n).add_, torch.ones(n))))


def halvings() -> list[LawPoint]:
    """Times of rounding rows of 64 numbers, as when they travel."""
    from runtime.embedding.half import rounded

    def rounding(numbers: int) -> tuple[int, Callable[[], object]]:
        rows = np.random.default_rng(0).normal(size=numbers).astype(np.float32)
        return numbers, partial(rounded, rows, np.full(numbers // 64, 64))

    return _by_size("distinct_floats", rounding)


def _by_size(of: str, made: Callable[[int], tuple[int, Callable[[], object]]]) -> list[LawPoint]:
    """Seconds of the work that is ``made`` for so many numbers about, by those that it has."""
    return [LawPoint({"one": 1.0, of: n}, _median_s(work)) for n, work in map(made, NUMBERS)]


def pulls() -> list[LawPoint]:
    """Times in which a rank of async copies all dense weights, of networks with two hidden
    layers."""
    from torch import nn

    from runtime.dense.optimizer import copy_weights, replica

    def copying(weights: int) -> tuple[int, Callable[[], object]]:
        width = round((weights / 2) ** 0.5)
        model = nn.Sequential(*(nn.Linear(width, out) for out in (width, width, 1)))
        matrices = sum(layer.weight.numel() for layer in model)
        copied = replica(model, shared=False)
        return matrices, partial(copy_weights, list(model.parameters()), copied)

    return _by_size("dense_params", copying)


def sleeps() -> list[LawPoint]:
    """How long a thread that asks to be woken sleeps: an injected latency."""
    event = threading.Event()
    return [
        LawPoint({"one": 1.0, "asked_s": asked_s}, _median_s(partial(event.wait, asked_s)))
        for asked_s in ASKED_S
    ]


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))
