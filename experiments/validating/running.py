"""A case run by the concurrent executor: its throughput, the seconds of its stages, staleness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.validating.cases import Case
from experiments.validating.stages import RowWork, Stages, measured_stages
from persia_sim.words.staleness import staleness_in_steps
from persia_sim.words.vocabulary import Mode


@dataclass(frozen=True, slots=True)
class Found:
    """One run without its first third."""

    samples_per_s: float
    stale_steps: float
    stages: Stages


class TimedRows:
    """The rows of a shard; how long the server's own work on them takes is noted."""

    def __init__(self, rows: Any, work: RowWork) -> None:
        self._rows, self._work = rows, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def read(self, handle: Any, create: bool, batch_step: int) -> None:
        """As the rows'."""
        _timed(self._work.read, handle.step, self._rows.read, handle, create, batch_step)

    def refresh(self, handle: Any, batch_step: int) -> Any:
        """As the rows'."""
        return _timed(self._work.refresh, handle.step, self._rows.refresh, handle, batch_step)

    def update(self, pushes: Any, update: int, step: int) -> Any:
        """As the rows'; the step of an update is counted from 1."""
        return _timed(self._work.update, step - 1, self._rows.update, pushes, update, step)


class Drawn:
    """A stream whose first samples are drawn already, so that no rank draws while it is timed."""

    def __init__(self, source: Any, samples: int) -> None:
        self._source = source
        self._chunks: list[Any] = []
        for chunk in source.chunks("train"):
            self._chunks.append(chunk)
            samples -= chunk.size
            if samples <= 0:
                break

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def chunks(self, part: str) -> Any:
        """As the stream's; the training part ends with what is drawn."""
        return iter(self._chunks) if part == "train" else self._source.chunks(part)


def run_case(case: Case, steps: int) -> Found:
    """Train so many steps in this process and measure them."""
    import torch

    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    torch.set_num_threads(1)
    source: Any = Drawn(case.source(), steps * case.batch)
    parts = assemble(case.config(steps), source)
    work = RowWork([], [], [])
    store: Any = parts.store  # rows of this process, one server for each shard
    for server in store.servers:
        server.rows = TimedRows(server.rows, work)
    parts.meter.start()
    ConcurrentRun(parts).run()
    first = steps // 3
    late = staleness_in_steps(parts.recorder.finish(mode=str(case.mode), ranks=case.ranks))
    kept = late.missing_steps[late.step >= first]
    stages = measured_stages(parts.spans.spans, work, first, case.mode is Mode.LOOKAHEAD)
    return Found(parts.meter.samples_per_s(skip=first), float(kept.mean()), stages)


def _timed(notes: list[tuple[int, float]], step: int, work: Callable[..., Any], *told: Any) -> Any:
    began = time.perf_counter()
    found = work(*told)
    notes.append((step, time.perf_counter() - began))
    return found
