"""The all-reduce as traffic on the GPU hosts' NICs, beside rows and gradients."""

from __future__ import annotations

import numpy as np
import simpy

from persia_sim.engine.clock import Clock, Process
from persia_sim.engine.hardware import Platform
from persia_sim.model.allreduce import Bucket


class ReduceOnNics:
    """Sums the buckets of one step after the other, each when every rank has it.

    A bucket takes as long as its closed form, or until its bytes have passed every host's NIC,
    whichever is later: so it slows down, and slows others down, where a NIC is shared.
    """

    def __init__(
        self, env: Clock, platform: Platform, buckets: tuple[Bucket, ...], ranks: int
    ) -> None:
        self._env = env
        self._platform = platform
        self._buckets = buckets
        self._ranks = ranks
        self._ready: list[tuple[float, float]] = []

    def will_compute(self, forward_end_s: float, backward_s: float) -> simpy.Event | None:
        """A rank has begun its step; the last one gets the event that all buckets are summed."""
        self._ready.append((forward_end_s, backward_s))
        if len(self._ready) < self._ranks:
            return None
        ends, backwards = np.array(self._ready).T
        self._ready = []
        ready = [float((ends + b.ready_share * backwards).max()) for b in self._buckets]
        return self._env.process(self._reduce(ready))

    def reduce_now(self) -> simpy.Event:
        """All ranks have the whole gradient: the event that all buckets are summed."""
        return self._env.process(self._reduce([self._env.now] * len(self._buckets)))

    def _reduce(self, ready_s: list[float]) -> Process:
        for bucket, ready in zip(self._buckets, ready_s, strict=True):
            if ready > self._env.now:
                yield self._env.timeout(ready - self._env.now)
            yield self._platform.ring(bucket.nic_bytes, bucket.seconds)
