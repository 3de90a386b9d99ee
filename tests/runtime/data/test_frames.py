"""Frames of a program are the data set that a file of theirs would be."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from runtime import write_data_set
from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.open import open_source

COLUMNS = ["user", {"name": "tags", "kind": "multi"}, {"name": "price", "kind": "numeric"}]
SCHEMA = {"columns": COLUMNS, "labels": ["clicked"], "split": {"test_fraction": 0.25}}


def frame(rows: int, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "user": [f"u{n}" for n in draw.integers(0, 9, rows)],
            "tags": [list(draw.integers(0, 5, draw.integers(0, 3))) for _ in range(rows)],
            "price": draw.random(rows),
            "clicked": draw.integers(0, 2, rows),
        }
    )


def samples(name: str, part: str) -> Batch:
    return Batch.concat(list(open_source(name).chunks(part)))


def equal(one: Batch, other: Batch) -> bool:
    pairs = zip(one.named().items(), other.named().items(), strict=True)
    return all(a == b and x.tobytes() == y.tobytes() for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_frame_its_pieces_and_a_file_of_it_are_the_same_samples(tmp_path, part):
    whole = frame(400)
    at_once = write_data_set(tmp_path / "a", whole, **SCHEMA)
    pieces = (whole.iloc[start : start + 90] for start in range(0, 400, 90))
    by_pieces = write_data_set(tmp_path / "b", pieces, **SCHEMA)

    # The same rows in a CSV of pandas' own, lists as texts.
    (tmp_path / "c").mkdir()
    texts = whole.assign(tags=[",".join(map(str, tags)) for tags in whole["tags"]])
    texts.to_csv(tmp_path / "c/data.csv", index=False)
    schema = (tmp_path / "a/schema.toml").read_text().replace("data.parquet", "data.csv")
    (tmp_path / "c/schema.toml").write_text(schema)

    expected = samples(str(tmp_path / "c/schema.toml"), part)
    assert expected.size == {"train": 300, "test": 100}[part]
    assert equal(samples(at_once, part), expected)
    assert equal(samples(by_pieces, part), expected)


@pytest.mark.parametrize(
    ("frames", "changes", "why"),
    [
        ([frame(5), frame(5).rename(columns={"user": "users"})], {}, "frame 1 cannot be a part"),
        ([frame(5), frame(5).assign(price="dear")], {}, "frame 1 cannot be a part of the table"),
        ([], {}, "frames must be a pandas DataFrame"),
        (frame(5), {"file": "x.csv"}, "file is of files that are given"),
        (frame(5), {"splt": {}}, "splt"),
    ],
)
def test_frames_that_are_no_data_set_are_refused_by_name(tmp_path, frames, changes, why):
    with pytest.raises(DataError, match=why):
        write_data_set(tmp_path / "a", frames, **SCHEMA | changes)
