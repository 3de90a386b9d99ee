"""async_averaging: replicas that rounds move towards their mean, among threads or in a given order.

Among processes `runtime.hosts.dense.replicas` does it.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from persia_sim.base.trace import ALL, Kind, TraceRecorder
from persia_sim.base.vocabulary import DEFAULT_AVERAGE_EVERY_S
from runtime.config import TrainConfig
from runtime.dense.optimizer import copy_weights, make_optimizer, replica
from runtime.dense.rules import DenseRule, OnUpdate, StepGradients
from runtime.dense.state import DenseState, capture, load_model, load_optimizers

PERIOD_S = DEFAULT_AVERAGE_EVERY_S
"""Seconds between two averagings, where ranks train at once. Source: the original's 500 ms."""


class AveragedReplicas(DenseRule):
    """async_averaging: each rank trains its own replica; rounds move them towards their mean.

    A round is a snapshot of every rank, each taken between two of its steps, and then a move of
    every replica by (mean - its own snapshot): nobody waits for anybody (Bagua's model averaging,
    which the original uses in its "async" runs).
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, recorder: TraceRecorder, on_update: OnUpdate
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._on_update = on_update
        self._replicas = [replica(model, shared=False) for _ in range(config.sync.ranks)]
        self._optimizers = [make_optimizer(config, one) for one in self._replicas]
        self._rounds: dict[int, AveragingRound] = {}
        """By number, those that are not over."""
        self._version = self._begun = 0
        self._last_step = [0] * config.sync.ranks
        self._lock = threading.Lock()
        self._telling = threading.Lock()

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._replicas[rank]

    def end_step(self, given: StepGradients) -> None:
        """One step of the rank's own optimiser; nobody else is touched."""
        rank, step, gradients, loss, samples = given
        with self._telling:  # in the updates' order
            with self._lock:  # so that a snapshot never sees half a step
                self._last_step[rank] = step
                self._optimizers[rank].step(gradients)
                self._recorder.record(Kind.DENSE_PUSH, rank, step, ALL, self._version)
                self._version += 1
            self._on_update(loss, samples)

    def enter_round(self, rank: int, step: int, number: int) -> None:
        """The rank's snapshot for a round, taken after ``step``."""
        self._recorder.record(Kind.AVERAGE_READ, rank, step, ALL, number)
        self._begun = max(self._begun, number + 1)
        round_ = self._rounds.setdefault(number, AveragingRound(len(self._replicas)))
        round_.read(rank, self._replicas[rank])

    def leave_round(self, rank: int, step: int, number: int) -> None:
        """The rank takes the mean of a round in, after ``step``.

        Raises ValueError while the mean is not known, which only an order can ask for that no run
        has had.
        """
        round_ = self._rounds.get(number)
        if round_ is None or not round_.is_complete:
            raise ValueError(
                f"the order has rank {rank} take in the mean of round {number} before the weights"
                " of every rank are in it; it is not a whole order"
            )
        self._recorder.record(Kind.AVERAGE_WRITE, rank, step, ALL, number)
        round_.write(rank, self._replicas[rank])
        if round_.is_over:
            del self._rounds[number]

    def snapshot(self) -> nn.Module:
        """A model with the mean of the replicas."""
        with self._lock:
            return mean_model(self._model, [list(one.parameters()) for one in self._replicas])

    def state_dict(self) -> DenseState:
        """The mean of the replicas, and copies of them and of their optimisers."""
        return capture(
            self.snapshot(),
            self._optimizers,
            replicas=self._replicas,
            version=self._version,
            rounds=self._begun,
        )

    def load_state_dict(self, state: DenseState) -> None:
        """Take replicas and optimisers of the ranks, and the counters."""
        # Other ranks in number all begin with the mean of those saved.
        saved = state["replicas"]
        ranks = len(self._replicas)
        weights_of = saved if len(saved) == ranks else [state["model"]] * ranks
        for replica_, weights in zip(self._replicas, weights_of, strict=True):
            load_model(replica_, {"model": weights})
        load_optimizers(self._optimizers, state)
        self._version = state["version"]
        self._begun = state["rounds"]


class TimedAveraging(AveragedReplicas):
    """Averaging among threads: a round begins every period.

    Ranks enter and leave a round between two of their steps, so it needs no thread of its own.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, recorder: TraceRecorder, on_update: OnUpdate
    ) -> None:
        super().__init__(config, model, recorder, on_update)
        self._period_s = PERIOD_S
        self._due_s = time.perf_counter() + self._period_s

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: enter an open round, or leave it with the mean once it is known."""
        with self._lock:
            number, round_ = self._under_way()
            due = step > 0 and time.perf_counter() >= self._due_s
            if due and rank not in round_.snapshots:
                self.enter_round(rank, step - 1, number)
            if round_.is_complete and rank not in round_.moved:
                self._leave(rank, step - 1, number)

    def end_leg(self) -> None:
        """Ranks that know the mean move to it; a round that some have not entered is given up."""
        with self._lock:
            number, round_ = self._under_way()
            if round_.is_complete:
                for rank in sorted(round_.snapshots.keys() - round_.moved):
                    self._leave(rank, self._last_step[rank], number)
            elif round_.snapshots:
                self._rounds.clear()
                self._due_s = time.perf_counter() + self._period_s

    def _under_way(self) -> tuple[int, AveragingRound]:
        """The round that is not over, or the next one, and its number."""
        number = next(iter(self._rounds), self._begun)
        return number, self._rounds.setdefault(number, AveragingRound(len(self._replicas)))

    def _leave(self, rank: int, step: int, number: int) -> None:
        self.leave_round(rank, step, number)
        if number not in self._rounds:
            self._due_s = time.perf_counter() + self._period_s


class AveragingRound:
    """One round of averaging among ``ranks`` replicas."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._mean = list[Tensor]()
        self.snapshots: dict[int, list[Tensor]] = {}
        """Weights of the ranks that have entered."""
        self.moved: set[int] = set()
        """Ranks whose replica has."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank's snapshot is in, so that the mean is known."""
        return len(self.snapshots) == self._ranks

    @property
    def is_over(self) -> bool:
        """Whether every replica has moved."""
        return len(self.moved) == self._ranks

    def read(self, rank: int, model: nn.Module) -> None:
        """Put the rank's weights in; the last one in computes the mean, in rank order."""
        self.snapshots[rank] = snapshot_of(model)
        if self.is_complete:
            self._mean = mean_weights([self.snapshots[r] for r in range(self._ranks)])

    def write(self, rank: int, model: nn.Module) -> None:
        """Move the rank's weights by (mean - snapshot) of a complete round: what it learned
        meanwhile stays."""
        move(model, self._mean, self.snapshots[rank])
        self.moved.add(rank)


def snapshot_of(model: nn.Module) -> list[Tensor]:
    """A copy of the weights."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def move(model: nn.Module, mean: Sequence[Tensor], snapshot: Sequence[Tensor]) -> None:
    """Add (mean - snapshot) to a model's weights."""
    with torch.no_grad():
        for weight, new, old in zip(model.parameters(), mean, snapshot, strict=True):
            weight.add_(new.to(weight.device) - old)


def mean_weights(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Elementwise mean over replicas, summed in rank order."""
    with torch.no_grad():
        return [reduce(torch.add, same) / len(same) for same in zip(*replicas, strict=True)]


def mean_model(like: nn.Module, replicas: Sequence[Sequence[Tensor]]) -> nn.Module:
    """A copy of ``like`` with the mean of the replicas' weights."""
    model = copy.deepcopy(like)
    copy_weights(mean_weights(replicas), model)
    return model
