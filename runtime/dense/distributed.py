"""Dense weights among ranks that are processes: one rank here, the others elsewhere.

The all-reduce: a bucket of gradients is a flat buffer that sets out as soon as it is full: during
the backward pass (hooks on the parameters) or after it. Every rank sends the same buckets in the
same order, zeros where it has no gradient, and then a small vector: whether it is left out, its
loss and samples, which parameters it has gradients of, what its loss scale saw. So all ranks decide
the same, and none can wait for a bucket that another one does not send.

``ring`` adds up in torch's order; ``gather`` brings every rank's buffer here and adds up in rank
order, which gives the bytes of ranks that are threads, for W times the memory and traffic.

async_averaging: a thread beside training meets those of the other ranks, again and again.
"""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from persia_sim.words.trace import ALL, Kind, TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.averaging import mean_model, mean_weights, move, snapshot_of
from runtime.dense.group import RankGroup
from runtime.dense.loss_scale import LossScale
from runtime.dense.optimizer import (
    Buckets,
    DenseGradients,
    make_optimizer,
    sum_in_rank_order,
)
from runtime.dense.rules import BarrierRule, DenseRule, OnUpdate, StepGradients
from runtime.dense.state import DenseState, capture, load_model, load_optimizers
from runtime.stop import RunStopped, Stop

_LEFT_OUT, _SPOILT, _LOSS, _SAMPLES, _FINITE, _OVERFLOW, _STEP, _PRESENT = range(8)
"""Columns of the vector; from the last one on, a column per parameter."""


class DistributedWeights(BarrierRule):
    """Every rank has weights of its own, and takes the same step as all others."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        recorder: TraceRecorder,
        on_update: OnUpdate,
        *,
        group: RankGroup,
        overlapped: bool,
        scale: LossScale,
        stop: Stop,
    ) -> None:
        """``recorder``: the updates are recorded at rank 0 alone."""
        recorder = recorder if group.rank == 0 else TraceRecorder(keep=False)
        super().__init__(config, model, recorder, on_update)
        self._group, self._scale, self._stop = group, scale, stop
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            group.broadcast(parameter)
        self._reduce = ProcessAllReduce(model, group, gathers=config.engine.dense_sum == "gather")
        if overlapped and group.ranks > 1:
            self._reduce.overlap()

    def end_step(self, given: StepGradients) -> None:
        """Send what is not yet sent, and wait until all ranks' gradients are here."""
        self._group.status = f"trains step {given.step}"
        with self._stop.working():  # the others may still compute: nobody is stuck
            sums, said = self._reduce.join(given.gradients, self._vector(given))
        self._scale.take_in(bool(said[:, _FINITE].any()), bool(said[:, _OVERFLOW].any()))
        losses = said[said[:, _LEFT_OUT] == 0, _LOSS].tolist()
        self.update(self._version, sums, losses, int(said[:, _SAMPLES].sum()))

    def _vector(self, given: StepGradients) -> list[float]:
        _, step, gradients, loss, samples = given
        finite, overflow = self._scale.reports
        present = gradients if gradients is not None else [None] * len(self._parameters)
        left_out = gradients is None
        said = [left_out, 0, 0.0 if left_out else float(loss), samples, finite, overflow, step]
        return [*map(float, said), *(float(g is not None) for g in present)]


class _Sent(NamedTuple):
    """A bucket under way."""

    work: dist.Work
    found: Tensor
    """[n] the sum, or [ranks, n] of every rank; there when the work is done."""


class ProcessAllReduce:
    """Sums one step's gradients over the processes, bucket by bucket."""

    def __init__(self, model: nn.Module, group: RankGroup, *, gathers: bool) -> None:
        self._group, self._gathers = group, gathers
        self._own = Buckets(model)
        self._plan, self._parameters = self._own.plan, self._own.parameters
        self._buffers = [self._buffer(bucket) for bucket in self._plan]
        self._sent: list[_Sent] = []
        self._failed: Exception | None = None

    def overlap(self) -> None:
        """Hook the parameters, so that a full bucket sets out during backward."""
        self._own.hook(self._send_full)

    def join(
        self, gradients: DenseGradients | None, vector: list[float]
    ) -> tuple[DenseGradients, Tensor]:
        """The sums over the ranks that are not left out, and the vectors of all: [ranks, ...].

        ``gradients`` None leaves this rank out (not finite).
        """
        if self._failed is not None:
            raise self._failed
        sent_before = len(self._sent)
        self._own.end_step(gradients)
        while len(self._sent) < len(self._plan):
            self._send(len(self._sent))
        vector[_SPOILT] = float(gradients is None and sent_before > 0)
        flags = torch.tensor(vector, dtype=torch.float64, device=self._group.wire)
        work, rows = self._group.all_gather(flags)
        self._group.wait(work, f"gradients of step {vector[_STEP]:.0f}")
        said = rows.cpu()
        self._refuse_other_step(said[:, _STEP].tolist())
        self._wait()
        if not self._gathers and bool(said[:, _SPOILT].any()):
            self._sent.clear()  # a sum holds what must not count: again, without it
            for bucket in range(len(self._plan)):
                self._send(bucket)
            self._wait()
        sums = self._sums(said)
        self._sent.clear()
        self._own.end_step(None)
        return sums, said

    def _wait(self) -> None:
        for sent in self._sent:
            self._group.wait(sent.work, "gradients")

    def _sums(self, said: Tensor) -> DenseGradients:
        """A parameter has a sum where any rank that counts has a gradient."""
        counts = (said[:, _LEFT_OUT] == 0)[:, None] & (said[:, _PRESENT:] > 0)
        have = counts.tolist()
        sums: DenseGradients = [None] * len(self._parameters)
        for bucket, sent in zip(self._plan, self._sent, strict=True):
            start = 0
            for number in bucket:
                parameter = self._parameters[number]
                part = sent.found.narrow(-1, start, parameter.numel())
                start += parameter.numel()
                if self._gathers:
                    given = [part[r] if row[number] else None for r, row in enumerate(have)]
                    total = sum_in_rank_order(given)
                else:
                    total = part if any(row[number] for row in have) else None
                if total is not None:
                    sums[number] = total.view_as(parameter).to(parameter.device)
        return sums

    def _send_full(self, bucket: int) -> None:
        """Send the buckets that are full, in the order that all ranks keep."""
        try:
            while len(self._sent) < len(self._plan) and not self._own.missing[len(self._sent)]:
                self._send(len(self._sent))
        except Exception as error:  # told by join: here it would look like the user's model's
            self._failed = error

    def _send(self, bucket: int) -> None:
        buffer, start = self._buffers[bucket], 0
        for number in self._plan[bucket]:
            parameter, gradient = self._parameters[number], self._own.gradients[number]
            part = buffer.narrow(0, start, parameter.numel())
            start += parameter.numel()
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1))
        if self._gathers:
            self._sent.append(_Sent(*self._group.all_gather(buffer)))
        else:
            self._sent.append(_Sent(self._group.all_reduce(buffer), buffer))

    def _buffer(self, bucket: list[int]) -> Tensor:
        size = sum(self._parameters[number].numel() for number in bucket)
        dtype = self._parameters[bucket[0]].dtype  # the same for all: that of the precision
        return torch.empty(size, dtype=dtype, device=self._group.wire)

    def _refuse_other_step(self, steps: list[float]) -> None:
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks met at different steps: {[int(s) for s in steps]}")


MEET_S = 0.05
"""Between two meetings of the threads beside training."""


class _Phase(IntEnum):
    """Where a rank stands in the round of averaging that is under way."""

    APART = 0
    ENTERED = 1
    """Its snapshot is taken."""
    KNOWN = 2
    """The mean is here."""
    LEFT = 3
    """Its replica has moved."""


class _Asked(IntEnum):
    """What a rank wants of a meeting."""

    NOTHING = 0
    REPLICAS = 1
    STATES = 2
    CLOSE = 3


class DistributedReplicas(DenseRule):
    """async_averaging: this rank's own replica, moved towards the mean of all now and then.

    Training only copies weights when a snapshot is due, and adds the mean when it is there: it
    waits for nobody. At each meeting of the threads beside it all see what all say, so all decide
    the same. Rank 0 writes down what each rank has done, in that rank's order; a round's moves come
    behind all of its snapshots.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        recorder: TraceRecorder,
        on_update: OnUpdate,
        *,
        group: RankGroup,
        stop: Stop,
    ) -> None:
        self._rank, self._ranks, self._model = group.rank, group.ranks, model
        self._recorder, self._on_update, self._stop = recorder, on_update, stop
        self._period_s = config.sync.average_every_s
        for parameter in model.parameters():
            group.broadcast(parameter)
        self._optimizer = make_optimizer(config, model)
        self._changed = threading.Condition()  # held while the replica is in the middle of a step
        self._asking = threading.Lock()
        self._asked, self._heard = _Asked.NOTHING, list[Tensor]()
        self._has_ended_leg = False
        self._done: list[tuple[Kind, int, float, int]] = []  # and not yet told to rank 0
        self._untold: deque[tuple[float, int]] = deque()
        self._last_step = self._version = 0
        self.rounds = -1
        """Of averaging, begun or over; the number of the one under way."""
        self._phase, self._due_s = _Phase.APART, 0.0
        self._snapshot: list[Tensor] | None = None
        self._mean: list[Tensor] | None = None
        self._begin_round()
        self._group = group.beside()
        self._meeting = threading.Thread(target=self._meet_on, name="average", daemon=True)
        self._meeting.start()

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: give a snapshot to the round that is due, or take its mean in."""
        with self._changed:
            due = self._phase is _Phase.APART and time.perf_counter() >= self._due_s
            if due and step > 0:
                self._snapshot, self._phase = snapshot_of(self._model), _Phase.ENTERED
                self._done.append((Kind.AVERAGE_READ, step - 1, 0.0, 0))
            if self._phase is _Phase.KNOWN:
                self._leave(step - 1)

    def end_step(self, given: StepGradients) -> None:
        """One step of the rank's own optimiser."""
        with self._changed:
            if given.gradients is not None:
                self._optimizer.step(given.gradients)
            self._done.append((Kind.DENSE_PUSH, given.step, float(given.loss), given.samples))
            self._last_step = given.step
        self._tell()

    def snapshot(self) -> nn.Module:
        """At rank 0 a model with the mean of the replicas, elsewhere the own one."""
        if self._rank:
            return self._model
        found = self._ask(_Asked.REPLICAS)
        return mean_model(self._model, [self._shaped(replica) for replica in found])

    def end_leg(self) -> None:
        """A mean that is known reaches all replicas; a round that some have not entered is given
        up; all updates are told."""
        with self._changed:
            self._has_ended_leg = True
        while self._has_ended_leg or self._untold:
            self._wait(lambda: bool(self._untold) or not self._has_ended_leg)
            self._tell()

    def state(self) -> DenseState:
        """At rank 0: the mean of the replicas, all of them and their optimisers."""
        if self._rank:
            raise RuntimeError(f"rank {self._rank} holds no replica but its own")
        mean = capture(self.snapshot(), [], version=self._version, rounds=self.rounds)
        for saved in self._ask(_Asked.STATES):
            content = io.BytesIO(saved.numpy().tobytes())
            own = torch.load(content, map_location="cpu", weights_only=True)
            mean["replicas"].append(own["replica"])
            mean["optimizers"].append(own["optimizer"])
        return mean

    def go_on(self, state: DenseState) -> None:
        """Take replica, optimiser and counters of a checkpoint."""
        with self._changed:
            saved, optimizers = state["replicas"], state["optimizers"]
            # Another number of ranks begins with the mean, as in one process.
            same = len(saved) == self._ranks
            load_model(self._model, {"model": saved[self._rank] if same else state["model"]})
            own = optimizers[self._rank % len(optimizers)]
            load_optimizers([self._optimizer], {"optimizers": [own]})
            self._version, self.rounds = state["version"], state["rounds"]

    def close(self) -> None:
        """All is done; every rank calls it."""
        with self._changed:
            self._asked = _Asked.CLOSE
        self._meeting.join()

    def _ask(self, what: _Asked) -> list[Tensor]:
        """What all ranks say to this, in their order."""
        with self._asking:
            with self._changed:
                self._asked = what
            self._wait(lambda: self._asked is _Asked.NOTHING)
            return self._heard

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(holds, timeout=0.2):
                self._stop.check()

    def _tell(self) -> None:
        """While nothing is held: who is told may evaluate, and then asks for the replicas."""
        while self._untold:
            self._on_update(*self._untold.popleft())

    def _leave(self, step: int) -> None:
        assert self._mean is not None and self._snapshot is not None  # as the phase says
        move(self._model, self._mean, self._snapshot)
        self._phase = _Phase.LEFT
        self._done.append((Kind.AVERAGE_WRITE, step, 0.0, 0))

    def _begin_round(self) -> None:
        with self._changed:
            self._phase, self.rounds = _Phase.APART, self.rounds + 1
            self._snapshot = self._mean = None
            self._due_s = time.perf_counter() + self._period_s

    # The thread beside training.

    def _meet_on(self) -> None:
        try:
            while self._meet():
                time.sleep(MEET_S)
        except RunStopped:
            pass
        except BaseException as error:
            self._stop.set(error)

    def _meet(self) -> bool:
        """Once; whether there will be another time."""
        with self._changed:
            done, self._done = self._done, []
            own = [self._asked, self._has_ended_leg, self._phase, len(done)]
        said = self._gather(torch.tensor(own, dtype=torch.float64))
        asked, ended, phases, counts = said.int().unbind(1)
        if counts.any():
            rows = torch.tensor(done, dtype=torch.float64).reshape(-1, 4)
            for rank, told in enumerate(self._gather_rows(rows)):
                self._note(rank, told)
        if asked[0] in (_Asked.REPLICAS, _Asked.STATES):
            replicas = asked[0] == _Asked.REPLICAS
            heard = self._gather_rows(self._flat_replica() if replicas else self._saved())
            with self._changed:
                self._heard = heard
                self._asked = _Asked.NOTHING
                self._changed.notify_all()
        if (phases == _Phase.ENTERED).all():
            self._average()
        elif (phases == _Phase.LEFT).all():
            self._begin_round()
        if ended.all():
            self._end_leg(phases)
        return not (asked == _Asked.CLOSE).all()

    def _average(self) -> None:
        assert self._snapshot is not None  # as the phase says
        replicas = [[own] for own in self._gather(_flat(self._snapshot))]
        with self._changed:
            self._mean, self._phase = self._shaped(mean_weights(replicas)[0]), _Phase.KNOWN

    def _end_leg(self, phases: Tensor) -> None:
        """No rank is in a step. What is done here is told at the next meeting."""
        with self._changed:
            if self._phase is _Phase.KNOWN:
                self._leave(self._last_step)
            elif not phases.any():
                self._has_ended_leg = False
                self._changed.notify_all()
            elif (phases == _Phase.APART).any():
                self._begin_round()  # the one before is given up

    def _note(self, rank: int, done: Tensor) -> None:
        """At rank 0 it is written down, and told."""
        if self._rank:
            return
        for kind, step, loss, samples in done.tolist():
            is_push = kind == Kind.DENSE_PUSH
            version = self._version if is_push else self.rounds
            self._recorder.record(Kind(int(kind)), rank, int(step), ALL, version)
            if is_push:
                self._version += 1
                self._untold.append((loss, int(samples)))

    def _flat_replica(self) -> Tensor:
        with self._changed:
            return _flat(snapshot_of(self._model))

    def _saved(self) -> Tensor:
        """Bytes."""
        buffer = io.BytesIO()
        with self._changed:
            replica, optimizer = self._model.state_dict(), self._optimizer.state_dict()
            torch.save({"replica": replica, "optimizer": optimizer}, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        own = list(self._model.parameters())
        parts = torch.split(flat, [parameter.numel() for parameter in own])
        return [part.view_as(parameter) for part, parameter in zip(parts, own, strict=True)]

    def _gather(self, own: Tensor) -> Tensor:
        """Of all ranks, in their order: [ranks, ...]."""
        work, found = self._group.all_gather(own)
        self._group.wait(work, "replica")
        return found

    def _gather_rows(self, own: Tensor) -> list[Tensor]:
        """The same where ranks have different numbers of rows."""
        counts = self._gather(torch.tensor(len(own))).tolist()
        padded = own.new_zeros((max(counts), *own.shape[1:]))
        padded[: len(own)] = own
        return [of_rank[:n] for of_rank, n in zip(self._gather(padded), counts, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """On the CPU, one behind the other."""
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])
