"""The dense weights: one optimiser, gradients summed over the ranks in rank order."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.config import ModelConfig
from runtime.dense.functional import FunctionalOptimizer

DenseGradients = list[Tensor | None]
"""One per parameter of the model, in its order; None where the loss does not reach."""


def make_optimizer(config: ModelConfig, model: nn.Module) -> FunctionalOptimizer:
    """The configured optimiser over the model's parameters."""
    return FunctionalOptimizer(config.optimizer, model.parameters(), config.lr)


def sum_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum over ranks of one parameter's gradients: ((g0 + g1) + g2) + ... (law 6)."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def apply_gradients(optimizer: FunctionalOptimizer, gradients: DenseGradients) -> None:
    """One optimiser step with the given gradients."""
    optimizer.step(gradients)


def replica(model: nn.Module, *, shared: bool) -> nn.Module:
    """A copy for one rank; ``shared`` weights are the same memory, gradients never are.

    Separate Parameters are needed even then: autograd's version counters would notice an optimiser
    step made through another rank's.
    """
    twin = copy.deepcopy(model)
    if shared:
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
    return twin


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Overwrite the target's parameters with the source's."""
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)


MAX_BUCKET_BYTES = 25 * 2**20
"""Source: the default of torch's DistributedDataParallel."""
LEAST_BUCKETS = 4
"""So that a small model overlaps, too."""


def bucket_plan(model: nn.Module) -> list[list[int]]:
    """Parameter numbers by bucket, in the order in which the backward pass finishes them.

    Parameters that the user froze are in none.
    """
    sizes = {
        number: p.numel() * p.element_size()
        for number, p in enumerate(model.parameters())
        if p.requires_grad
    }
    limit = min(MAX_BUCKET_BYTES, -(-sum(sizes.values()) // LEAST_BUCKETS))
    plan: list[list[int]] = []
    filled = limit
    for number in reversed(sizes):
        if filled + sizes[number] > limit:
            plan.append([])
            filled = 0
        plan[-1].append(number)
        filled += sizes[number]
    return plan
