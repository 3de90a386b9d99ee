"""The model of the counting world: the gradient of each row is 1, whatever the loss says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape


class Counting(nn.Module):
    """Its logits are a weight's; the rows' gradients are 1, whatever the loss says."""

    def __init__(self, shape: InputShape, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, T]"""
        logits: Tensor = self.weight + _UnitSlope.apply(embeddings.pooled)  # type: ignore[no-untyped-call]
        return logits


class _UnitSlope(torch.autograd.Function):
    """[B, E] -> zeros [B, 1], with a gradient of 1 for every element."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor) -> Tensor:
        ctx.shape = pooled.shape
        return pooled.new_zeros(len(pooled), 1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.new_ones(ctx.shape)
