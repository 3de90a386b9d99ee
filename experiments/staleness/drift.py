"""How far rows move while a run under constant lag goes on, weighed by how often ids are read.

The run is the very one of the executor `constant_lag`: at a few steps the rows of some test samples
are peeked at twice, which changes nothing: when step s looks its rows up, and when the last push
that it missed has been applied, or so many more. The difference is what the lookup missed, or, in a
run that misses nothing, what one would miss that came so many updates late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.result_cache import ResultCache
from experiments.staleness.frequency import first_samples
from experiments.sweep import PRELOADED
from persia_sim.base.trace import Event, Kind
from persia_sim.theory.convergence import drift, relative_drift
from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.embedding.batch_rows import Handle
from runtime.engines.open import source_of
from runtime.order.executor import OrderedRun, constant_lag_order
from runtime.rank.parts import Parts, assemble

PROBED_SAMPLES = 4096
"""How many of the first samples of the test part are peeked at."""
Drift = dict[str, float]
"""Drift at one ``step``, so many ``updates`` later than what its lookup missed. ``drift``: sum_id
p_id ||d_id||^2 over the rows of a sample; ``relative``: the same over sum_id p_id ||row_id||^2;
``predictions``: mean square of what the missed updates change in predicted probabilities."""


def measured(
    config: TrainConfig, steps: Sequence[int], samples: Batch, updates: Sequence[int] = (0,)
) -> list[Drift]:
    """Train as ``config`` says, and measure the drift of the rows of ``samples`` from the lookups
    of these steps until so many ``updates`` after the last push that they missed.

    A step that the run does not reach, or not so long before its end, is left out.
    """
    torch.set_num_threads(config.engine.threads)
    parts = assemble(config, source_of(config))
    drifts_met: list[Drift] = []

    def watched() -> Iterator[Event]:
        """The order as it is; behind a ``yield`` its event has been carried out."""
        as_read: dict[tuple[int, int], Handle] = {}
        pushed = -1
        last_rank = config.sync.ranks - 1
        for event in constant_lag_order(config, parts.feed):
            yield event

            # Peek when the last rank of a probed step has looked its rows up.
            if event.kind == Kind.LOOKUP and event.rank == last_rank and event.step in steps:
                read = parts.store.peek(samples)
                as_read.update({(event.step, more): read for more in updates})
            elif event.kind == Kind.PUSH:
                pushed = event.step

            # Peek again when what it missed, and so many more updates, have been applied.
            for step, more in [key for key in as_read if sum(key) <= pushed + 1]:
                late = as_read.pop((step, more))
                drift_now = _drift_of(parts, samples, late)
                drifts_met.append({"step": step, "updates": more, **drift_now})

    OrderedRun(parts).run(watched())
    return drifts_met


def _drift_of(parts: Parts, samples: Batch, late: Handle) -> Drift:
    """The drift of rows since they were read."""
    # Of each row: its share of the samples, how far it has moved, and its norm.
    fresh = parts.store.peek(samples)
    shares = []
    missed = []
    rows = []
    for name, plan in fresh.plans.items():
        shares.append(np.bincount(plan.inverse, minlength=len(plan.ids)) / samples.size)
        missed.append(np.square(fresh.values[name] - late.values[name]).sum(1) ** 0.5)
        rows.append(np.square(fresh.values[name]).sum(1) ** 0.5)
    share, miss, row = (np.concatenate(part) for part in (shares, missed, rows))

    # What the same model predicts with either rows.
    learner = parts.learner
    pool = parts.worker.pool
    now, then = (learner.predict(learner.model, samples, pool(read)) for read in (fresh, late))
    return {
        "drift": drift(share, miss[:, None]),
        "relative": relative_drift(share, miss[:, None], row[:, None]),
        "predictions": float(np.square(now - then).mean()),
    }


def drifts(
    wanted: Mapping[str, tuple[TrainConfig, int]],
    probes: int,
    root: Path,
    jobs: int,
    updates: Sequence[int] = (0,),
) -> ResultCache:
    """The drift at so many steps of each run, by label; what ``root`` does not hold is measured.

    ``wanted``: label -> config and dense updates of a run; ``updates`` as `measured` takes them.
    """
    results = ResultCache(root / "drift.jsonl")
    work = {label: partial(_drifts_of, *run, probes, updates) for label, run in wanted.items()}
    results.fill(work, "drift", jobs, PRELOADED)
    return results


def _drifts_of(
    config: TrainConfig, length: int, probes: int, updates: Sequence[int]
) -> list[Drift]:
    """The work of one process: drifts at steps from where lookups are as late as they get."""
    held_out = first_samples(source_of(config), "test", PROBED_SAMPLES)
    last = max(1, length - 1)
    first_step = min(config.sync.window or 0, last)
    last_step = max(0, last - max(updates))
    steps = np.linspace(first_step, last_step, probes).round().astype(int)
    return measured(config, sorted(set(steps.tolist())), held_out, updates)
