"""Two towers: a vector of the user, a vector of the item, and their product as the score.

    persia-runtime train --config run.toml --model.name two_tower:TwoTower

The item's vector needs no user, so a service can compute it once and search among millions. Fields
are named in ``USER`` and ``ITEM``; a field that stands in neither is not read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from runtime.models.inputs import Embeddings, InputShape

USER, ITEM = ("user",), ("item", "tags")
TEMPERATURE = 0.1
"""Divides the cosine (source: choice; 0.05 to 0.2 are usual)."""


def tower(width: int, hidden: Sequence[int]) -> nn.Sequential:
    """An MLP down to the last width of ``hidden``."""
    layers: list[nn.Module] = []
    for wide in hidden:
        layers += [nn.Linear(width, wide), nn.ReLU()]
        width = wide
    return nn.Sequential(*layers[:-1])


class TwoTower(nn.Module):
    """The rows of user and item -> one logit a sample; dense features are not read."""

    samples_are_independent = True
    """No sample sees another, so ranks of one process may be computed as one batch."""

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        if shape.tasks != 1:
            raise ValueError(f"two towers score one task, and the data have {shape.tasks}")
        self.user_columns = [shape.columns(name) for name in USER]
        self.item_columns = [shape.columns(name) for name in ITEM]
        self.user = tower(sum(c.stop - c.start for c in self.user_columns), hidden)
        self.item = tower(sum(c.stop - c.start for c in self.item_columns), hidden)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """One logit a sample."""
        rows = embeddings.pooled
        user = self.user(torch.cat([rows[:, columns] for columns in self.user_columns], dim=1))
        item = self.item(torch.cat([rows[:, columns] for columns in self.item_columns], dim=1))
        cosine = (normalize(user, dim=1) * normalize(item, dim=1)).sum(1, keepdim=True)
        return cosine / TEMPERATURE + self.bias
