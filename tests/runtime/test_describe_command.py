"""`persia-runtime describe`: a run's model and data in the simulator's words, counted by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from persia_sim.presets.from_file import read_model
from persia_sim.sharded.ranker import RowUpdate
from runtime.__main__ import main
from runtime.data.batch import Batch, Field, Layout
from runtime.describe_command import count, expected, exponent, ids_by_field
from tests.tree import ROOT


@pytest.fixture
def example(tmp_path, monkeypatch):
    for path in (ROOT / "examples").glob("*"):
        if path.suffix in (".toml", ".csv", ".py"):
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _described(words: str, folder: Path, capsys):
    assert main(["describe", *words.split()]) == 0
    path = folder / "described.toml"
    path.write_text(capsys.readouterr().out)
    return read_model(path)


@pytest.mark.long
def test_the_examples_model_and_data_are_what_one_counts_by_hand(example, capsys):
    """Three pooled bags and one more of rows of 8, one number, layers of 64, 32 and 1; products are
    of 40 columns, since the input is filled up with zeros."""
    ranker = _described("--config run.toml", example, capsys)
    assert ranker.dense_macs == 40 * 64 + 64 * 32 + 32
    assert ranker.dense_params == 34 * 64 + 65 * 32 + 33
    assert ranker.widths == 32 + 64 + 32 + 1
    assert (ranker.layers, ranker.dense_features) == (3, 1)
    assert ranker.update is RowUpdate.ROWWISE_ADAGRAD
    (table,) = ranker.tables
    assert table.dim == 8 and table.ids_per_sample[:2] == (1.0, 1.0)
    assert table.pooled == 32 and len(table.ids_per_sample) == 4


def test_what_is_typed_beside_the_file_counts(example, capsys):
    words = "--config run.toml --rows.dim 16 --model.name dlrm --rows.optimizer.kind adam"
    ranker = _described(words, example, capsys)
    assert ranker.update is RowUpdate.LAZY_ADAM and ranker.tables[0].dim == 16
    # One number through layers of 64 and 16; dots of all pairs of five vectors of 16, which the
    # product makes both ways; then 10 dots and 16 numbers through 64, 32 and 1.
    bottom, pairs = 1 * 64 + 64 * 16, 5 * 5 * 16
    top = 26 * 64 + 64 * 32 + 32
    assert top + pairs < ranker.dense_macs <= 8 * 64 + 64 * 16 + pairs + 32 * 64 + 64 * 32 + 32
    assert ranker.dense_params == bottom + 80 + top + 64 + 32 + 1


def _batch(ids: list[list[list[int]]]) -> Batch:
    """Samples of bags of ids."""
    bags = [bag for sample in ids for bag in sample]
    flat = np.array([each for bag in bags for each in bag], np.uint64)
    starts = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])])
    none = np.empty((len(ids), 0), np.float32)
    return Batch(ids=flat, offsets=starts, dense=none, labels=np.zeros((len(ids), 1), np.float32))


LAYOUT = Layout(fields=(Field(name="a", table="x"), Field(name="b", table="y"),
                        Field(name="c", table="x")))  # fmt: skip


def test_ids_are_counted_by_field_table_and_batch():
    chunk = _batch([[[1], [7, 7], [2]], [[1], [], [3]], [[2], [8], [2]]])
    assert {k: v.tolist() for k, v in ids_by_field(chunk, LAYOUT).items()} == {
        "a": [1, 1, 2], "b": [7, 7, 8], "c": [2, 3, 2],
    }  # fmt: skip
    found = count(iter([chunk, chunk]), LAYOUT, batch=2)
    assert found.samples == 6 and found.ids == {"a": 6, "b": 6, "c": 6}
    assert found.rows["x"].tolist() == [1, 2, 3] and found.rows["y"].tolist() == [7, 8]
    assert found.distinct == {"x": 3.0, "y": 1.0}, "of whole batches: the first two samples"
    with pytest.raises(ValueError, match="training part has no sample"):
        count(iter(()), LAYOUT, batch=2)


@pytest.mark.parametrize("zipf", [0.0, 0.7, 1.05, 1.5])
def test_the_exponent_is_that_of_the_draws(zipf):
    """Batches of 500 ids, drawn of 2,000 as often as a Zipf law says."""
    rows, draws = 2000, 500
    share = np.arange(1, rows + 1) ** -zipf
    ids = np.random.default_rng(3).choice(rows, size=(200, draws), p=share / share.sum())
    distinct = float(np.mean([len(np.unique(own)) for own in ids]))
    assert expected(draws, rows, zipf) == pytest.approx(distinct, rel=0.01)
    assert exponent(distinct, draws, rows) == pytest.approx(zipf, abs=0.15 if not zipf else 0.03)


def test_the_simulator_meets_as_many_distinct_ids_as_a_batch_has(example, capsys):
    (table,) = _described("--config run.toml", example, capsys).tables
    assert table.distinct(128) == pytest.approx(
        expected(128 * table.ids, int(table.rows), table.zipf), rel=0.02
    )


def test_a_mistake_is_a_sentence(capsys):
    assert main(["describe", "--data.name", "nothing.toml"]) == 2
    assert "no file nothing.toml" in capsys.readouterr().err
    assert main(["describe", "--help"]) == 0
    assert "persia-sim sharded --model" in capsys.readouterr().out
