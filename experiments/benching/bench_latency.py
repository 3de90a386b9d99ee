"""Injected latency against law 15: what a window hides, and what sync and re-reading pay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benching.windows import interleave, summarize
from experiments.checks import COUNT, between, each_between, not_empty
from experiments.tables import aligned, write_csv
from persia_sim.words.vocabulary import Mode
from runtime.config import DataConfig, EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import TableConfig

GOAL = 0.10
"""Measured and predicted differ by at most this share (design of the testbed, law 15)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Milliseconds a step of every mode with a lookup and a push of L each, against law 15.

    C of the law is the same mode's step without latency, measured in the same rounds.
    """

    latency_s: tuple[float, ...] = (0.01, 0.02)
    """Seconds that each message takes."""
    windows: tuple[int, ...] = (1, 4, 16)
    """Bounds tau of hybrid and raw_hybrid, and steps ahead of lookahead."""
    ranks: int = 1
    """NN workers."""
    batch: int = 256
    """Samples of one dense update."""
    window_steps: int = 60
    """Steps in a measurement; the first third is warm-up."""
    rounds: int = 5
    """Interleaved rounds of all measurements."""
    most_foreign_cores: float = 0.15
    """A measurement in which other processes used more cores than this is refused."""
    out: Path = Path("runs/bench-latency")
    """Folder of the CSV."""

    def __post_init__(self) -> None:
        not_empty(latency_s=self.latency_s, windows=self.windows)
        each_between(1e-4, 10.0, latency_s=self.latency_s)
        each_between(1, 1024, windows=self.windows)
        between(1, 64, ranks=self.ranks)
        between(*COUNT, batch=self.batch, rounds=self.rounds)
        between(9, 100_000, window_steps=self.window_steps)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)


@dataclass(frozen=True, slots=True)
class Case:
    """One mode with its window and its latency."""

    name: str
    mode: Mode
    window: int
    lookahead: str
    latency_s: float

    @property
    def hides(self) -> bool:
        """Whether messages of a window travel side by side."""
        return self.mode.reads_late_rows or self.lookahead == "forwarded"

    def predicted_s(self, compute_s: float) -> float:
        """Law 15: the step when a lookup and a push take ``latency_s`` each."""
        whole_s = 2 * self.latency_s + compute_s
        return max(compute_s, whole_s / (self.window + 1)) if self.hides else whole_s


def cases(options: Options) -> list[Case]:
    """Every mode at every window, with each latency and with none."""
    found = []
    for latency_s in (0.0, *options.latency_s):
        found.append(Case("sync", Mode.SYNC, 0, "reread", latency_s))
        for window in options.windows:
            for lookahead in ("reread", "forwarded"):
                name = f"lookahead {lookahead}, ahead {window}"
                found.append(Case(name, Mode.LOOKAHEAD, window, lookahead, latency_s))
            for mode in (Mode.RAW_HYBRID, Mode.HYBRID):
                found.append(Case(f"{mode}, tau {window}", mode, window, "reread", latency_s))
    return found


def run(options: Options) -> None:
    """Measure all cases in turn, print each beside the law, and say which agree."""
    import torch
    from tqdm import tqdm

    from runtime.data.open import open_source

    torch.set_num_threads(1)
    source = open_source("synthetic")
    measures: dict[str, Callable[[], float]] = {
        _key(case): partial(_step_s, options, case, source) for case in cases(options)
    }
    with tqdm(total=len(measures) * options.rounds, desc="windows", disable=None) as bar:
        windows = interleave(
            measures, options.rounds, options.most_foreign_cores, lambda: bar.update() and None
        )
    write_csv(options.out / "bench_latency.csv", [asdict(w) for w in windows])
    medians = {name: summarize(windows, name).median for name in measures}
    lines = table(cases(options), medians)
    print(aligned(["", "L [ms]", "C [ms]", "step [ms]", "law 15 [ms]", "measured / law"], lines))
    far = sum(abs(float(line[-1]) - 1) > GOAL for line in lines)
    loaded = sum(not w.quiet for w in windows)
    print(
        f"{len(lines) - far} of {len(lines)} within {GOAL:.0%} of law 15; {loaded} of"
        f" {len(windows)} measurements on a loaded machine\n{options.out / 'bench_latency.csv'}"
    )


def table(all_cases: list[Case], medians_s: dict[str, float]) -> list[list[str]]:
    """A line for each case with latency: measured beside the law."""
    lines = []
    for case in all_cases:
        if not case.latency_s:
            continue
        still = Case(case.name, case.mode, case.window, case.lookahead, 0.0)
        compute_s, measured_s = medians_s[_key(still)], medians_s[_key(case)]
        law_s = case.predicted_s(compute_s)
        numbers = [1e3 * x for x in (case.latency_s, compute_s, measured_s, law_s)]
        lines.append([case.name, *(f"{x:.2f}" for x in numbers), f"{measured_s / law_s:.2f}"])
    return lines


def _key(case: Case) -> str:
    return f"{case.name}, L {case.latency_s:g}"


def _step_s(options: Options, case: Case, source: Any) -> float:
    """Seconds a step of one short run, after its first third."""
    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    chosen: dict[str, Any] = {"mode": case.mode, "ranks": options.ranks}
    if case.mode.reads_late_rows:
        chosen["tau"] = case.window
    elif case.mode is Mode.LOOKAHEAD:
        chosen |= {"ahead": case.window, "lookahead": case.lookahead}
    steps = max(options.window_steps, 6 * (case.window + 1))
    config = TrainConfig(
        sync=SyncConfig(**chosen),
        engine=EngineConfig(executor="concurrent", latency_s=case.latency_s),
        data=DataConfig(name="synthetic"),
        batch=options.batch,
        steps=steps,
        rows=TableConfig(dim=8),
        model=ModelConfig(hidden=(256, 128)),
    )
    parts = assemble(config, source)
    parts.meter.start()
    ConcurrentRun(parts).run()
    rate = parts.meter.samples_per_s(skip=steps // 3)
    return options.batch / rate if rate else math.nan
