"""What keeps the dense weights up to date, whichever mode says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from runtime.dense.optimizer import DenseGradients

Told = Callable[[float, int], None]
"""Called after each dense update with its mean loss (NaN: all of it was left out) and samples."""


class DenseRule(Protocol):
    """One for all ranks of a process; a rank calls it from its training thread."""

    def model(self, rank: int) -> nn.Module:
        """The rank's model, with weights of its own or shared ones."""
        ...

    def begin_step(self, rank: int, step: int) -> None:
        """Before forward: async pulls the weights, averaging may enter or leave a round."""
        ...

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """After backward: hand in the gradients; in barrier modes wait for the update.

        ``gradients`` None leaves this rank out of the step (not finite). ``loss`` is the rank's
        share of the step's mean loss.
        """
        ...

    def snapshot(self) -> nn.Module:
        """The model to evaluate, whole at one version."""
        ...
