"""Questions of bench-engines about the memory of rows: the pause of a snapshot, a long run.

For a snapshot one thread looks up and pushes without a break while another takes snapshots: in turn
by copying all rows inside the cut, and behind training, as a checkpoint does it. ``options`` are
those of bench-engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benching.wide import full_store, handle_of, uniform_ids
from experiments.benching.windows import ForeignLoad
from experiments.tables import Column, table, write_csv
from persia_sim.words.vocabulary import Mode
from runtime.config import DataConfig, EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Field, Layout
from runtime.embedding.config import RowOptimizer, TableConfig

PAUSE_GOAL_S = 0.05
"""Of the pause, for 1 M rows of width 16 with Adagrad."""
WAYS = ("inside the cut", "behind training")
MEMORY_GOAL_BYTES = 1 << 30
"""Beside the rows."""
READINGS = 100
_GIB = 1 << 30
Taken = dict[str, Any]
"""One snapshot as the CSV has it."""


def snapshot(options: Any) -> None:
    """How long training stands still for a snapshot of the rows, and what it feels afterwards."""
    from tqdm import tqdm

    config = TableConfig(dim=options.dim, optimizer=RowOptimizer(kind="adagrad", lr=0.05))
    layout = Layout(fields=(Field(name="a"),))
    store = full_store(layout, config, [uniform_ids(np.arange(options.rows))])
    found = []
    for number in tqdm(range(options.rounds), desc="rounds", disable=None):
        for way in WAYS:
            with ForeignLoad() as load:
                taken = _take(options, store, way, seed=number)
            found.append({"round": number, "way": way, **taken, "foreign_cores": load.cores})
    path = write_csv(options.out / "bench_snapshot.csv", found)
    print(_snapshot_table(found))
    own = [t["pause_s"] for t in found if t["way"] == WAYS[1]]
    verdict = "met" if np.median(own) < PAUSE_GOAL_S else "MISSED"
    print(f"goal: pause behind training < {1e3 * PAUSE_GOAL_S:.0f} ms: {verdict}")
    if options.rows != 1_000_000 or options.dim != 16:
        print("(the goal is for 1 M rows and dim 16)")
    print(str(path))


def _snapshot_table(found: Sequence[Taken]) -> str:
    """A line a way: medians, and of the pause the longest."""

    def median(column: str, scale: float, form: str) -> Column:
        return lambda own: format(scale * float(np.median([o[column] for o in own])), form)

    groups = [[one for one in found if one["way"] == way] for way in WAYS]
    columns: dict[str, Column] = {
        "copied": lambda own: own[0]["way"],
        "pause [ms]": median("pause_s", 1e3, ".2f"),
        "longest": lambda own: f"{1e3 * max(o['pause_s'] for o in own):.2f}",
        "until copied": median("whole_s", 1e3, ".2f"),
        "step before": median("step_s", 1e3, ".2f"),
        "step meanwhile": median("step_meanwhile_s", 1e3, ".2f"),
        "longest step": median("longest_step_s", 1e3, ".2f"),
        "copy [MB]": median("copy_bytes", 1e-6, ".0f"),
        "memory [MB]": median("more_bytes", 1e-6, ".0f"),
        "foreign cores": median("foreign_cores", 1.0, ".2f"),
    }
    return table(groups, columns)


def _take(options: Any, store: Any, way: str, seed: int) -> Taken:
    stop, ends = threading.Event(), [time.perf_counter()]

    def train() -> None:
        draws = np.random.default_rng(seed)
        gradient = np.full((options.batch, options.dim), 1e-3, np.float32)
        while not stop.is_set():
            ids = uniform_ids(draws.integers(0, options.rows, options.batch))
            handle = handle_of(store, ids)
            store.read(handle, 0)
            store.push(0, [(handle, {"rows": gradient[: len(handle.values["rows"])]})])
            ends.append(time.perf_counter())

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        time.sleep(options.around_s)
        before_bytes = _resident_bytes(reset_peak=True)
        began = time.perf_counter()
        with store.consistent_cut():
            held = time.perf_counter()
            store.freeze_snapshots(only_changed=False, track=False)
            if way == WAYS[0]:
                store.servers[0].rows.tables["rows"].copy_slice(options.rows)
            pause_s = time.perf_counter() - held
        snapshot = store.servers[0].rows.collect()
        copied = time.perf_counter()
        until = len(ends)
        while len(ends) == until and trainer.is_alive():  # the step that saw the end
            time.sleep(0.001)
    finally:
        stop.set()
        trainer.join()
    more_bytes = _resident_bytes(reset_peak=False) - before_bytes
    columns = snapshot["rows"].values()
    copy_bytes = sum(a.nbytes for a in columns if isinstance(a, np.ndarray))
    at, steps = np.array(ends[1:]), np.diff(ends)
    before, meanwhile = at < began, (at >= began) & (at - steps <= copied)
    during = steps[meanwhile]
    return {
        "pause_s": pause_s,  # for which pushes and lookups were held back
        "whole_s": copied - began,
        "step_s": float(np.median(steps[before])) if before.any() else float("nan"),
        "step_meanwhile_s": float(np.median(during)),  # of those that overlap the snapshot
        "longest_step_s": float(during.max()),
        "copy_bytes": copy_bytes,  # of the columns that are handed on
        "more_bytes": more_bytes,  # of resident memory at most; NaN where the system does not say
    }


def _resident_bytes(*, reset_peak: bool) -> float:
    """Resident memory now, from which a new peak is looked for; or the peak since then (Linux)."""
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        return status_bytes("VmRSS" if reset_peak else "VmHWM")
    except OSError:
        return float("nan")


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
