"""The dense weights of every mode and optimiser against plain PyTorch, and when they are summed."""

from __future__ import annotations

import copy
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from persia_sim.base.trace import TraceRecorder
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.allreduce import DenseSync
from runtime.config import ModelConfig
from runtime.dense import optimizer, rules
from runtime.dense.averaging import AveragedReplicas, mean_model, mean_weights
from runtime.dense.buckets import MAX_BUCKET_BYTES, bucket_plan
from runtime.dense.optimizer import sum_in_rank_order
from runtime.embedding.config import RowOptimizer
from runtime.rank.components import assemble
from runtime.rank.learner import Learner
from tests.runtime.plain import assert_equal_to, gradients_of, plain_training
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, run


def unmarked(samples: int) -> ArraySource:
    source = ArraySource(samples)
    source._all.dense[:, 1] = 0
    return source


SOURCE = unmarked(300)
OPTIMIZERS = {"sgd": 0.3, "adagrad": 0.05, "adam": 0.01}


def chosen(optimizer="adam", **changes):
    rows = RowOptimizer(kind="adagrad", lr=0.1, initial_accumulator=0.01)
    model = ModelConfig(hidden=(6, 4), optimizer=optimizer, lr=OPTIMIZERS[optimizer])
    return config(model=model, optimizer=rows, **{"dtype": "float64", **changes})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
def test_dense_optimisers_in_sync_are_torchs(optimizer, executor):
    """13 steps, the last of them short: its loss is the mean over the samples it has."""
    world = run(chosen(optimizer, ranks=4, executor=executor), SOURCE)
    plain = plain_training(chosen(optimizer), SOURCE, size=24, ranks=4)
    assert_equal_to(plain, world)
    assert world.meter.updates == 13


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dense_optimisers_keep_to_their_rule_with_late_rows(optimizer):
    world = run(chosen(optimizer, mode=Mode.HYBRID, tau=3, ranks=2), SOURCE)
    assert_equal_to(plain_training(chosen(optimizer), SOURCE, size=24, ranks=2, row_lag=3), world)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tau", [0, 1])
def test_async_takes_late_gradients_into_the_newest_weights(optimizer, tau):
    """Three ranks in turn: weights miss the two others, rows also tau steps of every rank."""
    source = unmarked(12 * 24)  # four batches each, so that the last pushes come in turn, too
    world = run(chosen(optimizer, mode=Mode.ASYNC, tau=tau, ranks=3), source)
    plain = plain_training(
        chosen(optimizer), source, size=24, ranks=1, dense_lag=2, row_lag=3 * (1 + tau) - 1
    )
    assert_equal_to(plain, world)


def test_async_global_batches_are_a_ranks_share():
    source = unmarked(12 * 24)
    world = run(chosen(mode=Mode.ASYNC, tau=0, ranks=3, match="global"), source)
    plain = plain_training(chosen(), source, size=8, ranks=1, dense_lag=2, row_lag=2)
    assert_equal_to(plain, world)


def test_replicas_are_averaged_by_hand():
    """Two ranks, own SGD steps, and after every second step of both the mean of the two."""
    settings = chosen("sgd", mode=Mode.ASYNC_AVERAGING, tau=0, ranks=2, average_every_steps=2)
    everything, optimizer = SOURCE._all, settings.rows.optimizer
    untouched = run(chosen(), SOURCE, order=[]).store.peek(everything)
    ids, table = untouched.plans["rows"].ids, untouched.values["rows"].copy()
    squares = np.full_like(table, optimizer.initial_accumulator)
    model = copy.deepcopy(assemble(settings, SOURCE).learner.model)
    names = [name for name, _ in model.named_parameters()]
    replicas = [[p.detach().clone() for p in model.parameters()] for _ in range(2)]
    read: list = [None, None]
    steps, rounds = [0, 0], 0
    batches = -(-everything.size // 24)
    for number in range(batches + 2):
        rank = number % 2
        if read[rank] is not None:
            batch, rows = read[rank]
            _, dense, of_rows = gradients_of(
                model, names, replicas[rank], rows, ids, batch, batch.size
            )
            replicas[rank] = [w - 0.3 * g for w, g in zip(replicas[rank], dense, strict=True)]
            squares = squares + of_rows**2
            table = table - optimizer.lr * of_rows / (np.sqrt(squares) + optimizer.epsilon)
            steps[rank] += 1
            read[rank] = None
            if rank == 1 and steps[1] % 2 == 0 and number < batches:
                mean = [(a + b) / 2 for a, b in zip(*replicas, strict=True)]
                replicas, rounds = [mean, mean], rounds + 1
        if number < batches:
            start = 24 * number
            part = everything.rows(start, min(start + 24, everything.size))
            read[rank] = part, table
    world = run(settings, SOURCE)
    assert rounds == 2
    assert steps == [7, 6]
    for mine, first, second in zip(world.model.parameters(), *replicas, strict=True):
        assert np.abs((mine.detach() - (first + second) / 2).numpy()).max() < 1e-12
    place = {int(i): k for k, i in enumerate(ids)}
    found, values, _ = world.store.export()["rows"]
    assert np.abs(values - table[[place[int(i)] for i in found]]).max() < 1e-12


@pytest.mark.parametrize("rule_of", [rules.AsyncRule, AveragedReplicas])
def test_updates_are_told_in_their_order_each_with_its_own_weights(rule_of):
    """Another rank's push came between an update and its snapshot, and was told before it."""
    model, told, first = torch.nn.Linear(1, 1, bias=False), [], threading.Event()
    begin = model.weight.item()

    def on_update(loss, samples):
        if loss == 0:
            first.set()
            time.sleep(0.3)
        told.append((loss, round((rule.snapshot().weight.item() - begin) * 2, 4)))

    settings = chosen("sgd", mode=Mode.ASYNC, ranks=2)
    rule = rule_of(settings, model, TraceRecorder(), on_update)
    step = -torch.ones(1, 1) / OPTIMIZERS["sgd"]  # by 1; the mean of two replicas by a half
    given = [rules.StepGradients(rank, 0, [step], float(rank), 1) for rank in (0, 1)]
    rank_0 = threading.Thread(target=rule.end_step, args=given[:1])
    rank_0.start()
    first.wait()
    rule.end_step(given[1])
    rank_0.join()
    by = 1 if rule_of is AveragedReplicas else 2
    assert told == [(0.0, by), (1.0, 2 * by)]


@pytest.mark.parametrize("rule_of", [rules.AsyncRule, AveragedReplicas])
def test_a_snapshot_stays_as_it_was_while_ranks_push_on(rule_of):
    rule = rule_of(
        chosen("sgd", mode=Mode.ASYNC, ranks=2), torch.nn.Linear(2, 1), TraceRecorder(),
        lambda *_: None,
    )  # fmt: skip
    shown = rule.snapshot()
    before = copy.deepcopy(shown.state_dict())
    given = [torch.ones_like(parameter) for parameter in shown.parameters()]
    for rank in (0, 1):
        rule.end_step(rules.StepGradients(rank, 0, given, 0.0, 1))
    for name, tensor in shown.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert not torch.equal(tensor, rule.snapshot().state_dict()[name])


def test_means_of_weights_are_elementwise():
    draw = np.random.default_rng(0)
    arrays = [[draw.normal(size=(2, 3)), draw.normal(size=3)] for _ in range(5)]
    found = mean_weights([[torch.from_numpy(a) for a in weights] for weights in arrays])
    for k, mean in enumerate(found):
        expected = np.mean([weights[k] for weights in arrays], axis=0)
        assert np.allclose(mean.numpy(), expected, rtol=0, atol=1e-15)
    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    weights = [m.weight.detach().clone() for m in models]
    like = torch.nn.Linear(2, 1)
    mean = mean_model(like, [list(m.parameters()) for m in models])
    assert torch.allclose(mean.weight, sum(weights) / 3)
    assert not torch.equal(like.weight, mean.weight)
    assert all(torch.equal(m.weight, w) for m, w in zip(models, weights, strict=True))


def test_buckets_hold_every_trained_parameter_once_last_layer_first():
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
    model[2].weight.requires_grad_(False)
    plan = bucket_plan(model)
    numbers = [number for bucket in plan for number in bucket]
    assert numbers == [k for k in reversed(range(12)) if k != 4]
    assert len(plan) >= 4
    sizes = [p.numel() for p in model.parameters()]
    assert max(sum(sizes[k] for k in bucket) for bucket in plan) <= max(360_000, sum(sizes) / 4)


def test_a_network_below_the_least_bucket_is_one_message():
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(6)))
    assert bucket_plan(model) == [list(reversed(range(12)))]


def test_the_bytes_of_a_bucket_are_those_that_a_simulation_takes():
    assert DenseSync(source="a test").bucket_bytes == MAX_BUCKET_BYTES


def test_dense_gradients_do_not_wait_for_the_pushes_of_late_rows(monkeypatch):
    """A lag of 8 steps over 3 ranks would keep 27 times the weights."""
    living: weakref.WeakSet = weakref.WeakSet()
    compute, most = Learner.gradients, [0]

    def watched(self, *args, **kwargs):
        found = compute(self, *args, **kwargs)
        living.update(found.dense)
        most[0] = max(most[0], len(living))
        return found

    monkeypatch.setattr(Learner, "gradients", watched)
    run(chosen(mode=Mode.HYBRID, tau=8, ranks=3), SOURCE)
    assert most[0] <= 2 * 3 * 6


def where_sums_are_taken(monkeypatch, **changes) -> tuple[int, int]:
    """Sums of a parameter's gradients inside somebody's backward pass, and outside of all."""
    inside, taken = threading.local(), []
    real, compute = sum_in_rank_order, Learner.gradients

    def spied_sum(gradients):
        taken.append(getattr(inside, "backward", False))
        return real(gradients)

    def spied_compute(self, *args, **kwargs):
        inside.backward = True
        try:
            return compute(self, *args, **kwargs)
        finally:
            inside.backward = False

    monkeypatch.setattr(optimizer, "sum_in_rank_order", spied_sum)
    monkeypatch.setattr(Learner, "gradients", spied_compute)
    world = run(config(ranks=3, executor="concurrent", **changes), unmarked(12 * 24))
    assert world.meter.updates == 12
    return taken.count(True), taken.count(False)


PARAMETERS = 12 * 4
"""Sums of 12 steps: weights and biases of two layers."""


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.LOOKAHEAD])
def test_the_all_reduce_of_overlapping_modes_happens_inside_the_backward_pass(monkeypatch, mode):
    assert where_sums_are_taken(monkeypatch, mode=mode) == (PARAMETERS, 0)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.RAW_HYBRID])
def test_the_all_reduce_of_the_other_modes_happens_after_it(monkeypatch, mode):
    assert where_sums_are_taken(monkeypatch, mode=mode) == (0, PARAMETERS)


@pytest.mark.parametrize("tau", [0, 2])
def test_overlapped_and_exposed_sums_are_the_same_bytes(tau):
    hybrid = run(chosen(mode=Mode.HYBRID, tau=tau, ranks=3, executor="concurrent"), SOURCE)
    exposed = run(chosen(mode=Mode.RAW_HYBRID, tau=tau, ranks=3), SOURCE, order=hybrid.trace)
    assert_same_bytes(hybrid, exposed)
