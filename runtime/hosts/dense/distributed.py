"""The dense all-reduce among ranks that are processes: one rank here, the others elsewhere.

A bucket of gradients is a flat buffer that sets out as soon as it is full: during the backward pass
(hooks on the parameters) or after it. Every rank sends the same buckets in the same order, zeros
where it has no gradient. With the last one, which sets out after the backward pass, go the facts of
the rank: whether it is left out, its loss and samples, which parameters it has gradients of. So all
ranks decide the same, none can wait for a bucket that another one does not send, and a small
network costs one message a step.

``ring`` adds up in torch's order; ``gather`` brings every rank's buffer here and adds up in rank
order, which gives the bytes of ranks that are threads, for W times the memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from persia_sim.base.trace import TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.buckets import Buckets, gathers
from runtime.dense.optimizer import DenseGradients, sum_in_rank_order
from runtime.dense.rules import BarrierRule, OnUpdate, StepGradients
from runtime.hosts.dense.group import RankGroup
from runtime.stop import Stop

_LEFT_OUT, _SPOILT, _LOSS, _SAMPLES, _STEP, _PRESENT = range(6)
"""Columns of the facts; from the last one on, a column per parameter."""
_FACT_BYTES = 8


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
        stop: Stop,
    ) -> None:
        """``recorder``: the updates are recorded at rank 0 alone."""
        recorder = recorder if group.rank == 0 else TraceRecorder(keep=False)
        super().__init__(config, model, recorder, on_update)
        self._group = group
        self._stop = stop
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            group.broadcast(parameter)
        self._reduce = ProcessAllReduce(model, group, gathers=gathers(config, model))
        if overlapped and group.ranks > 1:
            self._reduce.overlap()

    def end_step(self, given: StepGradients) -> None:
        """Send what is not yet sent, and wait until all ranks' gradients are here."""
        self._group.status = f"trains step {given.step}"
        with self._stop.working():  # the others may still compute: nobody is stuck
            sums, facts = self._reduce.join(given.gradients, self._facts(given))
        losses = facts[facts[:, _LEFT_OUT] == 0, _LOSS].tolist()
        self.update(self._version, sums, losses, int(facts[:, _SAMPLES].sum()))

    def _facts(self, given: StepGradients) -> list[float]:
        _, step, gradients, loss, samples = given
        present = gradients if gradients is not None else [None] * len(self._parameters)
        left_out = gradients is None
        facts = [left_out, 0, 0.0 if left_out else float(loss), samples, step]
        return [*map(float, facts), *(float(g is not None) for g in present)]


class ProcessAllReduce:
    """Sums one step's gradients over the processes, bucket by bucket."""

    def __init__(self, model: nn.Module, group: RankGroup, *, gathers: bool) -> None:
        self._group = group
        self._gathers = gathers
        self._buckets = Buckets(model)
        self._plan = self._buckets.plan or [[]]  # where nothing is trained, facts travel alone
        self._last = len(self._plan) - 1
        self._parameters = self._buckets.parameters
        self._sizes = [
            [self._parameters[number].numel() for number in numbers] for numbers in self._plan
        ]
        # A ring adds up: there each rank has a place of its own for its facts, among zeros.
        self._facts_size = _PRESENT * _FACT_BYTES + len(self._parameters)
        places = 1 if gathers else group.ranks
        self._sizes[-1].append(places * self._facts_size)
        filled = zip(self._plan, map(sum, self._sizes), strict=True)
        self._buffers = [self._buffer(*bucket) for bucket in filled]
        self._sent: list[tuple[dist.Work, Tensor]] = []
        """Buckets under way; when the work is done, [n] the sum, or [ranks, n] of every rank."""
        self._failed: Exception | None = None

    def overlap(self) -> None:
        """Hook the parameters, so that a full bucket sets out during backward."""
        self._buckets.hook(self._send_full)

    def join(
        self, gradients: DenseGradients | None, facts: list[float]
    ) -> tuple[DenseGradients, Tensor]:
        """The sums over the ranks that are not left out, and the facts of all: [ranks, ...].

        ``gradients`` None leaves this rank out (not finite).
        """
        if self._failed is not None:
            raise self._failed

        # Buckets that the backward pass has not sent yet go out now, whether this rank counts or
        # not: all-reduce needs everybody. With the last one the ranks tell each other whether
        # something was sent that must not count.
        sent_before = len(self._sent)
        spoilt = self._buckets.end_step(gradients)
        facts[_SPOILT] = float(spoilt and sent_before > 0)
        while len(self._sent) < self._last:
            self._send(len(self._sent))
        self._put_facts(facts)
        self._send(self._last)
        self._wait(facts)

        # They must be at one step, else their sums would mean nothing.
        of_ranks = self._facts_of_ranks()
        if (of_ranks[:, _STEP] != of_ranks[0, _STEP]).any():
            raise RuntimeError(
                f"the ranks met at different steps: {of_ranks[:, _STEP].int().tolist()}"
            )

        # Where a rank was left out after it had begun to send, all send again without it; the last
        # bucket was sent when that was known.
        if of_ranks[:, _SPOILT].any():
            last = self._sent[self._last]
            self._sent.clear()
            for bucket in range(self._last):
                self._send(bucket)
            self._sent.append(last)
            self._wait(facts)

        # The sums of those that count; the next step begins empty.
        sums = self._sums(of_ranks)
        self._sent.clear()
        self._buckets.end_step(None)
        return sums, of_ranks

    def _wait(self, facts: list[float]) -> None:
        """For the newest first: where the device does one after the other, that is all."""
        for work, _ in reversed(self._sent):
            self._group.wait(work, f"gradients of step {facts[_STEP]:.0f}")

    def _put_facts(self, facts: list[float]) -> None:
        """Write this rank's facts behind the last bucket, in numbers that any dtype holds and a sum
        with zeros leaves as they are: a byte each."""
        of_bytes = torch.tensor(facts[:_PRESENT], dtype=torch.float64).view(torch.uint8)
        numbers = torch.cat([of_bytes, torch.tensor(facts[_PRESENT:], dtype=torch.uint8)])
        places = self._buffers[-1][-self._sizes[-1][-1] :].view(-1, self._facts_size)
        places.zero_()
        places[0 if self._gathers else self._group.rank].copy_(numbers)

    def _facts_of_ranks(self) -> Tensor:
        """The facts of all ranks, float64 [ranks, ...]."""
        _, gathered = self._sent[self._last]
        numbers = gathered[..., -self._sizes[-1][-1] :].reshape(-1, self._facts_size).cpu()
        of_bytes, present = numbers.to(torch.uint8).tensor_split([_PRESENT * _FACT_BYTES], dim=1)
        # A copy: of one rank the slice counts as contiguous, whatever the length of its row.
        of_bytes = of_bytes.clone(memory_format=torch.contiguous_format)
        return torch.cat([of_bytes.view(torch.float64), present.double()], dim=1)

    def _sums(self, facts: Tensor) -> DenseGradients:
        """A parameter has a sum where any rank that counts has a gradient."""
        counts = (facts[:, _LEFT_OUT] == 0)[:, None] & (facts[:, _PRESENT:] > 0)
        have = counts.tolist()
        sums: DenseGradients = [None] * len(self._parameters)
        for bucket, sizes, (_, gathered) in zip(self._plan, self._sizes, self._sent, strict=True):
            for number, part in zip(bucket, torch.split(gathered, sizes, -1), strict=False):
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
        """Send the buckets that are full, in the order that all ranks keep; but for the last, with
        which the facts go."""
        try:
            while len(self._sent) < self._last and not self._buckets.missing[len(self._sent)]:
                self._send(len(self._sent))
        except Exception as error:  # told by join: here it would look like the user's model's
            self._failed = error

    def _send(self, bucket: int) -> None:
        buffer = self._buffers[bucket]
        parts = torch.split(buffer, self._sizes[bucket])
        for number, part in zip(self._plan[bucket], parts, strict=False):  # facts stand behind
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
        like = self._parameters[bucket[0]] if bucket else torch.empty(0)  # of all is the dtype
        pinned = like.is_cuda and self._group.wire.type == "cpu"  # gloo, for ranks that share a GPU
        return torch.empty(size, dtype=like.dtype, device=self._group.wire, pin_memory=pinned)
