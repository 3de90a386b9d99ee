"""Models with explicit products of fields: DLRM, DeepFM and DCN-v2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape, by_field, flatten
from runtime.models.mlp import COLUMNS, mlp


class DLRM(nn.Module):
    """Dot products of all pairs of fields (Naumov et al. 2019, arXiv 1906.00091).

    The dense features pass through a bottom MLP to one more vector of the fields' width.
    """

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        self.dim = shape.one_dim("dlrm")
        fields = len(shape.layout.fields) + bool(shape.layout.dense)
        self.bottom = mlp(len(shape.layout.dense), (4 * self.dim, self.dim))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)
        width = self.pairs.shape[1] + self.dim * bool(shape.layout.dense)
        self.top = mlp(width, hidden)
        self.head = nn.Linear(hidden[-1], shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        vectors = by_field(embeddings, self.dim)
        inputs = []
        if dense.shape[1]:
            low = self.bottom(dense)
            vectors = torch.cat([low[:, None], vectors], dim=1)
            inputs.append(low)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        inputs.append(products[:, self.pairs[0], self.pairs[1]])
        logits: Tensor = self.head(self.top(torch.cat(inputs, dim=1)))
        return logits


class DeepFM(nn.Module):
    """A factorisation machine beside an MLP (Guo et al. 2017, arXiv 1703.04247).

    The first value of each row is its first-order weight, the others are its factors; with T tasks
    the machine's two terms enter each logit with a learned weight.
    """

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        self.dim = shape.one_dim("deepfm")
        if self.dim < 2:
            raise ValueError(f"deepfm needs dim >= 2 (a weight and factors), got {self.dim}")
        self.tower = mlp(shape.width, hidden)
        self.head = nn.Linear(hidden[-1] + 2 + len(shape.layout.dense), shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        vectors = by_field(embeddings, self.dim)
        first = vectors[:, :, 0].sum(1, keepdim=True)
        factors = vectors[:, :, 1:]
        second = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True)
        deep = self.tower(flatten(dense, embeddings, multiple_of=COLUMNS))
        logits: Tensor = self.head(torch.cat([deep, first, second, dense], dim=1))
        return logits


class DCNv2(nn.Module):
    """Cross layers x0 * (W x + b) + x beside an MLP (Wang et al. 2021, arXiv 2008.13535)."""

    def __init__(self, shape: InputShape, hidden: Sequence[int], layers: int = 3) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(layers))
        self.tower = mlp(shape.width, hidden)
        self.head = nn.Linear(hidden[-1] + shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        first = flatten(dense, embeddings)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits: Tensor = self.head(torch.cat([crossed, self.tower(first)], dim=1))
        return logits
