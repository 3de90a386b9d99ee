"""Row optimisers, on arrays of distinct rows at once, in torch's formulas (law 4).

Every rule changes ``values`` [n, d] and ``state`` [n, k] in place, given gradients [n, d] and the
learning rate of this step; the rate is an argument so that no rule can miss its factor.
"""

from __future__ import annotations

import math

import numpy as np

from runtime.embedding.config import RowOptimizer

BETA1, BETA2 = 0.9, 0.999


def apply(
    optimizer: RowOptimizer,
    values: np.ndarray,
    state: np.ndarray,
    gradients: np.ndarray,
    lr: float,
    step: int,
) -> None:
    """One optimiser step on n distinct rows, at the learning rate ``lr``.

    ``step`` counts the run's steps from 1: Adam corrects its bias by it.
    """
    if optimizer.kind == "sgd":
        sgd(values, gradients, lr)
    elif optimizer.kind == "adagrad":
        adagrad(values, state, gradients, lr, optimizer.epsilon)
    elif optimizer.kind == "rowwise_adagrad":
        rowwise_adagrad(values, state, gradients, lr, optimizer.epsilon)
    elif optimizer.kind == "adam":
        adam(values, state, gradients, lr, optimizer.epsilon, step)
    else:
        raise ValueError(f"{optimizer.kind} is not in the reference")


def sgd(values: np.ndarray, gradients: np.ndarray, lr: float) -> None:
    """Without momentum or decay."""
    values -= lr * gradients


def adagrad(
    values: np.ndarray, state: np.ndarray, gradients: np.ndarray, lr: float, eps: float
) -> None:
    """``state`` [n, d]: the sum of squares of each element."""
    state += gradients * gradients
    values -= lr * gradients / (np.sqrt(state) + eps)


def rowwise_adagrad(
    values: np.ndarray, state: np.ndarray, gradients: np.ndarray, lr: float, eps: float
) -> None:
    """``state`` [n, 1]: the sum of the mean squares of each row."""
    state += mean_square(gradients)
    values -= lr * gradients / (np.sqrt(state) + eps)


def adam(
    values: np.ndarray,
    state: np.ndarray,
    gradients: np.ndarray,
    lr: float,
    eps: float,
    step: int,
) -> None:
    """``state`` [n, 2 d]: mean, then mean square."""
    dim = values.shape[1]
    mean, square = state[:, :dim], state[:, dim:]
    mean += (1 - BETA1) * (gradients - mean)
    square += (1 - BETA2) * (gradients * gradients - square)
    correction1 = values.dtype.type(1 - math.pow(BETA1, step))
    correction2 = values.dtype.type(1 - math.pow(BETA2, step))
    # As in torch's SparseAdam, eps is added before the correction of the mean square.
    length = lr * np.sqrt(correction2) / correction1
    values -= length * mean / (np.sqrt(square) + eps)


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
