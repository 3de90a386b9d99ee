"""The dense weights of async and async_averaging for ranks that are processes: kept at rank 0.

A thread serves each rank's connection, so nobody waits for anybody: in async it pulls and pushes
at the same `AsyncRule` that serves threads; in async_averaging it collects snapshots and hands
out their mean, while the ranks train.
"""

from __future__ import annotations

import contextlib
import io
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from persia_sim.words.trace import ALL, TraceRecorder
from persia_sim.words.trace import Kind as EventKind
from runtime.dense.rules import AsyncRule, OnUpdate, mean_model, mean_weights
from runtime.dense.state import DenseState, capture
from runtime.engines.processes.channel import is_own_user
from runtime.engines.processes.dense_link import Kind, Layout, Link, Message, open_door
from runtime.stop import PeerError, RunStopped, Stop, wait_for

Handle = Callable[[Link, Message], None]
"""What the host does with a message of a rank."""

_News = tuple[float, int] | threading.Event
"""Loss and samples of an update, or somebody who waits until all before it are told."""


class Door:
    """Lets the ranks in, a thread for each; a rank that goes without a word stops the run."""

    def __init__(self, layout: Layout, handle: Handle, stop: Stop) -> None:
        self._layout, self._handle, self._stop = layout, handle, stop
        self._closing = False
        self._door, self.name = open_door()
        self._threads = [threading.Thread(target=self._let_in, name="dense-door", daemon=True)]
        self._links: list[Link] = []
        self._threads[0].start()

    def close(self) -> None:
        """No more visitors."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread that lets in
        self._door.close()
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _let_in(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return
            if not is_own_user(sock):
                sock.close()
                continue
            link = Link(sock, self._layout, "a rank")
            self._links.append(link)
            thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, link: Link) -> None:
        try:
            while (message := link.receive()).kind is not Kind.BYE:
                if message.kind is Kind.HELLO:
                    link.who = f"rank {message.rank}"
                    if message.samples != self._layout.weight_bytes:
                        raise PeerError(
                            f"rank {message.rank} has {message.samples} bytes of dense weights,"
                            f" rank 0 {self._layout.weight_bytes}: their models differ"
                        )
                self._handle(link, message)
        except RunStopped:
            pass
        except BaseException as error:
            if not self._closing:
                self._stop.set(error)
        finally:
            link.close()


class WeightsHost:
    """async: serves the weights of a `AsyncRule` to the ranks of other processes."""

    def __init__(self, server: AsyncRule, model: nn.Module, stop: Stop) -> None:
        self._server = server
        self._layout = Layout(list(model.parameters()))
        self._door = Door(self._layout, self._handle, stop)
        self.name = self._door.name
        """How a rank finds it."""

    def close(self) -> None:
        """All ranks have ended, or the run has."""
        self._door.close()

    def _handle(self, link: Link, message: Message) -> None:
        rank, step = message.rank, message.step
        if message.kind is Kind.PULL:
            self._server.begin_step(rank, step)
            weights = self._layout.pack(list(self._server.model(rank).parameters()))
            link.send(Message(Kind.WEIGHTS, rank, step, payload=weights))
        elif message.kind is Kind.PUSH:
            found = self._layout.gradients(bytearray(message.payload))
            gradients = found if any(g is not None for g in found) else None
            self._server.end_step(rank, step, gradients, message.loss, message.samples)
            link.send(Message(Kind.PUSHED, rank, step))


class AveragingHost:
    """async_averaging: collects the ranks' snapshots, and tells everybody their mean.

    It records what the ranks did in the order in which it hears of it; a rank tells everything
    over one connection, so its own order is kept, and a mean is told after its snapshots.
    """

    def __init__(
        self, model: nn.Module, ranks: int, recorder: TraceRecorder, told: OnUpdate, stop: Stop
    ) -> None:
        self._model, self._ranks, self._recorder, self._stop = model, ranks, recorder, stop
        self._layout = Layout(list(model.parameters()))
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._snapshots: dict[int, list[Tensor]] = {}
        self._given: dict[int, list[Tensor]] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._written = self._version = self._number = 0
        stop.on_stop(self._wake)
        self._told, self._news = told, queue.SimpleQueue[_News | None]()
        self._telling = threading.Thread(target=self._tell, name="dense-told", daemon=True)
        self._telling.start()
        self._door = Door(self._layout, self._handle, stop)
        self.name = self._door.name
        """How a rank finds it."""

    def snapshot(self) -> nn.Module:
        """A model with the mean of the replicas, each taken between two steps of its rank."""
        with self._changed:
            self._given = {}
            links = dict(self._links)
        for rank, link in links.items():
            link.send(Message(Kind.GIVE, rank))
        with self._changed:
            wait_for(
                self._changed,
                lambda: len(self._given) == self._ranks,
                self._stop,
                lambda: f"an evaluation waits for the replicas of ranks {self._missing()}",
            )
            model = mean_model(self._model, [self._given[r] for r in sorted(self._given)])
        return model

    def give_round_up(self) -> None:
        """Between two legs, all ranks have settled: a round that some have not entered is over."""
        with self._changed:
            if self._snapshots:
                self._snapshots = {}
                self._begin_round()

    def state(self) -> DenseState:
        """Between two legs: the mean of the replicas, all of them and their optimisers."""
        with self._changed:
            self._states = {}
            links = dict(self._links)
        for rank, link in links.items():
            link.send(Message(Kind.TELL_STATE, rank))
        with self._changed:
            wait_for(
                self._changed,
                lambda: len(self._states) == self._ranks,
                self._stop,
                lambda: f"a checkpoint waits for all replicas; here are {sorted(self._states)}",
            )
            told = [self._states[rank] for rank in range(self._ranks)]
            version, rounds = self._version, self._number
        mean = capture(self.snapshot(), [], version=version, rounds=rounds)
        return mean | {
            "replicas": [one["replica"] for one in told],
            "optimizers": [one["optimizer"] for one in told],
        }

    def go_on(self, state: DenseState) -> None:
        """Take the counters of a checkpoint."""
        with self._changed:
            self._version, self._number = state["version"], state["rounds"]

    def settle(self) -> None:
        """Return when all that the ranks have said is told; they have settled before."""
        all_told = threading.Event()
        self._news.put(all_told)
        while not all_told.wait(timeout=0.2):
            self._stop.check()

    def close(self) -> None:
        """All ranks have ended, or the run has."""
        self._door.close()
        self._news.put(None)
        self._telling.join(timeout=5.0)

    def _handle(self, link: Link, message: Message) -> None:
        rank, step = message.rank, message.step
        act = {
            Kind.HELLO: self._greet,
            Kind.TRAINED: self._note_trained,
            Kind.SNAPSHOT: self._take_snapshot,
            Kind.WRITTEN: self._note_written,
            Kind.WEIGHTS: self._take_weights,
            Kind.STATE: self._take_state,
            Kind.SETTLE: self._answer_settled,
        }.get(message.kind)
        if act is None or not 0 <= rank < self._ranks:
            raise PeerError(f"{link.who} sent {message.kind.name} of rank {rank}, step {step}")
        with self._changed:
            act(link, message)
            self._changed.notify_all()

    def _greet(self, link: Link, message: Message) -> None:
        self._links[message.rank] = link
        link.send(Message(Kind.OPEN, message.rank, self._number))

    def _note_trained(self, link: Link, message: Message) -> None:
        self._record(EventKind.DENSE_PUSH, message, self._version)
        self._version += 1
        self._news.put((message.loss, message.samples))

    def _take_snapshot(self, link: Link, message: Message) -> None:
        self._record(EventKind.AVERAGE_READ, message, self._number)
        self._snapshots[message.rank] = self._layout.views(message.payload)
        if len(self._snapshots) == self._ranks:
            mean = mean_weights([self._snapshots[r] for r in range(self._ranks)])
            payload = self._layout.pack(mean)
            self._snapshots = {}
            for rank, other in self._links.items():
                other.send(Message(Kind.MEAN, rank, self._number, payload=payload))

    def _note_written(self, link: Link, message: Message) -> None:
        self._record(EventKind.AVERAGE_WRITE, message, self._number)
        self._written += 1
        if self._written == self._ranks:
            self._written = 0
            self._begin_round()

    def _begin_round(self) -> None:
        self._number += 1
        for rank, link in self._links.items():
            link.send(Message(Kind.OPEN, rank, self._number))

    def _take_state(self, link: Link, message: Message) -> None:
        buffer = io.BytesIO(message.payload)
        self._states[message.rank] = torch.load(buffer, map_location="cpu", weights_only=True)

    def _take_weights(self, link: Link, message: Message) -> None:
        self._given[message.rank] = self._layout.views(message.payload)

    def _answer_settled(self, link: Link, message: Message) -> None:
        link.send(Message(Kind.SETTLED, message.rank))

    def _record(self, kind: EventKind, message: Message, version: int) -> None:
        self._recorder.record(kind, message.rank, message.step, ALL, version)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self._given]

    def _tell(self) -> None:
        """In a thread of its own: who is told may evaluate, and then waits for the ranks."""
        try:
            while (news := self._news.get()) is not None:
                if isinstance(news, threading.Event):
                    news.set()
                else:
                    self._told(*news)
        except RunStopped:
            pass
        except BaseException as error:
            self._stop.set(error)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
