"""async_averaging among processes, as one rule: this rank's replica, and at rank 0 the host."""

from __future__ import annotations

from torch import nn

from persia_sim.words.trace import TraceRecorder
from runtime.config import TrainConfig
from runtime.dense.group import RankGroup
from runtime.dense.optimizer import DenseGradients
from runtime.dense.rules import DenseRule, OnUpdate
from runtime.dense.state import DenseState
from runtime.engines.processes.dense_host import AveragingHost
from runtime.engines.processes.dense_ranks import AveragedReplica
from runtime.stop import Stop


class AveragingRule(DenseRule):
    """Between two legs all ranks meet, so that a round is either over or given up."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        group: RankGroup,
        recorder: TraceRecorder,
        told: OnUpdate,
        stop: Stop,
    ) -> None:
        self._group, self._meetings = group, 0
        for parameter in model.parameters():
            group.broadcast(parameter)
        self._host = None
        if group.rank == 0:
            self._host = AveragingHost(model, group.ranks, recorder, told, stop)
        name = group.gather("replicas", self._host.name if self._host else "")[0]
        self._replica = AveragedReplica(config, name, group.rank, model, stop)
        self._replica.settle()
        self._meet()  # the host knows all ranks

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._replica.model(rank)

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: give a snapshot to the round that is due, or take its mean in."""
        self._replica.begin_step(rank, step)

    def end_step(
        self, rank: int, step: int, gradients: DenseGradients | None, loss: float, samples: int
    ) -> None:
        """One step of the rank's own optimiser."""
        self._replica.end_step(rank, step, gradients, loss, samples)

    def snapshot(self) -> nn.Module:
        """At rank 0 a model with the mean of the replicas, elsewhere the own one."""
        return self._host.snapshot() if self._host else self._replica.snapshot()

    def end_leg(self) -> None:
        """A mean that is known reaches all replicas; a round that some have not entered is given
        up; all updates have been told."""
        self._replica.settle()
        self._meet()  # all snapshots that will come are there
        if self._host is not None:
            self._host.give_round_up()
        self._meet()
        self._replica.settle()  # a mean has come, if there is one
        self._replica.take_mean_in()
        self._replica.settle()
        self._meet()
        if self._host is not None:
            self._host.settle()

    def state(self) -> DenseState:
        """At rank 0: the mean of the replicas, all of them and their optimisers."""
        if self._host is None:
            raise RuntimeError(f"rank {self._group.rank} holds no replica but its own")
        return self._host.state()

    def go_on(self, state: DenseState) -> None:
        """Take replica, optimiser and counters of a checkpoint."""
        self._replica.go_on(state)
        if self._host is not None:
            self._host.go_on(state)

    def close(self) -> None:
        """All is done; every rank calls it."""
        self._replica.close()
        self._meet()
        if self._host is not None:
            self._host.close()

    def _meet(self) -> None:
        self._meetings += 1
        self._group.gather(f"averaging {self._meetings}", "")
