"""The dense network of an export, written and read as data: nothing that is read is code.

`dense.onnx` holds the network, for this package and other programs (see `graph`), and
`dense.safetensors` its weights, in the format of that name. A class that is no graph has its
weights alone: such a model is opened from its run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runtime.data.batch import Layout
from runtime.embedding.batch_rows import FieldVectors
from runtime.files import read_bounded
from runtime.models.inputs import Embeddings, InputShape, predictions
from runtime.rank.learner import autocast
from runtime.serving.graph import Graph, graph_of, library

Precision = Literal["float32", "float64", "bfloat16", "tf32"]
WEIGHTS = "dense.safetensors"
NETWORK = "dense.onnx"
MOST_BYTES = 512 * 2**20
"""Of a file of weights, or of a graph with its weights."""
MOST_APART = 1e-5
"""How far a prediction of `dense.onnx` may be from the model's, of a number beyond 1 as a share."""
Score = Callable[[np.ndarray, FieldVectors], np.ndarray]
"""Dense features [B, D] and vectors to what is predicted, float64 [B, T]."""


class Scorer(nn.Module):
    """A network whose input is plain tensors, computing in the precision of its training."""

    def __init__(self, model: Callable[[Tensor, Embeddings], Tensor], precision: str) -> None:
        super().__init__()
        self.model = model
        self._precision = precision

    def forward(
        self, dense: Tensor, pooled: Tensor, sequences: dict[str, Tensor], masks: dict[str, Tensor]
    ) -> Tensor:
        """Logits [B, T]."""
        with autocast("cpu", self._precision):
            return self.model(dense, Embeddings(pooled, sequences, masks))


def score_with(network: Callable[..., Tensor], dtype: torch.dtype, layout: Layout) -> Score:
    """By a `Scorer`."""

    def score(dense: np.ndarray, vectors: FieldVectors) -> np.ndarray:
        def to(array: np.ndarray) -> Tensor:
            return torch.tensor(array, dtype=dtype)  # a copy: a network may work in place

        sequences = {name: to(array) for name, array in vectors.sequences.items()}
        masks = {name: torch.from_numpy(mask) for name, mask in vectors.masks.items()}
        with torch.inference_mode():
            logits = network(to(dense), to(vectors.pooled), sequences, masks)
            return predictions(logits, layout)

    return score


def dtype_of(precision: str) -> torch.dtype:
    """Type of the weights and of their inputs, as in training."""
    return torch.float64 if precision == "float64" else torch.float32


# Written.


class Written(NamedTuple):
    """What was written of a network."""

    why_no_graph: str
    """Empty where there is one."""
    furthest: float
    """How far its predictions are from the model's, at most; NaN where there is none."""


def write_network(
    folder: Path,
    model: nn.Module,
    shape: InputShape,
    precision: str,
    tried: Sequence[tuple[np.ndarray, FieldVectors]],
) -> Written:
    """Write the files of a network into a fresh folder. Raises ValueError for weights that are no
    tensors.

    ``tried``: dense features and vectors on which the graph must predict what the model does,
    computed in the type of its weights; else there is no such file.
    """
    write_weights(folder / WEIGHTS, model.state_dict())
    dtype = dtype_of(precision)
    file = folder / NETWORK
    try:
        content = graph_of(model, shape, dtype)
        furthest = _furthest(content, model, shape, dtype, file, tried)
    except OSError:
        raise
    except Exception as error:  # whatever stops it, the weights can be had
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        return Written(reason, float("nan"))
    file.write_bytes(content)
    return Written("", furthest)


def _furthest(
    content: bytes,
    model: nn.Module,
    shape: InputShape,
    dtype: torch.dtype,
    file: Path,
    tried: Sequence[tuple[np.ndarray, FieldVectors]],
) -> float:
    graph = Graph(content, shape, dtype, file)
    score = score_with(Scorer(model, "float32").eval(), dtype, shape.layout)
    furthest = 0.0
    for dense, vectors in tried:
        expected = score(dense, vectors)
        apart = np.abs(graph.score(dense, vectors) - expected) / np.maximum(1, np.abs(expected))
        if not (apart <= MOST_APART).all():
            raise ValueError(
                f"of {len(dense)} samples a prediction of the graph is {apart.max():.2g} from the"
                f" model's, more than {MOST_APART:g}"
            )
        furthest = max(furthest, float(apart.max(initial=0)))
    return furthest


def write_weights(file: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors by name. Raises ValueError for what is none, or of a type without a name."""
    safetensors = library("safetensors.torch")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ValueError(f"{name} of the dense network is a {kind}: an export holds tensors")
    # Each in memory of its own: the format knows none that share it.
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        content = safetensors.save(plain, {"format": "pt"})
    except Exception as error:  # of the library's own kinds
        raise ValueError(f"the dense network's weights cannot be exported: {error}") from None
    file.write_bytes(content)


# Read.


def read_network(folder: Path, shape: InputShape, precision: str) -> Score:
    """What `write_network` wrote; `BrokenFileError` for any other content."""
    file = folder / NETWORK
    return Graph(read_bounded(file, MOST_BYTES), shape, dtype_of(precision), file).score
