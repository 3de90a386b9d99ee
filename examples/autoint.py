"""AutoInt (Song et al., CIKM 2019): fields attend to each other instead of being multiplied.

persia-runtime train --config run.toml --model.name autoint:AutoInt
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape, by_field

LAYERS, HEADS, WIDTH = 2, 2, 16


class InteractingLayer(nn.Module):
    """Self-attention over the fields of a sample, with a residual connection."""

    def __init__(self, width_in: int) -> None:
        super().__init__()
        self.query = nn.Linear(width_in, WIDTH, bias=False)
        self.key = nn.Linear(width_in, WIDTH, bias=False)
        self.value = nn.Linear(width_in, WIDTH, bias=False)
        self.residual = nn.Linear(width_in, WIDTH, bias=False)

    def forward(self, fields: Tensor) -> Tensor:
        """[B, F, width_in] -> [B, F, WIDTH]."""

        def by_head(values: Tensor) -> Tensor:
            return values.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)  # [B, H, F, d]

        query, key = by_head(self.query(fields)), by_head(self.key(fields))
        weights = torch.softmax(query @ key.transpose(2, 3), dim=3)  # no scale, as in the paper
        mixed = (weights @ by_head(self.value(fields))).transpose(1, 2).flatten(2)
        return torch.relu(mixed + self.residual(fields))


class AutoInt(nn.Module):
    """[B, D] dense features and the rows of the fields -> logits [B, T]."""

    samples_are_independent = True
    """No sample sees another, so ranks of one process may be computed as one batch."""

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        self.dim = shape.one_dim("AutoInt")
        widths = [self.dim] + [WIDTH] * (LAYERS - 1)
        self.attention = nn.Sequential(*(InteractingLayer(width) for width in widths))

        # An MLP beside the attention, as in AutoInt+; dense features reach it alone.
        fields = len(shape.pooled_dims) + len(shape.sequence_dims)
        layers: list[nn.Module] = []
        width = fields * self.dim + len(shape.layout.dense)
        for wide in hidden:
            layers += [nn.Linear(width, wide), nn.ReLU()]
            width = wide
        self.tower = nn.Sequential(*layers)
        self.head = nn.Linear(fields * WIDTH + width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """One logit a task."""
        fields = by_field(embeddings, self.dim)
        attended = self.attention(fields).flatten(1)
        deep = self.tower(torch.cat([fields.flatten(1), dense], dim=1))
        return self.head(torch.cat([attended, deep], dim=1))
