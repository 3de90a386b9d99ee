"""Law 4: training against plain PyTorch. Each dense optimiser against torch's class:
test_dense_optimizers.py; closed forms of the row optimisers: tests/runtime/embedding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from runtime.data.batch import Batch
from runtime.embedding.config import RowOptimizer
from runtime.models.inputs import Embeddings
from runtime.rank.components import assemble
from runtime.rank.feed import training_stream
from tests.runtime.worlds import ArraySource, changed, config, run

TORCH = {
    "sgd": lambda p, o: torch.optim.SGD(p, lr=o.lr),
    "adagrad": lambda p, o: torch.optim.Adagrad(
        p, lr=o.lr, initial_accumulator_value=o.initial_accumulator, eps=o.epsilon
    ),
    "adam": lambda p, o: torch.optim.SparseAdam(p, lr=o.lr),  # its own eps is ours,
}


def plain_pytorch(
    chosen, source, loss_of=binary_cross_entropy_with_logits
) -> tuple[dict[int, np.ndarray], torch.nn.Module]:
    """The same training with nn.Embedding and torch's own optimiser: rows by id, and the model."""
    learner = assemble(chosen, source).learner
    everything = Batch.concat(list(source.chunks("train")))
    untouched = run(chosen, source, order=[]).store.peek(everything)
    table = torch.from_numpy(untouched.values["rows"].copy())
    place = {int(i): k for k, i in enumerate(untouched.plans["rows"].ids)}
    sparse = chosen.rows.optimizer.kind == "adam"
    bag = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=sparse)
    row_optimizer = TORCH[chosen.rows.optimizer.kind]([bag.weight], chosen.rows.optimizer)
    dense_optimizer = torch.optim.Adam(learner.model.parameters(), lr=chosen.model.lr)
    for batch in training_stream(chosen, source):
        pooled = torch.zeros(batch.size * 3, chosen.rows.dim, dtype=learner.dtype)
        lengths = np.diff(batch.offsets)
        bags = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        rows = bag(torch.tensor([place[int(i)] for i in batch.ids]))
        pooled = pooled.index_add(0, bags, rows)
        divisor = np.maximum(lengths, 1)  # the third field is a mean, the others have one id
        pooled = pooled / torch.from_numpy(divisor[:, None]).to(learner.dtype)
        embeddings = Embeddings(pooled.reshape(batch.size, -1), {}, {})
        logits = learner.model(torch.from_numpy(batch.dense).to(learner.dtype), embeddings)
        loss = loss_of(logits, torch.from_numpy(batch.labels).to(learner.dtype))
        row_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss.backward()
        row_optimizer.step()
        dense_optimizer.step()
    return {i: bag.weight.detach()[k].numpy() for i, k in place.items()}, learner.model


@pytest.mark.first_case
@pytest.mark.parametrize(
    "optimizer",
    [
        RowOptimizer(kind="sgd", lr=0.5),
        RowOptimizer(kind="adagrad", lr=0.1, initial_accumulator=0.01),
        RowOptimizer(kind="adam", lr=0.01),
    ],
    ids=lambda o: o.kind,
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.law4
def test_sync_with_one_rank_equals_plain_pytorch(optimizer, dtype):
    steps = 100 if dtype == "float64" else 10
    source = ArraySource(24 * steps)
    chosen = config(optimizer=optimizer, dtype=dtype, steps=steps)
    expected, model = plain_pytorch(chosen, source)
    world = run(chosen, source)
    for mine, theirs in zip(world.model.parameters(), model.parameters(), strict=True):
        gap = float((mine - theirs).detach().abs().max())
        assert gap < (1e-10 if dtype == "float64" else 1e-6 * float(theirs.detach().norm()))
    ids, values, _ = world.store.export()["rows"]
    wanted = np.stack([expected[int(i)] for i in ids])
    if dtype == "float64":
        assert np.abs(values - wanted).max() < 1e-10
    else:
        assert np.linalg.norm(values - wanted) < 1e-6 * np.linalg.norm(wanted)


class Weighed(ArraySource):
    """The second task is a number, and each sample has a weight."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        draw = np.random.default_rng(6)
        numbers = draw.normal(size=samples), draw.integers(0, 4, samples)
        labels = np.column_stack([self._all.labels[:, 0], *numbers]).astype(np.float32)
        self._all = replace(self._all, labels=labels)

    @property
    def layout(self):
        return replace(super().layout, regression=("buy",), weighted=True)


def test_a_weighted_regression_beside_a_task_equals_plain_pytorch():
    def loss_of(logits, told):
        click = binary_cross_entropy_with_logits(logits[:, 0], told[:, 0], weight=told[:, 2])
        return (click + (told[:, 2] * (logits[:, 1] - told[:, 1]) ** 2).mean()) / 2

    chosen = config(optimizer=RowOptimizer(kind="sgd", lr=0.1), dtype="float64")
    source = Weighed(24 * 20)
    expected, model = plain_pytorch(chosen, source, loss_of)
    for settings in (chosen, changed(chosen, ranks=4), changed(chosen, ranks=3, fuse_ranks=True)):
        world = run(settings, source)
        for mine, theirs in zip(world.model.parameters(), model.parameters(), strict=True):
            assert float((mine - theirs).detach().abs().max()) < 1e-10
        ids, values, _ = world.store.export()["rows"]
        assert np.abs(values - np.stack([expected[int(i)] for i in ids])).max() < 1e-10
