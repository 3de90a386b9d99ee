"""An opened model predicts what evaluation does and knows every id; what is not one is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from runtime.checkpoint.whole import find_checkpoint
from runtime.config import ModelConfig
from runtime.data.batch import Batch, Field, Layout
from runtime.data.source import rebatch
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import TableConfig
from runtime.files import BrokenFileError
from runtime.inference import Model, open_model
from runtime.models.networks import BUILT_IN
from runtime.run.evaluate import evaluate
from runtime.serving.exported import Exported, export
from runtime.serving.network import score_with
from runtime.serving.trained import open_trained, read_vectors
from tests.oracles.reference.initial import table_key, uniform_rows
from tests.runtime.serving.trained_runs import checkpoint_of
from tests.runtime.worlds import ArraySource, World, config, run

BRANCHES = "tests.runtime.serving.trained_runs:Branches"
SOURCE = ArraySource(400, seed=1)
UNKNOWN = np.arange(10**6, 10**6 + 50, dtype=np.uint64)  # tags of field 0: never in the source


def expected(world: World) -> np.ndarray:
    return evaluate(world.learner, world.model, world.worker, SOURCE.chunks("test")).predictions


def predicted(model: Model) -> np.ndarray:
    return np.concatenate([model.predict(batch) for batch in SOURCE.chunks("test")])


def exported(folder: Path, out: Path) -> Exported:
    rows = next(rebatch(iter(SOURCE.chunks("test")), 1000))
    trained = open_trained(find_checkpoint(folder), device="cpu")
    return export(trained, out, rows if trained.learner.layout == SOURCE.layout else None)


@pytest.fixture(scope="module")
def world() -> World:
    return run(config(shards=3, seed=3), SOURCE)


@pytest.fixture(scope="module")
def folders(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of the run, and an export of it."""
    place = tmp_path_factory.mktemp("trained")
    checkpoint_of(world, place / "run")
    exported(place / "run", place / "out")
    return place / "run", place / "out"


@pytest.mark.parametrize("which", [0, 1], ids=["run", "export"])
def test_predictions_are_those_of_evaluation(world, folders, which):
    model = open_model(folders[which])
    assert model.layout == SOURCE.layout
    np.testing.assert_allclose(predicted(model), expected(world), rtol=0, atol=1e-6)


load_file = pytest.importorskip("safetensors.torch").load_file
PLAIN = "tests.runtime.serving.trained_runs:Plain"


@pytest.mark.first_case
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", [*BUILT_IN, PLAIN])
def test_predictions_are_to_the_byte_those_that_a_model_was_judged_by(name, precision, tmp_path):
    """Of a run in the precision of its training; an export computes in the type of the weights, and
    onnxruntime sums in another order than torch."""
    plain = config(model=ModelConfig(name=name, hidden=(4, 3), lr=0.01))
    rows = replace(plain.rows, dtype="float64" if precision == "float64" else "float32")
    engine = replace(plain.engine, precision=precision)
    world = run(replace(plain, engine=engine, rows=rows), SOURCE)
    checkpoint_of(world, tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "out")
    batch = next(iter(SOURCE.chunks("test")))
    vectors = world.worker.pool(world.store.peek(batch))
    judged = world.learner.predict(world.model.eval(), batch, vectors)
    found = {folder: open_model(tmp_path / folder).predict(batch) for folder in ("run", "out")}
    np.testing.assert_array_equal(found["run"], judged)
    world.learner.config = plain
    of_weights = world.learner.predict(world.model.eval(), batch, vectors)
    if precision == "bfloat16":
        assert np.abs(of_weights - judged).max() > 1e-5, "the precision is seen"
    np.testing.assert_allclose(found["out"], of_weights, rtol=0, atol=2e-7)


def test_one_checkpoint_is_opened_by_its_own_folder(world, folders):
    (folder,) = (folders[0] / "checkpoints").iterdir()
    np.testing.assert_allclose(predicted(open_model(folder)), expected(world), rtol=0, atol=1e-6)


def test_the_export_holds_a_network_and_rows_that_others_can_read(world, folders):
    ids, values, _ = world.store.export()["rows"]
    table = pq.read_table(folders[1] / "rows" / "rows.parquet")
    assert table.column_names == ["id", "vector"]
    assert table["id"].to_pylist() == sorted(ids.tolist())
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), values)
    session = pytest.importorskip("onnxruntime").InferenceSession(folders[1] / "dense.onnx")
    batch = next(iter(SOURCE.chunks("test")))
    vectors = world.worker.pool(world.store.peek(batch))
    (logits,) = session.run(["logits"], {"dense": batch.dense, "pooled": vectors.pooled})
    found = torch.sigmoid(torch.from_numpy(logits).double()).numpy()
    np.testing.assert_allclose(found, expected(world)[: batch.size], rtol=0, atol=1e-6)
    assert "dense.onnx" in (folders[1] / "README.md").read_text()


@pytest.mark.parametrize("which", [0, 1], ids=["run", "export"])
@pytest.mark.law10
def test_a_lookup_gives_rows_and_for_a_miss_the_initial_value(world, folders, which):
    model = open_model(folders[which])
    ids, values, _ = world.store.export()["rows"]
    mixed = np.concatenate([ids[::-1], UNKNOWN, ids[:3]])
    fresh = uniform_rows(table_key(3, "rows"), UNKNOWN, 4, 0.1, "float32")
    found = model.lookup("rows", mixed)
    np.testing.assert_array_equal(found, np.concatenate([values[::-1], fresh, values[:3]]))
    assert model.lookup("rows", []).shape == (0, 4)
    assert model.lookup("rows", [int(ids[5])]).tolist() == [values[5].tolist()]


def test_a_model_that_cannot_be_exported_is_weights_and_says_why(tmp_path):
    world = run(config(model=ModelConfig(name=BRANCHES, hidden=(4,))), SOURCE)
    checkpoint_of(world, tmp_path / "run")
    found = exported(tmp_path / "run", tmp_path / "out").manifest
    assert "dense.onnx" not in found.files
    assert not (tmp_path / "out" / "dense.onnx").exists()
    said = (tmp_path / "out" / "README.md").read_text()
    assert found.why_no_graph and found.why_no_graph in said and BRANCHES in said
    weights = load_file(tmp_path / "out" / "dense.safetensors")
    assert set(weights) == {"head.weight", "head.bias"}
    with pytest.raises(ValueError, match=r"no dense\.onnx .*: open the run itself"):
        open_model(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["manifest.json", "rows/rows.parquet", "dense.safetensors", "dense.onnx"]
)
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_or_missing_file_is_named(folders, tmp_path, name, harm):
    shutil.copytree(folders[1], tmp_path / "copy")
    file = tmp_path / "copy" / name
    whole = file.read_bytes()
    if harm == "remove":
        file.unlink()
    else:
        middle = len(whole) // 2
        flipped = bytes([whole[middle] ^ 1])
        rest = whole[middle + 1 :] if harm == "flip" else b""
        file.write_bytes(whole[:middle] + flipped + rest)
    with pytest.raises(ValueError) as caught:
        open_model(tmp_path / "copy")
    told = str(caught.value)
    assert len(told.splitlines()) == 1
    if (name, harm) == ("manifest.json", "remove"):
        assert "neither the folder of a run that wrote checkpoints nor a checkpoint" in told
    else:
        assert isinstance(caught.value, BrokenFileError)
        assert str(file) in told


def test_mistakes_of_a_newcomer_are_told_in_a_sentence(folders, tmp_path):
    model = open_model(folders[1])
    with pytest.raises(ValueError, match=r"no table is called 'row'; there are rows"):
        model.lookup("row", [1])
    with pytest.raises(ValueError, match=r"ids must be one row of whole numbers, got float64"):
        model.lookup("rows", [0.5])
    with pytest.raises(ValueError, match=r"ids must be one row of whole numbers, got int64 of sha"):
        model.lookup("rows", np.zeros((2, 2), int))
    with pytest.raises(ValueError, match=r"ids must be 0 to \d+, got -1"):
        model.lookup("rows", [3, -1])
    batch = next(iter(SOURCE.chunks("test")))
    with pytest.raises(ValueError, match=r"dense features must have shape \(37, 2\), got"):
        model.predict(replace_dense(batch, np.zeros((37, 1), np.float32)))
    with pytest.raises(ValueError, match=r"must have 111 bags of ids, one for each of the 3"):
        model.predict(Batch(batch.ids[:37], None, batch.dense, batch.labels))
    with pytest.raises(ValueError, match="does not exist; give the folder of a run"):
        open_model(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give the folder of a run"):
        open_model(tmp_path / "file")
    with pytest.raises(ValueError, match="it is neither the folder of a run"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wrote no checkpoint.*; train with --checkpoint-every e"):
        open_model(tmp_path)
    (tmp_path / "checkpoints" / "000").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"was never finished: it has no state\.json"):
        open_model(tmp_path / "checkpoints" / "000")
    with pytest.raises(ValueError, match="holds no checkpoint that can be used"):
        open_model(tmp_path)


def replace_dense(batch: Batch, dense: np.ndarray) -> Batch:
    return Batch(batch.ids, batch.offsets, dense, batch.labels)


def test_an_export_overwrites_nothing_and_leaves_nothing_half_done(folders, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there is there already; nothing is overwritten"):
        exported(folders[0], tmp_path / "there")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.serving.exported.write_network", full)
    with pytest.raises(OSError, match="No space left"):
        exported(folders[0], tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_sequences_keep_their_places_and_masks_in_an_export(tmp_path):
    source = WithSequences()
    world = run(config(test_rows=None), source)
    checkpoint_of(world, tmp_path / "run")
    assert "dense.onnx" in exported(tmp_path / "run", tmp_path / "out").manifest.files
    batches = list(source.chunks("test"))
    ours = evaluate(world.learner, world.model, world.worker, batches).predictions
    model = open_model(tmp_path / "out")
    found = np.concatenate([model.predict(batch) for batch in batches])
    np.testing.assert_allclose(found, ours, rtol=0, atol=1e-6)


class WithSequences(ArraySource):
    """The tags of a sample in order, three places of them."""

    def __init__(self) -> None:
        super().__init__(120, seed=2)

    @property
    def layout(self) -> Any:
        plain = super().layout
        *others, tags = plain.fields
        return replace(plain, fields=(*others, replace(tags, pooling="sequence", max_length=3)))


def test_reading_a_run_changes_no_byte_of_it(world, folders):
    before = {p: p.read_bytes() for p in folders[0].rglob("*") if p.is_file()}
    model = open_model(folders[0])
    predicted(model)
    model.lookup("rows", UNKNOWN)
    assert {p: p.read_bytes() for p in folders[0].rglob("*") if p.is_file()} == before
    assert len(model.tables["rows"].ids) == len(world.store)


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (
            pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float32(), 2)),
            r"vector: fixed_size_list.*\[2\]; a t",
        ),
        (pa.array(["a", "b"]), "has the columns id: uint64, vector: string; a table of this model"),
        (None, r"vectors\.parquet is no parquet file"),
        (pa.array([[1.0] * 4] * 2, pa.list_(pa.float32(), 4)), "its ids are not sorted"),
    ],
    ids=["width", "text", "no parquet", "order"],
)
def test_a_table_that_is_not_the_models_is_refused(tmp_path, column, told):
    """Such a file has its right digest where somebody made the export anew by hand."""
    file = tmp_path / "vectors.parquet"
    if column is None:
        file.write_bytes(b"PAR1 and no more")
    else:
        pq.write_table(pa.table({"id": pa.array([5, 4], pa.uint64()), "vector": column}), file)
    with pytest.raises(BrokenFileError, match=told):
        read_vectors(file, TableConfig(dim=4))


@pytest.mark.parametrize("given", [None, [1, 2], {"user": 3}])
def test_what_is_no_batch_is_refused_in_words(folders, given):
    with pytest.raises(ValueError, match=r"batch must be a runtime\.data\.batch\.Batch, got"):
        open_model(folders[1]).predict(given)


def test_a_network_that_works_in_place_leaves_the_callers_numbers_as_they_were():
    def network(dense, pooled, sequences, masks):
        return dense.mul_(2.0)[:, :1]

    layout = Layout(fields=(Field(name="a"),), dense=("x",))
    dense = np.ones((3, 1), np.float32)
    score_with(network, torch.float32, layout)(dense, FieldVectors(dense, {}, {}))
    assert (dense == 1).all()
