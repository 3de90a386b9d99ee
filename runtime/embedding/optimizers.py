"""Row optimisers, on arrays of distinct rows at once, in torch's formulas (law 4).

Every function changes ``values`` [n, d] and ``state`` [n, k] in place, given gradients [n, d].
"""

from __future__ import annotations

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
    if optimizer.kind == "sgd":
        values -= optimizer.lr * gradients
    elif optimizer.kind == "adagrad":
        state += gradients * gradients
        values -= optimizer.lr * gradients / (np.sqrt(state) + optimizer.eps)
    elif optimizer.kind == "adagrad_row":
        state += np.mean(gradients * gradients, axis=1, keepdims=True)
        values -= optimizer.lr * gradients / (np.sqrt(state) + optimizer.eps)
    else:
        mean, square = state[:, :dim], state[:, dim:]
        mean += (1 - optimizer.beta1) * (gradients - mean)
        square += (1 - optimizer.beta2) * (gradients * gradients - square)
        count = float(step) if optimizer.bias_correction == "global" else row_steps[:, None]
        correction1 = (1 - np.float64(optimizer.beta1) ** count).astype(values.dtype)
        correction2 = (1 - np.float64(optimizer.beta2) ** count).astype(values.dtype)
        # As in torch's SparseAdam, eps is added before the correction of the mean square.
        values -= optimizer.lr * np.sqrt(correction2) / correction1 * mean / (
            np.sqrt(square) + optimizer.eps
        )

