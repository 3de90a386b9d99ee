"""What a run tells while it trains: samples, losses, snapshots, and what was left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from torch import nn

Snapshot = Callable[[], nn.Module]


class Progress(Protocol):
    """Told of every dense update; may stop the world to evaluate a snapshot."""

    def update(self, updates: int, samples: int, loss: float, snapshot: Snapshot) -> None:
        """A dense update took ``samples`` samples of mean ``loss``; ``updates`` are done so far.

        The loss is NaN when all of the update was left out.
        """
        ...

    def skip(self) -> None:
        """A batch was left out because its loss or a gradient was not finite."""
        ...

    def lose(self) -> None:
        """A push was lost; its step was closed."""
        ...


class Meter:
    """Counts, times, and evaluates every so many updates."""

    def __init__(
        self,
        *,
        evaluate_every: int | None = None,
        evaluate: Callable[[int, int, nn.Module], None] | None = None,
        on_samples: Callable[[int], None] | None = None,
    ) -> None:
        self._every, self._evaluate, self._on_samples = evaluate_every, evaluate, on_samples
        self.updates = self.samples = 0
        self.batches_skipped = self.pushes_lost = 0
        self.losses: list[float] = []
        self._instants: list[tuple[float, int]] = []
        self._paused_s = 0.0

    def start(self) -> None:
        """The first sample is about to be read."""
        self._instants.append((time.perf_counter(), 0))

    def update(self, updates: int, samples: int, loss: float, snapshot: Snapshot) -> None:
        """See `Progress`."""
        self.updates, self.samples = updates, self.samples + samples
        self.losses.append(loss)
        self._instants.append((time.perf_counter() - self._paused_s, self.samples))
        if self._on_samples:
            self._on_samples(samples)
        if self._every and self._evaluate and updates % self._every == 0:
            began = time.perf_counter()
            self._evaluate(updates, self.samples, snapshot())
            self._paused_s += time.perf_counter() - began

    def skip(self) -> None:
        """See `Progress`."""
        self.batches_skipped += 1

    def lose(self) -> None:
        """See `Progress`."""
        self.pushes_lost += 1

    def samples_per_s(self, skip: int | None = None) -> float:
        """Without the first ``skip`` updates (default: a tenth, for warm-up) and evaluations."""
        first = self._instants[len(self._instants) // 10 if skip is None else skip]
        last = self._instants[-1]
        return (last[1] - first[1]) / max(last[0] - first[0], 1e-9)
