"""A question of bench-engines: does a long run take more memory than its rows?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.tables import table, write_csv
from persia_sim.words.vocabulary import Mode
from runtime.config import DataConfig, EngineConfig, ModelConfig, SyncConfig, TrainConfig

MEMORY_GOAL_BYTES = 1 << 30
"""Beside the rows."""
READINGS = 100
_GIB = 1 << 30


def status_bytes(name: str) -> int:
    """A size that Linux tells of this process: RssAnon is resident memory that is in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{name} of /proc/self/status is not there; this is measured on Linux only")


def memory(options: Any) -> None:
    """One run of many small steps: its memory at the start, in the middle and at the end."""
    from tqdm import tqdm

    from runtime.data.open import open_source
    from runtime.engines.open import assemble_for
    from runtime.run.training import Training

    steps, samples = options.window_steps, options.window_steps * options.batch
    (ranks,), (shards,), (tau,) = options.ranks, options.servers, options.windows
    config = TrainConfig(
        sync=SyncConfig(mode=Mode.HYBRID, tau=tau, ranks=ranks),
        batch=options.batch,
        steps=steps,
        engine=EngineConfig(executor=options.executor, shards=shards),
        data=DataConfig(name="synthetic", rows=samples),
        model=ModelConfig(hidden=(8,)),
    )
    parts = assemble_for(config, open_source("synthetic", rows=samples))
    training = Training(parts, {})
    readings: list[dict[str, float]] = []
    every = max(1, steps // READINGS)
    with tqdm(total=steps, unit=" steps", disable=None) as bar:

        def note(count: int) -> None:
            bar.update()
            done = parts.meter.updates
            if done % every == 0:
                rows = parts.store.resident_bytes
                readings.append(
                    {"steps": done, "rows_bytes": rows, "all_bytes": status_bytes("RssAnon")}
                )

        training.begin(lambda *_: None, note)
        training.engine.run()
    trace = parts.recorder.finish()
    path = write_csv(options.out / "bench_memory.csv", readings)
    columns = {
        "steps": "{steps:,.0f}",
        "rows [GiB]": lambda r: f"{r['rows_bytes'] / _GIB:.3f}",
        "beside them [GiB]": lambda r: f"{(r['all_bytes'] - r['rows_bytes']) / _GIB:.3f}",
    }
    print(table([readings[0], readings[len(readings) // 2], readings[-1]], columns))
    beside = max(r["all_bytes"] - r["rows_bytes"] for r in readings)
    print(
        f"{len(trace):,} events in the trace; at most {beside / _GIB:.3f} GiB beside the rows; goal"
        f" {MEMORY_GOAL_BYTES / _GIB:.3f}: {'met' if beside <= MEMORY_GOAL_BYTES else 'MISSED'}"
    )
    print(str(path))
