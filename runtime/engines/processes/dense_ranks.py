"""A rank's side of async and async_averaging where the ranks are processes."""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from runtime.config import TrainConfig
from runtime.dense.optimizer import DenseGradients, make_optimizer
from runtime.dense.rules import DenseRule, move, snapshot_of
from runtime.dense.state import DenseState, load_model, load_optimizers
from runtime.engines.processes.dense_link import Kind, Layout, Link, Message, knock
from runtime.stop import PeerError, RunStopped, Stop, wait_for

_HOST = "rank 0, where the dense weights are,"


class RemoteWeights(DenseRule):
    """async: weights are pulled from rank 0 before each step, gradients are pushed there."""

    def __init__(self, name: str, rank: int, model: nn.Module, stop: Stop) -> None:
        self._rank, self._model, self._stop = rank, model, stop
        self._parameters = list(model.parameters())
        self._layout = Layout(self._parameters)
        self._link = Link(knock(name), self._layout, _HOST)
        self._link.send(Message(Kind.HELLO, rank, samples=self._layout.weight_bytes))
        stop.on_stop(self._link.close)  # at once, also under a send that nobody takes

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Pull the weights, whole at one version."""
        self._link.send(Message(Kind.PULL, rank, step))
        found = self._layout.views(self._answer(Kind.WEIGHTS).payload)
        with torch.no_grad():
            for mine, theirs in zip(self._parameters, found, strict=True):
                mine.copy_(theirs)

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """Push the gradients; they have taken effect when this returns, so before the rows' do."""
        nothing: DenseGradients = [None] * len(self._parameters)
        found = nothing if gradients is None else gradients
        payload = self._layout.pack_gradients(found)
        self._link.send(Message(Kind.PUSH, rank, step, loss, samples, payload))
        self._answer(Kind.PUSHED)

    def snapshot(self) -> nn.Module:
        """The weights as they were pulled last; those of the run are at rank 0."""
        return self._model

    def state(self) -> DenseState:
        """That of the run is at rank 0."""
        raise RuntimeError(f"rank {self._rank} holds no dense weights but those it pulled")

    def go_on(self, state: DenseState) -> None:
        """Nothing: the weights come from rank 0."""

    def close(self) -> None:
        """The rank has ended, or the run has."""
        with contextlib.suppress(PeerError):  # the host may have ended first
            self._link.send(Message(Kind.BYE, self._rank))
        self._link.close()

    def _answer(self, kind: Kind) -> Message:
        with self._stop.working():  # the host may be evaluating
            found = self._link.receive()
        if found.kind is not kind:
            raise PeerError(f"{_HOST} answered {found.kind.name} instead of {kind.name}")
        return found


class AveragedReplica:
    """async_averaging: this rank's own replica, moved towards the mean now and then.

    Two threads of its own talk to rank 0. Training only copies weights when a snapshot is due, and
    adds the mean when one has come: it waits for nobody.
    """

    def __init__(
        self, config: TrainConfig, name: str, rank: int, model: nn.Module, stop: Stop
    ) -> None:
        self._rank, self._model, self._stop = rank, model, stop
        self._ranks, self._period_s = config.sync.ranks, config.sync.average_every_s
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(config.model, model)
        self._layout = Layout(self._parameters)
        self._changed = threading.Condition()  # held while the replica is in the middle of a step
        self._due_s: float | None = None
        self._snapshot: list[Tensor] | None = None
        self._mean: list[Tensor] | None = None
        self._settled = self._closing = False
        self._last_step = 0
        self._link = Link(knock(name), self._layout, _HOST)
        self._outbox = queue.SimpleQueue[Message | None]()
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=f"average-{rank}", daemon=True)
            for body in (self._send, self._receive)
        ]
        self._outbox.put(Message(Kind.HELLO, rank, samples=self._layout.weight_bytes))
        stop.on_stop(self._wake)
        for thread in self._threads:
            thread.start()

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: give a snapshot to the round that is due, or take its mean in."""
        with self._changed:
            due = self._due_s is not None and time.perf_counter() >= self._due_s
            if due and step > 0:
                self._due_s = None
                self._snapshot = snapshot_of(self._model)
                payload = self._layout.pack(self._snapshot)
                self._outbox.put(Message(Kind.SNAPSHOT, rank, step - 1, payload=payload))
            self._take_mean_in(step - 1)

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """One step of the rank's own optimiser."""
        with self._changed:
            if gradients is not None:
                self._optimizer.step(gradients)
            self._outbox.put(Message(Kind.TRAINED, rank, step, loss, samples))
            self._last_step = step

    def take_mean_in(self) -> None:
        """Between two legs: move to a mean that has come."""
        with self._changed:
            self._take_mean_in(self._last_step)

    def go_on(self, state: DenseState) -> None:
        """Take the rank's replica and optimiser of a checkpoint."""
        with self._changed:
            saved, optimizers = state["replicas"], state["optimizers"]
            # Another number of ranks begins with the mean, as in one process.
            same = len(saved) == self._ranks
            load_model(self._model, {"model": saved[self._rank] if same else state["model"]})
            own = optimizers[self._rank % len(optimizers)]
            load_optimizers([self._optimizer], {"optimizers": [own]})

    def snapshot(self) -> nn.Module:
        """The own replica; the mean of all is at rank 0."""
        return self._model

    def settle(self) -> None:
        """Return when rank 0 has heard all that was said, and what it said before has come."""
        self._settled = False
        self._outbox.put(Message(Kind.SETTLE, self._rank))
        with self._changed:
            wait_for(
                self._changed,
                lambda: self._settled,
                self._stop,
                lambda: f"rank {self._rank} waits for rank 0 to hear of its last step",
            )

    def close(self) -> None:
        """The rank has ended, or the run has."""
        self._closing = True
        self._outbox.put(Message(Kind.BYE, self._rank))
        self._outbox.put(None)
        self._threads[0].join(timeout=5.0)
        self._link.close()
        self._threads[1].join(timeout=5.0)

    def _take_mean_in(self, step: int) -> None:
        if self._mean is None or self._snapshot is None:
            return
        move(self._model, self._mean, self._snapshot)
        self._mean = self._snapshot = None
        self._outbox.put(Message(Kind.WRITTEN, self._rank, step))

    def _state(self) -> bytes:
        buffer = io.BytesIO()
        found = {"replica": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(found, buffer)
        return buffer.getvalue()

    def _send(self) -> None:
        while (message := self._outbox.get()) is not None:
            self._link.send(message)

    def _receive(self) -> None:
        while True:
            message = self._link.receive()
            with self._changed:
                if message.kind is Kind.OPEN:
                    self._due_s = time.perf_counter() + self._period_s
                    self._snapshot = self._mean = None
                elif message.kind is Kind.MEAN:
                    self._mean = self._layout.views(message.payload)
                elif message.kind is Kind.GIVE:
                    payload = self._layout.pack(self._parameters)
                    self._outbox.put(Message(Kind.WEIGHTS, self._rank, payload=payload))
                elif message.kind is Kind.TELL_STATE:
                    self._outbox.put(Message(Kind.STATE, self._rank, payload=self._state()))
                elif message.kind is Kind.SETTLED:
                    self._settled = True
                self._changed.notify_all()

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except RunStopped:
            pass
        except BaseException as error:
            if not self._closing:
                self._stop.set(error)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
