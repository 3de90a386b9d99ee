"""From a name to a network: the built-in ones, or the user's own class."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import nn

from runtime.models.blame import ModelError, blamed_on, told_error
from runtime.models.imported import refuse_code_in
from runtime.models.inputs import InputShape
from runtime.models.interactions import DLRM, DCNv2, DeepFM
from runtime.models.mlp import FeedForward

BUILT_IN = {"ffnn": FeedForward, "dlrm": DLRM, "deepfm": DeepFM, "dcn": DCNv2}


def build_model(name: str, shape: InputShape, hidden: Sequence[int], seed: int) -> nn.Module:
    """A freshly initialised network, a function of its arguments alone.

    ``name`` is built in, or ``package.module:Class`` for a class (or function) of the user's that
    takes (shape, hidden) and gives a module whose ``forward(dense, embeddings)`` returns [B, T].
    """
    make = BUILT_IN.get(name) or _import(name)
    remedy = "see runtime/models/mlp.py for one that can"
    try:
        with (
            torch.random.fork_rng(devices=[]),
            blamed_on(name, "cannot be made from (shape, hidden)", remedy),
        ):
            torch.manual_seed(seed)
            model = make(shape, hidden)
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch has no type of its own for it
            raise
        raise ValueError(
            f"model {name} with model.hidden {tuple(hidden)} does not fit into memory;"
            " use smaller widths"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name} must give a torch.nn.Module, got {type(model).__name__}")
    return model


def _import(name: str) -> type[nn.Module]:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"model {name!r} is not known: choose one of {', '.join(BUILT_IN)},"
            " or name your own as package.module:Class"
        )
    refuse_code_in(None, name)
    try:
        found: type[nn.Module] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"model {name!r} cannot be imported: {told_error(error)}; looked for it in the current"
            " folder and on PYTHONPATH"
        ) from error
    except Exception as error:  # importing runs the user's file
        raise ModelError(f"model {name!r} cannot be imported: {told_error(error)}") from error
    return found
