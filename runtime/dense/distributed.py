"""The dense all-reduce among ranks that are processes: one rank here, the others elsewhere.

A bucket of gradients is a flat buffer that sets out as soon as it is full: during the backward pass
(hooks on the parameters) or after it. Every rank sends the same buckets in the same order, zeros
where it has no gradient, and then a small vector: whether it is left out, its loss and samples,
which parameters it has gradients of, what its loss scale saw. So all ranks decide the same, and
none can wait for a bucket that another one does not send.

``ring`` adds up in torch's order; ``gather`` brings every rank's buffer here and adds up in rank
order, which gives the bytes of ranks that are threads, for W times the memory and traffic.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from persia_sim.base.trace import TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.group import RankGroup
from runtime.dense.optimizer import Buckets, DenseGradients, LossScale, sum_in_rank_order
from runtime.dense.rules import BarrierRule, OnUpdate, StepGradients
from runtime.stop import Stop

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
        self._group = group
        self._scale = scale
        self._stop = stop
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
            sums, facts = self._reduce.join(given.gradients, self._vector(given))
        self._scale.take_in(bool(facts[:, _FINITE].any()), bool(facts[:, _OVERFLOW].any()))
        losses = facts[facts[:, _LEFT_OUT] == 0, _LOSS].tolist()
        self.update(self._version, sums, losses, int(facts[:, _SAMPLES].sum()))

    def _vector(self, given: StepGradients) -> list[float]:
        _, step, gradients, loss, samples = given
        finite, overflow = self._scale.reports
        present = gradients if gradients is not None else [None] * len(self._parameters)
        left_out = gradients is None
        facts = [left_out, 0, 0.0 if left_out else float(loss), samples, finite, overflow, step]
        return [*map(float, facts), *(float(g is not None) for g in present)]


class ProcessAllReduce:
    """Sums one step's gradients over the processes, bucket by bucket."""

    def __init__(self, model: nn.Module, group: RankGroup, *, gathers: bool) -> None:
        self._group = group
        self._gathers = gathers
        self._buckets = Buckets(model)
        self._plan = self._buckets.plan
        self._parameters = self._buckets.parameters
        self._sizes = [
            [self._parameters[number].numel() for number in numbers] for numbers in self._plan
        ]
        filled = zip(self._plan, map(sum, self._sizes), strict=True)
        self._buffers = [self._buffer(*bucket) for bucket in filled]
        self._sent: list[tuple[dist.Work, Tensor]] = []
        """Buckets under way; when the work is done, [n] the sum, or [ranks, n] of every rank."""
        self._failed: Exception | None = None

    def overlap(self) -> None:
        """Hook the parameters, so that a full bucket sets out during backward."""
        self._buckets.hook(self._send_full)

    def join(
        self, gradients: DenseGradients | None, vector: list[float]
    ) -> tuple[DenseGradients, Tensor]:
        """The sums over the ranks that are not left out, and the vectors of all: [ranks, ...].

        ``gradients`` None leaves this rank out (not finite).
        """
        if self._failed is not None:
            raise self._failed

        # Buckets that the backward pass has not sent yet go out now, whether this rank counts or
        # not: all-reduce needs everybody.
        sent_before = len(self._sent)
        spoilt = self._buckets.end_step(gradients)
        while len(self._sent) < len(self._plan):
            self._send(len(self._sent))

        # The ranks tell each other whether something was sent that must not count.
        vector[_SPOILT] = float(spoilt and sent_before > 0)
        flags = torch.tensor(vector, dtype=torch.float64, device=self._group.wire)
        work, rows = self._group.all_gather(flags)
        self._group.wait(work, f"gradients of step {vector[_STEP]:.0f}")

        # They must be at one step, else their sums would mean nothing.
        facts = rows.cpu()
        if (facts[:, _STEP] != facts[0, _STEP]).any():
            raise RuntimeError(
                f"the ranks met at different steps: {facts[:, _STEP].int().tolist()}"
            )

        # Where a rank was left out after it had begun to send, all send again without it.
        self._wait()
        if facts[:, _SPOILT].any():
            self._sent.clear()  # something was sent that must not count: again, without it
            for bucket in range(len(self._plan)):
                self._send(bucket)
            self._wait()

        # The sums of those that count; the next step begins empty.
        sums = self._sums(facts)
        self._sent.clear()
        self._buckets.end_step(None)
        return sums, facts

    def _wait(self) -> None:
        for work, _ in self._sent:
            self._group.wait(work, "gradients")

    def _sums(self, facts: Tensor) -> DenseGradients:
        """A parameter has a sum where any rank that counts has a gradient."""
        counts = (facts[:, _LEFT_OUT] == 0)[:, None] & (facts[:, _PRESENT:] > 0)
        have = counts.tolist()
        sums: DenseGradients = [None] * len(self._parameters)
        for bucket, sizes, (_, gathered) in zip(self._plan, self._sizes, self._sent, strict=True):
            for number, part in zip(bucket, torch.split(gathered, sizes, -1), strict=True):
                parameter = self._parameters[number]
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
            while len(self._sent) < len(self._plan) and not self._buckets.missing[len(self._sent)]:
                self._send(len(self._sent))
        except Exception as error:  # told by join: here it would look like the user's model's
            self._failed = error

    def _send(self, bucket: int) -> None:
        buffer = self._buffers[bucket]
        parts = torch.split(buffer, self._sizes[bucket])
        for number, part in zip(self._plan[bucket], parts, strict=True):
            gradient = self._buckets.gradients[number]
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1))
        if self._gathers:
            self._sent.append(self._group.all_gather(buffer))
        else:
            self._sent.append((self._group.all_reduce(buffer), buffer))

    def _buffer(self, bucket: list[int], size: int) -> Tensor:
        like = self._parameters[bucket[0]]  # the dtype of all is that of the precision
        pinned = like.is_cuda and self._group.wire.type == "cpu"  # gloo, for ranks that share a GPU
        return torch.empty(size, dtype=like.dtype, device=self._group.wire, pin_memory=pinned)
