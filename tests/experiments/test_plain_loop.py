"""The plain loop that sweeps are timed against trains what a point trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.benching import plain_loop
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.data.open import open_source
from runtime.data.source import Part, Provenance, Source, rebatch
from runtime.run.session import train
from tests.experiments.clicks import clicks_file
from tests.oracles.reference.initial import table_key, uniform_rows
from tests.runtime.worlds import ArraySource

HIDDEN = (16, 8)


class IdsAlone:
    """A source without its dense features, which the plain loop does not have."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def layout(self) -> Layout:
        return replace(self._source.layout, dense=())

    def chunks(self, part: Part) -> Iterator[Batch]:
        for chunk in self._source.chunks(part):
            yield replace(chunk, dense=np.empty((chunk.size, 0), np.float32))

    def provenance(self) -> Provenance:
        return self._source.provenance()


def whole(source: Source, part: str) -> Batch:
    (batch,) = rebatch(source.chunks(part), 10**9)
    return batch


def numbered(*batches: Batch) -> tuple[list[plain_loop.Samples], np.ndarray]:
    """Batches for the plain loop, and the id of each of its rows."""
    ids = np.concatenate([b.ids for b in batches])
    distinct, numbers = np.unique(ids, return_inverse=True)
    found, start = [], 0
    for batch in batches:
        offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
        arrays = numbers[start : start + len(batch.ids)], offsets, batch.labels
        found.append(plain_loop.Samples(*(torch.from_numpy(a) for a in arrays)))
        start += len(batch.ids)
    return found, distinct


def point(tau: int, ranks: int, seed: int = 0, **changes) -> TrainConfig:
    late = {"mode": "hybrid", "tau": tau} if tau else {}
    base = TrainConfig(sync=SyncConfig(ranks=ranks, **late), batch=24, seed=seed)
    return replace(base, model=ModelConfig(hidden=HIDDEN), **changes)


@pytest.mark.parametrize(("tau", "ranks"), [(0, 1), (0, 4), (3, 4)])
def test_the_plain_loop_has_the_numbers_of_a_point(tau, ranks):
    source = IdsAlone(ArraySource(24 * 40))
    ours = train(point(tau, ranks), source)
    (samples,), ids = numbered(whole(source, "train"))
    start = uniform_rows(table_key(0, "rows"), ids, plain_loop.DIM, 0.01, "float32")
    rows = torch.from_numpy(start.copy())
    model = plain_loop.make_model(3 * plain_loop.DIM, 2, 0, HIDDEN)
    test = list(samples.batches(plain_loop.TEST_BATCH))
    curve = plain_loop.train(list(samples.batches(24)), test, rows, model, tau=tau)
    found_ids, values, _ = ours.store.export()["rows"]
    assert np.array_equal(found_ids, ids)
    assert float(np.abs(values - start).max()) > 0.01  # else nothing was pushed
    np.testing.assert_allclose(rows.numpy(), values, rtol=0, atol=2e-5)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        np.testing.assert_allclose(theirs.detach(), mine.detach(), rtol=0, atol=2e-5)
    found = [score.auc for score in ours.final.tasks.values()]
    np.testing.assert_allclose(curve[-1]["auc"], found, atol=1e-3)


@pytest.mark.long
def test_the_plain_loop_reaches_the_auc_of_a_point_within_the_noise_of_seeds():
    seeds, batch, shown = range(4), 96, 8_000
    source = IdsAlone(open_source("synthetic", rows=24_000))
    data, judged = DataConfig(name="synthetic"), EvaluationConfig(test_rows=shown)
    points = [point(4, 1, s, data=data, evaluation=judged) for s in seeds]
    ours = [train(replace(p, batch=batch), source).final.tasks["click"].auc for p in points]
    (clicks, test), ids = numbered(whole(source, "train"), whole(source, "test").rows(0, shown))
    batches, held_out = list(clicks.batches(batch)), list(test.batches(plain_loop.TEST_BATCH))
    width = plain_loop.DIM * len(batches[0].starts) // batch
    theirs = []
    for seed in seeds:
        model = plain_loop.make_model(width, 1, seed, HIDDEN)
        rows = (2 * torch.rand(len(ids), plain_loop.DIM) - 1) * plain_loop.ROW_SCALE
        theirs.append(plain_loop.train(batches, held_out, rows, model, tau=4)[-1]["auc"][0])
    error = np.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / len(seeds))
    assert min(ours) > 0.55
    assert abs(np.mean(ours) - np.mean(theirs)) < 3 * error


def test_the_plain_loop_reads_the_clicks_that_a_point_reads(tmp_path):
    path = clicks_file(tmp_path)
    source = open_source("kuairand-pure-14d", data_dir=tmp_path)
    *found, _ = plain_loop.read_clicks(path)
    expected, _ = numbered(whole(source, "train"), whole(source, "test"))
    assert [len(part.labels) for part in found] == [300, 100]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.labels, theirs.labels)
        assert torch.equal(mine.offsets, theirs.offsets)
    one, other = (torch.cat([part.ids for part in parts]) for parts in (found, expected))
    pairs = torch.stack([one, other]).unique(dim=1).shape[1]
    assert pairs == len(one.unique()) == len(other.unique())  # a number for each id and no other
