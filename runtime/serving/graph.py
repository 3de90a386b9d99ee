"""The dense network of an export as a graph of ONNX, which onnxruntime computes.

It is data: nothing that lies in such a file is run as code. Whose file it is does not matter, for a
graph is held against a list before it is computed: of operations, of the parts of a file, and of
how many bytes its weights have. While it is computed it gets no more memory than `MOST_MEMORY`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runtime.embedding.batch_rows import FieldVectors
from runtime.files import BrokenFileError
from runtime.models.inputs import Embeddings, InputShape, predictions

MOST_MEMORY = 2**30
"""For all that is computed, beside what torch and numpy hold."""
_MOST_BESIDE = 4 * 2**20
"""Bytes of a graph beside its weights; one in hundred of them is a node of 150 bytes."""
_MOST_AT_ONCE = 2**22
"""Numbers that are given to a graph at once; a network computes each sample by itself."""
_EXAMPLE = 3  # samples; torch takes 0 and 1 for constants

_NAMES = """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization Cast CastLike Ceil Celu Clip Concat
    Constant ConstantOfShape Conv Cos CumSum Div Einsum Elu Equal Erf Exp Expand Flatten Floor GRU
    Gather GatherElements GatherND Gelu Gemm GlobalAveragePool Greater GreaterOrEqual
    GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LSTM
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Mean Min Mish
    Mod Mul Neg Not Or PRelu Pad Pow RMSNormalization Range Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Relu Reshape Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Size
    Slice Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu
    Unsqueeze Where Xor
"""
OPERATIONS = frozenset(_NAMES.split())
"""Operations of ONNX' own domain that compute from their arguments alone: none draws, reads a file,
runs a graph of its own or calls a function of another domain."""
_FLOATS = {1: 4, 10: 2, 11: 8}
"""TensorProto.DataType of FLOAT, FLOAT16, DOUBLE: bytes of a number."""
_SIZES = _FLOATS | {2: 1, 3: 1, 5: 2, 6: 4, 7: 8, 9: 1}
"""And of UINT8, INT8, INT16, INT32, INT64, BOOL."""
_PARTS = {
    "ModelProto": {"ir_version", "opset_import", "producer_name", "producer_version", "graph"},
    "GraphProto": {"node", "name", "initializer", "input", "output"},
    "NodeProto": {"input", "output", "name", "op_type", "attribute"},
    "AttributeProto": {"name", "type", "f", "i", "s", "t", "floats", "ints", "strings"},
    "TensorProto": {"dims", "data_type", "name", "raw_data"},
}
"""All that such a file may hold: no function, no graph in a node, no bytes of another file."""


class Input(NamedTuple):
    """One input of the graph."""

    name: str
    """dense, pooled, sequence_FIELD or mask_FIELD."""
    type: str
    """float32, float64 or bool."""
    shape: tuple[int, ...]
    """Of one sample."""


def inputs_of(shape: InputShape, dtype: torch.dtype) -> list[Input]:
    """What a network is given, in order: also what it does not use."""
    number = str(dtype).removeprefix("torch.")
    long = [field for field in shape.layout.fields if field.pooling == "sequence"]
    return [
        Input("dense", number, (len(shape.layout.dense),)),
        Input("pooled", number, (sum(shape.pooled_dims),)),
        *(Input(f"sequence_{f.name}", number, (f.max_length, shape.dims[f.table])) for f in long),
        *(Input(f"mask_{f.name}", "bool", (f.max_length,)) for f in long),
    ]


def require_libraries() -> None:
    """Raise ValueError where a library that writes and reads graphs and weights is not there."""
    for name in ("onnx", "onnxscript", "onnxruntime", "safetensors"):
        library(name)


def library(name: str) -> Any:
    """A library of the extra `export`; ValueError saying how it is had, where it is not there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"an export needs {name.partition('.')[0]}: pip install 'persia-testbed[export]'"
        ) from None


# Written.


class _OfArrays(nn.Module):
    """A network whose inputs are plain tensors, one after the other."""

    def __init__(self, model: nn.Module, shape: InputShape) -> None:
        super().__init__()
        self.model = model
        self._long = [f.name for f in shape.layout.fields if f.pooling == "sequence"]

    def forward(self, *given: Tensor) -> Tensor:
        """Logits [B, T]."""
        dense, pooled, *rest = given
        count = len(self._long)
        sequences = dict(zip(self._long, rest[:count], strict=True))
        masks = dict(zip(self._long, rest[count:], strict=True))
        logits: Tensor = self.model(dense, Embeddings(pooled, sequences, masks))
        return logits


def graph_of(model: nn.Module, shape: InputShape, dtype: torch.dtype) -> bytes:
    """The file of a network, for any number of samples, in the type of its weights and not in the
    one that autocast gave it while it was trained. Raises whatever torch cannot write as a graph,
    as a path that hangs on its numbers."""
    inputs = inputs_of(shape, dtype)
    network = _OfArrays(model, shape).eval()
    example = tuple(torch.from_numpy(array) for array in drawn(inputs, _EXAMPLE).values())
    samples = torch.export.Dim("samples")
    several = (tuple({0: samples} for _ in inputs),)
    with _quiet():
        program = _program(network, example, several)
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[one.name for one in inputs],
            output_names=["logits"],
            verbose=False,
        )
    assert made is not None
    return _bare(made.model_proto)


def _program(network: nn.Module, example: Any, several: Any) -> torch.export.ExportedProgram:
    """What one way of tracing does not take, the other may; the first one's words are clearer."""
    try:
        return torch.export.export(network, example, dynamic_shapes=several, strict=False)
    except Exception as error:
        with suppress(Exception):
            return torch.export.export(network, example, dynamic_shapes=several, strict=True)
        raise error


def _bare(proto: Any) -> bytes:
    """Without what only its writer needs: each node names lines of the user's files."""
    graph = proto.graph
    graph.ClearField("value_info")
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    content: bytes = proto.SerializeToString()
    return content


def drawn(inputs: Sequence[Input], samples: int) -> dict[str, np.ndarray]:
    """Made-up values of the inputs, always the same ones."""
    draw = np.random.default_rng(0)
    return {
        one.name: np.ones((samples, *one.shape), bool)
        if one.type == "bool"
        else draw.standard_normal((samples, *one.shape)).astype(one.type)
        for one in inputs
    }


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


# Read.


class Graph:
    """A network that onnxruntime computes on the CPU; safe for threads."""

    def __init__(self, content: bytes, shape: InputShape, dtype: torch.dtype, file: Path) -> None:
        """``content``: of ``file``, by whomever; `BrokenFileError` where it is no such network."""
        self._file = file
        self._layout = shape.layout
        self._inputs = inputs_of(shape, dtype)
        width = sum(math.prod(one.shape) for one in self._inputs)
        if width > _MOST_AT_ONCE:
            raise BrokenFileError(f"{file}: a sample has {width:,} numbers, too many to compute")
        self._at_once = min(4096, _MOST_AT_ONCE // max(1, width))
        try:
            refuse_other(content, self._inputs)
        except ValueError as error:
            raise BrokenFileError(f"{file} is no network of an export: {error}") from None

        # Without its optimiser: a graph is computed as it stands.
        runtime = _onnxruntime()
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = runtime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"], enable_fallback=False
            )
        except Exception as error:  # a dozen kinds
            raise BrokenFileError(f"{file} is no network of an export: {_line(error)}") from None
        self._run(drawn(self._inputs, _EXAMPLE))

    def score(self, dense: np.ndarray, vectors: FieldVectors) -> np.ndarray:
        """Dense features [B, D] and vectors to what is predicted, float64 [B, T]."""
        arrays = [dense, vectors.pooled, *vectors.sequences.values(), *vectors.masks.values()]
        given = {
            one.name: np.ascontiguousarray(array, one.type)
            for one, array in zip(self._inputs, arrays, strict=True)
        }
        parts = [
            self._run({name: array[at : at + self._at_once] for name, array in given.items()})
            for at in range(0, len(dense), self._at_once)
        ]
        return predictions(torch.from_numpy(np.concatenate(parts)), self._layout)

    def _run(self, given: dict[str, np.ndarray]) -> np.ndarray:
        try:
            (logits,) = self._session.run(["logits"], given)
        except Exception as error:
            raise BrokenFileError(f"{self._file} cannot be computed: {_line(error)}") from None
        expected = (len(given["dense"]), len(self._layout.tasks))
        if logits.dtype not in (np.float32, np.float64) or logits.shape != expected:
            raise BrokenFileError(
                f"{self._file} gives {logits.dtype} of shape {logits.shape}, not a logit for each"
                f" task of a sample, {expected}"
            )
        result: np.ndarray = logits
        return result


@cache
def _onnxruntime() -> Any:
    """The library, whose sessions get their memory from a place that gives no more than a bound."""
    runtime = library("onnxruntime")
    runtime.set_default_logger_severity(4)  # what fails is raised
    memory = runtime.OrtMemoryInfo(
        "Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
    )
    as_asked = 1  # as many bytes as are asked for, where the default doubles them
    bound = runtime.OrtArenaCfg({"max_mem": MOST_MEMORY, "arena_extend_strategy": as_asked})
    runtime.create_and_register_allocator(memory, bound)
    return runtime


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def refuse_other(content: bytes, inputs: Sequence[Input]) -> None:
    """Raise ValueError for a file that holds anything but a graph of `OPERATIONS` over these
    inputs, with weights of as many bytes as they have."""
    refuse_many_parts(content)
    onnx = library("onnx")
    try:
        proto = onnx.ModelProto.FromString(content)
    except Exception as error:
        raise ValueError(_line(error)) from None
    graph = proto.graph
    _refuse_other_parts(proto)
    _refuse_other_parts(graph)
    if [one.domain for one in proto.opset_import] != [""]:
        raise ValueError(f"its operations are of {[o.domain for o in proto.opset_import]}")
    for tensor in graph.initializer:
        _refuse_other_size(tensor)

    # The operations, each with plain arguments.
    for node in graph.node:
        _refuse_other_parts(node)
        if node.op_type not in OPERATIONS:
            raise ValueError(f"{node.op_type!r} is no operation that an export may have")
        for argument in node.attribute:
            _refuse_other_parts(argument)
            if argument.HasField("t"):
                _refuse_other_size(argument.t)
    _refuse_whole_division(onnx, proto)

    # What it is given, and that it gives logits.
    types = {"float32": 1, "float64": 11, "bool": 9}
    wanted = [(one.name, types[one.type], list(one.shape)) for one in inputs]
    given = [(one.name, *_tensor_of(one)) for one in graph.input]
    if given != wanted:
        raise ValueError(f"its inputs are {given}, not {wanted}"[:400])
    if [one.name for one in graph.output] != ["logits"]:
        raise ValueError(f"it gives {[one.name for one in graph.output]}, not logits"[:400])


def _tensor_of(value: Any) -> tuple[int, list[int]]:
    """The type of an input, and its shape behind the samples."""
    tensor = value.type.tensor_type
    return tensor.elem_type, [one.dim_value for one in tensor.shape.dim[1:]]


def _refuse_other_parts(message: Any) -> None:
    kind = type(message).__name__
    if other := {part.name for part, _ in message.ListFields()} - _PARTS[kind]:
        raise ValueError(f"a {kind} of it has {', '.join(sorted(other))}")


def _refuse_other_size(tensor: Any) -> None:
    """Each number of a tensor lies in the file, so that none asks for more memory than that has."""
    _refuse_other_parts(tensor)
    dims = list(tensor.dims)
    size = _SIZES.get(tensor.data_type, 0)
    if not size or min(dims, default=0) < 0 or math.prod(dims) * size != len(tensor.raw_data):
        raise ValueError(f"{tensor.name!r} of shape {dims} does not fill its bytes"[:400])


def _refuse_whole_division(onnx: Any, proto: Any) -> None:
    """The least whole number by -1 ends the process, in onnxruntime as in C."""
    plain = type(proto)()
    plain.CopyFrom(proto)
    for tensor in plain.graph.initializer:  # weights: their types are all that is asked for
        if len(tensor.raw_data) > 1024:
            tensor.ClearField("raw_data")
    try:
        found = onnx.shape_inference.infer_shapes(plain).graph
    except Exception as error:
        raise ValueError(_line(error)) from None
    values = [*found.value_info, *found.input, *found.output]
    kinds = {one.name: one.type.tensor_type.elem_type for one in values}
    kinds |= {one.name: one.data_type for one in found.initializer}
    for node in found.node:
        if node.op_type == "Mod" and not any(a.name == "fmod" and a.i == 1 for a in node.attribute):
            raise ValueError("Mod may not be of whole numbers (fmod must be 1)")
        if node.op_type == "Div" and kinds.get(node.output[0]) not in _FLOATS:
            raise ValueError("Div may not be of whole numbers")


def refuse_many_parts(content: bytes) -> None:
    """Raise ValueError for a file that is no message of protobuf, or is one of more than a few MiB
    beside the numbers of its weights: empty parts take a hundred times their bytes in memory."""
    beside = 0
    weights = (7, 5, 9)  # ModelProto.graph, GraphProto.initializer, TensorProto.raw_data

    def number(at: int) -> tuple[int, int]:
        value = 0
        for place in range(10):
            if at + place >= len(content):
                break
            byte = content[at + place]
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value, at + place + 1
        raise ValueError("it is no message of protobuf")

    def walk(at: int, end: int, path: tuple[int, ...]) -> None:
        nonlocal beside
        while at < end:
            start = at
            key, at = number(at)
            inner = at
            match key & 7:
                case 0:
                    _, at = number(at)
                case 1:
                    at += 8
                case 2:
                    size, inner = number(at)
                    at = inner + size
                case 5:
                    at += 4
                case _:
                    raise ValueError("it is no message of protobuf")
            if at > end:
                raise ValueError("it is cut off")
            on_path = key & 7 == 2 and bool(path) and key >> 3 == path[0]
            beside += (inner if on_path else at) - start
            if beside > _MOST_BESIDE:
                raise ValueError(f"it has more than {_MOST_BESIDE:,} bytes beside its weights")
            if on_path and path[1:]:
                walk(inner, at, path[1:])

    walk(0, len(content), weights)
