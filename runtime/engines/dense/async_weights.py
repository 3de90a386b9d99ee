"""async: dense weights that ranks in other processes, or on other hosts, ask rank 0 for.

Ranks pull and push at the same `AsyncRule` that serves threads; nobody waits for anybody.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.dense.optimizer import DenseGradients
from runtime.dense.rules import AsyncRule, DenseRule, StepGradients
from runtime.dense.state import DenseState
from runtime.engines.launch.processes import Address
from runtime.engines.wire.calls import Method, Payload, R, answer, call, close_channel
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.coroutines import Coroutine
from runtime.engines.wire.listener import Listener
from runtime.engines.wire.messages import SECRET_BYTES, BadMessageError, Message, MessageKind
from runtime.engines.wire.peers import connect, listen
from runtime.engines.wire.tls import TLS
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

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Pull the weights, whole at one version."""
        parameters = list(self._model.parameters())
        pulled = tensors_in(self._call(WeightCalls.pull, rank=rank, step=step), parameters)
        with torch.no_grad():
            for parameter, tensor in zip(parameters, pulled, strict=True):
                parameter.copy_(tensor)

    def end_step(self, given: StepGradients) -> None:
        """Push the gradients; they have taken effect when this returns, so before the rows' do."""
        rank, step, gradients, loss, samples = given
        arrays = arrays_of(gradients or [])
        about = {"rank": rank, "step": step, "loss": float(loss), "samples": samples}
        self._call(WeightCalls.push, **about, **arrays)

    def snapshot(self) -> nn.Module:
        """The weights as they were pulled last; those of the run are at rank 0."""
        return self._model

    def state(self) -> DenseState:
        """Raise RuntimeError: the state of the run is at rank 0."""
        raise RuntimeError(f"rank {self._rank} holds no dense weights but those it pulled")

    def go_on(self, state: DenseState) -> None:
        """Nothing: the weights come from rank 0."""

    def close(self) -> None:
        """The rank has ended, or the run has."""
        close_channel(self._channel)

    def _call(self, method: Method[..., R], **arguments: Any) -> R:
        """Call rank 0, which may be evaluating. Raises PeerError, RunStopped."""
        try:
            with self._stop.working():
                return call(self._channel, method, self._stop.check, "", **arguments)
        except (PeerGoneError, TimeoutError):
            self._stop.check()
            raise PeerError(f"{_HOST} has gone before the end of the run") from None
