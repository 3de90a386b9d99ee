"""The question of bench-engines about rows: what transport to server processes takes of a step.

``options`` are those of bench-engines.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.benching.wide import concurrent_samples_per_s, wide_workload
from experiments.benching.windows import Window, ratio_of, summarize, verdict
from experiments.options import REFERENCE, STUDIED
from experiments.statistics import Ratio
from experiments.tables import aligned
from experiments.validating.link import Apart
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

TRANSPORT_GOALS = {("wide", REFERENCE): 0.05, ("small", REFERENCE): 0.15}
"""Share of a step that transport may take, by MLP and mode (design of the testbed)."""
LINK_GOALS = {("wide", STUDIED): 0.05}
"""Goals over a link of 10 Gbit/s."""
TOWERS = {"wide": (1024, 512, 256), "small": (256, 128, 64)}
"""Widths of the dense network's layers; rows and ids are the same."""
TRANSPORT_MODES = (REFERENCE, STUDIED)
SLOW_LR = 1e-6
"""The batches repeat: learned by heart, they have gradients that underflow, and a processor is five
times slower with those."""
WARM_UP_STEPS = 3
"""Steps of a window of transport that are not timed."""


def config_of(options: Any, sync: SyncConfig | None = None, **engine: Any) -> TrainConfig:
    """A run of one window in the concurrent executor."""
    return TrainConfig(
        sync=sync or SyncConfig(),
        engine=EngineConfig(executor="concurrent", **engine),
        data=DataConfig(name="synthetic"),
        batch=options.batch,
        steps=options.window_steps,
        rows=TableConfig(dim=options.dim),
        model=ModelConfig(hidden=options.hidden or TOWERS["small"]),
    )


def transport_config(options: Any, tower: str, mode: Mode, where: str, **apart: Any) -> TrainConfig:
    """A run of one window, with servers as ``processes`` (``apart``: where those of another host
    are) or in the ``threads`` of the ranks."""
    kind = "servers" if where == "processes" else "shards"
    elsewhere = apart if kind == "servers" else {}
    engine = {"threads": options.threads, kind: options.servers} | elsewhere
    config = config_of(options, SyncConfig(mode=mode, ranks=options.ranks), **engine)
    return replace(
        config,
        rows=replace(config.rows, optimizer=RowOptimizer(lr=SLOW_LR)),
        model=ModelConfig(hidden=TOWERS[tower], lr=SLOW_LR),
    )


def judged(ratio: Ratio, goal: float | None) -> list[str]:
    """The share of a step with its interval, its goal, and whether it is met.

    ``ratio`` is threads over processes, in samples/s: with 1.25 a fifth of a step is transport.
    """
    share, low, high = (1 - 1 / r for r in (ratio.mean, ratio.low, ratio.high))
    interval = f"{share:.1%} [{low:.1%}, {high:.1%}]"
    if goal is None:
        return [interval, "-", ""]
    rest = Ratio(1 - share, 1 - high, 1 - low, ratio.pairs, ratio.clean)
    return [interval, f"{goal:.0%}", verdict(rest, 1 - goal)]


class Transport:
    """Share of a step that server processes take beyond servers in the process of the ranks.

    In sync nothing hides it; hybrid shows what is left of it.
    """

    def __init__(self, options: Any) -> None:
        import torch

        from runtime.executors.open import assemble_for

        # Goals are those of the transport that is measured.
        torch.set_num_threads(options.threads)
        self._batch = options.batch
        self._goals = TRANSPORT_GOALS
        apart = {}
        if options.gbit_per_s is not None:
            self._goals = LINK_GOALS if options.gbit_per_s == 10 else {}
            apart = linked(self, options.gbit_per_s)
        self._cases = [(tower, mode) for tower in TOWERS for mode in TRANSPORT_MODES]
        self.candidates: dict[str, Callable[[], float]] = {}

        # Each network and mode, with rows here and with rows in processes.
        source = wide_workload(options.batch, options.rows)
        for tower, mode in self._cases:
            for where in ("threads", "processes"):
                components = assemble_for(
                    transport_config(options, tower, mode, where, **apart), source
                )
                measure = partial(concurrent_samples_per_s, components, source, WARM_UP_STEPS)
                measure()  # creates the rows; not counted
                name = f"{tower}, {mode}, {where}"
                self.candidates[name] = measure

    def report(self, windows: Sequence[Window]) -> str:
        """A line for each MLP and mode: both steps, the share, the goal."""
        lines = []
        for tower, mode in self._cases:
            both = [f"{tower}, {mode}, {where}" for where in ("threads", "processes")]
            steps_ms = [1e3 * self._batch / summarize(windows, name).median for name in both]
            judgement = judged(ratio_of(windows, *both), self._goals.get((tower, mode)))
            lines.append([f"{tower}, {mode}", *(f"{ms:.2f}" for ms in steps_ms), *judgement])
        columns = ["", "threads [ms]", "processes [ms]", "share of a step", "goal", ""]
        return aligned(columns, lines)


def linked(owner: object, gbit_per_s: float) -> dict[str, Any]:
    """Where the servers of a second host are, at a link of this rate; gone with ``owner``."""
    link = Apart("gbit_per_s")
    weakref.finalize(owner, link.close)
    link.shape(gbit_per_s)
    return {"servers_at": (link.servers_at,), "servers_secret": link.secret}
