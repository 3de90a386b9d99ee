"""The feed-forward tower of the paper's benchmarks, and the layers that the others share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape, flatten

PAPER_TOWER = (4096, 2048, 1024, 512, 256)
"""Source: the public benchmark page of the original (2021)."""


def mlp(width: int, hidden: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU after each, [B, width] -> [B, hidden[-1]]."""
    layers: list[nn.Module] = []
    for out in hidden:
        layers += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers)


class FeedForward(nn.Module):
    """All inputs side by side through one tower, one logit per task."""

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        self.tower = mlp(shape.width, hidden)
        self.head = nn.Linear(hidden[-1] if hidden else shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        logits: Tensor = self.head(self.tower(flatten(dense, embeddings)))
        return logits
