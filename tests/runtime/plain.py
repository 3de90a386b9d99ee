"""Training without the testbed: plain PyTorch in float64, with lags kept as a list of old weights.

A second opinion for the executors. One batch of the stream is a step of ``ranks`` shares; its rows
are those of ``row_lag`` steps ago, its dense weights those of ``dense_lag`` steps ago, and what it
learned is applied to the newest ones, in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits

from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.models.inputs import Embeddings
from runtime.rank.components import assemble
from tests.runtime.worlds import ArraySource, World, run

DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


@dataclass
class Plain:
    """What plain training ends with."""

    ids: np.ndarray
    rows: np.ndarray
    accumulators: np.ndarray
    weights: list[np.ndarray]
    losses: list[float]


def plain_training(
    chosen: TrainConfig,
    source: ArraySource,
    *,
    size: int,
    ranks: int,
    row_lag: int = 0,
    dense_lag: int = 0,
    merged: bool = True,
    left_out: Collection[tuple[int, int]] = (),
    compensation: float = 0.0,
    by_staleness: bool = False,
    wire: Callable[[np.ndarray], np.ndarray] = np.array,
) -> Plain:
    """Adagrad on the rows; ``left_out`` are the (step, rank) whose gradients are thrown away.

    ``compensation`` moves each gradient along with its row since it was read; ``by_staleness``
    divides the rows' rate by the steps that were missed; ``wire`` is what becomes of rows, and of a
    rank's gradients of them, on their way.
    """
    everything = source._all
    untouched = run(chosen, source, order=[]).store.peek(everything)
    ids, rows = untouched.plans["rows"].ids, untouched.values["rows"].astype(np.float64)
    optimizer = chosen.rows.optimizer
    model = copy.deepcopy(assemble(chosen, source).learner.model)
    newest = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    dense_optimizer = DENSE_OPTIMIZERS[chosen.model.optimizer](newest, lr=chosen.model.lr)
    old_rows, old_weights = [rows.copy()], [[p.detach().clone() for p in newest]]
    accumulators = np.full_like(rows, optimizer.initial_accumulator)
    losses = []
    for step in range(-(-everything.size // size)):
        batch = everything.rows(step * size, min((step + 1) * size, everything.size))
        shares = np.array_split(np.arange(batch.size), ranks)
        table = wire(old_rows[max(0, step - row_lag)])
        weights = old_weights[max(0, step - dense_lag)]
        of_rows, of_weights, loss = [], [], []
        for rank, share in enumerate(shares):
            if len(share) and (step, rank) not in left_out:
                part = batch.rows(int(share[0]), int(share[-1]) + 1)
                found = gradients_of(model, names, weights, table, ids, part, batch.size)
                loss.append(found[0])
                of_weights.append(found[1])
                of_rows.append(wire(found[2]))
        losses.append(sum(loss) if loss else np.nan)
        if of_weights:
            for parameter, gradients in zip(newest, zip(*of_weights, strict=True), strict=True):
                parameter.grad = torch.stack(gradients).sum(0)
            dense_optimizer.step()
        missed = min(step, row_lag)
        rate = optimizer.lr / max(1, missed) if by_staleness else optimizer.lr
        for gradient in [sum(of_rows)] if merged and of_rows else of_rows:
            gradient = gradient + compensation * gradient * gradient * (rows - table)
            accumulators += gradient**2
            rows = rows - rate * gradient / (np.sqrt(accumulators) + optimizer.epsilon)
        old_rows.append(rows)
        old_weights.append([p.detach().clone() for p in newest])
    return Plain(ids, rows, accumulators, [p.detach().numpy() for p in newest], losses)


def gradients_of(
    model: torch.nn.Module,
    names: list[str],
    weights: list[torch.Tensor],
    table: np.ndarray,
    ids: np.ndarray,
    batch: Batch,
    step_samples: int,
) -> tuple[float, list[torch.Tensor], np.ndarray]:
    """Share of the step's mean loss, gradients of the dense weights, gradients of all rows."""
    place = {int(i): k for k, i in enumerate(ids)}
    leaf = torch.from_numpy(table.copy()).requires_grad_()
    own = [w.clone().requires_grad_() for w in weights]
    lengths = np.diff(batch.offsets)
    bags = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    looked_up = leaf[torch.tensor([place[int(i)] for i in batch.ids])]
    pooled = torch.zeros(len(lengths), table.shape[1], dtype=torch.float64)
    pooled = pooled.index_add(0, bags, looked_up)
    pooled = pooled / torch.from_numpy(np.maximum(lengths, 1)[:, None])  # mean; one id: itself
    dense = torch.from_numpy(batch.dense.astype(np.float64))
    dense[:, 1:] = 0  # the marks of tests that poison a sample
    inputs = dense, Embeddings(pooled.reshape(batch.size, -1), {}, {})
    logits = functional_call(model, dict(zip(names, own, strict=True)), inputs)
    labels = torch.from_numpy(batch.labels.astype(np.float64))
    total = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    loss = total / (step_samples * labels.shape[1])
    loss.backward()
    return float(loss.detach()), [w.grad for w in own], leaf.grad.numpy()


def assert_equal_to(plain: Plain, world: World, tolerance: float = 1e-12) -> None:
    """Rows, accumulators, dense weights and losses agree; rows never looked up do not exist."""
    ids, values, state = world.store.export()["rows"]
    where = np.searchsorted(plain.ids, ids, sorter=(order := np.argsort(plain.ids)))
    where = order[where]
    assert np.array_equal(plain.ids[where], ids)
    assert np.abs(values - plain.rows[where]).max() < tolerance
    assert np.abs(state - plain.accumulators[where]).max() < tolerance
    for mine, theirs in zip(world.model.parameters(), plain.weights, strict=True):
        assert np.abs(mine.detach().numpy() - theirs).max() < tolerance
    assert np.allclose(world.meter.losses, plain.losses, rtol=0, atol=tolerance, equal_nan=True)
