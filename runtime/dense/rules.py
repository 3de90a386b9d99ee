"""What a dense network must obey in any mode: its device, statistics, draws and loss scale."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from runtime.config import TrainConfig
from runtime.embedding.store import Handle

_DRAWING = threading.Lock()  # torch's global generator is one for all threads
_GROWTH_GRADIENTS = 2000  # source: the growth interval of torch.amp.GradScaler
_DEFAULT_FLOAT16_SCALE = 65536.0  # source: the initial scale of torch.amp.GradScaler


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
    if names and (config.ranks > 1 or not config.mode.has_barrier):
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
def seeded_draws(seed: int, handle: Handle) -> Iterator[None]:
    """Make what the body draws a function of (seed, rank, step), whichever thread it runs in."""
    words = np.random.SeedSequence([seed, handle.rank, handle.step]).generate_state(2)
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))
        yield


class LossScale:
    """The factor that keeps float16 gradients above zero: halved on overflow, doubled later."""

    def __init__(self, config: TrainConfig) -> None:
        self._adapts = config.precision == "float16"
        default = _DEFAULT_FLOAT16_SCALE if self._adapts else 1.0
        self._most = self.value = default if config.loss_scale is None else config.loss_scale
        self._calm = 0
        self._lock = threading.Lock()

    def halve(self) -> bool:
        """After an overflow; False when that cannot be the scale's fault."""
        with self._lock:
            if not self._adapts or self.value <= 1.0:
                return False
            self.value, self._calm = self.value / 2, 0
            return True

    def note_finite(self) -> None:
        """After finite gradients."""
        if self._adapts:
            with self._lock:
                self._calm += 1
                if self._calm >= _GROWTH_GRADIENTS and self.value < self._most:
                    self.value, self._calm = self.value * 2, 0
