"""async_averaging: a replica per rank, moved towards the mean in the background.

A round is a snapshot of every rank, each taken between two of its steps, and then a move of every
replica by (mean - its own snapshot): nobody waits for anybody (Bagua's model averaging, which the
original uses in its "async" runs).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AveragingRound:
    """One round of averaging among ``ranks`` replicas."""

    def __init__(self, ranks: int) -> None:
        self._snapshots: list[list[Tensor] | None] = [None] * ranks
        self._written = 0
        self._mean: list[Tensor] | None = None

    def has_read(self, rank: int) -> bool:
        """Whether the rank's snapshot is in."""
        return self._snapshots[rank] is not None

    @property
    def is_complete(self) -> bool:
        """Whether every rank's snapshot is in, so that the mean is known."""
        return self._mean is not None

    @property
    def is_over(self) -> bool:
        """Whether every replica has moved."""
        return self._written == len(self._snapshots)

    def read(self, rank: int, model: nn.Module) -> None:
        """Put the rank's weights in; the last one in computes the mean, in rank order."""
        self._snapshots[rank] = [p.detach().clone() for p in model.parameters()]
        if all(s is not None for s in self._snapshots):
            self._mean = mean_weights([s for s in self._snapshots if s is not None])

    def write(self, rank: int, model: nn.Module) -> None:
        """Move the rank's weights by (mean - snapshot): what it learned meanwhile stays."""
        snapshot = self._snapshots[rank]
        if self._mean is None or snapshot is None:
            raise RuntimeError(f"rank {rank} cannot leave a round that is not complete")
        with torch.no_grad():
            for weight, mean, old in zip(model.parameters(), self._mean, snapshot, strict=True):
                weight.add_(mean - old)
        self._written += 1


def mean_model(like: nn.Module, replicas: Sequence[nn.Module]) -> nn.Module:
    """A copy of ``like`` with the mean of the replicas' weights."""
    model = copy.deepcopy(like)
    mean = mean_weights([list(m.parameters()) for m in replicas])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), mean, strict=True):
            parameter.copy_(value)
    return model


def mean_weights(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Elementwise mean over replicas, summed in rank order."""
    means = []
    for parameters in zip(*replicas, strict=True):
        total = parameters[0].detach()
        for other in parameters[1:]:
            total = total + other
        means.append(total / len(parameters))
    return means
