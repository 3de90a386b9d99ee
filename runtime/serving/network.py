"""The dense network of an export, written and read as data: nothing that is read is code.

`dense.safetensors` holds the weights, in the format of that name. A built-in network is made anew
from its name and widths. Of a class of the user's, `dense.json` holds the operations that
torch.export has seen in it, and these are held one by one against a list before anything is
computed; where torch.export does not take the class, the class itself is needed again.

`dense.pt2` is for other programs. Nobody here reads it: `torch.export.load` unpickles what lies in
the file and evaluates its expressions, so to load it is to trust who has made it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from persia_sim.base.files import parsed, read_regular
from runtime.data.batch import Layout
from runtime.embedding.batch_rows import FieldVectors
from runtime.files import BrokenFileError
from runtime.models.inputs import Embeddings, InputShape, predictions
from runtime.models.networks import BUILT_IN, build_model, is_imported
from runtime.rank.learner import autocast
from runtime.serving.operations import Operations, operations_of

Precision = Literal["float32", "float64", "bfloat16", "float16", "tf32"]
Form = Literal["built-in", "operations", "class"]
"""What is needed beside the weights: a name of ours, `dense.json`, or the user's class."""
WEIGHTS = "dense.safetensors"
OPERATIONS = "dense.json"
PROGRAM = "dense.pt2"
FILES_OF = {"built-in": {WEIGHTS}, "operations": {WEIGHTS, OPERATIONS}, "class": {WEIGHTS}}
_EXAMPLE = 3  # samples; torch takes 0 and 1 for constants


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


def score_with(
    network: Callable[..., Tensor], dtype: torch.dtype, layout: Layout
) -> Callable[[np.ndarray, FieldVectors], np.ndarray]:
    """By a `Scorer`: dense features [B, D] and vectors to what is predicted, float64 [B, T]."""

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


def write_network(
    folder: Path, model: nn.Module, name: str, shape: InputShape, precision: str
) -> tuple[Form, str, str]:
    """Write the files of a network into a fresh folder: what is needed beside the weights; why the
    class is; why there is no program for others. Raises ValueError for weights that are no tensors.
    """
    # A built-in network needs no more than its weights.
    scorer = Scorer(model, precision).eval()
    dtype = dtype_of(precision)
    tensors = model.state_dict()
    why = ""
    form: Form = "operations" if is_imported(name) else "built-in"
    with _quiet():
        # A program for others, and for us operations in place of the user's class, where it has
        # any.
        no_program = _write_program(folder / PROGRAM, scorer, shape, dtype)
        if form == "operations":
            try:
                document, constants = _checked_operations(model, precision, shape)
            except Exception as error:  # whatever stops it, the weights can be had
                form = "class"
                why = _sentence(error)
            else:
                (folder / OPERATIONS).write_text(json.dumps(document, allow_nan=False))
                tensors = {**tensors, **constants}
    write_weights(folder / WEIGHTS, tensors)
    return form, why, no_program


def _checked_operations(
    model: nn.Module, precision: str, shape: InputShape
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The operations of a network and the tensors in them that are not of its state. They give its
    very bytes and leave its weights as they are, or ValueError is raised."""
    scorer = Scorer(model, precision).eval()
    dtype = dtype_of(precision)
    # Seen without autocast, in which they are computed again.
    plain = Scorer(model, "float32").eval()
    document, tensors = operations_of(_exported(plain, shape, dtype), _names(shape))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    again = Scorer(Operations(document, tensors, _names(shape)), precision)
    for samples in (1, _EXAMPLE + 2):
        example = _example(shape, dtype, samples)
        with torch.inference_mode():
            if not torch.equal(again(*example), scorer(*example)):
                raise ValueError("its operations one by one give other logits")
    if not all(torch.equal(before[name], tensor) for name, tensor in tensors.items()):
        raise ValueError("it changes its own weights or buffers when it is evaluated")
    state = model.state_dict()
    return document, {name: tensor for name, tensor in tensors.items() if name not in state}


def _write_program(file: Path, scorer: Scorer, shape: InputShape, dtype: torch.dtype) -> str:
    """Why there is none; the program takes any number of samples and gives the same logits."""
    content = io.BytesIO()  # torch's own writer aborts the process where the disk is full
    try:
        program = _exported(scorer, shape, dtype)
        torch.export.save(program, content)
        _compare(content, scorer, shape, dtype)
    except Exception as error:
        return _sentence(error)
    file.write_bytes(content.getbuffer())
    return ""


def _exported(
    scorer: Scorer, shape: InputShape, dtype: torch.dtype
) -> torch.export.ExportedProgram:
    samples = torch.export.Dim("samples")
    example = _example(shape, dtype, _EXAMPLE)
    dynamic = tuple(
        {name: {0: samples} for name in one} if isinstance(one, dict) else {0: samples}
        for one in example
    )
    try:
        return torch.export.export(scorer, example, dynamic_shapes=dynamic, strict=False)
    except Exception:  # what one way of tracing does not take, the other may
        return torch.export.export(scorer, example, dynamic_shapes=dynamic, strict=True)


def _compare(content: io.BytesIO, scorer: Scorer, shape: InputShape, dtype: torch.dtype) -> None:
    content.seek(0)
    obtained = torch.export.load(content).module()  # bytes that were made here
    for samples in (1, _EXAMPLE + 2):
        example = _example(shape, dtype, samples)
        with torch.inference_mode():
            far = float((obtained(*example) - scorer(*example)).abs().max())
        if not far <= 1e-6:
            raise ValueError(f"the exported program's logits differ by {far:.2g}")


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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


def _long_fields(shape: InputShape) -> list[Any]:
    return [f for f in shape.layout.fields if f.pooling == "sequence"]


def _names(shape: InputShape) -> list[str]:
    """The sequences, in the order in which they are given."""
    return [field.name for field in _long_fields(shape)]


def _example(shape: InputShape, dtype: torch.dtype, samples: int) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=dtype)

    dims = shape.dims
    long = _long_fields(shape)
    sequences = {f.name: numbers(samples, f.max_length, dims[f.table]) for f in long}
    masks = {name: torch.ones(rows.shape[:2], dtype=torch.bool) for name, rows in sequences.items()}
    return (
        numbers(samples, len(shape.layout.dense)),
        numbers(samples, sum(shape.pooled_dims)),
        sequences,
        masks,
    )


# Read.


def read_network(
    folder: Path, form: Form, name: str, shape: InputShape, hidden: tuple[int, ...], precision: str
) -> Scorer:
    """What `write_network` wrote; `BrokenFileError` for any other content. The ``name`` of a class
    is imported where that is the form: who calls has asked whether it may be."""
    tensors = read_weights(folder / WEIGHTS)
    dtype = dtype_of(precision)
    if form == "operations":
        return _of_operations(folder / OPERATIONS, tensors, shape, precision)
    try:
        if form == "built-in":
            _refuse_other_shapes(name, shape, hidden, tensors)
        model = build_model(name, shape, hidden, 0).to(dtype)
        model.load_state_dict(tensors)
    except (RuntimeError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise BrokenFileError(
            f"{folder / WEIGHTS} does not hold the network's weights: {reason}"
        ) from None
    return Scorer(model, precision).eval()


def _of_operations(
    file: Path, tensors: Mapping[str, Tensor], shape: InputShape, precision: str
) -> Scorer:
    """The network of a file of operations, which are tried on a few samples."""
    try:
        document = parsed(read_regular(file), file)
        tried = _example(shape, dtype_of(precision), _EXAMPLE)
    except (OSError, ValueError, RuntimeError) as error:  # the last: sequences beyond any memory
        raise BrokenFileError(f"{file} is no network that can be tried: {error}") from None
    scorer = Scorer(Operations(document, tensors, _names(shape), str(file)), precision).eval()
    with torch.inference_mode():
        obtained = scorer(*tried)
    if obtained.shape != (_EXAMPLE, shape.tasks):
        raise BrokenFileError(
            f"{file} gives logits of shape {tuple(obtained.shape)}, not one a task of a sample"
        )
    return scorer


def _refuse_other_shapes(
    name: str, shape: InputShape, hidden: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> None:
    """Before any memory is asked for: a network of widths that are none of these weights'."""
    if name not in BUILT_IN:
        raise KeyError(f"no network is called {name}")
    with torch.device("meta"):
        wanted = build_model(name, shape, hidden, 0).state_dict()
    for weight in sorted(wanted.keys() ^ tensors.keys()):
        raise KeyError(f"{weight} is {'lacking' if weight in wanted else 'none of them'}")
    for weight, one in wanted.items():
        if one.shape != tensors[weight].shape:
            obtained = tuple(tensors[weight].shape)
            raise KeyError(f"{weight} has shape {obtained}, not {tuple(one.shape)}")


# The format safetensors (https://github.com/huggingface/safetensors): the length of a header, the
# header as JSON (of each tensor its type, shape, first and last byte), and the bytes of all.

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_ABOUT = "__metadata__"


def write_weights(file: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors by name. Raises ValueError for what is none, or of a type without a name."""
    header: dict[str, Any] = {_ABOUT: {"format": "pt"}}
    pieces = list[bytes]()
    at = 0
    # The widest first, so that each begins where its type may lie in memory.
    for name, tensor in sorted(tensors.items(), key=lambda one: -getattr(one[1], "itemsize", 0)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _NAMES:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise ValueError(
                f"{name} of the dense network is of type {kind}: an export holds tensors of"
                f" {', '.join(str(one).removeprefix('torch.') for one in _NAMES)}"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        pieces.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *pieces)))


def read_weights(file: Path) -> dict[str, Tensor]:
    """What `write_weights` wrote, in memory of its own; `BrokenFileError` for any other content."""
    try:
        content = read_regular(file)
        ends = 8 + int.from_bytes(content[:8], "little")
        if len(content) < ends:
            raise ValueError("its header is longer than the file")
        header = parsed(content[8:ends], file)
        return _tensors({k: v for k, v in header.items() if k != _ABOUT}, content[ends:])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BrokenFileError(f"{file} is no file of weights: {error}") from None


def _tensors(header: dict[str, Any], data: bytes) -> dict[str, Tensor]:
    """Each byte belongs to one tensor, so that none asks for more memory than the file has."""
    # In the order of their bytes, without a gap.
    result = dict[str, Tensor]()
    at = 0
    for name, about in sorted(header.items(), key=lambda one: tuple(one[1]["data_offsets"])):
        dtype = _TYPES[about["dtype"]]
        shape = about["shape"]
        (begin, end) = about["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"{name} has shape {shape} in bytes {begin} to {end}")
        if begin != at or end - begin != math.prod(shape) * dtype.itemsize or end > len(data):
            raise ValueError(f"{name} of shape {shape} does not fill its bytes, {begin} to {end}")
        at = end

        # A copy: torch writes into what it is given.
        part = bytearray(data[begin:end])
        result[name] = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        result[name] = result[name].reshape(shape)
    if at != len(data):
        raise ValueError(f"it has {len(data) - at} bytes that belong to no tensor")
    return result


assert set(FILES_OF) == set(get_args(Form))
