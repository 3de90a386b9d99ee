"""Dense weights that ranks in other processes ask rank 0 for; those of async.

A thread serves each rank's connection, so nobody waits for anybody. In async ranks pull and push at
the same `AsyncRule` that serves threads; `averaging` has what async_averaging says.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.dense.optimizer import DenseGradients
from runtime.dense.rules import AsyncRule, DenseRule, StepGradients
from runtime.dense.state import DenseState
from runtime.engines.processes.calls import Said, Verbs, answer, ask
from runtime.engines.processes.channel import Channel, PeerGoneError, listen
from runtime.engines.processes.launch import Address
from runtime.engines.processes.messages import (
    SECRET_BYTES,
    BadMessageError,
    Message,
    MessageKind,
)
from runtime.engines.processes.peers import START_WITHIN_S, Listener, come_in, until
from runtime.stop import PeerError, RunStopped, Stop

_HOST = "rank 0, where the dense weights are,"


def arrays_of(tensors: Iterable[Tensor | None]) -> dict[str, np.ndarray]:
    """A tensor for each parameter of a network, by its number; None is left out."""
    return {str(n): t.detach().cpu().numpy() for n, t in enumerate(tensors) if t is not None}


def tensors_in(arrays: Mapping[str, Any], like: Iterable[Tensor]) -> list[Tensor]:
    """What `arrays_of` was given of all. Raises PeerError where it is of another network."""
    found = gradients_in(arrays, like)
    known = [tensor for tensor in found if tensor is not None]
    if len(known) < len(found):
        raise PeerError(
            f"{len(known)} dense weights came of {len(found)}: the ranks' models differ"
        )
    return known


def gradients_in(arrays: Mapping[str, Any], like: Iterable[Tensor]) -> DenseGradients:
    """The same of those that there are, each where ``like`` has its own: on a GPU, it may be."""
    found: DenseGradients = []
    for number, own in enumerate(like):
        array = arrays.get(str(number))
        tensor = None if array is None else torch.from_numpy(array)
        if tensor is not None and (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise PeerError(
                f"{tuple(tensor.shape)} of {tensor.dtype} came for parameter {number}, which is"
                f" {tuple(own.shape)} of {own.dtype}: the ranks' models differ"
            )
        found.append(None if tensor is None else tensor.to(own.device))
    return found


def in_thread(body: Callable[[], None], stop: Stop, name: str) -> threading.Thread:
    """A thread that runs ``body``, whose error stops the run."""

    def guarded() -> None:
        try:
            body()
        except RunStopped:
            pass
        except BaseException as error:
            stop.set(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class DenseServer:
    """Answers the ranks' calls; a rank that goes without a word stops the run."""

    def __init__(self, verbs: Verbs, stop: Stop) -> None:
        self._verbs = {name: partial(self._do, verb) for name, verb in verbs.items()}
        self._stop = stop
        self._secret, self._notes = secrets.token_hex(SECRET_BYTES), list[IO[str]]()
        sock, self._name = listen(f"\0persia-testbed-dense-{secrets.token_hex(16)}")
        self._listener = Listener(sock, self._secret, self._serve, "rank 0")
        self._closing = threading.Event()
        self._channels: list[Channel] = []
        self._listening: dict[int, Channel] = {}
        threading.Thread(target=self._listener.serve_all, daemon=True).start()

    def leave_address(self) -> str:
        """The place of the address, for other processes of this user."""
        return Address((self._name,), (self._secret,), (os.getpid(),)).leave(self._notes)

    def ask(self, rank: int, verb: str, **asked: Any) -> Said:
        """Ask a rank, over the connection on which it listens; one call at a time."""
        try:
            return ask(self._listening[rank], verb, self._stop.check, **asked)
        except (PeerGoneError, TimeoutError):
            raise PeerError(f"rank {rank} has gone before the end of the run") from None

    def ask_all(self, verb: str, **asked: Any) -> list[Said]:
        """Ask all ranks that listen, in their order."""
        return [self.ask(rank, verb, **asked) for rank in sorted(self._listening)]

    def close(self) -> None:
        """No more visitors."""
        self._closing.set()
        self._listener.close()
        for channel in self._channels:
            channel.close()
        for note in self._notes:
            note.close()

    def _serve(self, channel: Channel, hello: Message, said: Said) -> None:
        self._channels.append(channel)
        try:
            if said.get("listens"):
                self._listening[hello.rank] = channel
                channel.send(Message(MessageKind.WELCOME))
                self._closing.wait()
                return
            while (found := channel.receive(self._stop.check))[0].kind is not MessageKind.GOODBYE:
                answer(channel, *found, self._verbs)
        except RunStopped:
            pass
        except (PeerGoneError, BadMessageError) as error:
            gone = f"rank {hello.rank} has gone before the end of the run: {error}"
            self._fail(PeerError(gone))
        except BaseException as error:
            self._fail(error)

    def _do(self, verb: Callable[..., Any], **asked: Any) -> Any:
        """What goes wrong in it is an error of this rank's run, too."""
        try:
            return verb(**asked)
        except RunStopped:
            raise
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if not self._closing.is_set():
            self._stop.set(error)


class DenseClient:
    """A rank's connection to the dense weights at rank 0."""

    def __init__(self, place: str, rank: int, stop: Stop, *, listens: bool = False) -> None:
        """``place``: of the address; ``listens``: this side answers what rank 0 asks."""
        address = Address.found_at(place)
        name, secret, hello = address.names[0], address.secrets[0], {"listens": listens}
        self._channel, self._stop = come_in(name, _HOST, secret, hello, rank), stop
        self.closing = False
        """Whether it is no mistake if rank 0 goes."""
        if listens:
            self._channel.receive(until(START_WITHIN_S, _HOST))
        stop.on_stop(self._channel.close)  # at once, also under a call that nobody answers

    def ask(self, verb: str, **asked: Any) -> Said:
        """Ask rank 0, which may be evaluating. Raises PeerError, RunStopped."""
        try:
            with self._stop.working():
                return ask(self._channel, verb, self._stop.check, **asked)
        except (PeerGoneError, TimeoutError):
            self._stop.check()
            raise PeerError(f"{_HOST} has gone before the end of the run") from None

    def answer(self, verbs: Verbs) -> None:
        """Answer what rank 0 asks, until this side is closed. Raises PeerError, RunStopped."""
        try:
            while True:
                answer(self._channel, *self._channel.receive(self._stop.check), verbs)
        except PeerGoneError:
            if not self.closing:
                raise PeerError(f"{_HOST} has gone before the end of the run") from None

    def close(self) -> None:
        """The rank has ended, or the run has."""
        self.closing = True
        with suppress(PeerGoneError, TimeoutError):  # rank 0 may have ended first
            self._channel.send(Message(MessageKind.GOODBYE), within_s=1.0)
        self._channel.close()


class WeightsServer(DenseServer):
    """async, at rank 0: serves the weights of a `AsyncRule` to the ranks of other processes."""

    def __init__(self, rule: AsyncRule, stop: Stop) -> None:
        self._rule = rule
        super().__init__({"pull": self._pull, "push": self._push}, stop)

    def _pull(self, rank: int, step: int) -> Said:
        self._rule.begin_step(rank, step)
        return arrays_of(self._rule.model(rank).parameters())

    def _push(self, rank: int, step: int, loss: float, samples: int, **gradients: Any) -> None:
        like = self._rule.model(rank).parameters()
        found = gradients_in(gradients, like) if gradients else None
        self._rule.end_step(StepGradients(rank, step, found, loss, samples))


class RemoteWeights(DenseRule):
    """async: weights are pulled from rank 0 before each step, gradients are pushed there."""

    def __init__(self, place: str, rank: int, model: nn.Module, stop: Stop) -> None:
        self._rank, self._model = rank, model
        self._client = DenseClient(place, rank, stop)

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Pull the weights, whole at one version."""
        own = list(self._model.parameters())
        found = tensors_in(self._client.ask("pull", rank=rank, step=step), own)
        with torch.no_grad():
            for mine, theirs in zip(own, found, strict=True):
                mine.copy_(theirs)

    def end_step(self, given: StepGradients) -> None:
        """Push the gradients; they have taken effect when this returns, so before the rows' do."""
        rank, step, gradients, loss, samples = given
        arrays = arrays_of(gradients or [])
        self._client.ask("push", rank=rank, step=step, loss=float(loss), samples=samples, **arrays)

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
        self._client.close()
