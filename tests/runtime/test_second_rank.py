"""What belongs to one rank of several, and not to the first: its replica, its optimiser, its
counts, over the legs of a run and over a resume."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persia_sim.base.trace import Kind, TraceRecorder
from persia_sim.base.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.dense import averaging
from runtime.dense.averaging import AveragedReplicas, TimedAveraging
from runtime.dense.optimizer import FunctionalOptimizer, make_optimizer
from runtime.dense.rules import StepGradients
from runtime.dense.state import DenseState
from runtime.hosts.dense.replicas import DistributedReplicas
from runtime.hosts.rank_process import GroupedRank
from runtime.stop import Stop
from tests.runtime.worlds import config


class GroupOfThreads:
    """Ranks that are threads, in place of processes: what one gathers, all have given."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._given = ranks, [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks)

    def of(self, rank: int) -> Any:
        def all_gather(own: Tensor) -> tuple[None, Tensor]:
            self._given[rank] = own.clone()
            self._barrier.wait(60)
            found = torch.stack(self._given)
            self._barrier.wait(60)
            return None, found

        group = SimpleNamespace(
            rank=rank, ranks=self.ranks, broadcast=lambda tensor: None, all_gather=all_gather,
            wait=lambda work, what: None,
        )  # fmt: skip
        group.beside = lambda: group
        return group


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def averaged(ranks: int) -> TrainConfig:
    chosen = {"mode": Mode.ASYNC_AVERAGING, "ranks": ranks, "executor": "concurrent"}
    return config(**chosen)


def saved_of(ranks: int) -> DenseState:
    """A checkpoint whose ranks have replicas and optimisers that are unlike, each with as many
    steps as its number says."""
    chosen, replicas, optimizers = averaged(ranks), [], []
    for rank in range(ranks):
        replicas.append(model_of(10 + rank))
        optimizers.append(make_optimizer(chosen, replicas[-1]))
        for _ in range(rank + 1):
            optimizers[-1].step([torch.ones_like(p) for p in replicas[-1].parameters()])
    weights = [dict(one.state_dict()) for one in replicas]
    mean = {name: sum(own[name] for own in weights) / ranks for name in weights[0]}
    return {
        "model": mean,
        "optimizers": [one.state_dict() for one in optimizers],
        "replicas": weights,
        "version": 7,
        "rounds": 3,
    }


def assert_same_weights(one: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def assert_same_optimizer(one: FunctionalOptimizer, expected: dict[str, Any]) -> None:
    found = one.state_dict()
    for number, tensors in expected["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(found["state"][number][name], tensor), (number, name)


@pytest.fixture(autouse=True)
def no_round_is_due(monkeypatch):
    """Unless a test says so."""
    monkeypatch.setattr(averaging, "PERIOD_S", 1000.0)


@contextmanager
def distributed(ranks: int) -> Iterator[list[DistributedReplicas]]:
    group, stop, chosen = GroupOfThreads(ranks), Stop(), averaged(ranks)
    rules = [
        DistributedReplicas(
            chosen, model_of(0), TraceRecorder(), lambda *_: None, group=group.of(rank), stop=stop
        )
        for rank in range(ranks)
    ]
    yield rules
    at_once([rule.close for rule in rules])
    assert stop.error is None


def at_once(bodies: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.law11
def test_ranks_that_are_processes_go_on_each_with_its_own_replica_and_optimiser():
    saved = saved_of(3)
    with distributed(3) as rules:
        for rank, rule in enumerate(rules):
            rule.load_state_dict(saved)
            assert_same_weights(rule.model(rank), saved["replicas"][rank])
            assert_same_optimizer(rule._optimizer, saved["optimizers"][rank])
        again = rules[0].state_dict()
    assert (again["version"], again["rounds"]) == (7, 3)
    for rank in range(3):
        for name, tensor in saved["replicas"][rank].items():
            assert torch.equal(again["replicas"][rank][name], tensor)


def on_threads(ranks: int) -> AveragedReplicas:
    return AveragedReplicas(averaged(ranks), model_of(0), TraceRecorder(), lambda *_: None)


@pytest.mark.law11
def test_ranks_that_are_threads_go_on_each_with_its_own_replica_and_optimiser():
    saved, rule = saved_of(3), on_threads(3)
    rule.load_state_dict(saved)
    for rank in range(3):
        assert_same_weights(rule.model(rank), saved["replicas"][rank])
        assert_same_optimizer(rule._optimizers[rank], saved["optimizers"][rank])
    again = rule.state_dict()
    assert (again["version"], again["rounds"]) == (7, 3)


def test_each_rank_trains_its_own_replica_with_its_own_optimiser():
    """Unequal numbers of steps, so that no two replicas or counts are alike."""
    with distributed(2) as rules:
        for rank, steps in enumerate((1, 3)):
            for step in range(steps):
                given = [
                    torch.full_like(p, 1.0 + rank) for p in rules[rank].model(rank).parameters()
                ]
                rules[rank].end_step(StepGradients(rank, step, given, 0.5, 4))
        found = rules[0].state_dict()
    chosen = averaged(2)
    for rank, steps in enumerate((1, 3)):
        alone = model_of(0)
        optimizer = make_optimizer(chosen, alone)
        for _ in range(steps):
            optimizer.step([torch.full_like(p, 1.0 + rank) for p in alone.parameters()])
        assert_same_weights(alone, found["replicas"][rank])
        assert found["optimizers"][rank]["state"][0]["step"] == steps


def test_a_rank_that_moves_at_the_end_of_a_leg_does_so_behind_its_own_last_step(monkeypatch):
    """Rank 1 enters the round after step 0 and trains on to step 4; rank 0 enters it last."""
    monkeypatch.setattr(averaging, "PERIOD_S", 1e-9)
    chosen = averaged(2)
    recorder = TraceRecorder()
    rule = TimedAveraging(chosen, model_of(0), recorder, lambda *_: None)
    for rank, steps in ((1, 5), (0, 2)):
        for step in range(steps):
            rule.begin_step(rank, step)
            given = [torch.full_like(p, 1.0 + rank) for p in rule.model(rank).parameters()]
            rule.end_step(StepGradients(rank, step, given, 0.5, 4))
    rule.end_leg()
    rounds = recorder.finish().of_kind(Kind.AVERAGE_READ, Kind.AVERAGE_WRITE)
    assert [tuple(row) for row in rounds[:, 1:4].tolist()] == [
        (Kind.AVERAGE_READ, 1, 0), (Kind.AVERAGE_READ, 0, 0), (Kind.AVERAGE_WRITE, 0, 0),
        (Kind.AVERAGE_WRITE, 1, 4),
    ]  # fmt: skip


def test_a_process_that_moves_at_the_end_of_a_leg_does_so_behind_its_own_last_step():
    """As threads do: rank 1 enters the round after step 0 and trains on; rank 0 enters it last."""
    with distributed(2) as rules:
        for rank, steps in ((1, 5), (0, 2)):
            for step in range(steps):
                rules[rank]._due_s = 0.0 if step == 1 else math.inf
                rules[rank].begin_step(rank, step)
                given = [torch.full_like(p, 1.0 + rank) for p in rules[rank]._model.parameters()]
                rules[rank].end_step(StepGradients(rank, step, given, 0.5, 4))
        at_once([rule.end_leg for rule in rules])
        told = rules[0]._recorder.finish()
    rounds = told.of_kind(Kind.AVERAGE_READ, Kind.AVERAGE_WRITE)[:, 1:4].tolist()
    assert sorted(map(tuple, rounds)) == [
        (Kind.AVERAGE_READ, 0, 0), (Kind.AVERAGE_READ, 1, 0), (Kind.AVERAGE_WRITE, 0, 1),
        (Kind.AVERAGE_WRITE, 1, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("are_processes", [False, True])
def test_a_round_that_some_have_not_entered_is_given_up_and_the_next_is_of_new_weights(
    are_processes, monkeypatch
):
    """Rank 1 enters in the first leg alone; in the second both do, with what they are then."""
    monkeypatch.setattr(averaging, "PERIOD_S", 1e-9)
    chosen = averaged(2)
    threads = TimedAveraging(chosen, model_of(0), TraceRecorder(), lambda *_: None)
    with distributed(2) as processes:
        rules = processes if are_processes else [threads, threads]
        weights = [rule.model(rank).weight for rank, rule in enumerate(rules)]
        begin = weights[0].detach().clone()

        def enter(rank: int, step: int, learned: float) -> None:
            with torch.no_grad():
                weights[rank].add_(learned)
            rules[rank]._due_s = 0.0
            rules[rank].begin_step(rank, step)
            rules[rank]._due_s = math.inf if are_processes else 0.0

        enter(1, 1, 1.0)
        at_once([rule.end_leg for rule in dict.fromkeys(rules)])
        enter(0, 1, 10.0)
        enter(1, 2, 2.0)
        at_once([rule.end_leg for rule in dict.fromkeys(rules)])
        for weight in weights:
            assert torch.allclose(weight.detach() - begin, torch.tensor(6.5), atol=1e-5)


# What rank 0 hears of the others at the end of a leg.


def process_rank(rank: int, heard: Callable[[str], list[str]]) -> tuple[GroupedRank, Any]:
    group = SimpleNamespace(
        rank=rank, ranks=3, status="", legs_ended=0, gather=lambda what, text: heard(text)
    )
    components = SimpleNamespace(
        config=config(), meter=SimpleNamespace(batches_skipped=0, pushes_lost=0, updates=5),
        learner=SimpleNamespace(drew_unseeded=False),
        worker=SimpleNamespace(row_gradient_seen=False),
        spans=SimpleNamespace(seconds={}, paused_s={}), store=SimpleNamespace(waited_s={}),
    )  # fmt: skip
    return GroupedRank(group), components


def words(**changes: Any) -> str:
    said = {
        "skipped": 0,
        "lost": 0,
        "drew_unseeded": False,
        "row_gradient_seen": False,
        "seconds": [],
        "waited": [],
    }
    return json.dumps(said | changes)


@pytest.mark.parametrize("who", [1, 2])
def test_rank_0_takes_up_what_each_other_rank_has_met_in_each_leg(who):
    legs = [{"skipped": 2, "lost": 1}, {"skipped": 3, "lost": 4}]
    said: list[str] = []

    def heard(own: str) -> list[str]:
        more = {"drew_unseeded": True, "row_gradient_seen": True, "seconds": [[who, "load", 1.5]],
                "waited": [[who, 1, 0.25]]}  # fmt: skip
        return [own, *(words(**(legs[len(said)] | more) if r == who else {}) for r in (1, 2))]

    rank, components = process_rank(0, heard)
    components.meter.batches_skipped, components.meter.pushes_lost = 1, 1
    components.spans.seconds, components.store.waited_s = {(0, "load"): 9.0}, {(0, 1): 8.0}
    rank.end_leg(components)
    assert (components.meter.batches_skipped, components.meter.pushes_lost) == (3, 2)
    assert components.learner.drew_unseeded and components.worker.row_gradient_seen
    assert components.spans.seconds == {(0, "load"): 9.0, (who, "load"): 1.5}
    assert components.store.waited_s == {(0, 1): 8.0, (who, 1): 0.25}
    said.append("a leg")
    components.spans.paused_s[0] = 3.0
    rank.end_leg(components)
    assert (components.meter.batches_skipped, components.meter.pushes_lost) == (6, 6)
    assert components.spans.paused_s == {0: 3.0, 1: 3.0, 2: 3.0}, "all wait while rank 0 evaluates"
