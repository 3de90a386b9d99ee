"""What a run tells while it trains: samples, losses, snapshots, and what was left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from runtime.rank.series import BlockMeans, Thinned

Snapshot = Callable[[], nn.Module]
Evaluate = Callable[[int, int, nn.Module], None]
"""Given updates and samples so far, and the model as it is."""


class Meter:
    """Counts, times, and evaluates every so many updates."""

    def __init__(self) -> None:
        self._every: int | None = None
        self._evaluate: Evaluate | None = None
        self._on_samples: Callable[[int], None] | None = None
        self.updates = self.samples = 0
        self.batches_skipped = self.pushes_lost = 0
        self._losses = BlockMeans()
        self._paused_s = 0.0
        self._start_clock()

    def start(
        self,
        *,
        every: int | None = None,
        evaluate: Evaluate | None = None,
        on_samples: Callable[[int], None] | None = None,
    ) -> None:
        """The first sample is about to be read; snapshots are evaluated ``every`` updates."""
        self._every, self._evaluate, self._on_samples = every, evaluate, on_samples
        self._start_clock()

    @property
    def losses(self) -> list[float]:
        """Mean loss of each dense update; NaN where all of it was left out.

        Of a long run, the mean over each ``updates_per_loss`` updates.
        """
        return self._losses.points

    @property
    def updates_per_loss(self) -> int:
        """Dense updates behind each of ``losses``: 1, unless the run is long."""
        return self._losses.values_per_point

    def evaluates_at(self, updates: int) -> bool:
        """Whether a snapshot is evaluated after so many updates."""
        return self._every is not None and updates % self._every == 0

    def update(self, updates: int, samples: int, loss: float, snapshot: Snapshot) -> None:
        """A dense update took ``samples`` samples of mean ``loss``; ``updates`` are done so far."""
        self.updates, self.samples = updates, self.samples + samples
        self._losses.append(loss)
        self._instants.append(self.samples, time.perf_counter() - self._paused_s)
        if self._on_samples:
            self._on_samples(samples)
        if self._evaluate and self.evaluates_at(updates):
            began = time.perf_counter()
            self._evaluate(updates, self.samples, snapshot())
            self._paused_s += time.perf_counter() - began

    def skip(self) -> None:
        """A batch was left out because its loss or a gradient was not finite."""
        self.batches_skipped += 1

    def lose(self) -> None:
        """A push was lost; its step was closed."""
        self.pushes_lost += 1

    def state(self) -> dict[str, Any]:
        """What `go_on` takes; plain JSON."""
        return {
            "updates": self.updates,
            "samples": self.samples,
            "batches_skipped": self.batches_skipped,
            "pushes_lost": self.pushes_lost,
            "losses": self._losses.state(),
            "instants": self._instants.state(),
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Count on from what `state` gave; the time in between does not count. After `start`."""
        self.updates, self.samples = state["updates"], state["samples"]
        self.batches_skipped, self.pushes_lost = state["batches_skipped"], state["pushes_lost"]
        self._losses.go_on(state["losses"])
        later_s = time.perf_counter() - self._paused_s - state["instants"]["last"][1]
        self._instants.go_on(state["instants"], later_s)

    def samples_per_s(self, skip: int | None = None) -> float:
        """Without the first ``skip`` updates (default: a tenth, for warm-up) and evaluations."""
        skip = len(self._instants) // 10 if skip is None else skip
        if skip >= len(self._instants) - 1:
            return math.nan
        first, last = self._instants.at(skip), self._instants.last
        return (last[0] - first[0]) / max(last[1] - first[1], 1e-9)

    def _start_clock(self) -> None:
        self._instants = Thinned()
        self._instants.append(0, time.perf_counter())
