"""The model of the counting world: the gradient of each row is 1, whatever the loss says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape

EVALUATED = "PERSIA_DRILL_EVALUATED"
"""Environment variable with a file's name: each batch that is evaluated adds a byte to it and takes
`EVALUATION_S`, so that a drill can kill in between."""
EVALUATION_S = 0.1


class Counting(nn.Module):
    """Its logits are a weight's; the rows' gradients are 1, whatever the loss says."""

    def __init__(self, shape: InputShape, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, T]"""
        if not self.training and EVALUATED in os.environ:
            with Path(os.environ[EVALUATED]).open("ab") as file:
                file.write(b".")
            time.sleep(EVALUATION_S)
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
