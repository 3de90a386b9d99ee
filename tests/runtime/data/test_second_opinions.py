"""Ids, batches and the synthetic truth computed a second time: published vectors, loops, sums."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from runtime.data.batch import interleave
from runtime.data.files import FileSource
from runtime.data.ids import hash_integers, join_hashes, mix64, scatter56, tag
from runtime.data.schema import Column, Join, Schema
from runtime.data.source import share
from runtime.data.split import CODES, UNPLACED, Split
from runtime.data.synthetic import Pair, Recipe, SyntheticField, SyntheticSource
from tests.oracles.reference.initial import hash_text

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

# The first outputs of splitmix64 from seed 0 and from seed 1234567 (S. Vigna, splitmix64.c; the
# second list stands at rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
FROM_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
FROM_1234567 = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


@pytest.mark.parametrize(("seed", "outputs"), [(0, FROM_0), (1234567, FROM_1234567)])
def test_the_hash_of_a_whole_number_is_an_output_of_splitmix64(seed, outputs):
    states = np.array([(seed + n * GOLDEN) & MASK for n in range(len(outputs))], np.uint64)
    assert hash_integers(states.view(np.int64)).tolist() == list(outputs)
    assert int(hash_integers(np.array([seed]))[0]) == outputs[0]


# printf '%s' TEXT | b2sum -l 64 (coreutils), read as a little-endian number.
B2SUM = {
    "click": "0cfe286a73616f2c",
    "user 7": "13419e5dee5570f9",
    "été": "bc5121b7615020d8",
    "007": "492a8021fcec81bd",
    "": "e4a6a0577479b2b4",
}


@pytest.mark.parametrize("text", B2SUM)
def test_the_hash_of_a_text_is_blake2b_of_its_utf8_bytes(text):
    assert hash_text(text) == int.from_bytes(bytes.fromhex(B2SUM[text]), "little")


def mixed(value: int) -> int:
    """The finaliser of splitmix64 in Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@given(st.integers(0, MASK), st.integers(0, MASK))
def test_the_hash_of_a_pair_mixes_the_first_then_adds_the_second(a, b):
    pair = join_hashes(np.array([a], np.uint64), np.array([b], np.uint64))
    assert int(pair[0]) == mixed((mixed((a + GOLDEN) & MASK) + b) & MASK)
    assert int(mix64(np.array([a], np.uint64))[0]) == mixed(a)


@given(st.lists(st.integers(0, 2**56 - 1), min_size=1, max_size=9))
def test_scattering_is_two_rounds_of_multiplication_and_shift(ranks):
    expected = []
    for z in ranks:
        for odd in (GOLDEN, 0xBF58476D1CE4E5B9):
            z = (z * odd) % 2**56
            z ^= z >> 28
        expected.append(z)
    assert scatter56(np.array(ranks, np.int64)).tolist() == expected


BAGS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=3, max_size=3)


@given(st.lists(BAGS, min_size=1, max_size=6), st.lists(st.booleans(), min_size=3, max_size=3))
def test_interleaving_puts_bag_after_bag_sample_by_sample(samples, single):
    samples = [[b[:1] if one else b for b, one in zip(s, single, strict=True)] for s in samples]
    ids = [np.array([i for s in samples for i in s[f]], np.uint64) for f in range(3)]
    lengths = [
        None if one else np.array([len(s[f]) for s in samples]) for f, one in enumerate(single)
    ]
    out, offsets = interleave(ids, lengths)
    bags = [bag for sample in samples for bag in sample]
    assert out.tolist() == [i for bag in bags for i in bag]
    if offsets is None:
        assert all(len(bag) == 1 for bag in bags)
    else:
        assert offsets.tolist() == [sum(map(len, bags[:n])) for n in range(len(bags) + 1)]


def test_shares_are_contiguous_in_the_order_of_ranks():
    source = SyntheticSource(recipe=RECIPE, train_rows=10)
    (batch,) = source.chunks("train")
    parts = share(batch, 4)
    assert [p.size for p in parts] == [2, 3, 3, 2]  # borders 2.5 and 7.5 round to even
    assert np.concatenate([p.labels for p in parts]).tolist() == batch.labels.tolist()


def test_a_file_of_mixed_parts_gives_each_part_its_own_rows_with_their_bags(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 300)
    n_rows = 120
    parts = ["test" if n % 7 in (2, 3) else "train" for n in range(n_rows)]
    tags = ["|".join(str(k) for k in range(n % 4)) for n in range(n_rows)]
    lines = [f"{n},{tags[n]},{parts[n]},{n % 2}" for n in range(n_rows)]
    (tmp_path / "d.csv").write_text("\n".join(["user,tags,part,label", *lines]) + "\n")
    schema = Schema(
        name="mixed",
        file="d.csv",
        columns=(Column(name="user"), Column(name="tags", kind="multi", separator="|")),
        split=Split(column="part", test_equals="test"),
    )
    source = FileSource(schema=schema, folder=tmp_path)
    for part in ("train", "test"):
        mine = [n for n in range(n_rows) if parts[n] == part]
        expected: list[int] = []
        for n in mine:
            expected += tag(0, hash_integers(np.array([n]))).tolist()
            texts = tags[n].split("|")
            expected += tag(1, np.array([hash_text(t) for t in texts], np.uint64)).tolist()
        chunks = list(source.chunks(part))
        assert len(chunks) > 3
        assert np.concatenate([c.ids for c in chunks]).tolist() == expected
        labels = np.concatenate([c.labels[:, 0] for c in chunks])
        assert labels.tolist() == [n % 2 for n in mine]


def test_a_join_is_that_of_pandas_over_many_blocks(tmp_path, monkeypatch):
    import pandas as pd

    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 200)
    rng = np.random.default_rng(0)
    main = pd.DataFrame({"u": rng.integers(0, 40, 300), "label": np.arange(300) % 2})
    side = pd.DataFrame({"id": rng.permutation(30), "age": rng.normal(size=30).round(3)})
    main.to_csv(tmp_path / "d.csv", index=False)
    side.to_csv(tmp_path / "side.csv", index=False)
    schema = Schema(
        name="joined",
        file="d.csv",
        joins=(Join(file="side.csv", left="u", right="id"),),
        columns=(Column(name="u"), Column(name="age", kind="numeric", log=False, fill=-9.0)),
        split=Split(test_fraction=0.1),
    )
    found = list(FileSource(schema=schema, folder=tmp_path).chunks("train"))
    assert len(found) > 5
    merged = main.merge(side, how="left", left_on="u", right_on="id")["age"].fillna(-9.0)
    ages = np.concatenate([c.dense[:, 0] for c in found])
    assert ages.tolist() == merged[:270].astype(np.float32).tolist()


@pytest.mark.parametrize("kind", ["int64", "float64", "float32", "float16", "decimal", "text"])
def test_a_number_may_mean_that_there_is_no_value(kind, tmp_path):
    """-1 and 999 among numbers: of a parquet file as of a CSV, where blanks do not count."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [3, -1, 5, 999, 3, -1, 5, 999]
    texts = [f" {number}" for number in numbers]
    types = {"decimal": pa.decimal128(9, 0), "text": pa.string(), "float16": pa.float16()}
    wide = np.array(numbers, np.float16) if kind == "float16" else numbers
    column = pa.array(texts if kind == "text" else wide, types.get(kind) or getattr(pa, kind)())
    lists = pa.ListArray.from_arrays(np.arange(0, 9, 2, dtype=np.int32), column)
    bags = pa.concat_arrays([lists, lists])
    table = {"u": column, "label": [0, 1] * 4, "b": column, "n": column, "day": column, "m": bags}
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    schema = Schema(
        name="gaps",
        file="d.parquet",
        columns=(Column(name="u"), Column(name="b", kind="bucket"), Column(name="m", kind="multi"),
                 Column(name="n", kind="numeric", log=False, fill=-9.0)),
        split=Split(test_fraction=0.5),
        missing=("", "-1", "999"),
    )  # fmt: skip
    source = FileSource(schema=schema, folder=tmp_path)
    (train,) = source.chunks("train")
    assert train.dense[:, 0].tolist() == [3.0, -9.0, 5.0, -9.0]
    absent = [int(tag(field, np.array([hash_text("")], np.uint64))[0]) for field in range(3)]
    found = [
        [int(i) in absent for i in train.ids[a:b]] for a, b in pairwise(train.offsets.tolist())
    ]
    by_row = [found[k : k + 3] for k in range(0, 12, 3)]
    assert by_row == [
        [[False], [False], [False, True]],
        [[True], [True], [False, True]],
        [[False], [False], [False, True]],
        [[True], [True], [False, True]],
    ]
    assert source.provenance().absent == {"u": 0.5, "b": 0.5, "n": 0.5}
    by_day = Schema(
        name="gaps", file="d.parquet", columns=(Column(name="u"),), missing=("-1", "999"),
        split=Split(column="day", test_from=5),
    )  # fmt: skip
    (codes,) = FileSource(schema=by_day, folder=tmp_path, skip_bad_rows=True).placed().values()
    assert codes.tolist() == [CODES["train"], UNPLACED, CODES["test"], UNPLACED] * 2


RECIPE = Recipe(
    name="small",
    fields=(
        SyntheticField(name="a", values=5, exponent=1.1, weight=0.8),
        SyntheticField(name="b", values=4, exponent=0.0, weight=0.5),
        SyntheticField(name="c", values=3, exponent=1.0),
    ),
    pairs=(Pair(first="a", second="c", weight=0.7),),
    click_rate=0.3,
    seed=11,
)


def slow_score(recipe: Recipe, bags: list[list[int]], dense: list[float]) -> float:
    """The raw score of one sample, as the module's text defines it, in Python's numbers."""
    key = mixed(recipe.seed)
    score, signs = 0.0, {}
    for field, bag in zip(recipe.fields, bags, strict=True):
        hashes = [mixed(value ^ key) for value in bag]
        effects = [((h >> 11) / 2**53 - 0.5) * math.sqrt(12) for h in hashes]
        score += field.weight * sum(effects) / len(bag)
        signs[field.name] = 1 - 2 * (hashes[0] & 1)
    score += sum(p.weight * signs[p.first] * signs[p.second] for p in recipe.pairs)
    return score + recipe.dense_weight * sum(x * (-1) ** n for n, x in enumerate(dense))


def popularity(field: SyntheticField) -> list[float]:
    """P(rank k) of the continuous power law on [1, values + 1), by its integral."""

    def integral(x: float) -> float:
        power = 1 - field.exponent
        return math.log(x) if power == 0 else (x**power - 1) / power

    edges = [integral(k) for k in range(1, field.values + 2)]
    return [(b - a) / edges[-1] for a, b in pairwise(edges)]


def test_the_best_reachable_auc_is_that_of_all_samples_there_can_be():
    """All 60 kinds of samples with their probabilities give rate, spread and AUC exactly."""
    combos, masses = [], []
    for ranks in product(*(range(f.values) for f in RECIPE.fields)):
        bags = [
            [int(tag(place, scatter56(np.array([rank])))[0])] for place, rank in enumerate(ranks)
        ]
        combos.append(slow_score(RECIPE, bags, []))
        masses.append(
            math.prod(popularity(f)[r] for f, r in zip(RECIPE.fields, ranks, strict=True))
        )
    score, mass = np.array(combos), np.array(masses)
    assert mass.sum() == pytest.approx(1)
    mean = (mass * score).sum()
    deviation = math.sqrt((mass * (score - mean) ** 2).sum())
    logit = RECIPE.gain * (score - mean) / deviation
    low, high = -20.0, 20.0
    for _ in range(60):  # the bias that gives the click rate
        middle = (low + high) / 2
        above = (mass / (1 + np.exp(-(logit + middle)))).sum() > RECIPE.click_rate
        low, high = (low, middle) if above else (middle, high)
    click = 1 / (1 + np.exp(-(logit + low)))
    positive, negative = mass * click, mass * (1 - click)
    wins = (click[:, None] > click) + 0.5 * (click[:, None] == click)
    best = (positive[:, None] * negative * wins).sum() / (positive.sum() * negative.sum())

    source = SyntheticSource(recipe=RECIPE)
    labels = np.concatenate([b.labels[:, 0] for b in source.chunks("test")])
    truth = np.concatenate([truth for _, truth in source.chunks_with_truth("test")])
    # Standard error of an AUC of 100,000 samples at this rate: 0.0017; of the calibration as much.
    assert roc_auc_score(labels, truth) == pytest.approx(best, abs=0.006)
    assert labels.mean() == pytest.approx(RECIPE.click_rate, abs=0.008)
    kinds = np.sort(np.unique(truth.round(9)))
    assert len(kinds) == len(click)
    assert kinds == pytest.approx(np.sort(click), abs=0.01)
