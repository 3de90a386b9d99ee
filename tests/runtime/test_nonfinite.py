"""Poison: NaN and infinity in the loss, in dense gradients alone, in row gradients alone.

What is skipped is skipped whole, for rows, dense weights and optimiser state alike: the run ends
where plain PyTorch ends that never saw these ranks' batches. The others of the step count as they
would have (their share of the step's mean loss), and a step of which nothing is left moves nothing.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from runtime.config import ModelConfig
from runtime.embedding.config import RowOptimizer
from runtime.rank.learner import NonFiniteError
from runtime.rank.staging import HostStaging
from tests.runtime.plain import assert_equal_to, plain_training
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, on_engine, run

RANKS, BATCH, SHARE, STEPS = 3, 24, 8, 12
LEFT_OUT = {(2, 1), (5, 0), (5, 1), (5, 2), (7, 0), (7, 2)}
POISONS = {"loss": 1, "dense nan": 2, "dense inf": 3, "rows inf": 4, "rows -inf and inf": 5}


class Spoil(torch.autograd.Function):
    """The identity, whose gradient has something added to it."""

    @staticmethod
    def forward(context, tensor, addition):
        context.save_for_backward(addition)
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient + context.saved_tensors[0], None


class Spoiled(torch.nn.Module):
    """Two layers; the second dense feature is no input but says what to spoil, by sample."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.first = torch.nn.Linear(sum(shape.pooled_dims) + 1, 5)
        self.last = torch.nn.Linear(5, shape.tasks)

    def forward(self, dense, embeddings):
        mark = dense[:, 1:]
        pooled = embeddings.pooled
        of_rows = torch.zeros_like(pooled)
        of_rows[(mark[:, 0] == 4) | (mark[:, 0] == 5), 0] = torch.inf
        of_rows[mark[:, 0] == 5, 1] = -torch.inf
        pooled = Spoil.apply(pooled, of_rows)
        of_weight = torch.zeros_like(self.first.weight)
        if (mark == 2).any():
            of_weight[1, 2] = torch.nan
        if (mark == 3).any():
            of_weight[1, 2] = torch.inf
        weight = Spoil.apply(self.first.weight, of_weight)
        hidden = torch.nn.functional.linear(
            torch.cat([pooled, dense[:, :1]], 1), weight, self.first.bias
        )
        logits = self.last(torch.relu(hidden))
        return torch.where(mark == 1, torch.nan, logits)


def poisoned(poison: int) -> ArraySource:
    source = ArraySource(STEPS * BATCH)
    source._all.dense[:, 1] = 0
    for step, rank in LEFT_OUT:
        source._all.dense[BATCH * step + SHARE * rank + 3, 1] = poison
    return source


def chosen(**changes):
    model = ModelConfig(name="tests.runtime.test_nonfinite:Spoiled", lr=0.01)
    optimizer = RowOptimizer(kind="adagrad", lr=0.1, initial_accumulator=0.01)
    base = {"ranks": RANKS, "dtype": "float64", "nonfinite": "skip", "shards": 2}
    return config(model=model, optimizer=optimizer, **{**base, **changes})


MODES = {
    "sync": ({}, {}),
    "lookahead": ({"mode": Mode.LOOKAHEAD}, {}),
    "hybrid": ({"mode": Mode.HYBRID, "tau": 2}, {"row_lag": 2}),
    "on arrival": (
        {"mode": Mode.RAW_HYBRID, "tau": 2, "merge_pushes": False},
        {"row_lag": 2, "merged": False},
    ),
}


# What is not finite is found in one place, and left out in a place of each mode.
EACH_MODE_AND_POISON = [("hybrid", poison) for poison in POISONS]
EACH_MODE_AND_POISON += [(mode, "rows inf") for mode in MODES if mode != "hybrid"]


@pytest.mark.first_case
@pytest.mark.parametrize(("mode", "poison"), EACH_MODE_AND_POISON)
def test_a_skipped_batch_leaves_no_trace_in_rows_weights_or_optimisers(mode, poison):
    options, lags = MODES[mode]
    source = poisoned(POISONS[poison])
    world = run(chosen(**options), source)
    plain = plain_training(chosen(), source, size=BATCH, ranks=RANKS, left_out=LEFT_OUT, **lags)
    assert_equal_to(plain, world)
    assert world.meter.batches_skipped == len(LEFT_OUT)
    assert world.meter.pushes_lost == 0
    assert np.isnan(world.meter.losses).tolist() == [step == 5 for step in range(STEPS)]
    lost = {(s, r) for _, _, r, s, _, _ in world.trace.of_kind(Kind.LOST_PUSH).tolist()}
    assert lost == LEFT_OUT


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("mode", "poison", "engine"),
    [(*both, "threads") for both in EACH_MODE_AND_POISON]
    + [("hybrid", poison, "processes") for poison in ("loss", "rows inf")],
)
def test_threads_skip_as_the_deterministic_executor_does(mode, poison, engine):
    """Each order that threads come up with replays to the same bytes, and sync has one only."""
    options, _ = MODES[mode]
    source = poisoned(POISONS[poison])
    recorded = run(chosen(**options, **on_engine(engine, 2)), source)
    replayed = run(chosen(**options), source, order=recorded.trace)
    assert_same_bytes(recorded, replayed)
    assert recorded.meter.batches_skipped == replayed.meter.batches_skipped == len(LEFT_OUT)
    assert np.array_equal(recorded.meter.losses, replayed.meter.losses, equal_nan=True)
    if mode in ("sync", "lookahead"):
        assert_same_bytes(recorded, run(chosen(**options), source))


def test_async_skips_a_rank_of_several():
    """Batch k sees what batches up to k - 3 taught; some of them are left out."""
    left_out = {(3, 0), (6, 0), (7, 0)}
    source = poisoned(0)
    for batch, _ in left_out:
        source._all.dense[BATCH * batch + 5, 1] = POISONS["rows inf"]
    world = run(chosen(mode=Mode.ASYNC, tau=0), source)
    plain = plain_training(
        chosen(), source, size=BATCH, ranks=1, row_lag=2, dense_lag=2, left_out=left_out
    )
    assert_equal_to(plain, world)
    recorded = run(chosen(mode=Mode.ASYNC, tau=0, executor="concurrent"), source)
    assert_same_bytes(recorded, run(chosen(mode=Mode.ASYNC, tau=0), source, order=recorded.trace))
    assert recorded.meter.batches_skipped == 3


@pytest.mark.parametrize("poison", POISONS)
def test_poison_stops_the_run_and_names_rank_and_step(poison):
    source = poisoned(0)
    source._all.dense[BATCH * 4 + SHARE * 2, 1] = POISONS[poison]
    settings = chosen(nonfinite="stop", mode=Mode.HYBRID, tau=1, executor="concurrent")
    with pytest.raises(NonFiniteError, match=r"rank 2, step 4;.*--nonfinite skip"):
        run(settings, source)


def test_averaging_skips_in_the_replica_of_the_rank_alone():
    """One rank and its replica: as plain training that left the batch out."""
    left_out = {(2, 0), (3, 0)}
    source = poisoned(0)
    for step, _ in left_out:
        source._all.dense[BATCH * step, 1] = POISONS["rows inf"]
    settings = chosen(mode=Mode.ASYNC_AVERAGING, tau=0, ranks=1, average_every_steps=5)
    plain = plain_training(chosen(), source, size=BATCH, ranks=1, left_out=left_out)
    assert_equal_to(plain, run(settings, source))


def test_buffers_of_gradients_that_are_left_out_are_given_back(monkeypatch):
    """As those of a batch that counts are: else each such batch would hold some for good."""
    held: list[int] = []
    receive = HostStaging.receive

    @contextmanager
    def counted(staging, embeddings):
        number = len(held)
        held.append(number)
        with receive(staging, embeddings) as vectors:
            yield vectors
        held[number] = -1

    monkeypatch.setattr(HostStaging, "receive", counted)
    run(chosen(), poisoned(POISONS["rows inf"]))
    assert len(held) == RANKS * STEPS and set(held) == {-1}
