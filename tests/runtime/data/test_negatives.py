"""Negatives: drawn uniformly among the other items, the same samples in every mode and executor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runtime.config import DataConfig
from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.negatives import negatives_of
from runtime.data.open import open_source
from runtime.data.source import share
from tests.runtime.worlds import World, config, run

ITEMS = 13
SCHEMA = """name = "made"
file = "log.csv"
labels = ["clicked", "bought"]
optional = ["bought"]
weight = "weight"
group = "user"
split = { leave_one_out = "test_only" }
negatives = { items = "items.csv", count = 3 }
columns = [
    "user", "item", { name = "tags", kind = "multi", separator = "|" },
    { name = "price", kind = "numeric", log = false },
    { name = "hour", kind = "numeric", log = false },
]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of clicks alone: what was not clicked is drawn."""
    folder = tmp_path_factory.mktemp("drawn")
    items = pd.DataFrame({"item": [f"i{n}" for n in range(ITEMS)], "price": np.arange(13.0)})
    items["tags"] = ["|".join(f"t{k}" for k in range(n % 3)) for n in range(ITEMS)]
    items.to_csv(folder / "items.csv", index=False)
    draw = np.random.default_rng(2)
    log = pd.DataFrame({"user": draw.integers(0, 9, 400), "n": draw.integers(0, ITEMS + 1, 400)})
    log["item"] = "i" + log.n.astype(str)  # i13 is no item of the table
    log = log.merge(items, on="item", how="left").assign(hour=draw.integers(0, 24, 400))
    log["price"] = log.price.fillna(99.0)
    log["clicked"], log["bought"], log["weight"] = 1, draw.choice(["1", ""], 400), 2
    log.to_csv(folder / "log.csv", index=False)
    (folder / "made.toml").write_text(SCHEMA)
    return folder


def drawn(folder: Path, seed: int = 7) -> tuple[Batch, Batch]:
    source = open_source(str(folder / "made.toml"))
    batch = Batch.concat(list(source.chunks("train")))
    negatives = negatives_of(source, seed)
    assert negatives is not None
    return batch, negatives.beside(batch, 5, 0)


def test_each_sample_is_followed_by_others_of_the_same_user_and_moment(folder):
    batch, whole = drawn(folder)
    assert whole.size == 4 * batch.size
    own = whole.take(np.arange(0, whole.size, 4))
    for name, array in batch.named().items():
        assert np.array_equal(own.named()[name], array, equal_nan=True), name
    for k in range(1, 4):
        beside = whole.take(np.arange(k, whole.size, 4))
        assert (beside.of_field(0) == batch.of_field(0)).all(), "the user"
        assert (beside.dense[:, 1] == batch.dense[:, 1]).all(), "the hour"
        assert (beside.labels == [0, 0, 2]).all(), "no label of an optional task, the weight"
        assert (beside.of_field(1) != batch.of_field(1)).all(), "another item"
        number = negatives_of(open_source(str(folder / "made.toml")), 0).items.number_of(
            beside.of_field(1)
        )
        assert (number == beside.dense[:, 0]).all(), "an item comes with its own price"


def test_the_draw_is_uniform_over_the_other_items(folder):
    """Chi-square over the items that are not the sample's own: 99.99 % of draws lie below."""
    from scipy.stats import chi2

    batch, _ = drawn(folder)
    at_13 = batch.take(np.flatnonzero(batch.dense[:, 0] == 0))  # of i0
    source = open_source(str(folder / "made.toml"))
    found = np.zeros(ITEMS)
    for seed in range(60):
        whole = negatives_of(source, seed).beside(at_13, 0, 0)
        beside = np.delete(whole.dense[:, 0], np.arange(0, whole.size, 4))
        found += np.bincount(beside.astype(int), minlength=ITEMS)
    assert found[0] == 0
    mean = found.sum() / (ITEMS - 1)
    assert ((found[1:] - mean) ** 2 / mean).sum() < chi2.ppf(0.9999, ITEMS - 2)


def test_ranks_draw_what_one_rank_does_and_other_batches_and_seeds_something_else(folder):
    batch, whole = drawn(folder)
    negatives = negatives_of(open_source(str(folder / "made.toml")), 7)
    firsts = np.cumsum([0, *(part.size for part in share(batch, 3))])
    parts = [
        negatives.beside(p, 5, int(at)) for p, at in zip(share(batch, 3), firsts, strict=False)
    ]
    shared = Batch.concat(parts).named()
    assert all(np.array_equal(shared[n], a, equal_nan=True) for n, a in whole.named().items())
    for other in (negatives.beside(batch, 6, 0), drawn(folder, seed=8)[1]):
        assert 0.5 < (other.of_field(1) != whole.of_field(1)).mean() < 0.75


def trained(folder: Path, **options: Any) -> World:
    settings = config(batch=32, seed=4, steps=None, **options)
    data = DataConfig(name=str(folder / "made.toml"), shuffle=True, epochs=2)
    return run(replace(settings, data=data), open_source(data.name))


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("sync", {"executor": "concurrent"}),
        ("lookahead", {}),
        ("lookahead", {"executor": "concurrent", "shards": 2}),
    ],
)
def test_exact_modes_give_the_bytes_of_sync_in_every_executor(folder, mode, more):
    one = trained(folder, mode="sync", ranks=2)
    other = trained(folder, mode=mode, ranks=2, **more)
    source = open_source(str(folder / "made.toml"))
    rows = sum(batch.size for batch in source.chunks("train"))
    assert one.meter.samples == other.meter.samples == 2 * rows, "what is drawn is not counted"
    for table, arrays in one.store.export().items():
        for array, same in zip(arrays, other.store.export()[table], strict=True):
            assert array.tobytes() == same.tobytes(), table
    for name, weights in one.model.state_dict().items():
        assert (weights == other.model.state_dict()[name]).all(), name


def test_a_table_of_one_item_is_refused(folder, tmp_path):
    for name in ("log.csv", "made.toml"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "items.csv").write_text("item\ni1\n")
    with pytest.raises(DataError, match="two or more"):
        negatives_of(open_source(str(tmp_path / "made.toml")), 0)
