"""Dense gradients that are applied some steps late, as with TorchRec's stashed gradients.

With a lag of N the weights that step s computes on are those after the update of step s - 1 - N.
The gradients in between are part of a checkpoint, and applied when the run ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import nn

from runtime.config import ModelConfig
from runtime.dense.optimizer import DenseGradients, make_optimizer
from runtime.dense.state import DenseState, load_optimizers, pending_of

Pending = list[DenseGradients | None]
"""Gradients that are not applied yet, oldest first; None of a step that was left out."""


def drain_into(model: nn.Module, config: ModelConfig, state: DenseState) -> None:
    """Apply what waits in a checkpoint to a model that holds its weights and is trained no more."""
    pending = pending_of(state, model)
    if not pending:
        return
    optimizer = make_optimizer(config, model)
    load_optimizers([optimizer], state)
    for gradients in pending:
        if gradients is not None:
            optimizer.step(gradients)


class LateGradients:
    """Holds the sums of the last ``lag`` steps back; with a lag of 0 it holds nothing."""

    def __init__(self, lag: int, apply: Callable[[DenseGradients], None]) -> None:
        self._lag, self._apply = lag, apply
        self._waiting: deque[DenseGradients | None] = deque()

    def take(self, sums: DenseGradients | None) -> None:
        """A step's gradients, None where all of it was left out: apply those that are due now.

        A copy is kept: the tensors may lie in buffers that are used again.
        """
        if not self._lag:
            self._give(sums)
            return
        if sums is not None:
            sums = [None if g is None else g.clone() for g in sums]
        self._waiting.append(sums)
        if len(self._waiting) > self._lag:
            self._give(self._waiting.popleft())

    def drain(self) -> None:
        """Apply all that wait, in their order: no step will follow."""
        while self._waiting:
            self._give(self._waiting.popleft())

    def pending(self) -> Pending:
        """What waits; the tensors are not changed any more."""
        return list(self._waiting)

    def go_on(self, pending: Sequence[DenseGradients | None]) -> None:
        """Take up what `pending` gave."""
        self._waiting = deque(pending)

    def _give(self, sums: DenseGradients | None) -> None:
        if sums is not None:
            self._apply(sums)
