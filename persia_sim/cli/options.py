"""The options of the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from persia_sim.model.scenario import DenseHome, Discipline, WorkerChoice
from persia_sim.words.vocabulary import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to simulate. An option that the mode does not read is an error."""

    cluster: str = "gcp-100t"
    """v100-2021-09, v100-paper, gcp-100t, this-host, or a .toml file."""
    workload: str = "criteo-syn5"
    """taobao-ad, avazu-ad, criteo-ad, kwai-video, criteo-syn1 to criteo-syn5, or a .toml file."""
    mode: Mode = Mode.HYBRID
    """How rows and dense weights are kept up to date."""
    tau: int | Literal["unbounded"] | None = None
    """Window in steps, or unbounded (raw_hybrid, hybrid, async); default: 4."""
    permits: int | None = None
    """Batches of a rank in flight (raw_hybrid, hybrid, async); default: unlimited."""
    ahead: int | None = None
    """Steps of prefetch (lookahead); default: 4."""
    lookahead: Literal["reread", "forwarded"] = "reread"
    """Stale rows of a prefetch are read again, or kept up to date by the workers (lookahead)."""
    merge_pushes: bool | None = None
    """Apply the pushes of a step at once (raw_hybrid, hybrid); default: yes."""
    average_every_s: float | None = None
    """Seconds between two rounds (async_averaging); default: 0.5."""
    ranks: int | None = None
    """GPUs; default: the preset's."""
    batch_per_rank: int | None = None
    """Samples of a rank in a step, in [1, 65535]; default: the workload's."""
    servers: int | None = None
    """Server hosts; default: the preset's."""
    workers: int | None = None
    """Embedding worker hosts; default: the preset's."""
    loaders: int | None = None
    """Data loader processes; default: as many a rank as the preset has."""
    discipline: Discipline = Discipline.FLUID
    """How NICs are shared."""
    dense_on_nics: bool = False
    """All-reduce and averaging share the NICs with rows; default: a network of their own."""
    dense_home: DenseHome | None = None
    """Where the dense weights are (async): servers, one or apart; default: servers."""
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
    detect_s: float | None = None
    """Until a crash is noticed; default: 1 (assumed)."""
    restart_s: float | None = None
    """Until the process runs again; default: 5 (assumed)."""
    load_s: float | None = None
    """Until its checkpoint is loaded; default: 2 (assumed)."""
    full_recovery: bool = False
    """A server's crash takes everybody back to the checkpoint, not only that server."""
    checkpoint_every_s: float | None = None
    """Useful seconds between checkpoints; default: none is written."""
    checkpoint_s: float | None = None
    """Training stands still this long for a checkpoint; default: 1 (assumed)."""
    steps: int = 100
    """Batches that each rank trains."""
    seed: int = 0
    """Root of all random draws."""
    rows: str = "fp16-lean"
    """How servers keep rows: fp16-lean, f32-adagrad or f32-sgd."""
    evict: bool = False
    """Keep the most recently used rows when not all fit, instead of refusing."""
    after_samples: float | None = None
    """Samples since the servers were empty; default: full, or as full as they will be."""
    profile: Path | None = None
    """Measured costs (JSON, written by `python -m runtime profile`) instead of the catalogue's."""
    sensitivity: bool = False
    """Also run it with each resource ten per cent faster (a run for each)."""
    timeline: Path | None = None
    """Write a Chrome trace (open it in Perfetto) of the steps in --timeline-steps."""
    timeline_steps: tuple[int, int] | None = None
    """First and last step of the timeline; default: ten from the middle."""
    trace: Path | None = None
    """Write the order of events (.npz), which the replay can execute."""
    trace_shards: bool = False
    """One row of the trace for each server process, not for all of them together; a replay then
    needs that number of shards."""
