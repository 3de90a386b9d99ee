"""The rules of the dense weights, each written once: whoever carries one out imports it from here.

Gradients come from threads (`SharedWeights`), from processes (`runtime.hosts.dense`) or in a given
order, one instant after the other (`runtime.executors.given_order`). Averaging has a file of its
own.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import nn

from persia_sim.base.trace import ALL, Kind, TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.buckets import Buckets
from runtime.dense.optimizer import (
    DenseGradients,
    LateGradients,
    copy_weights,
    make_optimizer,
    replica,
    sums_in_rank_order,
)
from runtime.dense.state import DenseState, capture, load_optimizers, pending_of
from runtime.stop import Stop, Turns


class AwaitedLoss(Protocol):
    """A loss on its way from a GPU."""

    known_s: float | None
    """When it was here, by `time.perf_counter`; None where nobody has noted that."""

    def is_known(self) -> bool:
        """Whether nobody needs to wait for it."""
        ...

    def __float__(self) -> float:
        """Wait for it."""
        ...


Loss = float | AwaitedLoss
OnUpdate = Callable[[Loss, int], None]
"""Called after each dense update with its mean loss (NaN: all of it was left out) and samples."""


class LateSum:
    """The losses of a step's ranks, whose sum is asked for when all are known."""

    known_s: float | None = None
    """Nobody notes it."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        self._losses = losses

    def is_known(self) -> bool:
        """Whether all are."""
        return all(is_known(loss) for loss in self._losses)

    def __float__(self) -> float:
        """The sum of the losses that are not NaN; NaN where all are."""
        losses = [loss for loss in map(float, self._losses) if not math.isnan(loss)]
        return math.fsum(losses) if losses else math.nan


def is_known(loss: Loss) -> bool:
    """Whether a loss is a float at once; one on its way from a GPU is waited for as a float, and
    then may be the error of its step."""
    return isinstance(loss, float) or loss.is_known()


class StepGradients(NamedTuple):
    """What a rank hands in after its backward pass."""

    rank: int
    step: int
    gradients: DenseGradients | None
    """None leaves the rank out of the step (not finite)."""
    loss: Loss
    """The rank's share of the step's mean loss."""
    samples: int


class DenseRule:
    """What keeps the dense weights up to date; one for all ranks of a process.

    A rank calls `begin_step` and `end_step` from its training thread.
    """

    def model(self, rank: int) -> nn.Module:
        """The rank's model, with weights of its own or shared ones."""
        raise NotImplementedError

    def begin_step(self, rank: int, step: int) -> None:
        """Before forward: async pulls the weights, averaging may enter or leave a round."""

    def end_step(self, given: StepGradients) -> None:
        """After backward: hand in the gradients; in barrier modes wait for the update."""
        raise NotImplementedError

    def snapshot(self) -> nn.Module:
        """The model to evaluate, whole at one version."""
        raise NotImplementedError

    def drain(self) -> None:
        """No step follows: gradients that wait (a dense lag) are applied."""

    def end_leg(self) -> None:
        """No rank is in a step, and none will be before this state may be written down."""

    def state_dict(self) -> DenseState:
        """A copy of weights and optimisers, between two legs."""
        raise NotImplementedError

    def load_state_dict(self, state: DenseState) -> None:
        """Take the optimisers, replicas and counters of a checkpoint; the ranks' number may differ.

        The weights are in the model already.
        """
        raise NotImplementedError


class _OneModel(DenseRule):
    """One set of weights with one optimiser, whose updates are counted and recorded."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, recorder: TraceRecorder, on_update: OnUpdate
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._on_update = on_update
        self._optimizer = make_optimizer(config, model)
        self._late = LateGradients(config.sync.dense_lag, self._optimizer)
        self._version = 0

    def model(self, rank: int) -> nn.Module:
        """The one of all ranks."""
        return self._model

    def snapshot(self) -> nn.Module:
        """The weights themselves: no rank computes while a snapshot is asked for."""
        return self._model

    def drain(self) -> None:
        """Apply the gradients that wait."""
        self._late.drain()

    def state_dict(self) -> DenseState:
        """A copy of the weights, their optimiser, and the gradients that wait."""
        pending = self._late.waiting
        return capture(self._model, [self._optimizer], version=self._version, pending=pending)

    def load_state_dict(self, state: DenseState) -> None:
        """Take the optimiser, the gradients that wait and the count of updates."""
        load_optimizers([self._optimizer], state)
        self._late.waiting = deque(pending_of(state, self._model))
        self._version = state["version"]

    def _take(self, kind: Kind, rank: int, step: int, gradients: DenseGradients | None) -> None:
        """One update; None for its gradients counts it without them."""
        self._recorder.record(kind, rank, step, ALL, self._version)
        self._late.take(gradients)
        self._version += 1


class BarrierRule(_OneModel):
    """sync, lookahead, raw_hybrid, hybrid: a step is one update from all ranks' gradients."""

    def apply(self, step: int, sums: DenseGradients) -> None:
        """One optimiser step with the sums over the ranks that are not left out."""
        some = any(gradient is not None for gradient in sums)
        self._take(Kind.DENSE_UPDATE, ALL, step, sums if some else None)

    def update(self, step: int, sums: DenseGradients, losses: Sequence[Loss], samples: int) -> None:
        """Apply the sums and report the update; NaN is the loss of a rank that is left out."""
        self.apply(step, sums)
        mean = LateSum(losses)
        self._on_update(float(mean) if mean.is_known() else mean, samples)


class SharedWeights(BarrierRule):
    """The dense all-reduce among ranks that are threads: one set of weights in one memory, so one
    optimiser step serves all, while every rank stands at the rendezvous.

    A bucket is summed by the rank that is last to have its gradients ready, in rank order, so the
    bytes do not depend on who that is. Overlapped, this happens inside the backward passes (hooks
    on the parameters); exposed, after them.
    """

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

    def end_step(self, given: StepGradients) -> None:
        """Sum what is not yet summed, and wait until the weights are updated."""
        spoilt = self._buckets[given.rank].end_step(given.gradients)
        with self._lock:
            self._losses.append(given.loss)
            self._samples += given.samples
            self._any_spoilt |= spoilt
        self._rendezvous.meet(given.rank)

    def _contribute(self, bucket: int) -> None:
        with self._lock:
            self._arrived[bucket] += 1
            last = self._arrived[bucket] == len(self._models)
        if last:
            self._sum(self._plan[bucket])

    def _sum(self, numbers: Sequence[int]) -> None:
        of_ranks = [[one.gradients[number] for number in numbers] for one in self._buckets]
        for number, total in zip(numbers, sums_in_rank_order(of_ranks), strict=True):
            self._sums[number] = total

    def _sum_and_update(self) -> None:
        """Runs while all ranks stand at the rendezvous."""
        # Sum what the backward passes have not: buckets that not every rank has filled, or all.
        is_summed = [n == len(self._models) and not self._any_spoilt for n in self._arrived]
        buckets = zip(self._plan, is_summed, strict=True)
        self._sum([number for bucket, is_done in buckets if not is_done for number in bucket])

        # The next step's sums are begun before this step's update is told of.
        sums = self._sums
        losses = self._losses
        samples = self._samples
        self._begin_sums()
        self.update(self._version, sums, losses, samples)

    def _begin_sums(self) -> None:
        self._sums: DenseGradients = [None] * len(self._buckets[0].parameters)
        self._arrived = [0] * len(self._plan)
        self._any_spoilt = False
        self._losses: list[Loss] = []
        self._samples = 0


class Rendezvous:
    """All ranks meet; the last to come does the work of the step, then everybody goes on.

    Not `threading.Barrier`: its action runs inside its own lock, so that a failing action could not
    tell the others to stop. Here the work runs without any lock; if it raises, the error is that of
    the rank that did it, and the others are woken by the stop of the run.
    """

    def __init__(self, ranks: int, work: Callable[[], None], stop: Stop) -> None:
        self._ranks = ranks
        self._work = work
        self._stop = stop
        self._changed = Turns()
        self._here: set[int] = set()
        self._meetings = 0
        stop.on_stop(self._changed.wake)

    def meet(self, rank: int) -> None:
        """Return when all ranks have come and the work is done; RunStopped if the run stops."""
        with self._changed:
            number = self._meetings
            self._here.add(rank)
            last = len(self._here) == self._ranks
            if not last:
                self._changed.wait_until(lambda: self._meetings > number, self._stop, self._who)
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


class AsyncRule(_OneModel):
    """async: a rank pulls all weights at one version, and pushes gradients into the newest ones."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, recorder: TraceRecorder, on_update: OnUpdate
    ) -> None:
        super().__init__(config, model, recorder, on_update)
        self._pulled = [replica(model, shared=False) for _ in range(config.sync.ranks)]
        self._lock = threading.Lock()
        self._telling = threading.Lock()

    def model(self, rank: int) -> nn.Module:
        """The rank's copy of the weights."""
        return self._pulled[rank]

    def begin_step(self, rank: int, step: int) -> None:
        """Copy the weights to the rank's replica, whole at one version."""
        with self._lock:
            self._recorder.record(Kind.DENSE_PULL, rank, step, ALL, self._version)
            copy_weights(self._model.parameters(), self._pulled[rank])

    def end_step(self, given: StepGradients) -> None:
        """One optimiser step with the rank's gradients (None: they are left out)."""
        with self._telling:  # in the updates' order; meanwhile weights are pulled, and shown
            with self._lock:
                self._take(Kind.DENSE_PUSH, given.rank, given.step, given.gradients)
            self._on_update(given.loss, given.samples)

    def snapshot(self) -> nn.Module:
        """A copy of the weights, whole at one version: others may push meanwhile."""
        with self._lock:
            return copy.deepcopy(self._model)
