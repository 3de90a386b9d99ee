"""What a run does beside the laws: non-finite values, evaluation, errors, averaging, snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import SupportsFloat

import numpy as np
import pytest
import torch
from torch import nn

from persia_sim.base.trace import TraceRecorder
from persia_sim.base.vocabulary import Mode
from runtime.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    TrainConfig,
)
from runtime.dense.averaging import AveragingRound
from runtime.dense.rules import AsyncRule, StepGradients
from runtime.embedding.config import RowOptimizer
from runtime.executors.given_order import OrderedRun
from runtime.executors.threads import ConcurrentRun
from runtime.hosts.dense.async_weights import DenseServer, RemoteWeights
from runtime.models.networks import BUILT_IN
from runtime.rank.components import assemble
from runtime.rank.progress import Meter, SpanRecorder, bound_by
from runtime.rank.stages import Team
from runtime.run.session import train
from runtime.stop import Stop
from tests.runtime.worlds import ArraySource, config, run

SOURCE = ArraySource(300)
TEST = next(iter(SOURCE.chunks("test")))


def test_row_gradients_sum_is_ranks_times_mean_for_sgd():
    sgd = RowOptimizer(kind="sgd", lr=0.1)
    one_step = {"optimizer": sgd, "steps": 1, "ranks": 4}
    mean, total = run(config(**one_step), SOURCE), run(config(row_gradients="sum", **one_step),
                                                       SOURCE)  # fmt: skip
    start = run(config(**one_step), SOURCE, order=[]).store
    batch = next(iter(SOURCE.chunks("train"))).rows(0, 24)
    fresh = start.peek(batch).values["rows"]
    moved = mean.store.peek(batch).values["rows"] - fresh
    moved_by_sum = total.store.peek(batch).values["rows"] - fresh
    assert np.allclose(moved_by_sum, 4 * moved, atol=1e-6)


@pytest.mark.law10
def test_evaluation_creates_no_row_and_sees_initial_values():
    world = run(config(steps=1), SOURCE)
    unseen = ArraySource(50, seed=9, ids_per_field=10**6)
    batch = next(iter(unseen.chunks("test")))
    before = len(world.store)
    world.learner.predict(world.learner.model, batch, world.worker.pool(world.store.peek(batch)))
    assert len(world.store) == before
    other = run(config(steps=2), SOURCE)
    assert (world.store.peek(batch).values["rows"] == other.store.peek(batch).values["rows"]).all()


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_every_model_learns_in_hybrid(name):
    source = ArraySource(1500)
    source._all.labels[:] = (source._all.dense[:, :1] + 0.3 > 0) * 1.0
    model = ModelConfig(name=name, hidden=(16,), lr=0.01)
    losses = run(config(mode=Mode.HYBRID, model=model, tau=2), source).meter.losses
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])


def test_a_timeline_has_every_stage_of_every_step():
    from persia_sim.base.chrome import chrome_events

    spans = SpanRecorder(enabled=True)
    run(config(mode=Mode.HYBRID, tau=1, ranks=2, executor="concurrent"), SOURCE, spans=spans)
    found = {(s.rank, s.stage, s.step) for s in spans.spans if s.step < 13}
    stages = ("load", "lookup", "forward", "backward", "dense_sync", "push")
    assert found == {(r, stage, s) for r in range(2) for stage in stages for s in range(13)}
    events = chrome_events(spans.spans)
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_a_round_of_averaging_moves_every_replica_by_mean_minus_what_it_put_in():
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    for model, weight in zip(models, (1.0, 2.0, 6.0), strict=True):
        torch.nn.init.constant_(model.weight, weight)
    round_ = AveragingRound(3)
    for rank, model in enumerate(models):
        assert not round_.is_complete
        round_.read(rank, model)
    torch.nn.init.constant_(models[0].weight, 1.5)  # rank 0 has learned meanwhile
    for rank, model in enumerate(models):
        round_.write(rank, model)
    assert [m.weight.item() for m in models] == [3.5, 3.0, 3.0]
    assert round_.is_over


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ASYNC])
def test_a_snapshot_in_the_middle_of_threads_sees_rows_and_weights_that_stand_still(mode):
    chosen = config(mode=mode, ranks=3, executor="concurrent",
                    **({"tau": 3} if mode.reads_late_rows else {}))  # fmt: skip
    components = assemble(chosen, ArraySource(600))
    batch = next(iter(SOURCE.chunks("test")))
    changed = []

    def look_twice(updates: int, samples: int, model: torch.nn.Module) -> None:
        first = components.learner.predict(
            model, batch, components.worker.pool(components.store.peek(batch))
        )
        time.sleep(0.03)
        second = components.learner.predict(
            model, batch, components.worker.pool(components.store.peek(batch))
        )
        changed.append(not np.array_equal(first, second))

    components.meter.start(every=5, evaluate=look_twice)
    ConcurrentRun(components).run()
    assert len(changed) >= 5
    assert not any(changed)


def test_snapshots_of_threads_in_sync_are_those_of_the_lag_executor():
    scores = []
    for executor in ("constant_lag", "concurrent"):
        components = assemble(config(ranks=2, executor=executor), SOURCE)
        seen: list[float] = []
        components.meter.start(
            every=4, evaluate=lambda u, s, m, p=components, out=seen: out.append(
                float(p.learner.predict(m, TEST, p.worker.pool(p.store.peek(TEST))).sum())
            )
        )  # fmt: skip
        if executor == "concurrent":
            ConcurrentRun(components).run()
        else:
            OrderedRun(components).run()
        scores.append(seen)
    assert scores[0] == scores[1]
    assert len(scores[0]) == 3


# The timeline of a run against a clock that the test turns.


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("runtime.rank.progress.time.perf_counter", lambda: now[0])
    return now


FAST = {(0, "training"): 10.0, (0, "dense_sync"): 7.0, (0, "forward"): 2.0}
SLOW = {**FAST, (1, "training"): 10.0, (1, "dense_sync"): 3.0}
TWIN = {(1, "training"): 10.0, (1, "dense_sync"): 7.0, (1, "forward"): 2.0}
WAITS = {(0, 0): 9.0, (1, 0): 1.0, (1, 1): 3.0}


@pytest.mark.parametrize(
    ("seconds", "paused_s", "expected"),
    [
        ({}, {}, ""),
        (FAST, {}, "applying dense gradients (70 % of the time of rank 0)"),
        (FAST | TWIN, {}, "summing and applying dense gradients (70 % of the time of rank 0)"),
        (FAST, {0: 6.0}, "its dense network (50 % of the time of rank 0)"),
        # Rank 0 has waited 5 s for an evaluation that rank 1 has not waited for.
        (SLOW, {0: 5.0}, "its dense network (40 % of the time of rank 0)"),
        (FAST, {0: 11.0}, "its dense network (67 % of the time of rank 0)"),
        (SLOW | {(1, "load"): 4.0}, {}, "its data (70 % of the time of rank 1)"),
        (SLOW | {(1, "backward"): 4.0}, {}, "its dense network (40 % of the time of rank 1)"),
        (
            SLOW,
            {},
            "its rows (70 % of the time of rank 1), 75 % of the waiting for server 1",
        ),
    ],
)
def test_a_run_is_bound_by_what_its_slowest_rank_waits_for(seconds, paused_s, expected):
    assert bound_by(seconds, WAITS, paused_s) == expected


def test_an_evaluation_is_taken_from_the_rank_that_waited_for_it(clock):
    """async over processes: rank 1's push is evaluated by rank 0's process while rank 0 trains.
    By hand: 30 s of evaluation, in which rank 1 waits and rank 0 exchanges for 2 s."""
    meter, spans = Meter(), SpanRecorder(enabled=False)

    def evaluate(updates: int, samples: int, model: nn.Module) -> None:
        clock[0] += 20.0
        with spans.span("dense", "dense_push", 0, 7), spans.exchange(0, meter.pauses_s):
            clock[0] += 2.0
        clock[0] += 8.0

    meter.start(every=1, evaluate=evaluate)
    with spans.exchange(1, meter.pauses_s):
        clock[0] += 3.0  # of its own push, before
        meter.update(1, 64, 0.5, lambda: nn.Linear(1, 1))
    assert spans.paused_s == {0: 2.0, 1: 30.0}
    assert (meter.paused_s, meter.pauses_s()) == (30.0, 30.0)
    assert spans.seconds == {(0, "dense_push"): 2.0}


def test_holding_and_releasing_the_servers_is_no_training(clock):
    """By hand: 64 samples a second, and after each second update 5 s to hold the servers, 20 s of
    evaluation and 7 s to release them."""
    meter, spans = Meter(), SpanRecorder(enabled=False)

    @contextmanager
    def frozen() -> Iterator[None]:
        clock[0] += 5.0
        yield
        clock[0] += 7.0

    def evaluate(updates: int, samples: int, model: nn.Module) -> None:
        clock[0] += 20.0

    components = SimpleNamespace(
        config=config(mode=Mode.SYNC), store=SimpleNamespace(frozen=frozen, shards=1), meter=meter,
        process=SimpleNamespace(ranks=[0]), stop=Stop(),
    )  # fmt: skip
    team = Team(
        components, lambda components, on_update: SimpleNamespace(snapshot=lambda: nn.Linear(1, 1))
    )
    meter.start(every=2, evaluate=evaluate)
    with spans.exchange(0, meter.pauses_s):
        for _ in range(6):
            clock[0] += 1.0
            team._note_update(0.5, 64)
    assert meter.samples_per_s(skip=0) == pytest.approx(64.0)
    assert meter.samples_per_s(skip=1) == meter.samples_per_s(skip=2) == pytest.approx(64.0)
    assert spans.paused_s == {0: 3 * 32.0}


def test_rank_0_notes_what_other_processes_wait_for_its_evaluations():
    settings = config(mode=Mode.ASYNC, ranks=2)
    meter, spans = Meter(), SpanRecorder(enabled=False)

    def on_update(loss: SupportsFloat, samples: int) -> None:
        meter.update(meter.updates + 1, samples, loss, lambda: nn.Linear(3, 1))

    rule = AsyncRule(settings, nn.Linear(3, 1), TraceRecorder(), on_update)
    server = DenseServer(rule, Stop(), exchange=partial(spans.exchange, pauses_s=meter.pauses_s))
    try:
        meter.start(every=2, evaluate=lambda updates, samples, model: time.sleep(0.2))
        remote = RemoteWeights(server.address, 1, nn.Linear(3, 1), Stop())
        for step in range(2):
            remote.begin_step(1, step)
            given = [torch.ones_like(p) for p in rule.model(1).parameters()]
            remote.end_step(StepGradients(1, step, given, 0.5, 8))
        remote.end_leg()
        remote.close()
    finally:
        server.close()
    assert meter.paused_s >= 0.2
    assert spans.paused_s.keys() == {1}
    assert spans.paused_s[1] == pytest.approx(meter.paused_s, rel=1e-6)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID])
def test_a_run_of_long_latency_is_bound_by_its_rows(mode):
    settings = config(mode=mode, executor="concurrent", latency_s=0.2, steps=3)
    assert train(settings, SOURCE).bound_by.startswith("its rows (")


# The goals on real data, by one seed: the test AUC of sync (the mean of five: 0.7321 and 0.9139).


@pytest.mark.data
def test_sync_reaches_0_7315_on_one_pass_of_kuairand(real_data):
    """Logistic regression has 0.717 (same split and features, published with the data cut)."""
    data = DataConfig(name="kuairand-pure-14d", dir=real_data("kuairand-pure-14d"))
    assert train(TrainConfig(data=data)).final.tasks["click"].auc >= 0.7315


def test_the_recent_loss_and_each_auc_are_told_as_they_come():
    told = []
    chosen = replace(config(steps=8), evaluation=EvaluationConfig(evaluate_every_steps=3))
    outcome = train(chosen, SOURCE, on_figures=told.append)
    recent, expected = outcome.losses[0], []
    for loss in outcome.losses:
        recent += 0.05 * (loss - recent)
        expected.append(recent)
    assert [figures["loss"] for figures in told] == pytest.approx(expected)
