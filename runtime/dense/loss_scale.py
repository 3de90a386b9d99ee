"""The factor on a float16 loss."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from runtime.config import TrainConfig

FIRST_SCALE = 65536.0  # source: torch.amp.GradScaler
_GROWTH_UPDATES = 2000  # source: the growth interval of torch.amp.GradScaler
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
        self._most = self._value = FIRST_SCALE if self._adapts else 1.0
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
        if not self._adapts:
            return 1.0
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
            self._found_finite = finite
            self._found_overflow = overflow

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; plain JSON."""
        with self._lock:
            return {name: getattr(self, f"_{name}") for name in _SCALE_STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
