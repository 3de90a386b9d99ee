"""The dense network as a file: a `torch.export` program where it can be one, else its weights."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from persia_sim.words.files import read_regular
from runtime.data.batch import Layout
from runtime.embedding.store import FieldVectors
from runtime.files import BrokenFileError
from runtime.models.inputs import Embeddings, InputShape, predictions

Score = Callable[[np.ndarray, FieldVectors], np.ndarray]
"""Dense features [B, D] and vectors to what is predicted, float64 [B, T]."""

PROGRAM, WEIGHTS = "dense.pt2", "dense.pt"
_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_EXAMPLE = 3  # samples; torch takes 0 and 1 for constants
_CLOSE = 1e-6


class Scorer(nn.Module):
    """A network whose input is plain tensors, computing in the precision of its training."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self._short = model, _SHORT.get(precision)

    def forward(
        self, dense: Tensor, pooled: Tensor, sequences: dict[str, Tensor], masks: dict[str, Tensor]
    ) -> Tensor:
        """Logits [B, T]."""
        cast = torch.autocast("cpu", self._short) if self._short else nullcontext()
        with cast:
            logits: Tensor = self.model(dense, Embeddings(pooled, sequences, masks))
        return logits


def score_with(network: Callable[..., Tensor], dtype: torch.dtype, layout: Layout) -> Score:
    """Predictions by a `Scorer` or a loaded program."""

    def score(dense: np.ndarray, vectors: FieldVectors) -> np.ndarray:
        def to(array: np.ndarray) -> Tensor:
            return torch.tensor(array, dtype=dtype)  # a copy: a network may work in place

        sequences = {name: to(array) for name, array in vectors.sequences.items()}
        masks = {name: torch.from_numpy(mask) for name, mask in vectors.masks.items()}
        with torch.inference_mode():
            logits = network(to(dense), to(vectors.pooled), sequences, masks)
            return predictions(logits, layout)

    return score


def write_network(
    folder: Path, model: nn.Module, shape: InputShape, precision: str
) -> tuple[str, str]:
    """Write one of the two files; gives its name and, of mere weights, why they are that.

    The program takes any number of samples and gives the bytes of the network, or it is not taken.
    """
    scorer = Scorer(model, precision).eval()
    dtype = torch.float64 if precision == "float64" else torch.float32
    reason = ""
    for strict in (False, True):
        content = io.BytesIO()  # torch's own writer aborts the process where the disk is full
        try:
            with _quiet():
                program = _exported(scorer, shape, dtype, strict)
                torch.export.save(program, content)
                _compare(content, scorer, shape, dtype)
        except Exception as error:  # whatever stops it, the weights can be had
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            (folder / PROGRAM).write_bytes(content.getbuffer())
            return PROGRAM, ""
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    (folder / WEIGHTS).write_bytes(content.getbuffer())
    return WEIGHTS, reason


def read_program(file: Path) -> Callable[..., Tensor]:
    """The program that `write_network` wrote; `BrokenFileError` for any other content."""
    try:
        return _program(io.BytesIO(read_regular(file)))
    except Exception as error:  # torch has a dozen kinds for a damaged file
        raise BrokenFileError(f"{file} is not a torch.export program: {error}") from None


def read_weights(file: Path, model: nn.Module) -> None:
    """Fill the network; `BrokenFileError` when they are of another one."""
    try:
        content = io.BytesIO(read_regular(file))
        model.load_state_dict(torch.load(content, map_location="cpu", weights_only=True))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BrokenFileError(f"{file} does not hold the network's weights: {reason}") from None


def _exported(scorer: Scorer, shape: InputShape, dtype: torch.dtype, strict: bool) -> Any:
    samples = torch.export.Dim("samples")
    example = _example(shape, dtype, _EXAMPLE)
    dynamic = tuple(
        {name: {0: samples} for name in one} if isinstance(one, dict) else {0: samples}
        for one in example
    )
    return torch.export.export(scorer, example, dynamic_shapes=dynamic, strict=strict)


def _program(content: BinaryIO) -> Callable[..., Tensor]:
    content.seek(0)
    with _quiet():
        program: Callable[..., Tensor] = torch.export.load(content).module()
    return program


def _compare(content: BinaryIO, scorer: Scorer, shape: InputShape, dtype: torch.dtype) -> None:
    found = _program(content)
    for samples in (1, _EXAMPLE + 2):
        example = _example(shape, dtype, samples)
        with torch.inference_mode():
            far = float((found(*example) - scorer(*example)).abs().max())
        if not far <= _CLOSE:
            raise ValueError(f"the exported program's logits differ by {far:.2g}")


def _example(shape: InputShape, dtype: torch.dtype, samples: int) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=dtype)

    layout: Layout = shape.layout
    long = [f for f in layout.fields if f.pooling == "sequence"]
    sequences = {f.name: numbers(samples, f.max_length, shape.dims[f.table]) for f in long}
    masks = {name: torch.ones(rows.shape[:2], dtype=torch.bool) for name, rows in sequences.items()}
    return (
        numbers(samples, len(layout.dense)),
        numbers(samples, sum(shape.pooled_dims)),
        sequences,
        masks,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch tells its failures twice; here they become one reason."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
