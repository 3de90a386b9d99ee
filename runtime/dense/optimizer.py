"""The dense optimiser, and the gradients that it is given: sums in rank order, and late ones.

The optimisers are torch's own by their functional form: the same bytes, without torch's compiler.
Making a `torch.optim.Optimizer` imports torch._dynamo and with it 800 modules, a second of every
process (source: measured, torch 2.13, November 2026); its functions need none of them.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.sgd import sgd

from runtime.config import OF_TORCH, ModelConfig, TrainConfig

DenseGradients = list[Tensor | None]
"""One per parameter of the model, in its order; None where the loss does not reach."""

State = dict[str, Tensor]
"""What one parameter's past updates left behind; empty before the first."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DECAY_OF_ADAMW = 0.01
"""torch's own."""
_NEW: dict[str, tuple[str, ...]] = {"adam": _MOMENTS, "adamw": _MOMENTS, "adagrad": ("sum",)}
_FUSED = {"adam": torch._fused_adam_, "adamw": torch._fused_adamw_}
"""What torch's functions of these names end in where they are fused: one call for all weights. What
they check and group before takes as long, of a small network."""


class FunctionalOptimizer:
    """adam, adamw, adagrad or sgd with torch's defaults, over the given parameters."""

    def __init__(self, config: ModelConfig, parameters: Iterable[Tensor]) -> None:
        self._config = config
        self._kind = config.optimizer
        self._lr = config.lr
        self._parameters = list(parameters)
        self._states: list[State] = [{} for _ in self._parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None] | None) -> None:
        """One update; a parameter whose gradient is None stays as it is, and so does its state.
        None: all of it is left out."""
        if gradients is None:
            return
        triples = zip(self._parameters, gradients, self._states, strict=True)
        present = [(p, g, state) for p, g, state in triples if g is not None]
        if present:
            parameters, known, states = (list(column) for column in zip(*present, strict=True))
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    self._begin(parameter, state)
            self._update(parameters, known, states)

    def state_dict(self) -> dict[str, Any]:
        """``state`` as torch writes it: by the parameter's number, tensors by torch's names."""
        return {"state": {n: dict(state) for n, state in enumerate(self._states) if state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; the tensors are copied.

        Raises ValueError when it is of another kind of optimiser or of other parameters.
        """
        # Whether the state is of this kind of optimiser and of these parameters, before anything
        # changes.
        saved: dict[int, State] = state_dict["state"]
        names = {"step", *_NEW[self._kind]} if self._kind in _NEW else set()
        for number, state in saved.items():
            if number >= len(self._parameters) or set(state) != names:
                held = ", ".join(sorted(state))
                raise ValueError(f"{self._kind} cannot go on from {held} of parameter {number}")
            shape = self._parameters[number].shape
            for name in names - {"step"}:
                if state[name].shape != shape:
                    raise ValueError(
                        f"{name} of parameter {number} is {tuple(state[name].shape)}, the parameter"
                        f" {tuple(shape)}"
                    )

        # Copy it in place: graphs and hooks hold these tensors.
        for number, restored in enumerate(self._states):
            restored.clear()
            if number in saved:
                self._begin(self._parameters[number], restored)
                for name, tensor in restored.items():
                    tensor.copy_(saved[number][name])

    def _begin(self, parameter: Tensor, state: State) -> None:
        """Before a parameter's first update."""
        if self._kind == "sgd":
            return
        device = parameter.device if _NEW[self._kind] is _MOMENTS else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in _NEW[self._kind]:
            state[name] = torch.zeros_like(parameter)

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]
    ) -> None:
        # torch's own functions, each with the state that it wants.
        given: dict[str, Any] = {"lr": self._lr, "maximize": False}
        given["weight_decay"] = _DECAY_OF_ADAMW if self._kind == "adamw" else 0.0
        of = {name: [state[name] for state in states] for name in states[0]}
        if self._kind == "sgd":
            none: list[Tensor | None] = [None] * len(parameters)
            sgd(parameters, gradients, none, momentum=0.0, dampening=0.0, nesterov=False, **given)
        elif self._kind == "adagrad":
            adagrad(parameters, gradients, of["sum"], of["step"], lr_decay=0.0, eps=1e-10, **given)
        elif self._kind in _FUSED:
            torch._foreach_add_(of["step"], 1)
            _FUSED[self._kind](
                parameters,
                gradients,
                of["exp_avg"],
                of["exp_avg_sq"],
                [],
                of["step"],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                **given,
            )
        else:
            raise AssertionError(self._kind)  # one that is new trains by no other one's formula


class TorchOptimizer(FunctionalOptimizer):
    """Any class of torch.optim with its own defaults, whose ``step`` needs no closure."""

    def __init__(self, config: ModelConfig, parameters: Iterable[Tensor]) -> None:
        """As `FunctionalOptimizer`. Raises ValueError naming a class that is none, that wants more
        than parameters and a rate, or that takes no dense gradients."""
        super().__init__(config, parameters)
        made_by = _class_of_torch(config.optimizer)
        try:
            self._made = made_by(self._parameters, lr=config.lr)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"model.optimizer {config.optimizer} cannot be made from parameters, lr: {error}"
            ) from None

        # A step of one weight, as some classes take no gradients like those of a network.
        weight = torch.zeros(1, 1, requires_grad=True)
        weight.grad = torch.zeros(1, 1)
        try:
            made_by([weight], lr=config.lr).step()
        except RuntimeError as error:
            raise ValueError(f"model.optimizer {config.optimizer}: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """What torch's class gives."""
        return self._made.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; ValueError when it is of other parameters or kinds."""
        groups = state_dict.get("param_groups")
        if groups is None or [set(g) for g in groups] != [set(g) for g in self._made.param_groups]:
            raise ValueError(f"{self._kind} cannot go on from another optimiser's state")
        saved = {"state": state_dict["state"], "param_groups": groups}
        self._made.load_state_dict(copy.deepcopy(saved))  # torch keeps what it is given

    def _begin(self, parameter: Tensor, state: State) -> None:
        """The class does so itself."""

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]
    ) -> None:
        # The gradients stand in their parameters for this step alone: others keep none there.
        for group in self._made.param_groups:
            group["lr"] = self._lr
        held = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._made.step()
        for parameter, before in zip(self._parameters, held, strict=True):
            parameter.grad = before


def _class_of_torch(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class behind torch.optim:NAME. Raises ValueError for what is no such class, and for one
    whose step wants a closure, which would compute a rank's gradients again."""
    found = getattr(torch.optim, name.removeprefix(OF_TORCH), None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"model.optimizer {name}: torch.optim has no optimiser of that name")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"model.optimizer {name}: its step computes the loss several times, which no mode does;"
            " choose another"
        )
    return found


def make_optimizer(config: TrainConfig, model: nn.Module) -> FunctionalOptimizer:
    """The configured optimiser over the model's parameters: that of all ranks, or of a replica."""
    kind = TorchOptimizer if config.model.optimizer.startswith(OF_TORCH) else FunctionalOptimizer
    return kind(config.model, model.parameters())


def sum_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum over ranks of one parameter's gradients: ((g0 + g1) + g2) + ... (law 6)."""
    known = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, known) if known else None


def sums_in_rank_order(of_ranks: Iterable[Sequence[Tensor | None]]) -> DenseGradients:
    """The sums of several parameters' gradients, which each rank gives in the same order."""
    return [sum_in_rank_order(gradients) for gradients in zip(*of_ranks, strict=True)]


class LateGradients:
    """Holds the sums of the last ``lag`` steps back, as TorchRec's stashed gradients.

    The weights that step s computes on are those after the update of step s - 1 - lag. What waits
    is part of a checkpoint, and applied when the run ends. A lag of 0 holds nothing.
    """

    def __init__(self, lag: int, optimizer: FunctionalOptimizer) -> None:
        self._lag = lag
        self._optimizer = optimizer
        self.waiting: deque[DenseGradients | None] = deque()
        """Oldest first; the tensors are not changed any more."""

    def take(self, sums: DenseGradients | None) -> None:
        """A step's gradients, None where all of it was left out: apply those that are due now.

        A copy is kept: the tensors may lie in buffers that are used again.
        """
        if self._lag:
            copies = None if sums is None else [None if g is None else g.clone() for g in sums]
            self.waiting.append(copies)
            if len(self.waiting) <= self._lag:
                return
            sums = self.waiting.popleft()
        self._optimizer.step(sums)

    def drain(self) -> None:
        """Apply all that wait, in their order: no step will follow."""
        while self.waiting:
            self._optimizer.step(self.waiting.popleft())


def replica(model: nn.Module, *, shared: bool) -> nn.Module:
    """A copy for one rank; ``shared`` weights are the same memory, gradients never are.

    Separate Parameters are needed even then: autograd's version counters would notice an optimiser
    step made through another rank's. Raises ValueError for a model that cannot be copied.
    """
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"model {type(model).__name__} cannot be copied, and this mode gives each rank its own:"
            f" {str(error).partition('. ')[0]}; keep nothing computed as an attribute"
            " (torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm)"
        ) from error
    if shared:
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
    return twin


def copy_weights(weights: Iterable[Tensor], target: nn.Module) -> None:
    """Overwrite the target's parameters with these."""
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), weights, strict=True):
            mine.copy_(theirs)
