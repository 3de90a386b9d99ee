"""What a dense network is given, and what it must know of its input's shape.

Shape letters: B samples, D dense features, F pooled fields, E the sum of their dims, L ids of a
sequence, d a table's dim, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from persia_sim.base.schema import nearest
from runtime.data.batch import Layout


class Embeddings(NamedTuple):
    """The rows of one batch as tensors; gradients flow back to the embedding workers."""

    pooled: Tensor
    """[B, E]: the pooled fields side by side, in the layout's order."""
    sequences: dict[str, Tensor]
    """Per sequence field [B, L, d]; zero where a sample has fewer than L ids."""
    masks: dict[str, Tensor]
    """Per sequence field bool [B, L]: where an id stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """The shape of a model's input, from the data's layout and the tables' widths."""

    layout: Layout
    dims: dict[str, int]
    """Width of each table."""

    @property
    def pooled_dims(self) -> list[int]:
        """Width of each pooled field."""
        return [self.dims[f.table] for f in self.layout.fields if f.pooling != "sequence"]

    @property
    def sequence_dims(self) -> list[int]:
        """Width of each sequence field."""
        return [self.dims[f.table] for f in self.layout.fields if f.pooling == "sequence"]

    def columns(self, field: str) -> slice:
        """The columns of `Embeddings.pooled` that hold the row of a field.

        Raises ValueError for a field that the data do not have, and for a sequence, whose rows
        stand in `Embeddings.sequences` by its name.

        Example:
            >>> from runtime.data.batch import Field, Layout
            >>> user, item = Field(name="user", table="users"), Field(name="item", table="items")
            >>> layout = Layout(fields=(user, item), tasks=("click",))
            >>> InputShape(layout=layout, dims={"users": 8, "items": 4}).columns("item")
            slice(8, 12, None)
        """
        first = 0
        for candidate in self.layout.fields:
            if candidate.pooling == "sequence":
                if candidate.name == field:
                    raise ValueError(
                        f"{field} is a sequence: its rows are embeddings.sequences[{field!r}]"
                    )
                continue
            width = self.dims[candidate.table]
            if candidate.name == field:
                return slice(first, first + width)
            first += width
        names = [candidate.name for candidate in self.layout.fields]
        raise ValueError(f"the data have no field {field!r}; {nearest(field, names)}")

    @property
    def width(self) -> int:
        """Floats per sample in `flatten`."""
        return sum(self.pooled_dims) + sum(self.sequence_dims) + len(self.layout.dense)

    @property
    def tasks(self) -> int:
        """T."""
        return len(self.layout.tasks)

    def one_dim(self, model: str) -> int:
        """The common width of all fields, which models with field-by-field products need."""
        dims = set(self.pooled_dims + self.sequence_dims)
        if len(dims) != 1:
            raise ValueError(
                f"{model} needs all fields of one width, got {sorted(dims)};"
                " give their tables the same dim or choose mlp or dcn"
            )
        return dims.pop()


def predictions(logits: Tensor, layout: Layout) -> np.ndarray:
    """float64 [B, T]: the probability of each task, and of a regression the number itself."""
    numbers = logits.double()
    predictions = torch.sigmoid(numbers)
    for k, task in enumerate(layout.tasks):
        if task in layout.regression:
            predictions[:, k] = numbers[:, k]
    return predictions.cpu().numpy()


def sequence_means(embeddings: Embeddings) -> list[Tensor]:
    """Each sequence field as the mean of its rows, [B, d]."""
    return [
        rows.sum(1) / embeddings.masks[name].sum(1, keepdim=True).clamp(min=1)
        for name, rows in embeddings.sequences.items()
    ]


def flatten(dense: Tensor, embeddings: Embeddings, *, multiple_of: int = 1) -> Tensor:
    """Everything side by side, [B, width], and zeros to make the width a multiple."""
    parts = [embeddings.pooled, *sequence_means(embeddings), dense]
    missing = -sum(part.shape[1] for part in parts) % multiple_of
    if missing:
        parts.append(dense.new_zeros(dense.shape[0], missing))  # len() is a constant in an export
    parts = [part for part in parts if part.shape[1]] or parts[:1]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def by_field(embeddings: Embeddings, dim: int) -> Tensor:
    """All fields as vectors, [B, F, dim]."""
    flat = torch.cat([embeddings.pooled, *sequence_means(embeddings)], dim=1)
    return flat.reshape(flat.shape[0], -1, dim)
