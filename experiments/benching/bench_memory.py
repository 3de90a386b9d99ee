"""The memory of a long run beside its rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from experiments.options import Count, Ranks, StudyOptions, Tau
from experiments.tables import aligned, write_csv
from persia_sim.words.schema import Within

GOAL_BYTES = 1 << 30
READINGS = 100
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StudyOptions):
    """One run of many small steps; its memory is read a hundred times on the way."""

    steps: Count = 1_000_000
    """Steps of all ranks."""
    ranks: Ranks = 8
    """NN workers W."""
    shards: Annotated[int, Within(1, 4096)] = 4
    """Embedding servers."""
    batch: Count = 16
    """Samples per dense update."""
    tau: Tau = 4
    """Bound of mode hybrid."""
    executor: Literal["lag", "concurrent"] = "lag"
    """Who carries the steps out: one thread, or a thread a rank."""


def run(options: Options) -> None:
    """Train, then print memory at the start, in the middle and at the end, and the goal."""
    from tqdm import tqdm

    from persia_sim.words.vocabulary import Mode
    from runtime.config import DataConfig, EngineConfig, ModelConfig, SyncConfig, TrainConfig
    from runtime.data.open import open_source
    from runtime.engines.open import assemble_for
    from runtime.run.training import Training

    samples = options.steps * options.batch
    config = TrainConfig(
        sync=SyncConfig(mode=Mode.HYBRID, tau=options.tau, ranks=options.ranks),
        batch=options.batch,
        steps=options.steps,
        engine=EngineConfig(executor=options.executor, shards=options.shards),
        data=DataConfig(name="synthetic", rows=samples),
        model=ModelConfig(hidden=(8,)),
    )
    parts = assemble_for(config, open_source("synthetic", rows=samples))
    training = Training(parts, {})
    readings: list[dict[str, float]] = []
    every = max(1, options.steps // READINGS)
    with tqdm(total=options.steps, unit=" steps", disable=None) as bar:

        def note(count: int) -> None:
            bar.update()
            done = parts.meter.updates
            if done % every == 0:
                rows = parts.store.resident_bytes
                readings.append({"steps": done, "rows_bytes": rows, "all_bytes": own_bytes()})

        training.begin(lambda *_: None, note)
        training.engine.run()
    trace = parts.recorder.finish()
    write_csv(options.out / "bench_memory.csv", readings)
    shown = [readings[0], readings[len(readings) // 2], readings[-1]]
    cells = [
        [f"{r['steps']:,.0f}", _gib(r["rows_bytes"]), _gib(r["all_bytes"] - r["rows_bytes"])]
        for r in shown
    ]
    print(aligned(["steps", "rows [GiB]", "beside them [GiB]"], cells))
    beside = max(r["all_bytes"] - r["rows_bytes"] for r in readings)
    print(
        f"{len(trace):,} events in the trace; at most {_gib(beside)} GiB beside the rows;"
        f" goal {_gib(GOAL_BYTES)}: {'met' if beside <= GOAL_BYTES else 'MISSED'}"
    )
    print(f"{options.out / 'bench_memory.csv'}")


def own_bytes() -> int:
    """Resident memory of this process that is in no file (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    raise ValueError("bench-memory reads RssAnon of /proc/self/status, which is not there")


def _gib(count: float) -> str:
    return f"{count / _GIB:.3f}"
