"""async_averaging among ranks that are processes: threads beside training meet again and again.

Training only copies weights when a snapshot is due, and adds the mean when it is there: it waits
for nobody. At a meeting all see what all say, so all decide the same. Rank 0 writes down what each
rank has done, in that rank's order; a round's moves come behind all of its snapshots.
"""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from persia_sim.base.trace import ALL, Kind, TraceRecorder
from runtime.config import TrainConfig
from runtime.dense import averaging
from runtime.dense.averaging import mean_model, mean_weights, move, snapshot_of
from runtime.dense.optimizer import make_optimizer
from runtime.dense.rules import DenseRule, OnUpdate, StepGradients
from runtime.dense.state import DenseState, capture, load_model, load_optimizers
from runtime.hosts.dense.group import RankGroup
from runtime.stop import RunStopped, Stop

MEET_S = 0.05
"""Between two meetings."""


class Phase(IntEnum):
    """Where a rank stands in the round of averaging that is under way."""

    APART = 0
    ENTERED = 1
    """Its snapshot is taken."""
    KNOWN = 2
    """The mean is here."""
    LEFT = 3
    """Its replica has moved."""


class DistributedReplicas(DenseRule):
    """This rank's own replica, moved towards the mean of all now and then."""

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
        """``recorder`` and ``on_update`` are those of rank 0 alone."""
        self._rank = group.rank
        self._ranks = group.ranks
        self._model = model
        self._recorder = recorder
        self._on_update = on_update
        self._stop = stop
        self._period_s = averaging.PERIOD_S

        # All replicas begin with the weights of rank 0.
        for parameter in model.parameters():
            group.broadcast(parameter)
        self._optimizer = make_optimizer(config, model)

        # Where this rank stands in the round of averaging, and what rank 0 has still to hear of it.
        self._changed = threading.Condition()  # held while the replica is in the middle of a step
        self._phase = Phase.APART
        self._due_s = time.perf_counter() + self._period_s
        self._snapshot: list[Tensor] | None = None
        self._mean: list[Tensor] | None = None
        self._last_step = self._version = 0
        self.rounds = 0
        """Rounds of averaging, begun or over; the number of the one under way."""
        self._done: list[tuple[Kind, int, float, int]] = []  # rank 0 has not heard of it
        self._untold: deque[tuple[float, int]] = deque()
        self._asking = threading.Lock()
        self._states = list[dict[str, Any]]()
        self._wants_states = self._has_ended_leg = self._closes = False

        # Rounds are met in a thread, so that training waits for nobody.
        self._group = group.beside()
        self._meeting = threading.Thread(target=self._meet_on, name="average", daemon=True)
        self._meeting.start()

    def model(self, rank: int) -> nn.Module:
        """The rank's own replica."""
        return self._model

    def begin_step(self, rank: int, step: int) -> None:
        """Between two steps: give a snapshot to the round that is due, or take its mean in."""
        with self._changed:
            due = self._phase is Phase.APART and time.perf_counter() >= self._due_s
            if due and step > 0:
                self._snapshot = snapshot_of(self._model)
                self._phase = Phase.ENTERED
                self._done.append((Kind.AVERAGE_READ, step - 1, 0.0, 0))
            self._take_mean_in(step - 1)

    def end_step(self, given: StepGradients) -> None:
        """One step of the rank's own optimiser."""
        with self._changed:
            self._optimizer.step(given.gradients)
            self._done.append((Kind.DENSE_PUSH, given.step, float(given.loss), given.samples))
            self._last_step = given.step
        self._tell()

    def snapshot(self) -> nn.Module:
        """At rank 0 a model with the mean of the replicas, elsewhere the own one."""
        if self._rank:
            return self._model
        names = [name for name, _ in self._model.named_parameters()]
        replicas = [state["replica"] for state in self._all_states()]
        return mean_model(self._model, [[state[name] for name in names] for state in replicas])

    def end_leg(self) -> None:
        """A mean that is known reaches all replicas; a round that some have not entered is given
        up; all updates are told."""
        with self._changed:
            self._has_ended_leg = True
        while self._has_ended_leg or self._untold:
            self._wait(lambda: bool(self._untold) or not self._has_ended_leg)
            self._tell()

    def state_dict(self) -> DenseState:
        """At rank 0: the mean of the replicas, all of them and their optimisers."""
        if self._rank:
            raise RuntimeError(f"rank {self._rank} holds no replica but its own")
        mean = capture(self.snapshot(), [], version=self._version, rounds=self.rounds)
        for state in self._all_states():
            mean["replicas"].append(state["replica"])
            mean["optimizers"].append(state["optimizer"])
        return mean

    def load_state_dict(self, state: DenseState) -> None:
        """Take replica, optimiser and counters of a checkpoint."""
        with self._changed:
            saved = state["replicas"]
            optimizers = state["optimizers"]
            # Another number of ranks begins with the mean, as in one process.
            same = len(saved) == self._ranks
            load_model(self._model, {"model": saved[self._rank] if same else state["model"]})
            optimizer = optimizers[self._rank % len(optimizers)]
            load_optimizers([self._optimizer], {"optimizers": [optimizer]})
            self._version = state["version"]
            self.rounds = state["rounds"]

    def close(self) -> None:
        """All is done; every rank calls it."""
        with self._changed:
            self._closes = True
        self._meeting.join()

    def _all_states(self) -> list[dict[str, Any]]:
        """At rank 0 replica and optimiser of each rank, between two of its steps."""
        with self._asking:
            self._wants_states = True
            self._wait(lambda: not self._wants_states)
            return self._states

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(holds, timeout=0.2):
                self._stop.check()

    def _tell(self) -> None:
        """While nothing is held: who is told may evaluate, and then asks for the replicas."""
        while self._untold:
            self._on_update(*self._untold.popleft())

    def _take_mean_in(self, step: int) -> None:
        if self._mean is None or self._snapshot is None:
            return
        move(self._model, self._mean, self._snapshot)
        self._phase = Phase.LEFT
        self._mean = None
        self._done.append((Kind.AVERAGE_WRITE, step, 0.0, 0))

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
        # All ranks gather where each stands; whatever follows, all do alike.
        with self._changed:
            done = self._done
            self._done = []
            flags = [self._wants_states, self._has_ended_leg, self._closes, self._phase, len(done)]
        gathered = self._gathered(torch.tensor(list(map(int, flags))))
        wants_states, ended, closes, phases, counts = gathered.unbind(1)

        # Updates that were done since, and the states that somebody wants.
        if counts.any():
            rows = torch.tensor(done, dtype=torch.float64).reshape(-1, 4)
            self._write_down(self._gathered_rows(rows))
        if wants_states.any():
            self._show_states()

        # When every replica is in the round, its mean is taken; when all have left, the round is
        # over.
        if (phases == Phase.ENTERED).all() and self._snapshot is not None:
            flat = torch.cat([one.reshape(-1).cpu() for one in self._snapshot])
            (mean,) = mean_weights([[replica] for replica in self._gathered(flat)])
            with self._changed:
                parts = torch.split(mean, [one.numel() for one in self._snapshot])
                self._mean = [p.view_as(s) for p, s in zip(parts, self._snapshot, strict=True)]
                self._phase = Phase.KNOWN
        elif (phases == Phase.LEFT).all():
            self._end_round()

        # A leg ends for all at once.
        if ended.all():
            self._end_leg(phases)
        return not closes.all()

    def _end_round(self) -> None:
        with self._changed:
            self._phase = Phase.APART
            self.rounds = self.rounds + 1
            self._snapshot = self._mean = None
            self._due_s = time.perf_counter() + self._period_s

    def _end_leg(self, phases: Tensor) -> None:
        """No rank is in a step. Who moves says so at the next meeting."""
        with self._changed:
            if not phases.any():
                self._has_ended_leg = False
                self._changed.notify_all()
            elif (phases == Phase.APART).any():
                self._end_round()  # given up
            else:
                self._take_mean_in(self._last_step)

    def _write_down(self, of_ranks: list[Tensor]) -> None:
        """What each rank has done since the last meeting, at rank 0."""
        for rank, done in enumerate(of_ranks if self._rank == 0 else []):
            for kind, step, loss, samples in done.tolist():
                is_update = kind == Kind.DENSE_PUSH
                version = self._version if is_update else self.rounds
                self._recorder.record(Kind(int(kind)), rank, int(step), ALL, version)
                if is_update:
                    self._version += 1
                    self._untold.append((loss, int(samples)))

    def _show_states(self) -> None:
        """All ranks to rank 0."""
        buffer = io.BytesIO()
        with self._changed:
            replica = self._model.state_dict()
            optimizer = self._optimizer.state_dict()
            torch.save({"replica": replica, "optimizer": optimizer}, buffer)
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        streams = [io.BytesIO(one.numpy().tobytes()) for one in self._gathered_rows(packed)]
        if self._rank == 0:
            states = [torch.load(one, map_location="cpu", weights_only=True) for one in streams]
            with self._changed:
                self._states = states
                self._wants_states = False
                self._changed.notify_all()

    def _gathered(self, row: Tensor) -> Tensor:
        """The rows of all ranks, in their order: [ranks, ...]."""
        work, result = self._group.all_gather(row)
        self._group.wait(work, "replica")
        return result

    def _gathered_rows(self, rows: Tensor) -> list[Tensor]:
        """The rows of all ranks, which may have different numbers of them."""
        counts = self._gathered(torch.tensor(len(rows))).tolist()
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        return [rows[:n] for rows, n in zip(self._gathered(padded), counts, strict=True)]
