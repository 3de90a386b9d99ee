"""Threads against processes: samples/s of ranks and servers in one process, or in several."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from experiments.benching.windows import Window, interleave, paired_ratio, summarize, verdict
from experiments.checks import COUNT, between, each_between, each_known, not_empty
from experiments.tables import aligned, write_csv
from persia_sim.words.vocabulary import Mode
from runtime.run.folder import read_summary

GOAL = 0.9
"""Processes reach at least this share of the samples/s of threads at equal cores."""
ENGINES = {
    "threads": "ranks and servers in one process",
    "servers": "ranks in one process, each server in its own",
    "processes": "each rank and each server in its own",
}
MOST_RUN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Whole runs in every engine, in turn, each a start of its own; samples/s without the start."""

    engines: tuple[str, ...] = tuple(ENGINES)
    """threads, servers, processes."""
    modes: tuple[str, ...] = tuple(map(str, Mode))
    """Modes of training."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """NN workers."""
    servers: tuple[int, ...] = (1, 2)
    """Embedding servers (shards, where they are in the ranks' process)."""
    latency_s: tuple[float, ...] = (0.0,)
    """Seconds added to every lookup and every push, as a network would."""
    batch: int = 512
    """Samples of one dense update."""
    hidden: tuple[int, ...] = (256, 128)
    """Widths of the MLP."""
    dim: int = 16
    """Width of the rows."""
    steps: int = 150
    """Dense updates of a run; the first tenth is warm-up."""
    data: str = "synthetic"
    """Data set."""
    rounds: int = 5
    """Interleaved rounds."""
    most_foreign_cores: float = 0.15
    """A run beside which other processes used more cores than this is repeated once."""
    out: Path = Path("runs/scaling")
    """Folder of the CSV."""

    def __post_init__(self) -> None:
        not_empty(engines=self.engines, modes=self.modes, ranks=self.ranks, servers=self.servers)
        not_empty(latency_s=self.latency_s)
        each_known(ENGINES, engines=self.engines)
        each_known(dict.fromkeys(map(str, Mode)), modes=self.modes)
        each_between(1, 64, ranks=self.ranks, servers=self.servers)
        each_between(0.0, 10.0, latency_s=self.latency_s)
        not_empty(hidden=self.hidden)
        each_between(1, 2**20, hidden=self.hidden)
        between(*COUNT, batch=self.batch, rounds=self.rounds, dim=self.dim)
        between(20, COUNT[1], steps=self.steps)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration in one engine."""

    mode: str
    ranks: int
    servers: int
    latency_s: float
    engine: str

    @property
    def of(self) -> str:
        """What is compared between engines."""
        late = f", {1e3 * self.latency_s:g} ms" if self.latency_s else ""
        return f"{self.mode}, {self.ranks} ranks, {self.servers} servers{late}"

    @property
    def name(self) -> str:
        """Of this case alone."""
        return f"{self.of}: {self.engine}"


def cases(options: Options) -> list[Case]:
    """All of them; the engines of a configuration stand side by side."""
    return [
        Case(mode, ranks, servers, latency_s, engine)
        for mode in options.modes
        for ranks in options.ranks
        for servers in options.servers
        for latency_s in options.latency_s
        for engine in options.engines
    ]


def run(options: Options) -> None:
    """Measure, and print each configuration with the engines beside each other."""
    from tqdm import tqdm

    every = cases(options)
    stale: dict[str, list[float]] = {case.name: [] for case in every}
    measures: dict[str, Callable[[], float]] = {
        case.name: partial(_samples_per_s, options, case, stale) for case in every
    }
    with tqdm(total=len(measures) * options.rounds, desc="runs", disable=None) as bar:
        windows = interleave(
            measures, options.rounds, options.most_foreign_cores, lambda: bar.update() and None
        )
    write_csv(options.out / "scaling.csv", [asdict(w) for w in windows])
    means = {name: sum(found) / len(found) for name, found in stale.items()}
    print(table(options, windows, means))
    loaded = sum(not w.quiet for w in windows)
    print(f"{loaded} of {len(windows)} runs on a loaded machine; {os.cpu_count()} cores")
    print(options.out / "scaling.csv")


def table(options: Options, windows: list[Window], stale_steps: dict[str, float]) -> str:
    """A row for each configuration and engine: samples/s, ratio to threads, staleness."""
    header = ["", "engine", "samples/s", "of threads", "95 %", f"goal {GOAL}", "stale steps"]
    cells = []
    for case in cases(options):
        rate = summarize(windows, case.name).median
        base = Case(case.mode, case.ranks, case.servers, case.latency_s, "threads").name
        ratio, ends, says = "", "", ""
        if case.engine != "threads" and "threads" in options.engines and options.rounds > 1:
            found = paired_ratio(windows, case.name, base)
            ratio, ends = f"{found.mean:.2f}", f"{found.low:.2f}-{found.high:.2f}"
            says = verdict(found, GOAL)
        cells.append(
            [case.of, case.engine, f"{rate:,.0f}", ratio, ends, says,
             f"{stale_steps[case.name]:.2f}"]
        )  # fmt: skip
    return aligned(header, cells)


def command(options: Options, case: Case, folder: Path) -> list[str]:
    """The words behind ``python`` of one run."""
    words = ["-m", "runtime", "train", "--out", str(folder), "--mode", case.mode]
    words += ["--executor", "concurrent", "--data.name", options.data]
    words += ["--batch", str(options.batch), "--steps", str(options.steps)]
    words += ["--rows.dim", str(options.dim), "--model.hidden", *map(str, options.hidden)]
    words += ["--latency-s", str(case.latency_s), "--test-rows", "512"]
    if case.engine == "threads":
        words += ["--shards", str(case.servers)]
    else:
        words += ["--servers", str(case.servers)]
    if case.engine == "processes":
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(case.ranks), *words]
    return [*words, "--ranks", str(case.ranks)]


def _samples_per_s(options: Options, case: Case, stale: dict[str, list[float]]) -> float:
    folder = options.out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, *command(options, case, folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_RUN_S, check=False)
    summary = read_summary(folder)
    if summary is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"{case.name} did not finish: {last}")
    stale[case.name].append(summary["staleness"]["mean_steps"])
    return float(summary["samples_per_s"])
