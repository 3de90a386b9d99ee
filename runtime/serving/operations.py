"""A network as a list of operations, each a name of `OPERATIONS` with its arguments: data, which
can be computed and can do nothing else.

A value is an input, a weight, or the result of an earlier operation, by its number in this order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from runtime.files import BrokenFileError
from runtime.models.inputs import Embeddings

FORMAT = "persia-testbed-network-1"
_ATEN = """
    abs add addmm alias all amax amin any arange argmax argmin argsort avg_pool1d baddbmm batch_norm
    bitwise_and bitwise_not bitwise_or bmm broadcast_to cat ceil celu chunk clamp clamp_max
    clamp_min clone concat contiguous conv1d copy cos cosine_similarity cumprod cumsum detach div
    dot dropout einsum elu embedding eq erf exp expand expand_as feature_dropout fill flatten flip
    floor floor_divide fmod full full_like gather ge gelu glu group_norm gt hardsigmoid hardswish
    hardtanh hstack index index_add index_select instance_norm isfinite isnan layer_norm le
    leaky_relu lerp lift_fresh_copy linalg_vector_norm linear log log1p log_sigmoid log_softmax
    logical_and logical_not logical_or logsumexp lt masked_fill matmul max maximum mean min minimum
    mish mm movedim mul mv narrow ne neg new_full new_ones new_zeros norm ones ones_like outer pad
    permute pow prelu prod reciprocal relu relu6 remainder repeat repeat_interleave reshape rms_norm
    roll rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add select selu
    sigmoid sign silu sin slice softmax softplus sort split split_with_sizes sqrt square
    squeeze stack std sub sum sym_size t tan tanh threshold tile to topk transpose tril tril_indices
    triu triu_indices true_divide type_as unbind unflatten unfold unsqueeze var view vstack where
    zero zeros zeros_like
"""
OPERATIONS = frozenset(_ATEN.split())
"""Operations of torch's ATen: what computes from its arguments, or in place. None opens a file,
takes memory as it lies there, looks outside of its tensors, or draws."""
_LEFT_OUT = {"view.dtype"}
"""It reads numbers of one type as those of another."""
_NUMBERS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem")
}
"""Operations on sizes; getitem: on an operation with several results."""
_LARGEST = 2**63
_KINDS: dict[str, dict[str, Any]] = {
    "dtype": {
        str(one).removeprefix("torch."): one
        for one in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    },
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
    },
    "float": {text: float(text) for text in ("inf", "-inf", "nan")},
}
"""Arguments that JSON has no word for, as {kind: name}."""


class _Of(NamedTuple):
    """A value by its number."""

    number: int


class _Step(NamedTuple):
    name: str
    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]


def inputs_of(sequences: Sequence[str]) -> list[str]:
    """What a network is given, in order."""
    return [
        "dense",
        "pooled",
        *(f"sequences {s}" for s in sequences),
        *(f"masks {s}" for s in sequences),
    ]


class Operations:
    """A network made of them, given dense features and `Embeddings`."""

    def __init__(
        self,
        document: Any,
        tensors: Mapping[str, Tensor],
        sequences: Sequence[str],
        file: str = "the network",
    ) -> None:
        """``document``: as of `operations_of`; nothing is computed before each operation in it has
        been looked at. ``sequences``: of the layout. Raises BrokenFileError naming the ``file``."""
        self._file = file
        self._sequences = list(sequences)
        try:
            if document["format"] != FORMAT or document["inputs"] != inputs_of(sequences):
                raise ValueError(f"it is no network ({FORMAT}) of these inputs")
            self._weights = [tensors[name] for name in document["weights"]]
            known = len(document["inputs"]) + len(self._weights)
            self._steps = [_step(one, known + k) for k, one in enumerate(document["operations"])]
            self._output = _decoded(document["output"], known + len(self._steps))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else error
            raise BrokenFileError(f"{file} is no network: {why}") from None

    def __call__(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Logits [B, T]."""
        # Inputs and weights by number, as the steps name them.
        pooled, sequences, masks = embeddings
        values: list[Any] = [dense, pooled]
        values += [given[name] for given in (sequences, masks) for name in self._sequences]
        values += self._weights
        try:
            # Step by step; whatever a damaged file makes of them is an error of that file.
            for name, call, args, kwargs in self._steps:
                result = call(*_filled(args, values), **_filled(kwargs, values))
                if isinstance(result, int) and abs(result) >= _LARGEST:
                    raise ValueError(f"{name} gives a number beyond 64 bits")
                values.append(result)
            logits = _filled(self._output, values)
            if not isinstance(logits, Tensor):
                raise TypeError(f"its output is a {type(logits).__name__}")
        except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BrokenFileError(f"{self._file} cannot be computed: {reason}") from None
        return logits


def _filled(argument: Any, values: Sequence[Any]) -> Any:
    """The argument with values in the place of their numbers."""
    if isinstance(argument, _Of):
        return values[argument.number]
    if isinstance(argument, list):
        return [_filled(one, values) for one in argument]
    if isinstance(argument, dict):
        return {name: _filled(one, values) for name, one in argument.items()}
    return argument


# From a document.


def _step(document: Any, number: int) -> _Step:
    """An operation whose result has that number: of the list, and of earlier values."""
    name = document["name"]
    args = document["args"]
    kwargs = document["kwargs"]
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise TypeError(f"operation {number} has no arguments")
    call = _callable(name)
    if call is None:
        raise ValueError(f"operation {number} is {name!r}, which is none that a network may have")
    return _Step(
        name, call, _decoded(args, number), {k: _decoded(v, number) for k, v in kwargs.items()}
    )


def _callable(name: Any) -> Callable[..., Any] | None:
    """What computes the operation; None where it is none of the list, or not of this torch."""
    space, _, rest = str(name).partition(".")
    if space == "operator":
        return _NUMBERS.get(rest)
    base, _, overload = rest.partition(".")
    plain = base.removesuffix("_")
    if space != "aten" or plain not in OPERATIONS or rest in _LEFT_OUT or "out" in overload:
        return None
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or overload not in packet.overloads():
        return None
    result: Callable[..., Any] = getattr(packet, overload)
    return result


def _decoded(argument: Any, number: int) -> Any:
    """An argument of the operation with that number."""
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    if isinstance(argument, list):
        return [_decoded(one, number) for one in argument]
    if isinstance(argument, dict) and len(argument) == 1:
        ((kind, value),) = argument.items()
        if kind == "of" and type(value) is int and 0 <= value < number:
            return _Of(value)
        if kind in _KINDS and isinstance(value, str) and value in _KINDS[kind]:
            return _KINDS[kind][value]
    raise ValueError(f"operation {number} has an argument {str(argument)[:80]}")


# From a program.


def operations_of(
    program: ExportedProgram, sequences: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The operations of a program whose inputs are those of a `Scorer`, as plain JSON, and the
    tensors that they name. Raises ValueError for what is none of the list."""
    # A program that changes its own buffers has no fixed result.
    inputs = inputs_of(sequences)
    place = dict[str, int]()
    tensors = dict[str, Tensor]()
    signature = program.graph_signature
    if [spec.kind for spec in signature.output_specs] != [OutputKind.USER_OUTPUT]:
        raise ValueError("it changes its own buffers")
    # Inputs come first, then weights and what else is constant, then results.
    given = 0
    for spec in signature.input_specs:
        name = str(getattr(spec.arg, "name", ""))
        if spec.kind is InputKind.USER_INPUT:
            place[name], given = given, given + 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            target = str(spec.target)
            held = program.state_dict if target in program.state_dict else program.constants
            place[name] = len(inputs) + len(tensors)
            tensors[target.removeprefix("model.")] = held[target].detach()
        else:
            raise ValueError(f"it has an input of kind {spec.kind.name}")
    if given != len(inputs):
        raise ValueError(f"it has {given} inputs, not {len(inputs)}")

    # Operations in their order, those alone that the output needs.
    output, needed = _needed(program)
    operations = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node in needed:
            operations.append(_of_node(node, place))
            place[node.name] = len(inputs) + len(tensors) + len(operations) - 1

    # Everything by number: nothing in the file names code.
    document = {
        "format": FORMAT,
        "inputs": inputs,
        "weights": list(tensors),
        "operations": operations,
        "output": _encoded(output, place),
    }
    return document, tensors


def _needed(program: ExportedProgram) -> tuple[Node, set[Node]]:
    """The node of the logits, and all that they come from: not what only asserts something."""
    (end,) = [node for node in program.graph.nodes if node.op == "output"]
    (output,) = end.args[0]
    changing = [n for n in program.graph.nodes if getattr(n.target, "_schema", None) is not None]
    waiting = [output, *(n for n in changing if n.target._schema.is_mutable)]
    reached: set[Node] = set()
    while waiting:
        if (node := waiting.pop()) not in reached:
            reached.add(node)
            waiting += node.all_input_nodes
    return output, reached


def _of_node(node: Node, place: Mapping[str, int]) -> dict[str, Any]:
    name = str(node.target)
    if not hasattr(node.target, "_schema"):
        name = f"operator.{getattr(node.target, '__name__', name)}"
    if _callable(name) is None:
        raise ValueError(f"{name} is no operation that an export may have")
    kwargs = {key: _encoded(value, place) for key, value in node.kwargs.items()}
    return {"name": name, "args": [_encoded(one, place) for one in node.args], "kwargs": kwargs}


def _encoded(argument: Any, place: Mapping[str, int]) -> Any:
    if isinstance(argument, Node):
        return {"of": place[argument.name]}
    if isinstance(argument, list | tuple):
        return [_encoded(one, place) for one in argument]
    for kind, known in _KINDS.items():
        for name, value in known.items():
            if type(argument) is type(value) and str(argument) == str(value):
                return {kind: name}
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise ValueError(f"it has an argument of type {type(argument).__name__}")
