"""Dense gradients in buckets, as the backward pass finishes them, each summed at once; and whether
processes sum in rank order or in a ring."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from runtime.config import TrainConfig
from runtime.dense.optimizer import DenseGradients

MAX_BUCKET_BYTES = 25 * 2**20
"""Source: the default of torch's DistributedDataParallel."""
MIN_BUCKET_BYTES = 2**20
"""A smaller one costs the latency of a message and hides next to nothing. Source: the first bucket
of torch's DistributedDataParallel."""
LEAST_BUCKETS = 4
"""Of a network of four times ``MIN_BUCKET_BYTES`` or more, so that it overlaps, too."""


def bucket_plan(model: nn.Module) -> list[list[int]]:
    """Parameter numbers by bucket, in the order in which the backward pass finishes them.

    A small network is one bucket, so one message. Parameters that the user froze are in none.
    """
    sizes = {
        number: p.numel() * p.element_size()
        for number, p in enumerate(model.parameters())
        if p.requires_grad
    }
    share = -(-sum(sizes.values()) // LEAST_BUCKETS)
    limit = min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, share))
    plan: list[list[int]] = []
    filled = limit + 1
    for number in reversed(sizes):
        if filled + sizes[number] > limit:
            plan.append([])
            filled = 0
        plan[-1].append(number)
        filled += sizes[number]
    return plan


RING_FROM_BYTES = 128 * 1024
"""What a network between hosts carries in the latency of a message: 10 Gbit/s for 0.1 ms
(assumed). With W ranks and a network of n bytes a ring takes 2 (W - 1) messages in turn and
2 (W - 1) / W n bytes, a gather W - 1 and (W - 1) n."""


def gathers(config: TrainConfig, model: nn.Module) -> bool:
    """Whether ranks that are processes gather the dense gradients and add them up in rank order.

    It follows from the network's bytes and the ranks' number alone, so that a run that goes on, or
    is done again, adds up alike: gather for two ranks, and for more where the messages that it
    saves take longer than the bytes that it adds.

    >>> from runtime.config import SyncConfig
    >>> two, eight = (TrainConfig(sync=SyncConfig(ranks=ranks)) for ranks in (2, 8))
    >>> small, large = nn.Linear(100, 100), nn.Linear(1000, 1000)
    >>> [gathers(config, model) for config in (two, eight) for model in (small, large)]
    [True, True, True, False]
    """
    if config.engine.device != "cpu":  # NCCL's messages take microseconds
        return False
    trained = [p for p in model.parameters() if p.requires_grad]
    size_bytes = sum(p.numel() * p.element_size() for p in trained)
    ranks = config.sync.ranks
    return size_bytes * (ranks - 2) <= RING_FROM_BYTES * ranks


class Buckets:
    """One rank's gradients of a step, bucket by bucket, as its backward pass finishes them."""

    def __init__(self, model: nn.Module) -> None:
        self.plan = bucket_plan(model)
        self.parameters = list(model.parameters())
        self.missing: list[int] = []
        """Per bucket, gradients that the backward pass has not given yet."""
        self.end_step(None)

    def end_step(self, gradients: DenseGradients | None) -> bool:
        """The backward pass is over, and gave these; None: the rank is left out of the step.

        Whether what was taken of full buckets does not count: then, and where a gradient has come
        again behind that (a layer used twice behind reentrant checkpoints).
        """
        spoilt = gradients is None or min(self.missing, default=0) < 0
        none: DenseGradients = [None] * len(self.parameters)
        # In one assignment: another rank's thread may be summing them.
        self.gradients = none if gradients is None else list(gradients)
        self.missing = [len(bucket) for bucket in self.plan]
        return spoilt

    def hook(self, full: Callable[[int], None]) -> None:
        """Have ``full`` called during every backward pass as soon as a bucket is."""

        # A parameter's hooks are out of the garbage collector's sight: what they held would live as
        # long as the process, and with a run's weights its store and its connections.
        living = weakref.ref(self)
        call = weakref.WeakMethod(full)

        def ready(number: int, bucket: int, parameter: Tensor) -> None:
            buckets, is_full = living(), call()
            if buckets is None or is_full is None:
                return
            buckets.gradients[number] = parameter.grad
            buckets.missing[bucket] -= 1
            if not buckets.missing[bucket]:
                is_full(bucket)

        for bucket, numbers in enumerate(self.plan):
            for number in numbers:
                hook = partial(ready, number, bucket)
                parameter = self.parameters[number]
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
