"""The dense weights when nobody waits: one versioned copy on a server, or replicas averaged."""

from __future__ import annotations

import copy
import threading
import time

from torch import nn

from persia_sim.words.trace import ALL, Kind, TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.averaging import AveragingRound, mean_model
from runtime.dense.optimizer import (
    DenseGradients,
    apply_gradients,
    copy_weights,
    make_optimizer,
    replica,
)
from runtime.dense.rule import Told
from runtime.dense.state import DenseState, capture, load_optimizers, load_replicas


class DenseServer:
    """async: a rank pulls all weights at one version, and pushes gradients into the newest ones."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        recorder: TraceRecorder,
        told: Told,
    ) -> None:
        self._model, self._recorder, self._told = model, recorder, told
        self._replicas = [replica(model, shared=False) for _ in range(config.sync.ranks)]
        self._optimizer = make_optimizer(config.model, model)
        self._version = 0
        self._lock = threading.Lock()

    def begin_step(self, rank: int, step: int) -> None:
        """Copy the weights to the rank's replica, whole at one version."""
        with self._lock:
            self._recorder.record(Kind.DENSE_PULL, rank, step, ALL, self._version)
            copy_weights(self._model, self._replicas[rank])

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._replicas[rank]

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """One optimiser step with the rank's gradients (None: they are left out)."""
        with self._lock:
            self._recorder.record(Kind.DENSE_PUSH, rank, step, ALL, self._version)
            if gradients is not None:
                apply_gradients(self._optimizer, gradients)
            self._version += 1
        self._told(loss, samples)

    def snapshot(self) -> nn.Module:
        """A copy of the weights, whole at one version."""
        with self._lock:
            return copy.deepcopy(self._model)

    def drain(self) -> None:
        """Nothing waits."""

    def end_leg(self) -> None:
        """Nothing: a rank pulls the weights before each step."""

    def state(self) -> DenseState:
        """A copy of the weights and their optimiser."""
        with self._lock:
            return capture(self._model, [self._optimizer], version=self._version)

    def go_on(self, state: DenseState) -> None:
        """Take the optimiser and the version."""
        load_optimizers([self._optimizer], state)
        self._version = state["version"]


class ModelAverager:
    """async_averaging: each rank trains its own replica; a round of averaging starts every period.

    Ranks enter and leave a round between two of their steps, so it needs no thread of its own.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        recorder: TraceRecorder,
        told: Told,
    ) -> None:
        self._model, self._recorder, self._told = model, recorder, told
        self._replicas = [replica(model, shared=False) for _ in range(config.sync.ranks)]
        self._optimizers = [make_optimizer(config.model, m) for m in self._replicas]
        self._period_s = config.sync.average_every_s
        self._lock = threading.Lock()
        self._version = 0
        self._round = AveragingRound(config.sync.ranks)
        self._written = [False] * config.sync.ranks
        self._number = 0
        self._last_step = [0] * config.sync.ranks
        self._due_s = time.perf_counter() + self._period_s

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: enter an open round, or leave it with the mean once it is known."""
        with self._lock:
            waiting = step > 0 and time.perf_counter() >= self._due_s
            if waiting and not self._round.has_read(rank):
                self._recorder.record(Kind.AVERAGE_READ, rank, step - 1, ALL, self._number)
                self._round.read(rank, self._replicas[rank])
            if self._round.is_complete and not self._written[rank]:
                self._leave_round(rank, step - 1)

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._replicas[rank]

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """One step of the rank's own optimiser; nobody else is touched."""
        with self._lock:  # so that a snapshot never sees half a step
            if gradients is not None:
                apply_gradients(self._optimizers[rank], gradients)
            self._recorder.record(Kind.DENSE_PUSH, rank, step, ALL, self._version)
            self._version += 1
            self._last_step[rank] = step
        self._told(loss, samples)

    def snapshot(self) -> nn.Module:
        """A model with the mean of the replicas."""
        with self._lock:
            return mean_model(self._model, self._replicas)

    def drain(self) -> None:
        """Nothing waits."""

    def end_leg(self) -> None:
        """Ranks that know the mean move to it; a round that some have not entered is given up."""
        with self._lock:
            if self._round.is_complete:
                for rank in [rank for rank, left in enumerate(self._written) if not left]:
                    self._leave_round(rank, self._last_step[rank])
            elif any(map(self._round.has_read, range(len(self._replicas)))):
                self._start_round()

    def state(self) -> DenseState:
        """The mean of the replicas, and copies of them and of their optimisers."""
        mean = self.snapshot()
        version, rounds = self._version, self._number
        with self._lock:
            return capture(
                mean, self._optimizers, replicas=self._replicas, version=version, rounds=rounds
            )

    def go_on(self, state: DenseState) -> None:
        """Take replicas and optimisers of the ranks, and the counters."""
        load_replicas(self._replicas, state)
        load_optimizers(self._optimizers, state)
        self._version, self._number = state["version"], state["rounds"]

    def _leave_round(self, rank: int, step: int) -> None:
        self._recorder.record(Kind.AVERAGE_WRITE, rank, step, ALL, self._number)
        self._round.write(rank, self._replicas[rank])
        self._written[rank] = True
        if self._round.is_over:
            self._start_round()

    def _start_round(self) -> None:
        self._number += 1
        self._round = AveragingRound(len(self._replicas))
        self._written = [False] * len(self._replicas)
        self._due_s = time.perf_counter() + self._period_s
