"""What keeps the dense weights up to date, whichever mode says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from runtime.dense.optimizer import DenseGradients
from runtime.dense.state import DenseState

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

    def drain(self) -> None:
        """No step follows: gradients that wait (a dense lag) are applied."""
        ...

    def end_leg(self) -> None:
        """No rank is in a step, and none will be before this state may be written down."""
        ...

    def state(self) -> DenseState:
        """A copy of weights and optimisers, between two legs."""
        ...

    def go_on(self, state: DenseState) -> None:
        """Take the optimisers, replicas and counters of a checkpoint; the ranks' number may differ.

        The weights are in the model already.
        """
        ...
