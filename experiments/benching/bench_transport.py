"""What it costs that rows live in server processes: steps without them and with them, in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from experiments.benching.machine_load import own_cpu_s
from experiments.benching.wide import FIELDS, WideWorkload, wide_workload
from experiments.benching.windows import Ratio, interleave, paired_ratio, summarize
from experiments.checks import COUNT, between
from experiments.tables import aligned, write_csv
from persia_sim.words.vocabulary import Mode
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

GOALS = {"wide": 0.05, "small": 0.15}
"""Share of a step of sync that transport may take, by workload (design of the testbed)."""
TOWERS = {"wide": (1024, 512, 256), "small": (256, 128, 64)}
"""Widths of the dense network's layers; rows and ids are the same."""
MODES = (Mode.SYNC, Mode.HYBRID)
WARM_UP_STEPS = 3  # of a window, not timed
SLOW_LR = 1e-6
"""The batches repeat: learned by heart, they have gradients that underflow, and a processor is five
times slower with those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Share of a step that server processes take beyond servers in the process of the ranks.

    In sync nothing hides it; hybrid shows what is left of it.
    """

    servers: int = 1
    """Embedding servers of either kind."""
    ranks: int = 1
    """NN workers."""
    rows: int = 1_000_000
    """Distinct ids of the workload."""
    batch: int = 4096
    """Samples a step."""
    dim: int = 16
    """Floats in a row."""
    threads: int = 2
    """Threads of one dense operation."""
    clock: Literal["wall", "cpu"] = "wall"
    """wall: a step's seconds. cpu: the CPU seconds of ranks and servers together, for a busy
    machine; what a message waits is not in them."""
    rounds: int = 8
    """Interleaved rounds of all measurements."""
    window_steps: int = 15
    """Steps in a measurement, >= 4; the first three are not timed."""
    most_foreign_cores: float = 0.15
    """A measurement in which other processes used more cores than this is refused."""
    out: Path = Path("runs/bench-transport")
    """Folder of the CSV."""

    def __post_init__(self) -> None:
        between(1, 16, servers=self.servers)
        between(1, 64, ranks=self.ranks)
        between(FIELDS, 10**9, rows=self.rows)
        between(*COUNT, batch=self.batch, rounds=self.rounds)
        between(1, 4096, dim=self.dim)
        between(1, 1024, threads=self.threads)
        between(WARM_UP_STEPS + 1, COUNT[1], window_steps=self.window_steps)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)
        if self.batch < self.ranks:
            raise ValueError(f"batch {self.batch} gives {self.ranks} ranks less than a sample each")


def run(options: Options) -> None:
    """Measure all cases in turn; print the share of a step and whether the goals are met."""
    import torch
    from tqdm import tqdm

    torch.set_num_threads(options.threads)
    source = wide_workload(options.batch, options.rows)
    cases = [(tower, mode) for tower in TOWERS for mode in MODES]
    measures: dict[str, Callable[[], float]] = {}
    for tower, mode in cases:
        for servers in (0, options.servers):
            config = config_of(options, tower, mode, servers)
            measure = _prepared(config, source, options.clock)
            measure()  # creates the rows; not counted
            measures[_key(tower, mode, servers)] = measure
    with tqdm(total=len(measures) * options.rounds, desc="windows", disable=None) as bar:
        windows = interleave(
            measures, options.rounds, options.most_foreign_cores, lambda: bar.update() and None
        )
    write_csv(options.out / "bench_transport.csv", [asdict(w) for w in windows])
    lines = []
    for tower, mode in cases:
        here, there = (_key(tower, mode, servers) for servers in (0, options.servers))
        ratio = paired_ratio(windows, here, there)
        step_ms = [1e3 * options.batch / summarize(windows, name).median for name in (here, there)]
        lines.append(
            [f"{tower}, {mode}", *(f"{ms:.2f}" for ms in step_ms), *judged(ratio, tower, mode)]
        )
    columns = ["", "threads [ms]", "processes [ms]", "share of a step", "goal", ""]
    print(aligned(columns, lines))
    loaded = sum(not w.quiet for w in windows)
    print(
        f"{loaded} of {len(windows)} measurements on a loaded machine"
        f"\n{options.out / 'bench_transport.csv'}"
    )


def judged(ratio: Ratio, tower: str, mode: Mode) -> list[str]:
    """The share of a step with its interval, its goal, and whether it is met.

    ``ratio`` is threads over processes, in samples/s: with 1.25 a fifth of a step is transport.
    """
    share, low, high = (1 - 1 / r for r in (ratio.mean, ratio.low, ratio.high))
    told = f"{share:.1%} [{low:.1%}, {high:.1%}]"
    if mode is not Mode.SYNC:
        return [told, "-", ""]
    goal = GOALS[tower]
    found = "met" if high <= goal else "MISSED" if low > goal else "not decided"
    if not ratio.clean:
        found = f"not decided, the machine was loaded (would be {found})"
    return [told, f"{goal:.0%}", found]


def config_of(options: Options, tower: str, mode: Mode, servers: int) -> TrainConfig:
    """A run of one window; ``servers`` 0: as many in the process of the ranks."""
    where = {"servers": servers} if servers else {"shards": options.servers}
    return TrainConfig(
        sync=SyncConfig(mode=mode, ranks=options.ranks),
        engine=EngineConfig(executor="concurrent", threads=options.threads, **where),
        batch=options.batch,
        steps=options.window_steps,
        rows=TableConfig(dim=options.dim, optimizer=RowOptimizer(lr=SLOW_LR)),
        model=ModelConfig(hidden=TOWERS[tower], lr=SLOW_LR),
    )


def _key(tower: str, mode: Mode, servers: int) -> str:
    return f"{tower}, {mode}, {'processes' if servers else 'threads'}"


def _prepared(config: TrainConfig, source: WideWorkload, clock: str) -> Callable[[], float]:
    from runtime.engines.parts import assemble_for
    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import Parts

    def samples_per_s(parts: Parts) -> float:
        again = parts.again(source)
        began_s = own_cpu_s()
        again.meter.start()
        ConcurrentRun(again).run()
        if clock == "cpu":
            return again.meter.samples / (own_cpu_s() - began_s)
        return again.meter.samples_per_s(skip=WARM_UP_STEPS)

    return partial(samples_per_s, assemble_for(config, source))
