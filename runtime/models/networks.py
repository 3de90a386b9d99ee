"""The built-in networks: an MLP, models with products of fields, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

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


def mixed(gate: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Experts' outputs, each [B, H], weighted by the softmax of a gate [B, experts]: [B, H]."""
    weighted = gate.softmax(1)[:, :, None] * torch.stack(list(experts), 1)
    return weighted.sum(1)


class MMoE(nn.Module):
    """Experts that all tasks share, mixed by a gate of each task (Ma et al. 2018, KDD).

    An expert is an MLP of the hidden widths; behind its gate a task has a layer of the last width.
    """

    def __init__(
        self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0, experts: int = 4
    ) -> None:
        super().__init__()
        width, last = shape.width, hidden[-1]
        self.experts = nn.ModuleList(mlp(width, hidden, dropout) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(shape.tasks))
        self.towers = nn.ModuleList(mlp(last, (last,), dropout) for _ in range(shape.tasks))
        self.heads = nn.ModuleList(nn.Linear(last, 1) for _ in range(shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        flat = flatten(dense, embeddings)
        experts = [expert(flat) for expert in self.experts]
        of_tasks = zip(self.gates, self.towers, self.heads, strict=True)
        return torch.cat([h(t(mixed(gate(flat), experts))) for gate, t, h in of_tasks], dim=1)


class Extraction(nn.Module):
    """One layer of `PLE`: T + 1 groups of experts, of each task and, last, of all of them."""

    def __init__(
        self, width: int, out: int, tasks: int, experts: int, dropout: float, *, shares: bool
    ) -> None:
        """``shares``: whether a layer follows, which needs what is common to all tasks."""
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleList(mlp(width, (out,), dropout) for _ in range(experts))
            for _ in range(tasks + 1)
        )
        sizes = [2 * experts] * tasks + [(tasks + 1) * experts] * shares
        self.gates = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """[B, width] of each group -> [B, out] of each group; of the tasks alone in the last."""
        pairs = zip(self.experts, inputs, strict=True)
        found = [[expert(given) for expert in own] for own, given in pairs]  # type: ignore[attr-defined]
        seen = [own + found[-1] for own in found[:-1]] + [list(chain(*found))]
        return [mixed(g(x), s) for g, x, s in zip(self.gates, inputs, seen, strict=False)]


class PLE(nn.Module):
    """Experts of each task beside shared ones, mixed again in every layer (Tang et al. 2020,
    RecSys: progressive layered extraction). A hidden width is a layer."""

    def __init__(
        self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0, experts: int = 2
    ) -> None:
        super().__init__()
        widths, last = [shape.width, *hidden], len(hidden) - 1
        self.layers = nn.ModuleList(
            Extraction(width, out, shape.tasks, experts, dropout, shares=number < last)
            for number, (width, out) in enumerate(pairwise(widths))
        )
        self.heads = nn.ModuleList(nn.Linear(hidden[-1], 1) for _ in range(shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        found = [flatten(dense, embeddings)] * (len(self.heads) + 1)
        for layer in self.layers:
            found = layer(found)
        return torch.cat([head(x) for head, x in zip(self.heads, found, strict=True)], dim=1)
