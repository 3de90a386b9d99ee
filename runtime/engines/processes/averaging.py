"""async_averaging among ranks that are processes: replicas, and at rank 0 who averages them.

Training only copies weights when a snapshot is due, and adds the mean when one has come: it waits
for nobody. Each rank has two connections to rank 0: on one it says what it has done, on the other
it answers what rank 0 asks.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from persia_sim.words.trace import ALL, Kind, TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.averaging import mean_model, mean_weights, move, snapshot_of
from runtime.dense.group import RankGroup
from runtime.dense.optimizer import make_optimizer
from runtime.dense.rules import DenseRule, OnUpdate, StepGradients
from runtime.dense.state import DenseState, capture, load_model, load_optimizers
from runtime.engines.processes.calls import Said, Verbs
from runtime.engines.processes.dense_server import (
    DenseClient,
    DenseServer,
    arrays_of,
    in_thread,
    tensors_in,
)
from runtime.stop import Stop


class Averager(DenseServer):
    """At rank 0: collects the ranks' snapshots, and hands out their mean.

    It records what the ranks did in the order in which it hears of it; a rank says everything over
    one connection, so its own order is kept, and a mean is told after its snapshots.
    """

    def __init__(
        self, model: nn.Module, ranks: int, recorder: TraceRecorder, told: OnUpdate, stop: Stop
    ) -> None:
        verbs: Verbs = {"trained": self._trained, "snapshot": self._take, "written": self._wrote}
        super().__init__(verbs, stop)
        self._model, self._ranks, self._recorder = model, ranks, recorder
        self._lock = threading.Lock()
        self._snapshots: dict[int, list[Tensor]] = {}
        self._written = self._version = 0
        self.rounds = 0
        """Of averaging, begun or over; the number of the one under way."""
        self._told, self._news = told, queue.SimpleQueue[Any]()
        self._telling = in_thread(self._tell, stop, "dense-told")

    def snapshot(self) -> nn.Module:
        """A model with the mean of the replicas, each taken between two steps of its rank."""
        with self._lock:
            found = self.ask_all("replica")
        return mean_model(self._model, [tensors_in(one, self._model.parameters()) for one in found])

    def give_round_up(self) -> None:
        """Between two legs, all ranks have settled: a round that some have not entered is over."""
        with self._lock:
            if self._snapshots:
                self._snapshots = {}
                self.rounds += 1
                self.ask_all("begin_round")

    def state(self) -> DenseState:
        """Between two legs: the mean of the replicas, all of them and their optimisers."""
        with self._lock:
            found = self.ask_all("state")
        mean = capture(self.snapshot(), [], version=self._version, rounds=self.rounds)
        for one in found:
            saved = io.BytesIO(one["saved"].tobytes())
            own = torch.load(saved, map_location="cpu", weights_only=True)
            mean["replicas"].append(own["replica"])
            mean["optimizers"].append(own["optimizer"])
        return mean

    def go_on(self, state: DenseState) -> None:
        """Take the counters of a checkpoint."""
        self._version, self.rounds = state["version"], state["rounds"]

    def settle(self) -> None:
        """Return when all that the ranks have said is told; they have settled before."""
        _wait_in(self._news, self._stop)

    def close(self) -> None:
        """All ranks have ended, or the run has."""
        super().close()
        self._news.put(None)
        self._telling.join(timeout=5.0)

    def _trained(self, rank: int, step: int, loss: float, samples: int) -> None:
        with self._lock:
            self._recorder.record(Kind.DENSE_PUSH, rank, step, ALL, self._version)
            self._version += 1
            self._news.put((loss, samples))

    def _take(self, rank: int, step: int, **weights: Any) -> None:
        with self._lock:
            self._recorder.record(Kind.AVERAGE_READ, rank, step, ALL, self.rounds)
            self._snapshots[rank] = tensors_in(weights, self._model.parameters())
            if len(self._snapshots) == self._ranks:
                mean = mean_weights([self._snapshots[r] for r in range(self._ranks)])
                self._snapshots = {}
                self.ask_all("take_mean", **arrays_of(mean))

    def _wrote(self, rank: int, step: int) -> None:
        with self._lock:
            self._recorder.record(Kind.AVERAGE_WRITE, rank, step, ALL, self.rounds)
            self._written += 1
            if self._written == self._ranks:
                self._written = 0
                self.rounds += 1
                self.ask_all("begin_round")

    def _tell(self) -> None:
        """In a thread of its own: who is told may evaluate, and then asks the ranks."""
        while (news := self._news.get()) is not None:
            if isinstance(news, threading.Event):
                news.set()
            else:
                self._told(*news)


class AveragingRule(DenseRule):
    """This rank's own replica, moved towards the mean now and then; between two legs all ranks
    meet, so that a round is either over or given up."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        group: RankGroup,
        recorder: TraceRecorder,
        told: OnUpdate,
        stop: Stop,
    ) -> None:
        self._rank, self._model, self._group, self._stop = group.rank, model, group, stop
        self._ranks, self._period_s = config.sync.ranks, config.sync.average_every_s
        for parameter in model.parameters():
            group.broadcast(parameter)
        self._optimizer = make_optimizer(config, model)
        self._changing = threading.Lock()  # held while the replica is in the middle of a step
        self._due_s: float | None = time.perf_counter() + self._period_s
        self._snapshot: list[Tensor] | None = None
        self._mean: list[Tensor] | None = None
        self._last_step = self._meetings = 0
        self._outbox = queue.SimpleQueue[Any]()
        self.averager = None
        """At rank 0, who averages."""
        if group.rank == 0:
            self.averager = Averager(model, group.ranks, recorder, told, stop)
        place = self.averager.leave_address() if self.averager else ""
        place = group.gather("replicas", place)[0]
        self._says = DenseClient(place, group.rank, stop)
        self._listens = DenseClient(place, group.rank, stop, listens=True)
        verbs = {
            "begin_round": self._begin_round,
            "take_mean": self._take_mean,
            "replica": self._replica,
            "state": self._state,
        }
        bodies = self._say, partial(self._listens.answer, verbs)
        self._threads = [in_thread(body, stop, "average") for body in bodies]
        self._settle()
        self._meet()  # rank 0 knows all ranks

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: give a snapshot to the round that is due, or take its mean in."""
        with self._changing:
            due = self._due_s is not None and time.perf_counter() >= self._due_s
            if due and step > 0:
                self._due_s = None
                self._snapshot = snapshot_of(self._model)
                self._outbox.put(("snapshot", step - 1, arrays_of(self._snapshot)))
            self._take_mean_in(step - 1)

    def end_step(self, given: StepGradients) -> None:
        """One step of the rank's own optimiser."""
        with self._changing:
            if given.gradients is not None:
                self._optimizer.step(given.gradients)
            told = {"loss": float(given.loss), "samples": given.samples}
            self._outbox.put(("trained", given.step, told))
            self._last_step = given.step

    def snapshot(self) -> nn.Module:
        """At rank 0 a model with the mean of the replicas, elsewhere the own one."""
        return self.averager.snapshot() if self.averager else self._model

    def end_leg(self) -> None:
        """A mean that is known reaches all replicas; a round that some have not entered is given
        up; all updates have been told."""
        self._settle()
        self._meet()  # all snapshots that will come are there, and their mean is everywhere
        if self.averager is not None:
            self.averager.give_round_up()
        self._meet()
        with self._changing:
            self._take_mean_in(self._last_step)
        self._settle()
        self._meet()
        if self.averager is not None:
            self.averager.settle()

    def state(self) -> DenseState:
        """At rank 0: the mean of the replicas, all of them and their optimisers."""
        if self.averager is None:
            raise RuntimeError(f"rank {self._rank} holds no replica but its own")
        return self.averager.state()

    def go_on(self, state: DenseState) -> None:
        """Take replica, optimiser and counters of a checkpoint."""
        with self._changing:
            saved, optimizers = state["replicas"], state["optimizers"]
            # Another number of ranks begins with the mean, as in one process.
            same = len(saved) == self._ranks
            load_model(self._model, {"model": saved[self._rank] if same else state["model"]})
            own = optimizers[self._rank % len(optimizers)]
            load_optimizers([self._optimizer], {"optimizers": [own]})
        if self.averager is not None:
            self.averager.go_on(state)

    def close(self) -> None:
        """All is done; every rank calls it."""
        self._listens.closing = True  # rank 0 may be the first
        self._outbox.put(None)
        self._threads[0].join(timeout=5.0)
        self._says.close()
        self._meet()
        self._listens.close()
        self._threads[1].join(timeout=5.0)
        if self.averager is not None:
            self.averager.close()

    def _take_mean_in(self, step: int) -> None:
        if self._mean is None or self._snapshot is None:
            return
        move(self._model, self._mean, self._snapshot)
        self._mean = self._snapshot = None
        self._outbox.put(("written", step, {}))

    def _meet(self) -> None:
        self._meetings += 1
        self._group.gather(f"averaging {self._meetings}", "")

    def _settle(self) -> None:
        """Return when rank 0 has heard all that was said."""
        _wait_in(self._outbox, self._stop)

    def _say(self) -> None:
        while (said := self._outbox.get()) is not None:
            if isinstance(said, threading.Event):
                said.set()
            else:
                verb, step, more = said
                self._says.ask(verb, rank=self._rank, step=step, **more)

    # What rank 0 asks.

    def _begin_round(self) -> None:
        with self._changing:
            self._due_s = time.perf_counter() + self._period_s
            self._snapshot = self._mean = None

    def _take_mean(self, **weights: Any) -> None:
        with self._changing:
            self._mean = tensors_in(weights, self._model.parameters())

    def _replica(self) -> Said:
        with self._changing:
            return arrays_of(snapshot_of(self._model))

    def _state(self) -> Said:
        buffer = io.BytesIO()
        with self._changing:
            replica, optimizer = self._model.state_dict(), self._optimizer.state_dict()
            torch.save({"replica": replica, "optimizer": optimizer}, buffer)
        return {"saved": np.frombuffer(buffer.getvalue(), np.uint8)}


def _wait_in(line: queue.SimpleQueue[Any], stop: Stop) -> None:
    """Return when all that stands in the queue before has been done."""
    done = threading.Event()
    line.put(done)
    while not done.wait(timeout=0.2):
        stop.check()
