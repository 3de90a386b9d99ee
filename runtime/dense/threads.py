"""The dense all-reduce among ranks that are threads of one process.

A bucket is summed by the rank that is last to have its gradients ready, in rank order, so the bytes
do not depend on who that is. Overlapped, this happens inside the backward passes (hooks on the
parameters); exposed, after them. All ranks' models share one memory, so one optimiser step serves
them all, while every rank stands at the rendezvous.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from persia_sim.words.trace import ALL, Kind, TraceRecorder
from runtime.config import ModelConfig
from runtime.dense.late import LateGradients
from runtime.dense.optimizer import (
    DenseGradients,
    apply_gradients,
    bucket_plan,
    make_optimizer,
    replica,
    sum_in_rank_order,
)
from runtime.dense.rule import Told
from runtime.dense.state import DenseState, capture, load_optimizers, pending_of
from runtime.stop import Stop, wait_for


class SharedWeights:
    """The rule of the barrier modes: one set of weights, one optimiser step from all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        model: nn.Module,
        ranks: int,
        *,
        overlapped: bool,
        recorder: TraceRecorder,
        told: Told,
        stop: Stop,
        dense_lag: int = 0,
    ) -> None:
        self._shared, self._recorder, self._told = model, recorder, told
        self._models = [model if ranks == 1 else replica(model, shared=True) for _ in range(ranks)]
        optimizer = make_optimizer(config, model)
        self._optimizer = optimizer
        self._late = LateGradients(dense_lag, lambda g: apply_gradients(optimizer, g))
        self._allreduce = ThreadAllReduce(self._models, self._update, stop)
        if overlapped and ranks > 1:
            for rank, twin in enumerate(self._models):
                self._allreduce.overlap(rank, twin)
        self._lock = threading.Lock()
        self._losses: list[float] = []
        self._samples = self._updates = 0

    def model(self, rank: int) -> nn.Module:
        """The rank's model; the weights are those of all ranks."""
        return self._models[rank]

    def begin_step(self, rank: int, step: int) -> None:
        """Nothing: the weights are never late."""

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """Sum what is not yet summed, and wait until the weights are updated."""
        with self._lock:
            self._losses.append(loss)
            self._samples += samples
        self._allreduce.join(rank, gradients)

    def snapshot(self) -> nn.Module:
        """The weights themselves: no rank computes while a snapshot is asked for."""
        return self._shared

    def drain(self) -> None:
        """Apply the gradients that wait."""
        self._late.drain()

    def end_leg(self) -> None:
        """Nothing: all ranks stand at the same step."""

    def state(self) -> DenseState:
        """A copy of the weights and their optimiser."""
        pending, version = self._late.pending(), self._updates
        return capture(self._shared, [self._optimizer], version=version, pending=pending)

    def go_on(self, state: DenseState) -> None:
        """Take the optimiser, the gradients that wait and the count of updates."""
        load_optimizers([self._optimizer], state)
        self._late.go_on(pending_of(state, self._shared))
        self._updates = state["version"]

    def _update(self, sums: DenseGradients) -> None:
        """Runs while all ranks stand at the rendezvous."""
        self._recorder.record(Kind.DENSE_UPDATE, ALL, self._updates, ALL, self._updates)
        self._late.take(sums if any(g is not None for g in sums) else None)
        self._updates += 1
        losses = [loss for loss in self._losses if not math.isnan(loss)]
        samples, self._losses, self._samples = self._samples, [], 0
        self._told(math.fsum(losses) if losses else math.nan, samples)


class ThreadAllReduce:
    """Sums the gradients of W ranks; ``update`` then takes the sums, once per step."""

    def __init__(
        self, models: Sequence[nn.Module], update: Callable[[DenseGradients], None], stop: Stop
    ) -> None:
        self._plan = bucket_plan(models[0])
        self._ranks = len(models)
        self._update = update
        self._lock = threading.Lock()
        self._arrived = [0] * len(self._plan)
        parameters = sum(1 for _ in models[0].parameters())
        self._sums: DenseGradients = [None] * parameters
        self._found: list[DenseGradients] = [[None] * parameters for _ in models]
        self._missing = [[len(bucket) for bucket in self._plan] for _ in models]
        self._any_left_out = False
        self._rendezvous = Rendezvous(self._ranks, self._sum_and_update, stop)

    def overlap(self, rank: int, model: nn.Module) -> None:
        """Hook the rank's parameters, so that a full bucket is contributed during backward."""
        bucket_of = {number: b for b, bucket in enumerate(self._plan) for number in bucket}
        missing = self._missing[rank]

        def hook_for(number: int) -> Callable[[Tensor], None]:
            def ready(parameter: Tensor) -> None:
                bucket = bucket_of[number]
                self._found[rank][number] = parameter.grad
                missing[bucket] -= 1
                if missing[bucket] == 0:
                    self._contribute(bucket)

            return ready

        for number, parameter in enumerate(model.parameters()):
            if number not in bucket_of:
                continue  # frozen by the user
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                hook_for(number)
            )

    def join(self, rank: int, gradients: DenseGradients | None) -> None:
        """Exposed part: give what is not yet summed, then wait until the weights are updated.

        ``None`` leaves this rank's gradients out of the step (non-finite, or no samples).
        """
        if gradients is None:
            self._any_left_out = True
        self._found[rank] = [None] * len(self._sums) if gradients is None else list(gradients)
        self._missing[rank][:] = [len(bucket) for bucket in self._plan]
        self._rendezvous.meet(rank)

    def _contribute(self, bucket: int) -> None:
        with self._lock:
            self._arrived[bucket] += 1
            last = self._arrived[bucket] == self._ranks
        if last:
            self._sum(bucket)

    def _sum(self, bucket: int) -> None:
        for number in self._plan[bucket]:
            self._sums[number] = sum_in_rank_order([found[number] for found in self._found])

    def _sum_and_update(self) -> None:
        for bucket, arrived in enumerate(self._arrived):
            if arrived < self._ranks or self._any_left_out:
                self._sum(bucket)
        self._any_left_out = False
        self._arrived = [0] * len(self._plan)
        self._update(self._sums)
        self._sums = [None] * len(self._sums)


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
