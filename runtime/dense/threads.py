"""The dense all-reduce among ranks that are threads of one process.

A bucket is summed by the rank that is last to have its gradients ready, in rank order, so the bytes
do not depend on who that is. Overlapped, this happens inside the backward passes (hooks on the
parameters); exposed, after them. All ranks' models share one memory, so one optimiser step serves
them all, between two barriers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from runtime.dense.optimizer import DenseGradients, bucket_plan, sum_in_rank_order
from runtime.stop import RunStopped, Stop


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
        self._barrier = threading.Barrier(self._ranks, action=self._finish_step)
        self._stop = stop
        stop.on_stop(self._barrier.abort)

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
        try:
            self._barrier.wait()  # a rank that never comes waits elsewhere, and is told of there
        except threading.BrokenBarrierError:
            raise RunStopped from None
        self._stop.check()

    def _contribute(self, bucket: int) -> None:
        with self._lock:
            self._arrived[bucket] += 1
            last = self._arrived[bucket] == self._ranks
        if last:
            self._sum(bucket)

    def _sum(self, bucket: int) -> None:
        for number in self._plan[bucket]:
            self._sums[number] = sum_in_rank_order([found[number] for found in self._found])

    def _finish_step(self) -> None:
        """Runs in one rank's thread while the others stand at the barrier."""
        try:
            self._sum_and_update()
        except BaseException as error:
            self._stop.set(error)  # before the barrier breaks for the others
            raise

    def _sum_and_update(self) -> None:
        for bucket, arrived in enumerate(self._arrived):
            if arrived < self._ranks or self._any_left_out:
                self._sum(bucket)
        self._any_left_out = False
        self._arrived = [0] * len(self._plan)
        self._update(self._sums)
        self._sums = [None] * len(self._sums)
