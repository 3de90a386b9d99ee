"""async: dense weights that ranks in other processes, or on other hosts, ask rank 0 for.

Ranks pull and push at the same `AsyncRule` that serves threads; nobody waits for anybody.
"""

from __future__ import annotations

import os
import secrets
import threading
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
from runtime.engines.wire.calls import Said, Verbs, answer, ask, goodbye
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.coroutines import Steps
from runtime.engines.wire.listener import Listener
from runtime.engines.wire.messages import SECRET_BYTES, BadMessageError, Message, MessageKind
from runtime.engines.wire.peers import come_in, listen
from runtime.engines.wire.tls import TLS
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


class DenseServer:
    """At rank 0: serves the weights of a rule to the ranks of other processes. A rank that goes
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
        self._rule, self._stop, self._exchange = rule, stop, exchange
        self._verbs: Verbs = {"pull": self._pull, "push": self._push}
        sock, name = listen(at or f"\0persia-testbed-dense-{secrets.token_hex(16)}")
        secret = secrets.token_hex(SECRET_BYTES)
        self.address = Address((name,), (secret,), (os.getpid(),))
        self._listener = Listener(sock, secret, self._serve, "rank 0", tls=name.startswith(TLS))
        self._closing = threading.Event()
        threading.Thread(target=self._listener.serve_all, daemon=True).start()

    def close(self) -> None:
        """No more visitors."""
        self._closing.set()
        self._listener.close()

    def _serve(self, channel: Channel, hello: Message, said: Said) -> Steps[None]:
        try:
            while True:
                message, segment = yield from channel.receiving(self._stop.check)
                if message.kind is MessageKind.GOODBYE:
                    return
                answer(channel, message, segment, self._verbs)
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

    def _pull(self, rank: int, step: int) -> Said:
        with self._exchange(rank):
            self._rule.begin_step(rank, step)
        return arrays_of(self._rule.model(rank).parameters())

    def _push(self, rank: int, step: int, loss: float, samples: int, **gradients: Any) -> None:
        like = self._rule.model(rank).parameters()
        found = gradients_in(gradients, like) if gradients else None
        try:
            with self._exchange(rank):
                self._rule.end_step(StepGradients(rank, step, found, loss, samples))
        except RunStopped:
            raise
        except Exception as error:  # of this rank's run, too: it may have evaluated
            self._fail(error)
            raise


class RemoteWeights(DenseRule):
    """Weights are pulled from rank 0 before each step, gradients are pushed there."""

    def __init__(self, address: Address, rank: int, model: nn.Module, stop: Stop) -> None:
        """``address``: that of the `DenseServer`."""
        self._rank, self._model, self._stop = rank, model, stop
        who = {"ranks": f"rank {rank}", "pid": os.getpid()}
        self._channel = come_in(address.names[0], _HOST, address.secrets[0], who, rank)
        stop.on_stop(self._channel.close)  # at once, also under a call that nobody answers

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Pull the weights, whole at one version."""
        own = list(self._model.parameters())
        found = tensors_in(self._ask("pull", rank=rank, step=step), own)
        with torch.no_grad():
            for mine, theirs in zip(own, found, strict=True):
                mine.copy_(theirs)

    def end_step(self, given: StepGradients) -> None:
        """Push the gradients; they have taken effect when this returns, so before the rows' do."""
        rank, step, gradients, loss, samples = given
        arrays = arrays_of(gradients or [])
        self._ask("push", rank=rank, step=step, loss=float(loss), samples=samples, **arrays)

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
        goodbye(self._channel)

    def _ask(self, verb: str, **asked: Any) -> Said:
        """Ask rank 0, which may be evaluating. Raises PeerError, RunStopped."""
        try:
            with self._stop.working():
                return ask(self._channel, verb, self._stop.check, **asked)
        except (PeerGoneError, TimeoutError):
            self._stop.check()
            raise PeerError(f"{_HOST} has gone before the end of the run") from None
