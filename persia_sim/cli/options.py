"""The options of the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from persia_sim.model.scenario import DenseHome, Discipline, WorkerChoice
from persia_sim.words.vocabulary import (
    DEFAULT_AHEAD,
    DEFAULT_AVERAGE_EVERY_S,
    DEFAULT_TAU,
    Mode,
)


def unset(means: str) -> Any:
    """What `--help` says of an option that is not given, in place of None."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {means})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to simulate. An option that the mode does not read is an error."""

    cluster: str = "gcp-100t"
    """v100-2021-09, v100-paper, gcp-100t, this-host, or a .toml file."""
    workload: str = "criteo-syn5"
    """taobao-ad, avazu-ad, criteo-ad, kwai-video, criteo-syn1 to criteo-syn5, or a .toml file."""
    mode: Mode = Mode.HYBRID
    """How rows and dense weights are kept up to date."""
    tau: int | None = DEFAULT_TAU
    """Window in steps, or none: unbounded (raw_hybrid, hybrid, async)."""
    permits: Annotated[int | None, unset("unlimited")] = None
    """Batches of a rank in flight (raw_hybrid, hybrid, async)."""
    ahead: Annotated[int | None, unset(str(DEFAULT_AHEAD))] = None
    """Steps of prefetch (lookahead)."""
    lookahead: Literal["reread", "forwarded"] = "reread"
    """Stale rows of a prefetch are read again, or kept up to date by the workers (lookahead)."""
    merge_pushes: Annotated[bool | None, unset("yes")] = None
    """Apply the pushes of a step at once (raw_hybrid, hybrid)."""
    average_every_s: Annotated[float | None, unset(str(DEFAULT_AVERAGE_EVERY_S))] = None
    """Seconds between two rounds (async_averaging)."""
    ranks: Annotated[int | None, unset("the preset's")] = None
    """GPUs."""
    batch_per_rank: Annotated[int | None, unset("the workload's")] = None
    """Samples of a rank in a step, in [1, 65535]."""
    servers: Annotated[int | None, unset("the preset's")] = None
    """Server hosts."""
    workers: Annotated[int | None, unset("the preset's")] = None
    """Embedding worker hosts."""
    loaders: Annotated[int | None, unset("as many a rank as the preset has")] = None
    """Data loader processes."""
    discipline: Discipline = Discipline.FLUID
    """How NICs are shared."""
    dense_on_nics: bool = False
    """All-reduce and averaging share the NICs with rows; else they have a network of their own."""
    dense_home: Annotated[DenseHome | None, unset("servers")] = None
    """Where the dense weights are (async): servers, one or apart."""
    worker_choice: WorkerChoice = WorkerChoice.SPREAD
    """Which embedding worker serves a batch."""
    gpu_cv: float = 0.05
    """Coefficient of variation of a rank's compute time."""
    server_cv: float = 0.0
    """Coefficient of variation of one request at one server."""
    slow: tuple[str, ...] = ()
    """Stragglers, KIND:INDEXxFACTOR and perhaps @FROM-TO in seconds: rank:0x3 worker:5x2@1-4."""
    crash: tuple[str, ...] = ()
    """Crashes, KIND:INDEX@SECONDS: rank:3@2.5 server:0@1 worker:7@4."""
    detect_s: Annotated[float | None, unset("1 (assumed)")] = None
    """Seconds until a crash is noticed."""
    restart_s: Annotated[float | None, unset("5 (assumed)")] = None
    """Seconds until the process runs again."""
    load_s: Annotated[float | None, unset("2 (assumed)")] = None
    """Seconds until its checkpoint is loaded."""
    full_recovery: bool = False
    """A server's crash takes everybody back to the checkpoint, not only that server."""
    checkpoint_every_s: Annotated[float | None, unset("none is written")] = None
    """Useful seconds between checkpoints."""
    checkpoint_s: Annotated[float | None, unset("1 (assumed)")] = None
    """Seconds that training stands still for a checkpoint."""
    steps: int = 100
    """Batches that each rank trains."""
    seed: int = 0
    """Root of all random draws."""
    rows: str = "fp16-lean"
    """How servers keep rows: fp16-lean, f32-adagrad or f32-sgd."""
    evict: bool = False
    """Keep the most recently used rows when not all fit, instead of refusing."""
    after_samples: Annotated[float | None, unset("full, or as full as they will be")] = None
    """Samples since the servers were empty."""
    profile: Path | None = None
    """Measured costs (JSON, written by `python -m runtime profile`) instead of the catalogue's."""
    sensitivity: bool = False
    """Also run it with each resource ten per cent faster (a run for each)."""
    timeline: Path | None = None
    """Write a Chrome trace (open it in Perfetto) of the steps in --timeline-steps."""
    timeline_steps: Annotated[tuple[int, int] | None, unset("ten from the middle")] = None
    """First and last step of the timeline."""
    trace: Path | None = None
    """Write the order of events (.npz), which the replay can execute."""
    trace_shards: bool = False
    """One row of the trace for each server process, not for all of them together; a replay then
    needs that number of shards."""
