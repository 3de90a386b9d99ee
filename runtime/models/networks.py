"""The built-in networks: an MLP, and models with explicit products of fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from runtime.models.inputs import Embeddings, InputShape, by_field, flatten

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


def mlp(width: int, hidden: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU and dropout after each, [B, width] -> [B, hidden[-1]]."""
    layers: list[nn.Module] = []
    for number, out in enumerate(hidden):
        kind = nn.Linear if number else FirstLinear
        relu = nn.ReLU(inplace=True)  # a linear layer keeps its input only
        # In one module: the weights have the same names with dropout and without.
        layers += [kind(width, out), nn.Sequential(relu, nn.Dropout(dropout)) if dropout else relu]
        width = out
    return nn.Sequential(*layers)


class FeedForward(nn.Module):
    """All inputs side by side through one MLP, one logit per task."""

    def __init__(self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.tower = mlp(shape.width, hidden, dropout)
        last = nn.Linear if hidden else FirstLinear
        self.head = last(hidden[-1] if hidden else shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        logits: Tensor = self.head(self.tower(flatten(dense, embeddings, multiple_of=COLUMNS)))
        return logits


class DLRM(nn.Module):
    """Dot products of all pairs of fields (Naumov et al. 2019, arXiv 1906.00091).

    The dense features pass through a bottom MLP to one more vector of the fields' width.
    """

    def __init__(self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = shape.one_dim("dlrm")
        fields = len(shape.layout.fields) + bool(shape.layout.dense)
        self.bottom = mlp(len(shape.layout.dense), (4 * self.dim, self.dim), dropout)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)
        width = self.pairs.shape[1] + self.dim * bool(shape.layout.dense)
        self.top = mlp(width, hidden, dropout)
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

    def __init__(self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = shape.one_dim("deepfm")
        if self.dim < 2:
            raise ValueError(f"deepfm needs dim >= 2 (a weight and factors), got {self.dim}")
        self.tower = mlp(shape.width, hidden, dropout)
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

    def __init__(
        self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0, layers: int = 3
    ) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(layers))
        self.tower = mlp(shape.width, hidden, dropout)
        self.head = nn.Linear(hidden[-1] + shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        first = flatten(dense, embeddings)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits: Tensor = self.head(torch.cat([crossed, self.tower(first)], dim=1))
        return logits
