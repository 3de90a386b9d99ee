"""A case run by the concurrent executor: its throughput, the seconds of its stages, staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.validating.cases import Case
from experiments.validating.spans import RowWork, TimedCalls, TimedRows, TimedSpans
from experiments.validating.stages import Measured, Stages, measured_stages
from persia_sim.words.staleness import staleness_in_steps
from persia_sim.words.vocabulary import Mode


@dataclass(frozen=True, slots=True)
class Found:
    """One run without its first third."""

    samples_per_s: float
    stale_steps: float
    measured: Measured

    @staticmethod
    def read(kept: Mapping[str, Any]) -> Found:
        """From its fields in a file."""
        own = dict(kept["measured"])
        stages = {name: Stages(**own.pop(name)) for name in ("wall", "cpu")}
        return Found(kept["samples_per_s"], kept["stale_steps"], Measured(**stages, **own))


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

    from runtime.engines.parts import assemble_for
    from runtime.engines.threads import ConcurrentRun
    from runtime.order.merge import whole_trace

    torch.set_num_threads(1)
    source: Any = Drawn(case.source(), steps * case.updates_per_step * case.batch)
    spans, work = TimedSpans(), RowWork()
    parts = replace(assemble_for(case.config(steps), source), spans=spans)
    store: Any = parts.store
    if case.servers:
        parts.worker.store = TimedCalls(store, work)  # type: ignore[assignment]
    else:  # rows of this process, one server for each shard
        for server in store.servers:
            server.rows = TimedRows(server.rows, work)
    parts.meter.start()
    ConcurrentRun(parts).run()
    first = steps // 3
    facts = {"mode": str(case.mode), "ranks": case.ranks}
    late = staleness_in_steps(whole_trace(parts.recorder, store.recorded(), facts))
    if case.servers:
        store.close()
    kept = late.missing_steps[late.step >= first]
    measured = measured_stages(spans.timed, work, first, case.mode is Mode.LOOKAHEAD)
    return Found(
        parts.meter.samples_per_s(skip=first * case.updates_per_step), float(kept.mean()), measured
    )
