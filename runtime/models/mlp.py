"""The MLP of the paper's benchmarks, and the layers that the others share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import linear, pad

from runtime.models.inputs import Embeddings, InputShape, flatten

PAPER_MLP = (4096, 2048, 1024, 512, 256)
"""Source: the public benchmark page of the original (2021)."""

COLUMNS = 8
"""An MLP's input is filled up with zeros to a multiple of these: with 429 columns the backward
product of the first layer took 1.6 times as long as with 432. Source: measured, MKL 2024.2 on an
EPYC of family 25, model 17, November 2026. A multiple of 16 gains nothing more: filling 312 up to
320 made a batch of 128 slower (766 us, without 502; a Xeon of family 6, model 207)."""


class FirstLinear(nn.Linear):
    """A linear layer whose input may have zeros behind its features; no weight belongs to them."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, >= in_features] -> [B, out_features]."""
        more = input.shape[1] - self.in_features
        filled = pad(self.weight, (0, more)) if more else self.weight
        return linear(input, filled, self.bias)


def mlp(width: int, hidden: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU after each, [B, width] -> [B, hidden[-1]]."""
    layers: list[nn.Module] = []
    for number, out in enumerate(hidden):
        kind = nn.Linear if number else FirstLinear
        layers += [kind(width, out), nn.ReLU(inplace=True)]  # a linear layer keeps its input only
        width = out
    return nn.Sequential(*layers)


class FeedForward(nn.Module):
    """All inputs side by side through one MLP, one logit per task."""

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        self.tower = mlp(shape.width, hidden)
        last = nn.Linear if hidden else FirstLinear
        self.head = last(hidden[-1] if hidden else shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        logits: Tensor = self.head(self.tower(flatten(dense, embeddings, multiple_of=COLUMNS)))
        return logits
