"""How long training stands still for a snapshot of the rows, and what it feels afterwards.

One thread looks up and pushes without a break while another takes snapshots: in turn by copying all
rows inside the cut, and behind training, as a checkpoint does it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.benching.wide import full_store, handle_of, uniform_ids
from experiments.benching.windows import ForeignLoad
from experiments.options import Count, StudyOptions
from experiments.tables import aligned, write_csv
from persia_sim.words.schema import Within
from runtime.data.batch import Field, Layout
from runtime.embedding.config import RowOptimizer, TableConfig

GOAL_S = 0.05
"""Of the pause, for 1 M rows of width 16 with Adagrad."""
WAYS = ("inside the cut", "behind training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StudyOptions):
    """The pause of a snapshot of one Adagrad table in milliseconds, and the steps around it."""

    rows: Annotated[int, Within(1, 10**9)] = 1_000_000
    """Rows of the table."""
    dim: Annotated[int, Within(1, 4096)] = 16
    """Floats in a row."""
    batch: Count = 16_384
    """Ids of a step, drawn uniformly."""
    rounds: Count = 10
    """Snapshots of each way, in turn."""
    around_s: Annotated[float, Within(0.001, 3600)] = 0.3
    """Seconds of training before each snapshot."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One snapshot."""

    round: int
    way: str
    pause_s: float
    """How long pushes and lookups were held back."""
    whole_s: float
    """Until the copy was there."""
    step_s: float
    """Median step before."""
    step_meanwhile_s: float
    """Median step that overlaps the snapshot."""
    longest_step_s: float
    """Of those."""
    copy_bytes: int
    """Of the columns that are handed on."""
    more_bytes: float
    """Most resident memory meanwhile beyond that before; NaN where the system does not say."""
    foreign_cores: float
    """Cores that other processes used."""


def run(options: Options) -> None:
    """Measure, print the table and the goal, write the CSV."""
    from tqdm import tqdm

    config = TableConfig(dim=options.dim, optimizer=RowOptimizer(kind="adagrad", lr=0.05))
    layout = Layout(fields=(Field(name="a"),))
    store = full_store(layout, config, [uniform_ids(np.arange(options.rows))])
    found = []
    for number in tqdm(range(options.rounds), desc="rounds", disable=None):
        for way in WAYS:
            with ForeignLoad() as load:
                values = _take(options, store, way, seed=number)
            found.append(Taken(number, way, *values, foreign_cores=load.cores))
    write_csv(options.out / "bench_snapshot.csv", [asdict(one) for one in found])
    print(table(found))
    own = [t.pause_s for t in found if t.way == WAYS[1]]
    verdict = "met" if np.median(own) < GOAL_S else "MISSED"
    print(f"goal: pause behind training < {1e3 * GOAL_S:.0f} ms: {verdict}")
    if options.rows != 1_000_000 or options.dim != 16:
        print("(the goal is for 1 M rows and dim 16)")
    print(str(options.out / "bench_snapshot.csv"))


def table(found: list[Taken]) -> str:
    """A line a way: medians, and of the pause the longest."""
    lines = []
    for way in WAYS:
        own = [one for one in found if one.way == way]
        columns = "pause_s", "whole_s", "step_s", "step_meanwhile_s", "longest_step_s"
        medians = [1e3 * float(np.median([getattr(o, c) for o in own])) for c in columns]
        longest = 1e3 * max(o.pause_s for o in own)
        numbers = [medians[0], longest, *medians[1:]]
        sizes = [
            float(np.median([getattr(o, c) for o in own])) for c in ("copy_bytes", "more_bytes")
        ]
        foreign = float(np.median([o.foreign_cores for o in own]))
        words = [f"{n:.2f}" for n in numbers] + [f"{size / 1e6:.0f}" for size in sizes]
        lines.append([way, *words, f"{foreign:.2f}"])
    head = ["copied", "pause [ms]", "longest", "until copied", "step before", "step meanwhile"]
    return aligned([*head, "longest step", "copy [MB]", "memory [MB]", "foreign cores"], lines)


def _take(
    options: Options, store: Any, way: str, seed: int
) -> tuple[float, float, float, float, float, int, float]:
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
        snapshots = store.collect_snapshots()
        copied = time.perf_counter()
        until = len(ends)
        while len(ends) == until and trainer.is_alive():  # the step that saw the end
            time.sleep(0.001)
    finally:
        stop.set()
        trainer.join()
    more_bytes = _resident_bytes(reset_peak=False) - before_bytes
    columns = snapshots[0]["rows"].values()
    copy_bytes = sum(a.nbytes for a in columns if isinstance(a, np.ndarray))
    at, steps = np.array(ends[1:]), np.diff(ends)
    before, meanwhile = at < began, (at >= began) & (at - steps <= copied)
    typical = float(np.median(steps[before])) if before.any() else float("nan")
    during = steps[meanwhile]
    median, longest = float(np.median(during)), float(during.max())
    return pause_s, copied - began, typical, median, longest, copy_bytes, more_bytes


def _resident_bytes(*, reset_peak: bool) -> float:
    """Resident memory now, from which a new peak is looked for; or the peak since then (Linux)."""
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return float("nan")
    name = "VmRSS" if reset_peak else "VmHWM"
    (line,) = [one for one in status.splitlines() if one.startswith(name)]
    return 1024.0 * int(line.split()[1])
