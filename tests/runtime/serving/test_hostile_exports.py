"""Exports of strangers: what lies in their files is held against what an export has, and none of it
is run as code."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import ModelConfig
from runtime.files import BrokenFileError, digest_of, write_sealed
from runtime.inference import open_model
from runtime.serving import network
from runtime.serving.network import write_weights
from tests.runtime.serving.test_inference import SOURCE, exported
from tests.runtime.serving.trained_runs import checkpoint_of
from tests.runtime.worlds import config, run

onnx = pytest.importorskip("onnx", reason="needs the extra export")
load_file = pytest.importorskip("safetensors.torch").load_file
TensorProto, helper = onnx.TensorProto, onnx.helper
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an export of a class, own."""
    place = tmp_path_factory.mktemp("made")
    chosen = ModelConfig(name="tests.runtime.serving.trained_runs:Plain", hidden=(4,))
    checkpoint_of(run(config(model=chosen), SOURCE), place / "run")
    exported(place / "run", place / "own")
    return place


def sealed_anew(folder: Path, **changes: Any) -> None:
    """The manifest with the digests of the files as they are now, as who has changed them can."""
    file = folder / "manifest.json"
    known = json.loads(file.read_text())
    del known["digest"]
    known["files"] = {name: digest_of(folder / name) for name in known["files"]}
    write_sealed(file, known | changes)


# The network.


def whole(name: str, *values: int) -> Any:
    packed = struct.pack(f"<{len(values)}q", *values)
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], packed, raw=True)


def behind(*nodes: Any, numbers: tuple[Any, ...] = ()) -> Callable[[Any], None]:
    """Nodes before all others; the first input of a network's first node is their last result."""

    def change(proto: Any) -> None:
        later = list(proto.graph.node)
        later[0].input[0] = nodes[-1].output[0]
        del proto.graph.node[:]
        proto.graph.node.extend([*nodes, *later])
        proto.graph.initializer.extend(numbers)

    return change


def with_graph_in_a_node(proto: Any) -> None:
    node = proto.graph.node[0]
    node.attribute.append(helper.make_attribute("body", helper.make_graph([], "x", [], [])))


def with_bytes_of_another_file(proto: Any) -> None:
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def with_a_function(proto: Any) -> None:
    opsets = [helper.make_opsetid("", 20)]
    proto.functions.append(helper.make_function("mine", "f", ["a"], ["a"], [], opsets))


def with_larger_dims(proto: Any) -> None:
    proto.graph.initializer[0].dims[0] = 10**9


def with_another_domain(proto: Any) -> None:
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    proto.graph.node[0].domain = "com.microsoft"


def with_many_empty_nodes(proto: Any) -> None:
    proto.graph.MergeFromString(b"\x0a\x00" * 2**21)


def with_another_input(proto: Any) -> None:
    proto.graph.input[0].name = "dens"


def with_another_output(proto: Any) -> None:
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "odds"


MADE = helper.make_node
ADDED = [MADE("ReduceSum", ["zeros"], ["sum"], keepdims=0), MADE("Add", ["pooled", "sum"], ["x"])]
DOUBLED = [
    MADE("Concat", [str(n), str(n)], [str(n + 1) if n < 29 else "zeros"], axis=1) for n in range(30)
]
HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "drawn": (behind(MADE("RandomUniformLike", ["dense"], ["x"])), "'RandomUniformLike' is no"),
    "loop": (behind(MADE("Loop", ["dense"], ["x"])), "'Loop' is no operation"),
    "graph in a node": (with_graph_in_a_node, "a AttributeProto of it has g"),
    "function": (with_a_function, "has functions"),
    "another domain": (with_another_domain, "its operations are of"),
    "another file": (with_bytes_of_another_file, "has data_location, external_data"),
    "larger than its bytes": (with_larger_dims, "does not fill its bytes"),
    "many empty nodes": (with_many_empty_nodes, "beside its weights"),
    "another input": (with_another_input, "its inputs are"),
    "another output": (with_another_output, "not logits"),
    "the least number by -1": (
        behind(
            MADE("Div", ["least", "minus"], ["y"]), MADE("Cast", ["y"], ["x"], to=1),
            numbers=(whole("least", -(2**63)), whole("minus", -1)),
        ),
        "Div may not be of whole numbers",
    ),
    "4 GB of zeros": (
        behind(
            MADE("ConstantOfShape", ["size"], ["zeros"]), *ADDED, numbers=(whole("size", 10**9),)
        ),
        "cannot be computed",
    ),
    "doubled 30 times": (
        behind(MADE("Identity", ["pooled"], ["0"]), *DOUBLED, *ADDED), "cannot be computed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_network_that_is_more_than_operations_and_its_weights_is_refused(name, made, tmp_path):
    change, told = HOSTILE[name]
    got = shutil.copytree(made / "own", tmp_path / "got")
    file = got / "dense.onnx"
    proto = onnx.ModelProto.FromString(file.read_bytes())
    change(proto)
    file.write_bytes(proto.SerializeToString())
    sealed_anew(got)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenFileError, match=told) as caught:
        open_model(got)
    assert len(str(caught.value).splitlines()) == 1 and str(file) in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1.5 * 2**20, "1.5 GiB"


def test_a_network_larger_than_the_bound_is_not_read(made, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "MOST_BYTES", 500)
    with pytest.raises(BrokenFileError, match=r"dense\.onnx has .* bytes: it has at most 500"):
        open_model(made / "own")


# The weights.


def test_weights_come_back_with_their_bytes_types_and_shapes(tmp_path):
    file = tmp_path / "w.safetensors"
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    tensors["a part"] = tensors["torch.int64"][:, 1]  # of the same memory
    write_weights(file, tensors)
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_what_no_export_can_hold_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"odd of the dense network is a dict"):
        write_weights(tmp_path / "w", {"odd": {"x": 1}})


def of(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


def test_more_tasks_than_an_export_has_are_refused(made, tmp_path):
    got = shutil.copytree(made / "own", tmp_path / "got")
    layout = json.loads((got / "manifest.json").read_text())["layout"]
    sealed_anew(got, layout=layout | {"tasks": [f"t{n}" for n in range(300)]})
    with pytest.raises(BrokenFileError, match="an export has at most"):
        open_model(got)


# All of it.


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "count",
    [60, 500, pytest.param(100_000, marks=[pytest.mark.minutes, pytest.mark.timeout(7200)])],
)
def test_no_input_of_a_fuzzer_ends_the_process_or_takes_its_memory(count, made):
    """Of manifest, rows and network: a model or one sentence, within 2 GiB and 30 s of CPU."""
    words = [sys.executable, "-m", "tests.runtime.serving.fuzz_exports", made, "1", str(count)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    last = ended.stdout.rpartition("\r")[2]
    assert ended.returncode == 0, f"status {ended.returncode} at {last}\n{ended.stderr[-2000:]}"
    opened, _, refused, _ = last.splitlines()[-1].replace(",", "").split()
    assert int(opened) + int(refused) == count and int(opened) > count / 50
