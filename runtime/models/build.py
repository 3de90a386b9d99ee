"""From a name to a network, built in or the user's own, and what goes wrong inside the latter."""

from __future__ import annotations

import errno
import importlib
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from runtime.models.imported import refuse_code_in
from runtime.models.inputs import InputShape
from runtime.models.networks import DLRM, PLE, DCNv2, DeepFM, FeedForward, MMoE

BUILT_IN = {
    "ffnn": FeedForward,
    "dlrm": DLRM,
    "deepfm": DeepFM,
    "dcn": DCNv2,
    "mmoe": MMoE,
    "ple": PLE,
}


def build_model(
    name: str, shape: InputShape, hidden: Sequence[int], seed: int, dropout: float = 0.0
) -> nn.Module:
    """A freshly initialised network, a function of its arguments alone.

    ``name`` is built in, or ``package.module:Class`` for a class (or function) of the user's that
    takes (shape, hidden) and gives a module whose ``forward(dense, embeddings)`` returns [B, T].
    ``dropout`` is of built-in ones.
    """
    built_in = BUILT_IN.get(name)
    make = partial(built_in, dropout=dropout) if built_in else _import(name)
    remedy = "see runtime/models/networks.py for one that can"
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


_OURS = Path(__file__).resolve().parents[1]
_MODELS = Path(__file__).resolve().parent
_LIBRARIES = Path(sysconfig.get_path("stdlib")).resolve(), Path(torch.__file__).resolve().parent
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages, of this environment or of another one that it builds upon."""


class ModelError(ValueError):
    """The user's own network failed; the text names the model, the error, its file and line."""


def is_own(name: str) -> bool:
    """Whether the network is the user's (``package.module:Class``) and not built in."""
    return ":" in name


@contextmanager
def blamed_on(name: str, what: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the user's network into a ModelError: "model NAME WHAT: ...; REMEDY".

    Errors of built-in networks pass as they are: they are ours. So does an error that was raised in
    this package outside of the networks, as a hook of ours may do during a backward pass, and a
    full disk, which is nobody's mistake and ends a whole sweep.
    """
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or not is_own(name) or _is_ours(traceback.extract_tb(error.__traceback__)[-1]):
            raise
        hint = f"; {remedy}" if remedy else ""
        raise ModelError(f"model {name} {what}: {told_error(error)}{hint}") from error


def told_error(error: Exception) -> str:
    """Type and text of an error on one line, and the user's line that it came from.

    That is the deepest one outside of Python, of the installed packages and of this one; where
    there is none, as in C++ code of a backward pass, no line is named.

    >>> told_error(KeyError("dense"))
    "KeyError: 'dense'"
    """
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # the line lies in a file that never ran
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    return f"{told} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else told


def _is_ours(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename).resolve()
    return path.is_relative_to(_OURS) and not path.is_relative_to(_MODELS)


def _is_users(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    if not path.is_file():  # "<frozen importlib>", "<string>"
        return False
    found = path.resolve()
    known = any(found.is_relative_to(place) for place in (_OURS, *_LIBRARIES))
    return not known and _INSTALLED.isdisjoint(found.parts)
