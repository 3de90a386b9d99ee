"""The dense all-reduce among ranks that are threads of one process.

A bucket is summed by the rank that is last to have its gradients ready, in rank order, so the bytes
do not depend on who that is. Overlapped, this happens inside the backward passes (hooks on the
parameters); exposed, after them. All ranks' models share one memory, so one optimiser step serves
them all, while every rank stands at the rendezvous.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from persia_sim.words.trace import TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.optimizer import Buckets, DenseGradients, replica, sum_in_rank_order
from runtime.dense.rules import BarrierRule, OnUpdate
from runtime.stop import Stop, wait_for


class SharedWeights(BarrierRule):
    """One set of weights in one memory; every rank brings its gradients to a rendezvous."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        recorder: TraceRecorder,
        on_update: OnUpdate,
        *,
        overlapped: bool,
        stop: Stop,
    ) -> None:
        super().__init__(config, model, recorder, on_update)
        ranks = config.sync.ranks
        self._models = [model if ranks == 1 else replica(model, shared=True) for _ in range(ranks)]
        self._buckets = [Buckets(one) for one in self._models]
        self._plan = self._buckets[0].plan
        self._rendezvous = Rendezvous(ranks, self._sum_and_update, stop)
        self._lock = threading.Lock()
        self._begin_sums()
        if overlapped and ranks > 1:
            for buckets in self._buckets:
                buckets.hook(self._contribute)

    def model(self, rank: int) -> nn.Module:
        """The rank's model; the weights are those of all ranks."""
        return self._models[rank]

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """Sum what is not yet summed, and wait until the weights are updated."""
        self._buckets[rank].end_step(gradients)
        with self._lock:
            self._losses.append(loss)
            self._samples += samples
            self._any_left_out |= gradients is None
        self._rendezvous.meet(rank)

    def _contribute(self, bucket: int) -> None:
        with self._lock:
            self._arrived[bucket] += 1
            last = self._arrived[bucket] == len(self._models)
        if last:
            self._sum(bucket)

    def _sum(self, bucket: int) -> None:
        for number in self._plan[bucket]:
            of_ranks = [buckets.gradients[number] for buckets in self._buckets]
            self._sums[number] = sum_in_rank_order(of_ranks)

    def _sum_and_update(self) -> None:
        """Runs while all ranks stand at the rendezvous."""
        for bucket, arrived in enumerate(self._arrived):
            if arrived < len(self._models) or self._any_left_out:
                self._sum(bucket)
        sums, losses, samples = self._sums, self._losses, self._samples
        self._begin_sums()
        self.update(self._version, sums, losses, samples)

    def _begin_sums(self) -> None:
        self._sums: DenseGradients = [None] * len(self._buckets[0].parameters)
        self._arrived = [0] * len(self._plan)
        self._any_left_out = False
        self._losses: list[float] = []
        self._samples = 0


class Rendezvous:
    """All ranks meet; the last to come does the work of the step, then everybody goes on.

    Not `threading.Barrier`: its action runs inside its own lock, so that a failing action could not
    tell the others to stop. Here the work runs without any lock; if it raises, the error is that of
    the rank that did it, and the others are woken by the stop of the run.
    """

    def __init__(self, ranks: int, work: Callable[[], None], stop: Stop) -> None:
        self._ranks, self._work, self._stop = ranks, work, stop
        self._changed = threading.Condition()
        self._here: set[int] = set()
        self._meetings = 0
        stop.on_stop(self._wake)

    def meet(self, rank: int) -> None:
        """Return when all ranks have come and the work is done; RunStopped if the run stops."""
        with self._changed:
            number = self._meetings
            self._here.add(rank)
            last = len(self._here) == self._ranks
            if not last:
                wait_for(self._changed, lambda: self._meetings > number, self._stop, self._who)
                return
        with self._stop.working():
            self._work()
        with self._changed:
            self._here.clear()
            self._meetings += 1
            self._changed.notify_all()
        self._stop.check()

    def _who(self) -> str:
        missing = sorted(set(range(self._ranks)) - self._here)
        return f"ranks {sorted(self._here)} wait for the gradients of ranks {missing}"

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
