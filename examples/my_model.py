"""A network of one's own: attention over the user's history, then an MLP.

Any `nn.Module` made of (shape, hidden) will do whose forward gives a logit for each task.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape


class MyNet(nn.Module):
    """[B, D] dense features and the rows of the fields -> logits [B, T]."""

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        dim = shape.one_dim("MyNet")
        self.query = nn.Linear(sum(shape.pooled_dims), dim)
        width = shape.width
        layers: list[nn.Module] = []
        for wide in hidden:
            layers += [nn.Linear(width, wide), nn.ReLU()]
            width = wide
        self.tower = nn.Sequential(*layers, nn.Linear(width, shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """One logit a task."""
        history, mask = embeddings.sequences["history"], embeddings.masks["history"]  # [B, L, d]
        score = (history @ self.query(embeddings.pooled).unsqueeze(2)).squeeze(2)
        weight = torch.softmax(score.masked_fill(~mask, -1e9), dim=1) * mask
        read = (weight.unsqueeze(2) * history).sum(1)
        return self.tower(torch.cat([embeddings.pooled, read, dense], dim=1))
