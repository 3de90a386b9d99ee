"""`persia-runtime describe`: a run's model and data in the simulator's words, counted by hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.deriving import derive_workload
from persia_sim.base.popularity import exponent, grown
from persia_sim.cluster.tables import RowUpdate
from persia_sim.cluster.workload import Workload
from persia_sim.presets.from_file import read_workload
from runtime.__main__ import main
from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import tag
from runtime.describe_command import count, ids_by_field
from runtime.train_options import read_train
from tests.tree import ROOT


@pytest.fixture
def example(tmp_path, monkeypatch):
    for path in (ROOT / "examples").glob("*"):
        if path.suffix in (".toml", ".csv", ".py"):
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _described(words: str, folder: Path, capsys) -> Workload:
    assert main(["describe", *words.split()]) == 0
    path = folder / "described.toml"
    path.write_text(capsys.readouterr().out)
    return read_workload(path)


def test_the_examples_model_and_data_are_what_one_counts_by_hand(example, capsys):
    """Four bags of rows of 8 and one number, layers of 64, 32 and 1; products are of 40 columns,
    since the input is filled up with zeros, and each is made three times: forward, and backward to
    the weights and to the input. Tables are counted by pandas."""
    work = _described("--config run.toml", example, capsys)
    assert work.dense_flops == 3 * 2 * (40 * 64 + 64 * 32 + 32) == work.flops_per_sample
    assert work.dense_params == 34 * 64 + 65 * 32 + 33 + 0 == work.weights
    assert work.widths == 33 + 64 + 32 + 1 and work.columns == 4 + 1
    assert (work.mlp, work.dense_features) == ((64, 32, 1), 1)
    assert work.update is RowUpdate.ROWWISE_ADAGRAD
    clicks = pd.read_csv("clicks.csv", keep_default_na=False)
    clicks = clicks[clicks["day"] < "2026-03-09"]
    lists = {
        "user": [[user] for user in clicks["user"]],
        "item": [[item] for item in clicks["item"]],
        "tags": [tags.split("|") for tags in clicks["tags"]],
        "history": [history.split() or [""] for history in clicks["history"]],
    }
    for table in work.tables:
        bags = lists[table.name]
        assert table.fields == (table.name,) and table.dim == 8
        assert table.rows == len({each for bag in bags for each in bag}), table.name
        assert table.ids == pytest.approx(sum(map(len, bags)) / len(clicks), abs=1e-6)
        starts = range(0, len(clicks) - 127, 128)
        own = [len({each for bag in bags[n : n + 128] for each in bag}) for n in starts]
        assert table.distinct(128) == pytest.approx(np.mean(own), rel=0.02), table.name
    assert [table.name for table in work.tables] == list(lists)


def test_what_is_typed_beside_the_file_counts(example, capsys):
    words = "--batch-per-rank 64 --config run.toml --rows.dim 16 --model.name dlrm --scale 2"
    work = _described(f"{words} --rows.optimizer.kind adam", example, capsys)
    assert work.update is RowUpdate.LAZY_ADAM and work.tables[0].dim == 16
    assert work.batch_per_rank == 64
    # One number through layers of 64 and 16; dots of all pairs of five vectors of 16, which the
    # product makes both ways; then 10 dots and 16 numbers through 64, 32 and 1.
    bottom, pairs = 1 * 64 + 64 * 16, 5 * 5 * 16
    top = 26 * 64 + 64 * 32 + 32
    # Nobody asks for the gradient of the number itself.
    assert 2 * 3 * (top + pairs) < work.dense_flops
    assert work.dense_flops <= 2 * 3 * (8 * 64 + 64 * 16 + pairs + 32 * 64 + 64 * 32 + 32)
    assert work.dense_params == bottom + 80 + top + 64 + 32 + 1


OWN = """import torch
from torch import nn
class Bare(nn.Module):
    def __init__(self, shape, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sum(shape.pooled_dims) + 1, 1))
    def forward(self, dense, embeddings):
        return {}
"""


def test_a_module_of_ones_own_is_counted_or_its_operations_are_asked_for(
    example, capsys, monkeypatch
):
    monkeypatch.syspath_prepend(example)
    there = "torch.cat([embeddings.pooled, dense], 1)"
    (example / "product.py").write_text(OWN.format(f"{there} @ self.weight"))
    (example / "uncounted.py").write_text(OWN.format(f"({there} * self.weight.T).sum(1, True)"))
    (example / "broken.py").write_text(OWN.format(f"{there} @ self.weight[:3]"))
    words = "--config run.toml --model.name {}:Bare"
    work = _described(words.format("product"), example, capsys)
    assert work.dense_params == 25, "pooled rows of three fields, and a number"
    assert work.dense_flops == 2 * 3 * 25 and work.mlp == (1,)
    for module, words_of_it in (("uncounted", "no product"), ("broken", "cannot be run")):
        asked = words.format(module)
        assert main(["describe", *asked.split()]) == 2
        said = capsys.readouterr().err
        assert words_of_it in said and "--dense-flops" in said and f"{module}:Bare" in said
        given = _described(f"{asked} --dense-flops 150", example, capsys)
        assert (given.dense_flops, given.dense_params) == (150, 25)


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
    assert {k: [v.tolist() for v in own] for k, own in ids_by_field(chunk, LAYOUT).items()} == {
        "a": [[1, 1, 2], [0, 1, 2]], "b": [[7, 7, 8], [0, 0, 2]], "c": [[2, 3, 2], [0, 1, 2]],
    }  # fmt: skip
    found = count(iter([chunk, chunk]), LAYOUT, batch=2)
    assert found.samples == 6
    x, y = found.tables
    assert (x.name, x.fields, x.ids) == ("x", ["a", "c"], {"a": 6, "c": 6})
    assert (y.name, y.fields, y.ids) == ("y", ["b"], {"b": 6})
    assert x.rows.tolist() == [1, 2, 3] and y.rows.tolist() == [7, 8]
    one, two = x.windows
    assert (one.count, one.draws, one.distinct) == (3, 4, (3 + 2 + 3) / 3), "1213, 2212, 1322"
    assert (two.count, two.draws, two.distinct) == (1, 8, 3), "the first two"
    assert (y.batch.draws, y.batch.distinct) == (2, (1 + 2 + 1) / 3), "77, 877, 8"
    short = count(iter([chunk]), LAYOUT, batch=10).tables[1]
    assert (short.batch.draws, short.batch.distinct) == (3, 2), "a log shorter than a batch is one"
    assert short.rows.tolist() == [7, 8] and not short.windows
    with pytest.raises(ValueError, match="training part has no sample"):
        count(iter(()), LAYOUT, batch=2)


LAW = {"few": (300, 0.8), "many": (40_000, 1.1), "even": (5_000, 0.0)}
"""Values and exponent of each field."""


def _drawn(samples: int) -> Iterator[Batch]:
    """A log whose fields follow the law, the second with two ids a sample."""
    random = np.random.default_rng(7)
    columns = []
    for place, (values, zipf) in enumerate(LAW.values()):
        share = np.arange(1, values + 1) ** -zipf
        ids = random.choice(values, size=(samples, 1 + (place == 1)), p=share / share.sum())
        columns.append(tag(place, ids.astype(np.uint64)))
    lengths = np.tile([column.shape[1] for column in columns], samples)
    yield Batch(
        ids=np.concatenate(columns, 1).reshape(-1),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        dense=np.empty((samples, 0), np.float32),
        labels=np.zeros((samples, 1), np.float32),
    )


@pytest.mark.parametrize("scale", [1, 64])
def test_a_log_of_known_law_has_its_fields_ids_popularity_and_growth(scale):
    """Distinct ids are those that the law expects of the whole log, of which 100,000 samples are
    a cut; at 1 those that the log has. 2 %: half of that is the luck of the draw."""
    samples = 100_000
    layout = Layout(fields=tuple(Field(name=name) for name in LAW))
    counted = count(_drawn(samples), layout, batch=500)
    for table, (name, (values, zipf)) in zip(counted.tables, LAW.items(), strict=True):
        assert table.fields == [name]
        each = 2 if name == "many" else 1
        assert table.ids[name] == each * samples
        share = np.arange(1, values + 1) ** -zipf
        share /= share.sum()
        whole = -np.expm1(scale * each * samples * np.log1p(-share)).sum()
        assert table.rows_of(scale) == pytest.approx(whole, rel=0.02)
        batch = -np.expm1(500 * each * np.log1p(-share)).sum()
        own = table.batch
        assert (own.draws, own.distinct) == (500 * each, pytest.approx(batch, rel=0.02))
        fitted = exponent(own.distinct, own.draws, values)
        assert fitted == pytest.approx(zipf, abs=0.02 if zipf else 0.2)


def test_users_who_come_stay_and_leave_grow_with_the_log():
    """A thousand users, each for 40 samples and never again: ten times the log has ten times."""
    draws = 40_000 * 0.5 ** np.arange(8)
    assert grown(draws, draws / 40, 10.0) == pytest.approx(10_000, rel=0.02)


def test_a_mistake_is_a_sentence(capsys):
    assert main(["describe", "--data.name", "nothing.toml"]) == 2
    assert "no file nothing.toml" in capsys.readouterr().err
    assert main(["describe", "--scale", "0.5"]) == 2
    said = capsys.readouterr().err
    assert "scale" in said and "0.5" in said and "1" in said
    with pytest.raises(SystemExit) as end:
        main(["describe", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "persia-sim --workload" in said and "--scale" in said


def test_kuairand_is_what_pandas_counts(real_data):
    """Distinct ids of columns, and of batches of 128 in the order of the file."""
    name = "kuairand-pure-14d"
    folder = real_data(name)
    work = derive_workload(read_train(["--data.name", name, "--data.dir", str(folder)]).run)
    log = pd.read_parquet(folder / name / "data.parquet")
    log = log[log["date"] < 20220505]
    tables = {table.name: table for table in work.tables}
    for column in ("hour", "tab", "user", "video", "author", "music"):
        table = tables[column]
        assert (table.rows, table.ids) == (log[column].nunique(), 1), column
        own = [log[column][n : n + 128].nunique() for n in range(0, len(log) - 127, 128)]
        assert table.distinct(128) == pytest.approx(np.mean(own), rel=0.02), column
    tags = log["tag"].astype(str).str.split(",")
    assert tables["tag"].ids == pytest.approx(tags.map(len).mean(), abs=1e-6)
    assert tables["tag"].rows == len(set(tags.sum()))
