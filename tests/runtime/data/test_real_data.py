"""The ready schemas on the real sets, where PERSIA_DATA_DIR says they are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import Part

pytestmark = pytest.mark.data

# Rows of the training and the test part, and the label rate over both, as the sets are documented.
FACTS = {
    "kuairand-pure-14d": (166_932, 55_512, 0.4496),
    "adult": (32_561, 16_281, 0.2393),
    "census-income-kdd": (199_523, 99_762, 0.0620),
    "nycflights13": (261_844, 65_502, 0.2371),
    "nycflights13-time": (261_877, 65_469, 0.2371),
    "tennis": (1_351_194, 150_133, 0.4999),
    "tennis-random": (1_351_032, 150_295, 0.4999),
}


def part_of(name: str, part: Part) -> Batch:
    place = os.environ.get("PERSIA_DATA_DIR")
    if not place:
        pytest.skip("PERSIA_DATA_DIR is not set: no real data to read")
    folder = name.removesuffix("-time").removesuffix("-random")
    if not (Path(place) / folder / "data.parquet").is_file():
        pytest.fail(f"PERSIA_DATA_DIR is {place}, which has no {folder}/data.parquet")
    return Batch.concat(list(open_source(name, place).chunks(part)))


def count_ids_of_kuairand(train: Batch, test: Batch) -> None:
    """The ids of each field are as many as documented."""
    layout = open_source("kuairand-pure-14d", os.environ["PERSIA_DATA_DIR"]).layout
    ids = np.unique(np.concatenate([train.ids, test.ids]))
    per_field = np.bincount((ids >> np.uint64(56)).astype(int), minlength=len(layout.fields))
    distinct = dict(zip([f.name for f in layout.fields], per_field.tolist(), strict=True))
    for name, count in {"user": 25_156, "video": 6_361, "author": 5_641, "frame": 225}.items():
        assert distinct[name] == count
    assert 10 < distinct["duration_ms"] < 60


def draw_the_split_of_the_flights(train: Batch, test: Batch) -> None:
    """It is the documented one."""
    assert test.size == int((np.random.default_rng(1).random(327_346) < 0.2).sum())


def count_players_of_two_tours(train: Batch, test: Batch) -> None:
    """A player of two tours is two players."""
    layout = open_source("tennis", os.environ["PERSIA_DATA_DIR"]).layout
    place = [f.name for f in layout.fields].index("a_id")
    players = len(np.unique(train.ids.reshape(train.size, -1)[:, place]))
    # 39,069 numbers over all rows; some thousand of them name a man and a woman.
    assert players > 39_069


MORE = {
    "kuairand-pure-14d": count_ids_of_kuairand,
    "nycflights13": draw_the_split_of_the_flights,
    "tennis": count_players_of_two_tours,
}
"""Asked where the parts are in memory already: they take seconds to read."""


@pytest.mark.parametrize("name", FACTS)
def test_a_real_set_is_as_documented(name):
    train, test = part_of(name, "train"), part_of(name, "test")
    n_train, n_test, rate = FACTS[name]
    assert (train.size, test.size) == (n_train, n_test)
    clicks = train.labels[:, 0].sum() + test.labels[:, 0].sum()
    assert clicks / (n_train + n_test) == pytest.approx(rate, abs=5e-5)
    if name in MORE:
        MORE[name](train, test)
