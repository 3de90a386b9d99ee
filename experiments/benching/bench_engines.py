"""Engines beside each other and beside their bounds, in interleaved windows of all candidates:

- latency: every mode with injected latency beside law 15;
- wire: every mode over a slow wire beside law 15, with one lookup in flight and with ten;
- transport: rows in server processes beside rows in the process of the ranks;
- lookups: what a lookup over a link takes beyond one in this process, beside its bytes;
- scaling: whole runs with ranks and servers as threads or as processes, each a start of its own.

And what is asked of one candidate: the memory of a long run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments.benching.questions import Lookups, Transport, config_of, memory
from experiments.benching.wide import FIELDS, concurrent_samples_per_s
from experiments.benching.windows import (
    Bench,
    Window,
    interleave,
    ratio_of,
    summarize,
    verdict,
)
from experiments.benching.wire import WireBesideLaw
from experiments.options import MOST, Count, OneOf, Some, hold
from experiments.tables import aligned, write_csv
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from runtime.config import SyncConfig
from runtime.run.folder import read_summary

LATENCY_GOAL = 0.10
"""Measured and predicted differ by at most this share (design of the testbed, law 15)."""
SCALING_GOAL = 0.9
"""Processes reach at least this share of the samples/s of threads at equal cores."""
MOST_RUN_S = 300.0


ENGINES = ("threads", "servers", "processes")
"""Who shares a process: ranks and servers; ranks, each server apart; nobody."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "latency": {
        "rounds": 5,
        "window_steps": 60,
        "batch": 256,
        "dim": 8,
        "hidden": (256, 128),
        "ranks": (1,),
        "latency_s": (0.01, 0.02),
        "windows": (1, 4, 16),
    },
    "wire": {
        "rounds": 2,
        "window_steps": 60,
        "batch": 256,
        "dim": 8,
        "hidden": (256, 128),
        "round_trip_s": (0.03,),
        "lookups_in_flight": (1, 10),
    },
    "transport": {
        "rounds": 8,
        "window_steps": 15,
        "batch": 4096,
        "dim": 16,
        "threads": 2,
        "rows": 1_000_000,
        "ranks": (1,),
        "servers": (1,),
        "gbit_per_s": None,
    },
    "lookups": {
        "rounds": 5,
        "window_steps": 50,
        "batch": 1024,
        "dim": 64,
        "rows": 1_000_000,
        "gbit_per_s": 10.0,
        "threads": 1,
        "ranks": (1,),
        "servers": (1,),
    },
    "scaling": {
        "rounds": 5,
        "window_steps": 150,
        "batch": 512,
        "dim": 16,
        "hidden": (256, 128),
        "ranks": (1, 2, 4),
        "servers": (1, 2),
        "latency_s": (0.0,),
        "modes": tuple(map(str, Mode)),
        "engines": ENGINES,
        "data": "synthetic",
    },
    "memory": {
        "window_steps": 1_000_000,
        "batch": 16,
        "ranks": (8,),
        "servers": (4,),
        "windows": (4,),
        "executor": "constant_lag",
    },
}
"""What each question reads, and takes where nothing was typed."""
TYPED = sorted({name for defaults in DEFAULTS.values() for name in defaults})
"""Options that questions read, without those that all benches have."""
LEAST_STEPS = {"latency": 9, "transport": 4, "scaling": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Candidates in turn, round after round; what is not given is each question's own."""

    what: Some[Annotated[str, OneOf(DEFAULTS)]] = ("latency", "transport")
    """latency, wire (5 minutes), transport, lookups, scaling (half an hour), memory (an hour)."""
    rounds: Count | None = None
    """Interleaved rounds of all candidates."""
    window_steps: Annotated[int, Within(3, MOST)] | None = None
    """Steps of a measurement; the first are not timed. Of memory: those of all ranks."""
    batch: Count | None = None
    """Samples of one dense update; of lookups: of the
    largest batch, beside which a quarter and a sixteenth of it are looked up."""
    rows: Annotated[int, Within(FIELDS, 10**9)] | None = None
    """Distinct ids of the workload."""
    dim: Annotated[int, Within(1, 4096)] | None = None
    """Floats in a row."""
    hidden: Some[Annotated[int, Within(1, 2**20)]] | None = None
    """Widths of the MLP's layers."""
    threads: Annotated[int, Within(1, 1024)] | None = None
    """Threads of one dense operation."""
    ranks: Some[Annotated[int, Within(1, 64)]] | None = None
    """Ranks; several for scaling."""
    servers: Some[Annotated[int, Within(1, 64)]] | None = None
    """Embedding servers (shards, where they are in the ranks' process); several for scaling."""
    latency_s: Some[Annotated[float, Within(0.0, 10.0)]] | None = None
    """Seconds that each lookup and each push takes longer, as in a network."""
    round_trip_s: Some[Annotated[float, Within(1e-3, 10.0)]] | None = None
    """Seconds that an answer comes later over the wire. Example: 0.01 0.03."""
    lookups_in_flight: Some[Annotated[int, Within(1, 1024)]] | None = None
    """Lookups of a rank that are on the wire at once."""
    windows: Some[Annotated[int, Within(1, 1024)]] | None = None
    """Bounds tau of hybrid and raw_hybrid and steps ahead of lookahead, for latency; for memory,
    the bound of hybrid."""
    modes: Some[Annotated[str, OneOf(map(str, Mode))]] | None = None
    """Modes of scaling, such as sync hybrid."""
    engines: Some[Annotated[str, OneOf(ENGINES)]] | None = None
    """threads, servers, processes: of scaling."""
    data: str | None = None
    """Data set of scaling. Example: synthetic:avazu-ad."""
    gbit_per_s: Annotated[float, Within(0.01, 1000)] | None = None
    """Rate of the link to the server of transport and lookups, which is on a second host, a
    network namespace (needs root, iproute2 and util-linux)."""
    executor: Literal["constant_lag", "concurrent"] | None = None
    """Who carries out the steps whose memory is measured: one thread, or a thread a rank."""

    def _check(self) -> None:
        for name in self.what:
            hold("window_steps", self.window_steps or MOST, Within(LEAST_STEPS.get(name, 1), MOST))
            if name != "scaling":
                self._ask_at_one_number(name)
        if "latency" in self.what:
            for latency_s in self.latency_s or ():
                hold("latency_s", latency_s, Within(1e-4, 10.0))
        for name in TYPED:
            readers = [what for what, defaults in DEFAULTS.items() if name in defaults]
            if getattr(self, name) is not None and not {*readers} & {*self.what}:
                raise ValueError(
                    f"{name} is only used by --what {', '.join(readers)}; remove it or name one"
                )

    def of(self, what: str) -> Options:
        """The options of a question: those that were typed, its defaults for the rest."""
        defaults = DEFAULTS[what]
        typed = {name: getattr(self, name) for name in TYPED}
        chosen = {}
        for name, value in typed.items():
            is_typed = name in defaults and value is not None
            chosen[name] = value if is_typed else defaults.get(name)
        return replace(self, what=(what,), **chosen)

    def _ask_at_one_number(self, what: str) -> None:
        """Raise ValueError for a list where a question is asked at one number."""
        for name in ("ranks", "servers", *(("windows",) if what == "memory" else ())):
            values = getattr(self, name) or ()
            if name in DEFAULTS[what] and len(values) > 1:
                raise ValueError(f"{name} must be one number for {what}, got {list(values)}")
        batch = self.batch or DEFAULTS[what]["batch"]
        ranks = max(self.ranks or (1,))
        if batch < ranks:
            raise ValueError(f"batch {batch} gives {ranks} ranks less than a sample each")


def run(options: Options) -> None:
    """Measure all candidates of each question in turn, and print what came out."""
    for what in options.what:
        # Memory is a question of one candidate, with a table of its own.
        chosen = options.of(what)
        if what == "memory":
            memory(chosen)
            continue

        # Measure the candidates in turn, and say how many windows were disturbed.
        question = QUESTIONS[what](chosen)
        windows = interleave(question.candidates, chosen.rounds, chosen.most_foreign_cores, what)
        path = chosen.out / f"bench_{what}.csv"
        write_csv(path, [asdict(w) for w in windows])
        loaded = sum(not w.quiet for w in windows)
        print(question.report(windows))
        print(f"{loaded} of {len(windows)} windows on a loaded machine; {os.cpu_count()} cores")
        print(str(path))


@dataclass(frozen=True, slots=True)
class LateCase:
    """One mode with its window and its latency."""

    name: str
    mode: Mode
    window: int
    lookahead: str
    latency_s: float

    @property
    def key(self) -> str:
        """The name of its windows."""
        return f"{self.name}, L {self.latency_s:g}"

    def predicted_s(self, compute_s: float) -> float:
        """Law 15: the step when a lookup and a push take ``latency_s`` each."""
        whole_s = 2 * self.latency_s + compute_s
        side_by_side = self.mode.reads_late_rows or self.lookahead == "forwarded"
        return max(compute_s, whole_s / (self.window + 1)) if side_by_side else whole_s


def late_cases(latencies_s: Sequence[float], windows: Sequence[int]) -> list[LateCase]:
    """Every mode at every window, with each latency and with none."""
    cases = []
    for latency_s in (0.0, *latencies_s):
        cases.append(LateCase("sync", Mode.SYNC, 0, "reread", latency_s))
        for window in windows:
            for lookahead in ("reread", "forwarded"):
                name = f"lookahead {lookahead}, ahead {window}"
                cases.append(LateCase(name, Mode.LOOKAHEAD, window, lookahead, latency_s))
            for mode in (mode for mode in Mode if mode.may_merge):
                cases.append(LateCase(f"{mode}, tau {window}", mode, window, "reread", latency_s))
    return cases


def late_table(cases: Sequence[LateCase], medians_s: Mapping[str, float]) -> list[list[str]]:
    """A line for each case with latency: measured beside the law.

    C of the law is the same mode's step without latency, measured in the same rounds.
    """
    lines = []
    for case in cases:
        if not case.latency_s:
            continue
        compute_s = medians_s[replace(case, latency_s=0.0).key]
        measured_s = medians_s[case.key]
        law_s = case.predicted_s(compute_s)
        numbers = [1e3 * x for x in (case.latency_s, compute_s, measured_s, law_s)]
        lines.append([case.name, *(f"{x:.2f}" for x in numbers), f"{measured_s / law_s:.2f}"])
    return lines


class LatencyBesideLaw:
    """Seconds a step of every mode with a lookup and a push of L each."""

    def __init__(self, options: Options) -> None:
        import torch

        from runtime.data.open import open_source

        torch.set_num_threads(1)
        self._options = options
        self._source = open_source("synthetic")
        self._cases = late_cases(options.latency_s, options.windows)
        self.candidates = {case.key: partial(self._step_s, case) for case in self._cases}

    def _step_s(self, case: LateCase) -> float:
        """Seconds a step of one short run, after its first third."""
        from runtime.rank.parts import assemble

        # The mode with its window; enough steps for it to fill several times.
        options = self._options
        chosen: dict[str, Any] = {"mode": case.mode, "ranks": options.ranks[0]}
        if case.mode.reads_late_rows:
            chosen["tau"] = case.window
        elif case.mode.prefetches_rows:
            chosen |= {"ahead": case.window, "lookahead": case.lookahead}
        steps = max(options.window_steps, 6 * (case.window + 1))
        config = config_of(options, SyncConfig(**chosen), latency_s=case.latency_s)
        config = replace(config, steps=steps)

        parts = assemble(config, self._source)
        rate = concurrent_samples_per_s(parts, self._source, skip=steps // 3)
        return options.batch / rate if rate else float("nan")

    def report(self, windows: Sequence[Window]) -> str:
        """Every case beside the law, and how many agree."""
        medians = {name: summarize(windows, name).median for name in self.candidates}
        lines = late_table(self._cases, medians)
        header = ["", "L [ms]", "C [ms]", "step [ms]", "law 15 [ms]", "measured / law"]
        near = sum(abs(float(line[-1]) - 1) <= LATENCY_GOAL for line in lines)
        goal = f"{near} of {len(lines)} within {LATENCY_GOAL:.0%} of law 15"
        return f"{aligned(header, lines)}\n{goal}"


@dataclass(frozen=True, slots=True)
class ScalingCase:
    """One configuration in one engine."""

    mode: str
    ranks: int
    servers: int
    latency_s: float
    engine: str
    stale_steps: list[float] = field(default_factory=list, compare=False)
    """Mean staleness of each of its runs."""

    @property
    def of(self) -> str:
        """The configuration, which is compared between engines."""
        late = f", {1e3 * self.latency_s:g} ms" if self.latency_s else ""
        return f"{self.mode}, {self.ranks} ranks, {self.servers} servers{late}"

    @property
    def name(self) -> str:
        """The name of this case alone: configuration and engine."""
        return f"{self.of}: {self.engine}"


def scaling_command(options: Options, case: ScalingCase, folder: Path) -> list[str]:
    """The words behind ``python`` of one run."""
    # Options of the case, as somebody would type them.
    options_of_run = (
        f"--mode {case.mode} --executor concurrent --batch {options.batch}"
        f" --steps {options.window_steps} --rows.dim {options.dim} --latency-s {case.latency_s}"
        f" --model.hidden {' '.join(map(str, options.hidden))} --test-rows 512"
        f" --{'shards' if case.engine == 'threads' else 'servers'} {case.servers}"
    ).split()
    words = [
        "-m",
        "runtime",
        "train",
        "--out",
        str(folder),
        "--data.name",
        options.data,
        *options_of_run,
    ]

    # Ranks as processes are started by torchrun.
    if case.engine == "processes":
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(case.ranks), *words]
    return [*words, "--ranks", str(case.ranks)]


class Scaling:
    """Whole runs in every engine, each a start of its own; samples/s without the start."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cases = [
            ScalingCase(mode, ranks, servers, latency_s, engine)
            for mode in options.modes
            for ranks in options.ranks
            for servers in options.servers
            for latency_s in options.latency_s
            for engine in options.engines
        ]
        self.candidates = {case.name: partial(self._samples_per_s, case) for case in self._cases}

    def _samples_per_s(self, case: ScalingCase) -> float:
        folder = self._options.out / "run"
        shutil.rmtree(folder, ignore_errors=True)
        words = [sys.executable, *scaling_command(self._options, case, folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_RUN_S)
        summary = read_summary(folder)
        if summary is None:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"{case.name} did not finish: {last}")
        case.stale_steps.append(summary["staleness"]["mean_steps"])
        return float(summary["samples_per_s"])

    def report(self, windows: Sequence[Window]) -> str:
        """A row for each configuration and engine: samples/s, ratio to threads, staleness."""
        goal = f"goal {SCALING_GOAL}"
        cells = []
        header = ["", "engine", "samples/s", "of threads", "95 %", goal, "stale steps"]
        paired = "threads" in self._options.engines and self._options.rounds > 1
        for case in self._cases:
            # Beside threads of the same configuration, in pairs of windows.
            ratio = ""
            ends = ""
            says = ""
            if case.engine != "threads" and paired:
                of_threads = ratio_of(windows, case.name, replace(case, engine="threads").name)
                ratio = f"{of_threads.mean:.2f}"
                ends = f"{of_threads.low:.2f}-{of_threads.high:.2f}"
                says = verdict(of_threads, SCALING_GOAL)

            rate = f"{summarize(windows, case.name).median:,.0f}"
            stale = f"{sum(case.stale_steps) / len(case.stale_steps):.2f}"
            cells.append([case.of, case.engine, rate, ratio, ends, says, stale])
        return aligned(header, cells)


QUESTIONS: dict[str, Callable[[Options], Any]] = {
    "latency": LatencyBesideLaw,
    "wire": WireBesideLaw,
    "transport": Transport,
    "lookups": Lookups,
    "scaling": Scaling,
}
"""Each question has ``candidates``, name -> measure, and a ``report`` of their windows."""
