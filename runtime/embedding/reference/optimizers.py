"""Row optimisers, on arrays of distinct rows at once, in torch's formulas (law 4).

Every function changes ``values`` [n, d] and ``state`` [n, k] in place, given gradients [n, d].
"""

from __future__ import annotations

import math

import numpy as np

from runtime.embedding.config import RowOptimizer


def apply(
    optimizer: RowOptimizer,
    values: np.ndarray,
    state: np.ndarray,
    gradients: np.ndarray,
    step: int,
    row_steps: np.ndarray,
) -> None:
    """One optimiser step on n distinct rows.

    ``step`` counts the run's steps from 1, ``row_steps`` [n] each row's own updates from 1: Adam
    uses one of them, as ``bias_correction`` says.
    """
    dim = values.shape[1]
    lr = optimizer.lr_at(step)
    if optimizer.kind == "sgd":
        values -= lr * gradients
    elif optimizer.kind == "adagrad":
        state += gradients * gradients
        values -= lr * gradients / (np.sqrt(state) + optimizer.eps)
    elif optimizer.kind == "adagrad_row":
        state += mean_square(gradients)
        values -= lr * gradients / (np.sqrt(state) + optimizer.eps)
    else:
        mean, square = state[:, :dim], state[:, dim:]
        mean += (1 - optimizer.beta1) * (gradients - mean)
        square += (1 - optimizer.beta2) * (gradients * gradients - square)
        one_count = optimizer.bias_correction == "global"
        counts = np.array([step]) if one_count else row_steps
        correction1 = _bias_correction(optimizer.beta1, counts).astype(values.dtype)
        correction2 = _bias_correction(optimizer.beta2, counts).astype(values.dtype)
        # As in torch's SparseAdam, eps is added before the correction of the mean square.
        values -= (
            optimizer.lr
            * np.sqrt(correction2)
            / correction1
            * mean
            / (np.sqrt(square) + optimizer.eps)
        )


def mean_square(gradients: np.ndarray) -> np.ndarray:
    """The mean of squares of each row [n, d] as [n, 1], summed by halves.

    Element j takes element j + half, and so on down to one: the order in which a vector register is
    folded, so that other engines reach the same bytes.

    >>> mean_square(np.array([[1.0, 2.0, 3.0]]))
    array([[4.66666667]])
    """
    dim = gradients.shape[1]
    size = 1 << (dim - 1).bit_length()
    sums = np.zeros((len(gradients), size), gradients.dtype)
    sums[:, :dim] = gradients * gradients
    while size > 1:
        size //= 2
        sums[:, :size] += sums[:, size : 2 * size]
    means: np.ndarray = sums[:, :1] / gradients.dtype.type(dim)
    return means


def _bias_correction(beta: float, counts: np.ndarray) -> np.ndarray:
    """1 - beta**count as [n, 1], by the C library's pow: vectorised powers may differ from it."""
    distinct, inverse = np.unique(counts, return_inverse=True)
    powers = np.array([math.pow(beta, count) for count in distinct.tolist()])
    corrections: np.ndarray = (1 - powers)[inverse][:, None]
    return corrections
