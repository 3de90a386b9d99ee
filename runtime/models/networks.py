"""The built-in networks: an MLP, models with products of fields, mixtures of experts; from a name
to one of them or to the user's own, and what goes wrong inside the latter."""

from __future__ import annotations

import errno
import importlib
import random
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.parameter import is_lazy

from runtime.data.batch import Batch
from runtime.models.imported import is_pythons, refuse_code_in, taken_by_ours
from runtime.models.inputs import Embeddings, InputShape, by_field, flatten

COLUMNS = 8
"""An MLP's input is filled up with zeros to a multiple of these: with 429 columns the backward
product of the first layer took 1.6 times as long as with 432. Source: measured, MKL 2024.2 on an
EPYC of family 25, model 17, November 2026. A multiple of 16 gains nothing more: filling 312 up to
320 made a batch of 128 slower (766 us, without 502; a Xeon of family 6, model 207)."""


class FirstLinear(nn.Linear):
    """A linear layer whose input may have zeros behind its features; no weight belongs to them."""

    def reset_parameters(self) -> None:
        """Draw initial values as `nn.Linear` does, which warns of a layer without features."""
        if self.in_features:
            super().reset_parameters()
        else:
            nn.init.uniform_(self.bias, 0.0, 0.0)  # the same numbers are drawn

    def forward(self, input: Tensor) -> Tensor:
        """[B, >= in_features] -> [B, out_features]."""
        more = input.shape[1] - self.in_features
        filled = pad(self.weight, (0, more)) if more else self.weight
        return linear(input, filled, self.bias)


def mlp(width: int, hidden: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU and dropout after each, [B, width] -> [B, hidden[-1]]."""
    layers: list[nn.Module] = []
    for number, out in enumerate(hidden):
        kind = nn.Linear if number else FirstLinear
        relu = nn.ReLU(inplace=True)  # a linear layer keeps its input only
        # In one module: the weights have the same names with dropout and without.
        layers += [kind(width, out), nn.Sequential(relu, nn.Dropout(dropout)) if dropout else relu]
        width = out
    return nn.Sequential(*layers)


class FeedForward(nn.Module):
    """All inputs side by side through one MLP, one logit per task."""

    def __init__(self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.tower = mlp(shape.width, hidden, dropout)
        last = nn.Linear if hidden else FirstLinear
        self.head = last(hidden[-1] if hidden else shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        return cast(Tensor, self.head(self.tower(flatten(dense, embeddings, multiple_of=COLUMNS))))


class DLRM(nn.Module):
    """Dot products of all pairs of fields (Naumov et al. 2019, arXiv 1906.00091).

    The dense features pass through a bottom MLP to one more vector of the fields' width.
    """

    def __init__(self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = shape.one_dim("dlrm")
        fields = len(shape.layout.fields) + bool(shape.layout.dense)
        self.bottom = mlp(len(shape.layout.dense), (4 * self.dim, self.dim), dropout)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)
        width = self.pairs.shape[1] + self.dim * bool(shape.layout.dense)
        self.top = mlp(width, hidden, dropout)
        self.head = nn.Linear(hidden[-1], shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        vectors = by_field(embeddings, self.dim)
        inputs = []
        if dense.shape[1]:
            low = self.bottom(dense)
            vectors = torch.cat([low[:, None], vectors], dim=1)
            inputs.append(low)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        inputs.append(products[:, self.pairs[0], self.pairs[1]])
        return cast(Tensor, self.head(self.top(torch.cat(inputs, dim=1))))


class DeepFM(nn.Module):
    """A factorisation machine beside an MLP (Guo et al. 2017, arXiv 1703.04247).

    The first value of each row is its first-order weight, the others are its factors; with T tasks
    the machine's two terms enter each logit with a learned weight.
    """

    def __init__(self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = shape.one_dim("deepfm")
        if self.dim < 2:
            raise ValueError(f"deepfm needs dim >= 2 (a weight and factors), got {self.dim}")
        self.tower = mlp(shape.width, hidden, dropout)
        self.head = nn.Linear(hidden[-1] + 2 + len(shape.layout.dense), shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        vectors = by_field(embeddings, self.dim)
        first = vectors[:, :, 0].sum(1, keepdim=True)
        factors = vectors[:, :, 1:]
        second = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True)
        deep = self.tower(flatten(dense, embeddings, multiple_of=COLUMNS))
        return cast(Tensor, self.head(torch.cat([deep, first, second, dense], dim=1)))


class DCNv2(nn.Module):
    """Cross layers x0 * (W x + b) + x beside an MLP (Wang et al. 2021, arXiv 2008.13535)."""

    def __init__(
        self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0, layers: int = 3
    ) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(layers))
        self.tower = mlp(shape.width, hidden, dropout)
        self.head = nn.Linear(hidden[-1] + shape.width, shape.tasks)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        first = flatten(dense, embeddings)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        return cast(Tensor, self.head(torch.cat([crossed, self.tower(first)], dim=1)))


def mixed(gate: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Experts' outputs, each [B, H], weighted by the softmax of a gate [B, experts]: [B, H]."""
    weighted = gate.softmax(1)[:, :, None] * torch.stack(list(experts), 1)
    return weighted.sum(1)


class MMoE(nn.Module):
    """Experts that all tasks share, mixed by a gate of each task (Ma et al. 2018, KDD).

    An expert is an MLP of the hidden widths; behind its gate a task has a layer of the last width.
    """

    def __init__(
        self, shape: InputShape, hidden: Sequence[int], dropout: float = 0.0, experts: int = 4
    ) -> None:
        super().__init__()
        width = shape.width
        last = hidden[-1]
        self.experts = nn.ModuleList(mlp(width, hidden, dropout) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(shape.tasks))
        self.towers = nn.ModuleList(mlp(last, (last,), dropout) for _ in range(shape.tasks))
        self.heads = nn.ModuleList(nn.Linear(last, 1) for _ in range(shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, D], embeddings -> logits [B, T]."""
        flat = flatten(dense, embeddings)
        experts = [expert(flat) for expert in self.experts]
        of_tasks = zip(self.gates, self.towers, self.heads, strict=True)
        return torch.cat([h(t(mixed(gate(flat), experts))) for gate, t, h in of_tasks], dim=1)


BUILT_IN = {
    "mlp": FeedForward,
    "dlrm": DLRM,
    "deepfm": DeepFM,
    "dcn": DCNv2,
    "mmoe": MMoE,
}


def build_model(
    name: str, shape: InputShape, hidden: Sequence[int], seed: int, dropout: float = 0.0
) -> nn.Module:
    """A freshly initialised network, a function of its arguments alone.

    ``name`` is built in, or ``package.module:Class`` for a class of the user's below nn.Module that
    takes (shape, hidden) and whose ``forward(dense, embeddings)`` returns [B, T].
    ``dropout`` is of built-in ones.
    """
    # A class of the user's may fail in any way: it is blamed by its name, and its weights are drawn
    # from the seed.
    built_in = BUILT_IN.get(name)
    make = partial(built_in, dropout=dropout) if built_in else _import(name)
    remedy = "see runtime/models/networks.py for one that can"
    try:
        with _drawing(seed), blamed_on(name, "cannot be made from (shape, hidden)", remedy):
            model = make(shape, hidden)
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch has no type of its own for it
            raise
        raise ValueError(
            f"model {name} with model.hidden {tuple(hidden)} does not fit into memory;"
            " use smaller widths"
        ) from error

    # Weights that the first batch would draw are no function of the seed.
    if lazy := [n for n, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(
            f"model {name} has parameters without a shape ({', '.join(lazy[:3])}), which the first"
            " batch would draw, not the seed: give each layer the width of its input (shape.width)"
        )
    return model


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Have torch, numpy and Python draw from the seed, in float32, and set all back behind it."""
    drawn = random.getstate()
    dtype = torch.get_default_dtype()
    of_numpy = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float32)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_default_dtype(dtype)


def _import(name: str) -> type[nn.Module]:
    # Neither another's code nor Python's own is imported by mistake.
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"model {name!r} is not known: choose one of {', '.join(BUILT_IN)},"
            " or name your own as package.module:Class"
        )
    refuse_code_in(None, name)
    if is_pythons(module):
        raise ValueError(f"model {name!r}: {module} is a module of Python itself; name your own")

    # Importing runs the user's file: any error is one of that file.
    try:
        result = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if (taken := taken_by_ours(module)) is not None:
            raise ValueError(
                f"model {name!r}: {taken} is called as a package of this project, which is the one"
                f" that {module} names: give yours another name"
            ) from None
        imported_from = getattr(sys.modules.get(module), "__file__", None)
        raise ModelError(
            f"model {name!r} cannot be imported: {described_error(error)}; its folder must be the"
            " current one (of a script: its own), or on PYTHONPATH"
            + (
                f", and its name no other module's: {module} is {imported_from}"
                if imported_from
                else ""
            )
        ) from error
    except Exception as error:  # importing runs the user's file
        raise ModelError(f"model {name!r} cannot be imported: {described_error(error)}") from error
    # Whatever else it is might do anything when it is called.
    if not (isinstance(result, type) and issubclass(result, nn.Module)):
        kind = "another class" if isinstance(result, type) else f"a value of {type(result)}"
        raise ValueError(f"model {name} must be a class below torch.nn.Module, got {kind}")
    return result


_OURS = Path(__file__).resolve().parents[1]
_MODELS = Path(__file__).resolve().parent
_LIBRARIES = Path(sysconfig.get_path("stdlib")).resolve(), Path(torch.__file__).resolve().parent
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages, of this environment or of another one that it builds upon."""


class ModelError(ValueError):
    """The user's own network failed; the text names the model, the error, its file and line."""


def is_imported(name: str) -> bool:
    """Whether the network is the user's (``package.module:Class``) and not built in."""
    return ":" in name


_TRIED_APART = 1000
"""Samples that a network of somebody's own predicts once more, in two parts."""
_APART, _APART_IN_16_BITS = 1e-3, 3e-2
"""How far both predictions of a sample may be from each other, of a number beyond 1 as a share."""


def in_parts(name: str, first: Batch) -> list[Batch]:
    """The first samples of a batch in two parts, for `batch_warnings`; none for a built-in network,
    which computes each sample by itself. One part is small: its means differ from the batch's."""
    tried = min(first.size, _TRIED_APART)
    if not is_imported(name) or tried < 2:
        return []
    small = max(1, tried // 8)
    return [first.rows(0, small), first.rows(small, tried)]


def batch_warnings(
    name: str, precision: str, size: int, whole: np.ndarray, apart: Sequence[np.ndarray]
) -> list[str]:
    """A warning where a network predicts a sample otherwise in another batch.

    ``whole``: float [n, T], its predictions in batches of ``size``; ``apart``: those of the first
    of these samples in `in_parts`.
    """
    first = whole[: sum(map(len, apart))]
    difference = np.abs(np.concatenate(apart) - first) / np.maximum(1.0, np.abs(first))
    furthest = float(difference.max())
    allowed = _APART_IN_16_BITS if precision == "bfloat16" else _APART
    if not furthest > allowed:
        return []
    return [
        f"model {name} predicts a sample otherwise in another batch, by up to {furthest:.2g}: its"
        " output depends on the other samples of the batch, or on chance. What it says here is of"
        f" batches of {size:,}, and `evaluate`, `predict` and other batches give other scores;"
        " compute each sample by itself (in eval mode) to have one score"
    ]


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
        at = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        is_ours = at.is_relative_to(_OURS) and not at.is_relative_to(_MODELS)
        if full or not is_imported(name) or is_ours:
            raise
        hint = f"; {remedy}" if remedy else ""
        raise ModelError(f"model {name} {what}: {described_error(error)}{hint}") from error


def described_error(error: Exception) -> str:
    """Type and text of an error on one line, and the user's line that it came from.

    That is the deepest one outside of Python, of the installed packages and of this one; where
    there is none, as in C++ code of a backward pass, no line is named.

    >>> described_error(KeyError("dense"))
    "KeyError: 'dense'"
    """
    text = " ".join(str(error).split())
    sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # the line lies in a file that never ran
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    return f"{sentence} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else sentence


def _is_users(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    if not path.is_file():  # "<frozen importlib>", "<string>"
        return False
    resolved = path.resolve()
    known = any(resolved.is_relative_to(place) for place in (_OURS, *_LIBRARIES))
    return not known and _INSTALLED.isdisjoint(resolved.parts)
