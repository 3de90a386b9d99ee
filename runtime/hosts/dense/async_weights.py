"""async: dense weights that ranks in other processes, or on other hosts, ask rank 0 for.

Ranks pull and push at the same `AsyncRule` that serves threads. A pull takes one round trip; a push
is not waited for: it is answered before the pull behind it, over the same connection.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.dense.optimizer import DenseGradients
from runtime.dense.rules import AsyncRule, DenseRule, StepGradients
from runtime.dense.state import DenseState
from runtime.hosts.launch.processes import Address
from runtime.hosts.wire.calls import Payload, answer, close_channel, payload_of, send_call
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import (
    SECRET_BYTES,
    BadMessageError,
    Message,
    MessageKind,
    error_from,
)
from runtime.hosts.wire.peers import connect, listen
from runtime.hosts.wire.tls import TLS
from runtime.stop import PeerError, RunStopped, Stop

_HOST = "rank 0, where the dense weights are,"


def arrays_of(tensors: Iterable[Tensor | None]) -> dict[str, np.ndarray]:
    """A tensor for each parameter of a network, by its number; None is left out."""
    return {str(n): t.detach().cpu().numpy() for n, t in enumerate(tensors) if t is not None}


def tensors_in(arrays: Mapping[str, Any], like: Iterable[Tensor]) -> list[Tensor]:
    """What `arrays_of` was given for every parameter. Raises PeerError where it is of another
    network."""
    tensors = gradients_in(arrays, like)
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors):
        raise PeerError(
            f"{len(present)} dense weights came of {len(tensors)}: the ranks' models differ"
        )
    return present


def gradients_in(arrays: Mapping[str, Any], like: Iterable[Tensor]) -> DenseGradients:
    """What `arrays_of` was given, None for a parameter that it left out; each tensor is where
    ``like`` has its parameter: on a GPU, it may be."""
    gradients: DenseGradients = []
    for number, parameter in enumerate(like):
        array = arrays.get(str(number))
        tensor = None if array is None else torch.from_numpy(array)
        expected = (parameter.shape, parameter.dtype)
        if tensor is not None and (tensor.shape, tensor.dtype) != expected:
            raise PeerError(
                f"{tuple(tensor.shape)} of {tensor.dtype} came for parameter {number}, which is"
                f" {tuple(parameter.shape)} of {parameter.dtype}: the ranks' models differ"
            )
        gradients.append(None if tensor is None else tensor.to(parameter.device))
    return gradients


class WeightCalls(ABC):
    """The calls of a rank to rank 0, where the dense weights are."""

    @abstractmethod
    def pull(self, rank: int, step: int) -> Payload:
        """The weights, whole at one version, as `arrays_of` them."""

    @abstractmethod
    def push(self, rank: int, step: int, loss: float, samples: int, **gradients: Any) -> None:
        """Apply the ``gradients``, as `arrays_of` them."""


class DenseServer(WeightCalls):
    """Serves the weights of a rule to the ranks of other processes, at rank 0. A rank that goes
    without a word stops the run."""

    def __init__(
        self,
        rule: AsyncRule,
        stop: Stop,
        at: str = "",
        exchange: Callable[[int], AbstractContextManager[None]] = lambda rank: nullcontext(),
    ) -> None:
        """``at``: for ranks of other hosts HOST:PORT, with `TLS` before it if they encrypt;
        ``exchange``: around each answer to a rank, which notes what an evaluation took of it."""
        self._rule = rule
        self._stop = stop
        self._exchange = exchange
        sock, name = listen(at or f"\0persia-testbed-dense-{secrets.token_hex(16)}")
        secret = secrets.token_hex(SECRET_BYTES)
        self.address = Address((name,), (secret,), (os.getpid(),))
        tls = name.startswith(TLS)
        self._listener = Listener(sock, secret, self._converse, "rank 0", tls=tls)
        self._closing = threading.Event()
        threading.Thread(target=self._listener.serve_all, daemon=True).start()

    def close(self) -> None:
        """Admit nobody else, and end every connection."""
        self._closing.set()
        self._listener.close()

    def pull(self, rank: int, step: int) -> Payload:
        """The weights, whole at one version."""
        with self._exchange(rank):
            self._rule.begin_step(rank, step)
        return arrays_of(self._rule.model(rank).parameters())

    def push(self, rank: int, step: int, loss: float, samples: int, **gradients: Any) -> None:
        """Apply the gradients; none: the rank had no samples."""
        like = self._rule.model(rank).parameters()
        received = gradients_in(gradients, like) if gradients else None
        try:
            with self._exchange(rank):
                self._rule.end_step(StepGradients(rank, step, received, loss, samples))
        except RunStopped:
            raise
        except Exception as error:  # an error of this rank's run, too: it may have evaluated
            self._fail(error)
            raise

    def _converse(self, channel: Channel, hello: Message, payload: Payload) -> Coroutine[None]:
        """Answer one rank until it ends, or the run does."""
        try:
            while True:
                message, segment = yield from channel.receiving(self._stop.check)
                if message.kind is MessageKind.DISCONNECT:
                    return
                answer(channel, message, segment, WeightCalls, self)
        except RunStopped:
            pass
        except (PeerGoneError, BadMessageError) as error:
            gone = f"rank {hello.rank} has gone before the end of the run: {error}"
            self._fail(PeerError(gone))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._closing.is_set():
            self._stop.set(error)


class RemoteWeights(DenseRule):
    """Weights are pulled from rank 0 before each step, gradients are pushed there."""

    def __init__(self, address: Address, rank: int, model: nn.Module, stop: Stop) -> None:
        """``address``: that of the `DenseServer`."""
        self._rank = rank
        self._model = model
        self._stop = stop
        hello = {"ranks": f"rank {rank}", "pid": os.getpid()}
        self._channel = connect(address.names[0], _HOST, address.secrets[0], hello, rank)
        stop.on_stop(self._channel.close)  # at once, also under a call that nobody answers
        self._numbers = count(1)
        self._unanswered: deque[int] = deque()
        """The numbers of calls whose results have not come, in their order."""

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Pull the weights, whole at one version: behind all that this rank has pushed."""
        parameters = list(self._model.parameters())
        self._send(WeightCalls.pull, rank=rank, step=step)
        pulled = tensors_in(self._results(), parameters)
        with torch.no_grad():
            for parameter, tensor in zip(parameters, pulled, strict=True):
                parameter.copy_(tensor)

    def end_step(self, given: StepGradients) -> None:
        """Push the gradients. Nobody waits until they have taken effect, and those of the rows may
        do so before; what went wrong is raised by the next pull, or at the end of the leg."""
        rank, step, gradients, loss, samples = given
        arrays = arrays_of(gradients or [])
        about = {"rank": rank, "step": step, "loss": float(loss), "samples": samples}
        self._send(WeightCalls.push, **about, **arrays)

    def end_leg(self) -> None:
        """Every push has taken effect when this returns."""
        if self._unanswered:
            self._results()

    def snapshot(self) -> nn.Module:
        """The weights as they were pulled last; those of the run are at rank 0."""
        return self._model

    def state_dict(self) -> DenseState:
        """Raise RuntimeError: the state of the run is at rank 0."""
        raise RuntimeError(f"rank {self._rank} holds no dense weights but those it pulled")

    def load_state_dict(self, state: DenseState) -> None:
        """Nothing: the weights come from rank 0."""

    def close(self) -> None:
        """The rank has ended, or the run has."""
        close_channel(self._channel)

    def _send(self, method: Callable[..., Any], **arguments: Any) -> None:
        """Call rank 0, which may be evaluating, without waiting for the result. Raises PeerError,
        RunStopped."""
        number = next(self._numbers)
        send = partial(self._channel.send, within_s=inf, check=self._stop.check)
        with self._going_on():
            send_call(send, Message(MessageKind.CALL, number=number), method, arguments)
        self._unanswered.append(number)

    def _results(self) -> Payload:
        """The result of the newest call, behind those of all before it. Raises what one of them
        failed with, PeerError, RunStopped."""
        payload: Payload = {}
        while self._unanswered:
            with self._going_on():
                message, segment = self._channel.receive(self._stop.check)
            payload = payload_of(message, segment)
            expected = self._unanswered.popleft()
            if message.kind is MessageKind.FAILED:
                raise error_from(payload)
            if message.number != expected:
                raise PeerError(f"{_HOST} answered call {message.number}, not {expected}")
        return payload

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """While rank 0 is awaited."""
        try:
            with self._stop.working():
                yield
        except PeerGoneError:
            self._stop.check()
            raise PeerError(f"{_HOST} has gone before the end of the run") from None
