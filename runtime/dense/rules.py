"""What a dense network must obey in any mode: its device, statistics, draws and loss scale."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from runtime.config import TrainConfig

_DRAWING = threading.Lock()  # torch's global generator is one for all threads
_GROWTH_UPDATES = 2000  # source: the growth interval of torch.amp.GradScaler


def open_device(name: str) -> torch.device:
    """The device of the dense network, or ValueError when there is none such here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}; try --device cpu") from None
    return device


def refuse_running_statistics(model: nn.Module, config: TrainConfig) -> None:
    """Ranks do not share buffers, so statistics kept in them (batch norm) would differ by mode."""
    names = [n for n, b in model.named_buffers() if b.is_floating_point()]
    if names and (config.sync.ranks > 1 or not config.sync.mode.has_barrier):
        raise ValueError(
            f"model {config.model.name} keeps running statistics ({', '.join(names[:3])}), which"
            " ranks do not share: train it with one rank in a barrier mode, or use layer norm"
        )


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether training it draws from torch's generator, as dropout does.

    Found by its modules; a model that draws by functions says so with an attribute
    ``draws_random_numbers = True``.
    """
    if getattr(model, "draws_random_numbers", False):
        return True
    return any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())


@contextmanager
def seeded_draws(seed: int, rank: int, step: int) -> Iterator[None]:
    """Make what the body draws a function of (seed, rank, step), whichever thread it runs in."""
    words = np.random.SeedSequence([seed, rank, step]).generate_state(2)
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))
        yield


def generator_states(device: torch.device) -> list[Tensor]:
    """Where torch's generators stand from which a model on this device may draw."""
    states: list[Tensor] = [torch.random.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def have_moved(before: list[Tensor], device: torch.device) -> bool:
    """Whether anybody has drawn since ``before`` was taken."""
    now = generator_states(device)
    return any(not torch.equal(one, other) for one, other in zip(before, now, strict=True))


_SCALE_STATE = ("value", "calm", "step", "found_finite", "found_overflow")


class LossScale:
    """The factor that keeps float16 gradients above zero: halved on overflow, doubled later.

    One decision per dense update, however many ranks share it: in barrier modes all ranks of a
    step have the factor that stood after the step before, and one overflow or many halve it once.
    In async every batch is an update.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._adapts = config.engine.precision == "float16"
        self._shared = config.sync.mode.has_barrier
        self._most = self._value = config.engine.loss_scale if self._adapts else 1.0
        self._calm = 0
        self._step = 0
        self._found_finite = self._found_overflow = False
        self._lock = threading.Lock()

    @property
    def value(self) -> float:
        """The factor of the next update."""
        with self._lock:
            return self._decided()[0]

    def of(self, step: int) -> float:
        """The factor of a step's loss; all ranks have reported the steps before."""
        with self._lock:
            if step > self._step:
                self._step = step
                self._settle()
            return self._value

    def note_overflow(self, step: int) -> bool:
        """Scaled gradients of the step overflowed; False when that cannot be the scale's fault."""
        with self._lock:
            if not self._adapts or self._value <= 1.0:
                return False
            self._found_overflow = True
            if not self._shared:
                self._settle()
            return True

    def note_finite(self, step: int) -> None:
        """Gradients of the step were finite."""
        if self._adapts:
            with self._lock:
                self._found_finite = True
                if not self._shared:
                    self._settle()

    @property
    def reports(self) -> tuple[bool, bool]:
        """Whether ranks of this process saw finite gradients, and an overflow, in the open update:
        what ranks that are processes tell each other."""
        with self._lock:
            return self._found_finite, self._found_overflow

    def take_in(self, finite: bool, overflow: bool) -> None:
        """What all ranks saw in the open update, so that all processes decide the same."""
        with self._lock:
            self._found_finite, self._found_overflow = finite, overflow

    def state(self) -> dict[str, Any]:
        """What `go_on` takes; plain JSON."""
        with self._lock:
            return {name: getattr(self, f"_{name}") for name in _SCALE_STATE}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Decide on from what `state` gave."""
        with self._lock:
            for name in _SCALE_STATE:
                setattr(self, f"_{name}", state[name])

    def _settle(self) -> None:
        self._value, self._calm = self._decided()
        self._found_finite = self._found_overflow = False

    def _decided(self) -> tuple[float, int]:
        """The factor and the calm updates before it, given what the open update reported."""
        if self._found_overflow:
            return self._value / 2, 0
        calm = self._calm + self._found_finite
        if calm >= _GROWTH_UPDATES and self._value < self._most:
            return self._value * 2, 0
        return self._value, calm
