"""Exports of strangers: whatever lies in their files, reading them runs none of it."""

from __future__ import annotations

import copy
import io
import json
import shutil
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.__main__ import main
from runtime.checkpoint.whole import find_checkpoint
from runtime.config import ModelConfig
from runtime.files import BrokenFileError, digest_of, write_sealed
from runtime.inference import open_model
from runtime.serving.exported import export
from runtime.serving.network import read_weights, write_weights
from runtime.serving.operations import OPERATIONS, Operations
from runtime.serving.trained import open_trained
from tests.runtime.serving.trained_runs import checkpoint_of
from tests.runtime.worlds import ArraySource, config, run

SOURCE = ArraySource(200, seed=1)


class Ran:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a built-in network and one of a class, and an export of each."""
    place = tmp_path_factory.mktemp("made")
    for name, model in (("mlp", "mlp"), ("own", "tests.runtime.serving.trained_runs:Plain")):
        world = run(config(model=ModelConfig(name=model, hidden=(4,))), SOURCE)
        checkpoint_of(world, place / f"run-{name}")
        export(
            open_trained(find_checkpoint(place / f"run-{name}"), device="cpu"),
            place / f"got-{name}",
        )
    return place


def sealed_anew(folder: Path, **changes: Any) -> None:
    """The manifest with the digests of the files as they are now, as who has changed them can."""
    file = folder / "manifest.json"
    known = json.loads(file.read_text())
    del known["digest"]
    known["files"] = {name: digest_of(folder / name) for name in known["files"]}
    write_sealed(file, known | changes)


def pickled(mark: Path) -> bytes:
    content = io.BytesIO()
    torch.save(Ran(mark), content)
    return content.getvalue()


def of_sample_inputs(files: dict[str, bytes], mark: Path) -> None:
    files["data/sample_inputs/model.pt"] = pickled(mark)


def of_a_weight(files: dict[str, bytes], mark: Path) -> None:
    name = "data/weights/model_weights_config.json"
    about = json.loads(files[name])
    first = next(iter(about["config"].values()))
    first["use_pickle"] = True
    files[f"data/weights/{first['path_name']}"] = pickled(mark)
    files[name] = json.dumps(about).encode()


def of_an_expression(files: dict[str, bytes], mark: Path) -> None:
    """Which torch hands to sympy, which evaluates it."""
    text = files["models/model.json"].decode()
    begin = text.index('"expr_str": "') + len('"expr_str": "')
    end = text.index('", "hint"', begin)
    code = f"open({str(mark)!r}, 'w')"
    files["models/model.json"] = (text[:begin] + code + text[end:]).encode()


PLANTS = [of_sample_inputs, of_a_weight, of_an_expression]


@pytest.fixture(params=["mlp", "own"])
def got(request: pytest.FixtureRequest, made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / f"got-{request.param}", tmp_path / "got")


def commands(got: Path) -> list[list[str]]:
    """All that read a folder of somebody."""
    table = got.parent / "x.csv"
    table.write_text("a,b\n1,2\n")
    out = ["--out", str(got.parent / "y.csv")]
    return [
        ["predict", str(got), "--data", str(table), *out],
        ["evaluate", str(got)],
        ["export", str(got), "--out", str(got.parent / "again")],
        ["train", "--resume", str(got)],
        ["train", "--warm-start", str(got), "--steps", "1", "--out", str(got.parent / "run")],
    ]


@pytest.mark.first_case
@pytest.mark.parametrize("plant", PLANTS)
def test_code_inside_a_program_for_others_is_never_run(plant, got, tmp_path, capsys):
    mark, file = tmp_path / "it ran", got / "dense.pt2"
    with zipfile.ZipFile(file) as archive:
        files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    plant(files, mark)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"archive/{name}", content)
    sealed_anew(got)
    batch = next(iter(SOURCE.chunks("test")))
    try:
        assert open_model(got).predict(batch).shape == (batch.size, 2)
        for words in commands(got):
            main(words)
            assert "Traceback" not in capsys.readouterr().err
    finally:
        assert not mark.exists()
    with suppress(Exception):
        torch.export.load(file)
    assert mark.exists(), "the attack works where torch reads the file"


def op(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"name": name, "args": list(args), "kwargs": kwargs}


MARK = "MARK"
"""In the place of a file that code would leave."""
FORBIDDEN = [
    op("aten.from_file.default", MARK, True, 8),
    op("aten.from_file.default", MARK, True, 8, layout={"layout": "strided"}),
    op("aten.set_.source_Tensor", {"of": 0}, {"of": 1}),
    op("aten.as_strided.default", {"of": 0}, [9], [1], 10**6),
    op("aten.resize_.default", {"of": 0}, [10**6]),
    op("aten.empty.memory_format", [9]),
    op("aten.view.dtype", {"of": 0}, {"dtype": "int64"}),
    op("aten.add.out", {"of": 0}, {"of": 0}, out={"of": 0}),
    op("aten.add.nowhere", {"of": 0}, {"of": 0}),
    op("aten.relu.__init__", {"of": 0}),
    op("aten.relu.name"),
    op("aten.__class__.default"),
    op("aten._print.default", MARK),
    op("aten.bernoulli.default", {"of": 0}),
    op("prim.PythonOp", MARK),
    op("higher_order.wrap_with_autocast", MARK),
    op("profiler._record_function_enter", MARK),
    op("os.system", f"touch {MARK}"),
    op("builtins.eval", f"open({MARK!r}, 'w')"),
    op("builtins.open", MARK, "w"),
    op("operator.methodcaller", "backward"),
    op("operator.attrgetter", "__class__"),
    op("operator.pow", 10, 10),
    op("operator.__import__('os')", MARK),
    op("", MARK),
    op("aten"),
    {"name": "aten.relu.default", "args": {"of": 0}, "kwargs": {}},
    {"name": "aten.relu.default", "args": []},
    {"name": ["aten.relu.default"], "args": [{"of": 0}], "kwargs": {}},
    "aten.relu.default",
    op("aten.relu.default", {"of": 10**6}),
    op("aten.relu.default", {"of": -1}),
    op("aten.relu.default", {"of": True}),
    op("aten.relu.default", {"of": "0"}),
    op("aten.relu.default", {"of": 0, "and": 1}),
    op("aten.full.default", [1], {"float": "1e9"}),
    op("aten.relu.default", {"device": "cuda"}),
    op("aten.relu.default", {"__reduce__": ["os.system", MARK]}),
]


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("hostile", FORBIDDEN, ids=lambda one: str(one)[:60])
def test_an_operation_that_is_none_of_the_list_ends_the_reading_before_any_is_computed(
    hostile, where, made, tmp_path, monkeypatch
):
    got = shutil.copytree(made / "got-own", tmp_path / "got")
    mark, file = tmp_path / "it ran", got / "dense.json"
    document = json.loads(file.read_text())
    text = json.dumps(hostile).replace(MARK, str(mark))
    document["operations"].insert(0 if where == "first" else 10**6, json.loads(text))
    file.write_text(json.dumps(document))
    sealed_anew(got)
    monkeypatch.setattr(Operations, "__call__", None)
    with pytest.raises(BrokenFileError, match=r"dense\.json is no network"):
        open_model(got)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "persia-testbed-network-0"}, "is no network .* of these inputs"),
        ({"inputs": ["dense"]}, "is no network .* of these inputs"),
        ({"weights": ["no.such"]}, "is no network: lacks 'no.such'"),
        ({"operations": None}, "is no network"),
        ({"output": {"of": 10**6}}, "is no network"),
        ({"output": [{"of": 0}]}, "cannot be computed: its output is a list"),
        ({"output": {"of": 1}}, r"gives logits of shape \(3, 12\), not one a task of a sample"),
        ({"operations": [op("aten.matmul.default", {"of": 0}, {"of": 0})]}, "cannot be computed"),
        ({"operations": [op("aten.relu.default")]}, "cannot be computed"),
        ({"operations": [op("aten.zeros.default", [10**9, 10**9])]}, "cannot be computed"),
        (
            {"operations": [
                op("aten.sym_size.int", {"of": 0}, 0),
                *(op("operator.mul", {"of": -1}, {"of": -1}) for _ in range(500)),
            ]},
            "operator.mul gives a number beyond 64 bits",
        ),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_is_told_in_a_sentence(change, told, made, tmp_path):
    """-1: the result before."""
    got = shutil.copytree(made / "got-own", tmp_path / "got")
    file = got / "dense.json"
    document = json.loads(file.read_text()) | copy.deepcopy(change)
    if change.get("operations"):
        known = len(document["inputs"]) + len(document["weights"])
        for number, one in enumerate(document["operations"], known):
            one["args"] = [{"of": number - 1} if a == {"of": -1} else a for a in one["args"]]
        document["output"] = {"of": known + len(change["operations"]) - 1}
    file.write_text(json.dumps(document))
    sealed_anew(got)
    with pytest.raises(BrokenFileError, match=told) as caught:
        open_model(got)
    assert len(str(caught.value).splitlines()) == 1 and str(file) in str(caught.value)


def test_every_operation_of_the_list_is_one_that_torch_has():
    known = {name for name in OPERATIONS if hasattr(torch.ops.aten, name)}
    assert known == OPERATIONS


# The weights.

TENSORS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.builds(
        lambda shape, kind: torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(kind),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from(
            [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8,
             torch.bool]
        ),
    ),
    max_size=5,
)  # fmt: skip


@given(tensors=TENSORS)
def test_weights_come_back_with_their_bytes_types_and_shapes(tmp_path_factory, tensors):
    file = tmp_path_factory.mktemp("weights") / "w.safetensors"
    write_weights(file, tensors)
    found = read_weights(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_the_file_of_weights_is_as_its_format_says(tmp_path):
    """By hand, after the format's own description."""
    tensors = {"b": torch.tensor([1, 2], dtype=torch.uint8), "a": torch.tensor([[1.5, -2.0]])}
    write_weights(tmp_path / "w", tensors)
    content = (tmp_path / "w").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    assert json.loads(content[8 : 8 + size]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [8, 10]},
    }
    assert size % 8 == 0 and content[8 + size :] == struct.pack("<ff", 1.5, -2.0) + b"\1\2"


@pytest.mark.parametrize("wrong", [torch.zeros(1, dtype=torch.complex64), {"x": 1}, "text"])
def test_what_no_export_can_hold_is_named(wrong, tmp_path):
    with pytest.raises(ValueError, match=r"odd of the dense network is of type"):
        write_weights(tmp_path / "w", {"odd": wrong})


def file_of(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def of(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\1\2", b"\xff" * 8, file_of({}, size=2**63), file_of(b"[]"), file_of(b"{"),
        file_of(b'{"a": 1, "a": 2}'), file_of({"a": 5}), file_of({"a": {}}),
        file_of({"a": of(0, 8)}), file_of({"a": of(0, 8)}, b"x" * 7),
        file_of({"a": of(0, 8)}, b"x" * 9), file_of({}, b"x"),
        file_of({"a": of(0, 8), "b": of(4, 12)}, b"x" * 12),
        file_of({"a": of(4, 12)}, b"x" * 12), file_of({"a": of(8, 0)}, b"x" * 8),
        file_of({"a": of(-8, 0)}, b"x" * 8), file_of({"a": of(0, 8, (-1, -2))}, b"x" * 8),
        file_of({"a": of(0, 8, (2**40, 2**40))}, b"x" * 8),
        file_of({"a": of(0, 8, (2.0,))}, b"x" * 8), file_of({"a": of(0, 8, "2")}, b"x" * 8),
        file_of({"a": of(0, 8, (True, 2))}, b"x" * 8), file_of({"a": of("0", "8")}, b"x" * 8),
        file_of({"a": of(0, 8, (2,), "P32")}, b"x" * 8),
        file_of({"a": of(0, 8, (2,), [])}, b"x" * 8), file_of(b"\x80\x04."),
        file_of({"a": of(0, 8) | {"data_offsets": [0]}}, b"x" * 8),
    ],
)  # fmt: skip
def test_weights_that_are_none_are_refused_and_ask_for_no_memory(content, tmp_path):
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(BrokenFileError, match="is no file of weights"):
        read_weights(tmp_path / "w")


@settings(max_examples=200)
@given(data=st.data())
def test_any_byte_of_the_weights_that_is_changed_is_refused_or_is_a_number(data, tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "w"
    write_weights(
        file, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int8)}
    )
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        found = read_weights(file)
    except BrokenFileError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= len(content)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": [10**9]}, {"hidden": [10**6, 10**6]}, {"hidden": [4, 4]}, {"hidden": []},
        {"model": "dlrm"}, {"model": "dlrm", "hidden": []}, {"model": "os:system"}, {"model": ""},
        {"model": "tests.oracles:Net"},
    ],
)  # fmt: skip
def test_a_built_in_network_of_other_widths_is_never_made(change, made, tmp_path, monkeypatch):
    """Its shapes alone say that the weights are not its own."""
    got = shutil.copytree(made / "got-mlp", tmp_path / "got")
    sealed_anew(got, **change)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    with pytest.raises(BrokenFileError, match=r"safetensors does not hold the network's weights"):
        open_model(got)


# Own classes.


@pytest.mark.long
def test_an_export_of_ones_own_class_needs_none_of_its_code(made, tmp_path):
    """And gives what the run gives, to the byte; nobody is told of code."""
    told: list[str] = []
    got = open_model(made / "got-own", told.append)
    assert not told and json.loads((made / "got-own/manifest.json").read_text())["dense"] == (
        "operations"
    )
    elsewhere = shutil.copytree(made / "got-own", tmp_path / "got")
    sealed_anew(elsewhere, model="no.such.module:Net", model_code="")
    for model in (got, open_model(elsewhere)):
        for batch in SOURCE.chunks("test"):
            expected = open_model(made / "run-own").predict(batch)
            np.testing.assert_array_equal(model.predict(batch), expected)
