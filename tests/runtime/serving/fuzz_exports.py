"""Opens exports that nobody has written, one after another, from a seed.

    python -m tests.runtime.serving.fuzz_exports EXPORTS SEED COUNT

Each ends as a model or as a ValueError, or this process ends: with another error, by a signal, past
its limit of memory, or of time for one input. The last line on stdout says which input it was.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from runtime.files import digest_of, write_sealed
from runtime.inference import open_model
from runtime.serving.graph import OPERATIONS
from tests.runtime.changed import NUMBERS, changed_value, flipped

MEMORY = 2 * 2**30
"""Bytes that reading may take beside what is there before."""
CPU_S = 30
"""For one input."""
OPSET = 23


def of_manifest(draw: random.Random, folder: Path) -> None:
    """One to three values of the manifest, sealed anew."""
    file = folder / "manifest.json"
    document = json.loads(file.read_text())
    del document["digest"]
    for _ in range(draw.choice([1, 1, 2, 3])):
        document = changed_value(draw, document)
    if draw.random() < 0.05 or not isinstance(document, dict):
        file.write_bytes(flipped(draw, file.read_bytes()))
    else:
        write_sealed(file, document)


def a_tensor(draw: random.Random, name: str) -> TensorProto:
    """A few numbers of some type, sometimes with other dims than it has numbers."""
    kind = draw.choice([TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT64, TensorProto.INT32])
    dims = draw.choice([[], [1], [2], [3], [2, 2], [0], [1, 4]])
    count = 1
    for dim in dims:
        count *= dim
    least = -(2**31) if kind == TensorProto.INT32 else -(2**63)
    values = [max(least, min(-least - 1, draw.choice(NUMBERS))) for _ in range(count)]
    packed = {TensorProto.FLOAT: "f", TensorProto.INT64: "q", TensorProto.INT32: "i"}[kind]
    raw = struct.pack(f"<{count}{packed}", *values)
    if draw.random() < 0.05:
        dims = [draw.choice(NUMBERS) for _ in dims]
    return TensorProto(name=name, data_type=kind, dims=dims, raw_data=raw)


def an_attribute(draw: random.Random, operation: str) -> onnx.AttributeProto:
    """One that the operation may have, nearly always, with a value of its type."""
    known = onnx.defs.get_schema(operation, OPSET).attributes
    if not known or draw.random() < 0.02:
        return helper.make_attribute("axis", draw.choice(NUMBERS))
    name = draw.choice(sorted(known))
    small = [-1, 0, 1, 2, 3, *NUMBERS]
    values: dict[str, Any] = {
        "INT": draw.choice(small),
        "INTS": [draw.choice(small) for _ in range(draw.choice([1, 1, 2, 3]))],
        "FLOAT": draw.choice([0.5, 1e38, -1.0, 0.0]),
        "FLOATS": [0.5],
        "STRING": draw.choice(["bij,bjk->bik", "ij,ij->i", "...i,...i->...", "reflect", "edge"]),
        "STRINGS": ["Tanh"],
        "TENSOR": a_tensor(draw, ""),
    }
    if name == "to":
        values["INT"] = draw.choice([1, 1, 11, 7, 6, 9, 3, 2])
    kind = known[name].type.name
    return helper.make_attribute(name, values.get(kind, 0))


def a_node(draw: random.Random, given: str, names: list[str], fresh: str) -> onnx.NodeProto:
    """An operation of a value and of as many others as it takes."""
    operation = draw.choice(sorted(OPERATIONS))
    schema = onnx.defs.get_schema(operation, OPSET)
    most = min(schema.max_input, schema.min_input + 2)
    count = draw.randint(max(0, schema.min_input - 1), max(0, most - 1))
    extra = [draw.choice(names) for _ in range(count)]
    given_too = [given] if schema.max_input else []
    new = helper.make_node(operation, [*given_too, *extra], [fresh], name=fresh)
    required = [name for name, one in schema.attributes.items() if one.required]
    for name in required:
        for _ in range(40):
            if (one := an_attribute(draw, operation)).name == name:
                new.attribute.append(one)
                break
    if not required and draw.random() < 0.5:
        new.attribute.append(an_attribute(draw, operation))
    return new


def of_network(draw: random.Random, folder: Path) -> None:
    """Nodes changed, taken out, and put between others; weights of other sizes; or bytes."""
    file = folder / "dense.onnx"
    content = file.read_bytes()
    if draw.random() < 0.15:
        file.write_bytes(flipped(draw, content))
        return
    proto = onnx.ModelProto.FromString(content)
    graph = proto.graph
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        node = draw.choice(graph.node) if graph.node else None
        names = [one.name for one in (*graph.input, *graph.initializer)]
        names += [name for one in graph.node for name in one.output]
        match draw.randrange(8):
            case 0 if node is not None:
                node.op_type = draw.choice(sorted(OPERATIONS))
            case 1 if node is not None and node.input:
                node.input[draw.randrange(len(node.input))] = draw.choice(names)
            case 2 if node is not None:
                one = an_attribute(draw, node.op_type)
                others = [known for known in node.attribute if known.name != one.name]
                del node.attribute[:]
                node.attribute.extend([*others, one])
            case 3 if graph.initializer:
                one = draw.choice(graph.initializer)
                one.CopyFrom(a_tensor(draw, one.name))
            case 4 if graph.initializer:
                one = draw.choice(graph.initializer)
                if one.data_type == TensorProto.INT64:
                    count = len(one.raw_data) // 8
                    one.raw_data = struct.pack(f"<{count}q", *draw.choices(NUMBERS, k=count))
                elif one.dims:
                    one.dims[draw.randrange(len(one.dims))] = draw.choice(NUMBERS)
            case 5 if graph.node:
                del graph.node[draw.randrange(len(graph.node))]
            case _ if node is not None:  # a new one, between a node and who reads it
                fresh = f"fresh{len(graph.node)}"
                for number in range(draw.randrange(4)):
                    graph.initializer.append(a_tensor(draw, f"{fresh}_{number}"))
                    names += [f"{fresh}_{number}"] * 8
                new = a_node(draw, node.output[0], names, fresh)
                place = list(graph.node).index(node) + 1
                later = [copy.deepcopy(one) for one in graph.node[place:]]
                for one in later:
                    one.input[:] = [fresh if n == node.output[0] else n for n in one.input]
                del graph.node[place:]
                graph.node.extend([new, *later])
    file.write_bytes(proto.SerializeToString())


def of_rows(draw: random.Random, folder: Path) -> None:
    """Bytes of a table, most of them in its footer, which says where and how much all is."""
    file = folder / "rows" / "rows.parquet"
    content = file.read_bytes()
    at = len(content) - draw.choice([8, 200, 600, len(content)])
    file.write_bytes(content[:at] + flipped(draw, content[at:]))


def of_sketches(draw: random.Random, folder: Path) -> None:
    """Bytes of what is known of the samples that trained."""
    file = folder / "trained.arrays"
    file.write_bytes(flipped(draw, file.read_bytes()))


KINDS: list[Callable[[random.Random, Path], None]] = [
    of_manifest, of_network, of_network, of_rows, of_sketches,
]  # fmt: skip


def prepare(draw: random.Random, number: int, exports: Path, place: Path) -> None:
    """Make input ``number`` in an empty place; its files have their right digests."""
    change = KINDS[number % len(KINDS)]
    shutil.copytree(exports / "own", place, dirs_exist_ok=True)
    change(draw, place)
    if change is of_manifest:
        return
    file = place / "manifest.json"
    document = json.loads(file.read_text())
    del document["digest"]
    document["files"] = {one: digest_of(place / one) for one in document["files"]}
    write_sealed(file, document)


def main(exports: Path, seed: int, count: int) -> None:
    """Open them all."""
    open_model(exports / "own")  # what is imported late, and onnxruntime's own threads
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY,) * 2)
    opened = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "export"
        for number in range(count):
            print(f"\rinput {number} of seed {seed}", end="", flush=True)
            prepare(random.Random(f"{seed} {number}"), number, exports, place)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                open_model(place)
                opened += 1
            except ValueError as error:
                refused += 1
                assert len(str(error).splitlines()) == 1, error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            shutil.rmtree(place)
    print(f"\n{opened} opened, {refused} refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
