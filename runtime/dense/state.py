"""The dense weights and their optimisers as they are at one instant, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runtime.config import TrainConfig
from runtime.dense.optimizer import DenseGradients, FunctionalOptimizer, make_optimizer

DenseState = dict[str, Any]
"""``model``: the state dict to evaluate. ``optimizers``: a state dict each, one for all ranks or
one per replica. ``replicas``: in async_averaging a state dict per rank, else none. ``version``:
updates of the dense weights. ``rounds``: averagings begun. ``pending``: gradients that are to be
applied to ``model`` yet, of a run with a dense lag. ``generators``: where torch's random
generators stand, by device. All tensors are copies."""


def capture(
    model: nn.Module,
    optimizers: Sequence[FunctionalOptimizer],
    *,
    replicas: Sequence[nn.Module] = (),
    version: int,
    rounds: int = 0,
    pending: Iterable[DenseGradients | None] = (),
) -> DenseState:
    """Copies of everything; ``model`` is the one to evaluate."""
    generators = {"cpu": torch.random.get_rng_state()}
    for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
        generators[str(device)] = torch.cuda.get_rng_state(device)
    return {
        "model": copy.deepcopy(model.state_dict()),
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        "replicas": [copy.deepcopy(one.state_dict()) for one in replicas],
        "version": version,
        "rounds": rounds,
        "pending": list(pending),
        "generators": generators,
    }


def load_model(model: nn.Module, state: DenseState) -> None:
    """Overwrite the weights in their place; ValueError when they are of another network."""
    current = _shapes(model.state_dict())
    saved = _shapes(state["model"])
    for name in (*current, *saved):
        was = saved.get(name, "absent")
        is_ = current.get(name, "absent")
        if was != is_:
            raise ValueError(
                f"the checkpoint holds the weights of another network: {name} is {was} there, and"
                f" {is_} in model {type(model).__name__} here; give the columns and the options"
                " --model.name and --model.hidden that it was trained with"
            )
    model.load_state_dict(state["model"])


def _shapes(weights: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        for name, tensor in weights.items()
    }


def load_optimizers(optimizers: Sequence[FunctionalOptimizer], state: DenseState) -> None:
    """Give each optimiser its state; where they are more than were saved, saved ones serve again.

    ValueError when they are of another network or kind.
    """
    saved = state["optimizers"]
    if not saved:
        raise ValueError("the checkpoint holds no dense optimiser")
    try:
        for number, optimizer in enumerate(optimizers):
            optimizer.load_state_dict(saved[number % len(saved)])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint holds another dense optimiser: {error}") from None


def pending_of(state: DenseState, model: nn.Module) -> list[DenseGradients | None]:
    """The gradients that wait, on the model's device; none in checkpoints without a dense lag."""
    device = next(model.parameters(), torch.empty(0)).device
    return [
        None if step is None else [None if g is None else g.to(device) for g in step]
        for step in state.get("pending", [])
    ]


def drain_into(model: nn.Module, config: TrainConfig, state: DenseState) -> None:
    """Apply what waits in a checkpoint to a model that holds its weights and is trained no more."""
    pending = pending_of(state, model)
    if not pending:  # then no optimiser is needed, and a checkpoint may hold none
        return
    optimizer = make_optimizer(config, model)
    load_optimizers([optimizer], state)
    for gradients in pending:
        optimizer.step(gradients)


def load_generators(state: DenseState) -> None:
    """Set torch's random generators; those of devices that are not here stay as they are."""
    try:
        for device, where in state["generators"].items():
            if device == "cpu":
                torch.random.set_rng_state(where)
            elif torch.device(device).index < torch.cuda.device_count():
                torch.cuda.set_rng_state(where, device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the checkpoint holds no state of torch's generators: {error}") from None
