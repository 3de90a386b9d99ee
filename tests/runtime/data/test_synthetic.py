from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.synthetic import (
    CHUNK_ROWS,
    Recipe,
    SyntheticField,
    SyntheticSource,
    presets,
    raw_score,
    recipe,
)

LAST_PARAMETERS = 100e12  # of criteo-syn5, the paper's largest workload
DIM = 16


def tiny(**changes: object) -> Recipe:
    fields = (
        SyntheticField(name="user", values=1000),
        SyntheticField(name="tags", values=50, max_length=3),
    )
    return replace(Recipe(name="tiny", fields=fields, dense=1), **changes)


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("ids", "dense", "labels"))


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others():
    def first(made: Recipe) -> Batch:
        return next(SyntheticSource(recipe=made).chunks("train"))

    assert same(first(tiny()), first(tiny()))
    assert not same(first(tiny()), first(tiny(seed=2)))


def test_the_stream_goes_on_and_never_repeats():
    chunks = list(islice(SyntheticSource(recipe=tiny()).chunks("train"), 5))
    assert [c.size for c in chunks] == [CHUNK_ROWS] * 5
    assert len({c.dense.tobytes() for c in chunks}) == 5


def test_a_shorter_part_is_the_beginning_of_a_longer_one():
    short = SyntheticSource(recipe=tiny(), train_rows=20_000)
    long = SyntheticSource(recipe=tiny(), train_rows=40_000)
    a = Batch.concat(list(short.chunks("train")))
    b = Batch.concat(list(long.chunks("train")))
    assert (a.size, b.size) == (20_000, 40_000)
    assert same(a, b.rows(0, 20_000))


def test_the_parts_are_different_samples_with_one_truth():
    source = SyntheticSource(recipe=tiny(), train_rows=1000, test_rows=1000)
    parts = [next(source.chunks(p)) for p in ("train", "validation", "test")]
    assert len({p.dense.tobytes() for p in parts}) == 3


def test_the_true_probabilities_are_calibrated():
    source = SyntheticSource(recipe=tiny())
    truth = np.concatenate([truth for _, truth in source.chunks_with_truth("test")])
    labels = np.concatenate([b.labels[:, 0] for b in source.chunks("test")])
    for tenth in np.array_split(np.argsort(truth), 10):
        spread = np.sqrt(truth[tenth].mean() / len(tenth))
        assert abs(labels[tenth].mean() - truth[tenth].mean()) < 4 * spread


def test_the_layout_fits_the_batches():
    source = SyntheticSource(recipe=recipe("default"), train_rows=1000)
    batch = next(source.chunks("train"))
    n_fields = len(source.layout.fields)
    assert batch.offsets is not None
    assert len(batch.offsets) == 1000 * n_fields + 1
    assert batch.dense.shape == (1000, len(source.layout.dense))
    bags = np.diff(batch.offsets).reshape(1000, n_fields)
    assert bags[:, 3].max() == 5
    assert bags[:, 3].min() == 1
    assert (np.delete(bags, 3, axis=1) == 1).all()
    owner = np.repeat(np.tile(np.arange(n_fields), 1000), np.diff(batch.offsets))
    assert (batch.ids >> np.uint64(56) == owner.astype(np.uint64)).all()


@pytest.mark.first_case
@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_learned_to_an_auc_between_75_and_85(name):
    source = SyntheticSource(recipe=recipe(name), test_rows=50_000)
    labels = np.concatenate([b.labels[:, 0] for b in source.chunks("test")])
    best = roc_auc_score(
        labels, np.concatenate([truth for _, truth in source.chunks_with_truth("test")])
    )
    assert 0.75 < best < 0.85
    assert labels.mean() == pytest.approx(source.recipe.click_rate, abs=0.01)
    assert len(source.recipe.source) > 20


def test_presets_have_the_shape_of_the_workloads():
    made = {name: recipe(name) for name in presets()}
    shapes = {n: (len(r.fields), r.dense, r.distinct_ids) for n, r in made.items()}
    assert shapes["taobao-ad"] == (14, 0, 1_810_000)
    assert shapes["avazu-ad"] == (22, 0, 8_380_000)
    assert shapes["criteo-ad"] == (26, 13, 33_750_000)
    assert shapes["kwai-video"] == (40, 0, 125_000_000_000)
    for number, parameters in enumerate((6.25e12, 12.5e12, 25e12, 50e12, LAST_PARAMETERS), 1):
        assert shapes[f"criteo-syn{number}"] == (26, 13, parameters / DIM)
    assert shapes["default"][2] > 1_000_000
    assert recipe("criteo-ad", 0.1).distinct_ids == 3_375_000
    assert all(f.values >= 1 for f in recipe("criteo-ad", 1e-9).fields)


def test_the_fields_of_a_shape_are_as_described():
    video, criteo = recipe("kwai-video").fields, [f.values for f in recipe("criteo-ad").fields]
    assert criteo == sorted(criteo, reverse=True) and criteo[0] > 1_000_000 > criteo[-1]
    assert [f.max_length for f in video] == [1] * 32 + [8] * 8
    assert {(f.values >= 1_000_000, f.weight) for f in video} == {(True, 0.5), (False, 1.0)}
    for exponent in (1.1, 1.4, 1.8):
        assert {f.exponent for f in recipe(f"zipf-{exponent}").fields} == {exponent}


def test_another_draw_has_another_truth_other_samples_and_other_test_rows():
    one, two, same = (
        open_source(f"synthetic:zipf-1.4:0.1{draw}", rows=400) for draw in ("", ":2", ":1")
    )
    assert one.recipe.fields == two.recipe.fields
    assert one.provenance().sha256 == same.provenance().sha256 != two.provenance().sha256
    for part in ("train", "test"):
        first, second = (next(iter(s.chunks(part))) for s in (one, two))
        assert not np.array_equal(first.ids[:400], second.ids[:400])
    ids = [np.arange(5, dtype=np.uint64)] * len(one.recipe.fields)
    scores = [raw_score(s.recipe, ids, [None] * len(ids), np.empty((5, 0))) for s in (one, two)]
    assert not np.allclose(*scores), "one truth"
