"""What lookups of a run under constant lag miss of their rows, weighed by how often ids are read.

The run is the very one of the executor `lag`: at a few steps the rows of some test samples are
peeked at twice, which changes nothing: when step s looks its rows up, and when the last push that
it missed has been applied. The difference is what the lookup missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from persia_sim.theory.drift import drift, relative_drift
from persia_sim.words.trace import Event, Kind
from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.embedding.store import Handle
from runtime.order.executor import OrderedRun, lag_order
from runtime.rank.parts import Parts, assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """At one step of a run."""

    step: int
    drift: float
    """sum_id p_id ||d_id||^2, over the rows of a sample."""
    relative: float
    """The same over sum_id p_id ||row_id||^2."""
    predictions: float
    """Mean square of what the missed updates change in the predicted probabilities."""


def measured(config: TrainConfig, steps: Sequence[int], samples: Batch) -> list[Drift]:
    """Train as ``config`` says, and measure the drift of the rows of ``samples`` at these steps.

    Steps from 1 on that the run reaches; a step that misses nothing has drift 0.
    """
    data = config.data
    source = open_source(data.name, data.dir, data.rows, data.skip_bad_rows, keep=data.keep)
    torch.set_num_threads(config.engine.threads)
    parts = assemble(config, source)
    found: list[Drift] = []
    probe = _Probe(parts, samples, found)
    OrderedRun(parts).run(probe.watch(lag_order(config, parts.feed), frozenset(steps)))
    return found


class _Probe:
    def __init__(self, parts: Parts, samples: Batch, found: list[Drift]) -> None:
        self._parts, self._samples, self._found = parts, samples, found
        self._last_rank = parts.config.sync.ranks - 1

    def watch(self, order: Iterable[Event], steps: frozenset[int]) -> Iterator[Event]:
        """The order as it is; behind a ``yield`` its event has been carried out."""
        as_read: dict[int, Handle] = {}
        pushed = -1
        for event in order:
            yield event
            if event.kind == Kind.LOOKUP and event.rank == self._last_rank and event.step in steps:
                as_read[event.step] = self._parts.store.peek(self._samples)
            elif event.kind == Kind.PUSH:
                pushed = event.step
            for step in [s for s in as_read if s <= pushed + 1]:
                self._found.append(self._compare(step, as_read.pop(step)))

    def _compare(self, step: int, late: Handle) -> Drift:
        fresh = self._parts.store.peek(self._samples)
        shares, missed, rows = [], [], []
        for name, plan in fresh.plans.items():
            shares.append(np.bincount(plan.inverse, minlength=len(plan.ids)) / self._samples.size)
            missed.append(np.square(fresh.values[name] - late.values[name]).sum(1) ** 0.5)
            rows.append(np.square(fresh.values[name]).sum(1) ** 0.5)
        share, miss, row = (np.concatenate(part) for part in (shares, missed, rows))
        change = self._predict(fresh) - self._predict(late)
        return Drift(
            step=step,
            drift=drift(share, miss[:, None]),
            relative=relative_drift(share, miss[:, None], row[:, None]),
            predictions=float(np.square(change).mean()),
        )

    def _predict(self, handle: Handle) -> np.ndarray:
        learner = self._parts.learner
        return learner.predict(learner.model, self._samples, self._parts.worker.pool(handle))
