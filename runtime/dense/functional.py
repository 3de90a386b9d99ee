"""torch's own optimisers by their functional form: the same bytes, without torch's compiler.

Making a `torch.optim.Optimizer` imports torch._dynamo and with it 800 modules, a second of every
process (source: measured, torch 2.13, November 2026); its functions need none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from runtime.config import DenseOptimizer

State = dict[str, Tensor]
"""What one parameter's past updates left behind; empty before the first."""

_NEW: dict[str, tuple[str, ...]] = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


class FunctionalOptimizer:
    """adam, adagrad or sgd with torch's defaults, over the given parameters."""

    def __init__(self, kind: DenseOptimizer, parameters: Iterable[Tensor], lr: float) -> None:
        self._kind, self._lr = kind, lr
        self._parameters = list(parameters)
        self._states: list[State] = [{} for _ in self._parameters]
        steps: dict[str, Callable[[list[Tensor], list[Tensor], list[State]], None]] = {
            "adam": self._adam,
            "adagrad": self._adagrad,
            "sgd": self._sgd,
        }
        self._update = steps[kind]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None] | None = None) -> None:
        """One update; a parameter whose gradient is None stays as it is, and so does its state.

        Without ``gradients`` those of the parameters are taken.
        """
        if gradients is None:
            gradients = [p.grad for p in self._parameters]
        triples = zip(self._parameters, gradients, self._states, strict=True)
        found = [(p, g, state) for p, g, state in triples if g is not None]
        if found:
            parameters, known, states = (list(column) for column in zip(*found, strict=True))
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    self._begin(parameter, state)
            self._update(parameters, known, states)

    def zero_grad(self) -> None:
        """Forget the parameters' gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """``state`` as torch writes it: by the parameter's number, tensors by torch's names."""
        return {"state": {n: dict(state) for n, state in enumerate(self._states) if state}}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; the tensors are copied.

        Raises ValueError when it is of another kind of optimiser or of other parameters.
        """
        saved: dict[int, State] = found["state"]
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
        for number, own in enumerate(self._states):
            own.clear()
            if number in saved:
                self._begin(self._parameters[number], own)
                for name, tensor in own.items():
                    tensor.copy_(saved[number][name])

    def _begin(self, parameter: Tensor, state: State) -> None:
        """Before a parameter's first update."""
        if self._kind == "sgd":
            return
        device = parameter.device if self._kind == "adam" else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in _NEW[self._kind]:
            state[name] = torch.zeros_like(parameter)

    def _adam(self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]) -> None:
        adam(
            parameters,
            gradients,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._lr,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    def _adagrad(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]
    ) -> None:
        adagrad(
            parameters,
            gradients,
            [s["sum"] for s in states],
            [s["step"] for s in states],
            lr=self._lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=1e-10,
            maximize=False,
        )

    def _sgd(self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]) -> None:
        sgd(
            parameters,
            gradients,
            [None] * len(parameters),
            weight_decay=0.0,
            momentum=0.0,
            lr=self._lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
