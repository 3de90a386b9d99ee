"""The question of bench-engines about a slow wire: every mode over a round trip beside law 15, with
one lookup of a rank in flight and with several.

Ranks are threads of this process, servers and workers processes of its own behind a `slow_wire`, so
neither root nor a second host is needed. ``options`` are those of bench-engines.
"""

from __future__ import annotations

import atexit
import functools
import os
import platform
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benching.questions import config_of
from experiments.benching.windows import Window, summarize
from experiments.options import REFERENCE, STUDIED
from experiments.tables import aligned
from experiments.validating.slow_wire import rows_behind, slow_wire
from persia_sim.base.vocabulary import Dense, Mode, Read
from runtime.config import ModelConfig, SyncConfig, TrainConfig

GOAL = 0.10
"""Measured and predicted differ by at most this share on a quiet machine (law 15)."""
DOCS_EXAMPLE_S = 0.01
"""The round trip of the example in docs/results: a computation of half as long needs tau 4."""


@dataclass(frozen=True, slots=True)
class WireCase:
    """One run; ``most`` batches can be on their way at once, whatever the lookups."""

    name: str
    sync: SyncConfig
    most: float = 1
    round_trip_s: float = 0.0
    lookups_in_flight: int = 10
    workers: int = 0
    hidden: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The name of its windows."""
        return f"{self.name}, {1e3 * self.round_trip_s:g} ms, {self.lookups_in_flight} lookups"

    @property
    def alone(self) -> WireCase:
        """The same without a wire."""
        return replace(self, round_trip_s=0.0, lookups_in_flight=10)

    def predicted_s(self, compute_s: float) -> float:
        """Law 15 where a push is not waited for; of a permit its answer is, another round trip."""
        whole_s = self.round_trip_s + compute_s
        held_s = 0.0
        if self.sync.permits is not None:
            held_s = (whole_s + self.round_trip_s) / self.sync.permits
        return max(compute_s, held_s, whole_s / min(self.most, self.lookups_in_flight))


def wire_cases(round_trips_s: Sequence[float], lookups: Sequence[int]) -> list[WireCase]:
    """Every mode over each round trip, with so many lookups in flight."""
    late = partial(SyncConfig, mode=STUDIED, tau=16)
    no_bound = 2**31
    lookahead = REFERENCE.rules._replace(read=Read.AHEAD, dense=Dense.OVERLAPPED).mode
    forwarded = SyncConfig(mode=lookahead, lookahead="forwarded", ahead=16)
    own_steps = [mode for mode in Mode if not mode.has_barrier]
    modes = [
        WireCase("hybrid, tau 4", late(tau=4), 5),
        WireCase("hybrid, tau 16", late(), 17),
        WireCase("hybrid, no tau", late(tau=None), no_bound),
        WireCase("hybrid, 16 permits", late(tau=None, permits=16), no_bound),
        WireCase("hybrid, tau 16, 4 ranks", late(ranks=4), 17),
        WireCase("hybrid, tau 16, a worker beside the servers", late(), 17, workers=1),
        *(WireCase(f"{mode}, tau 16", late(mode=mode), 17) for mode in own_steps),
        WireCase("lookahead forwarded, ahead 16", forwarded, 17),
    ]
    waiting = [
        WireCase("sync", SyncConfig()),
        WireCase("lookahead reread, ahead 4", SyncConfig(mode=lookahead)),
    ]
    cases = []
    for round_trip_s in round_trips_s:
        cases += [replace(case, round_trip_s=round_trip_s) for case in waiting]
        for case in modes:
            for most in lookups:
                there = replace(case, round_trip_s=round_trip_s, lookups_in_flight=most)
                cases.append(there)
    example = WireCase("hybrid, tau 4, 640-320-128", late(tau=4), 5, DOCS_EXAMPLE_S)
    example = replace(example, hidden=(640, 320, 128))
    return [*cases, *(replace(example, lookups_in_flight=most) for most in lookups)]


class WireBesideLaw:
    """Seconds a step of every mode over a slow wire, and how late its rows are."""

    def __init__(self, options: Any) -> None:
        import torch

        from runtime.data.open import open_source

        torch.set_num_threads(1)
        self._options = options
        self._source = open_source("synthetic")
        self._late: dict[str, float] = {}
        self._cases = wire_cases(options.round_trip_s, options.lookups_in_flight)
        every = [*dict.fromkeys(case.alone for case in self._cases), *self._cases]
        self.candidates = {case.key: partial(self._step_s, case) for case in every}

    def _config(self, case: WireCase) -> TrainConfig:
        at, secret = _host()
        config = config_of(
            self._options,
            case.sync,
            servers=2,
            servers_at=at,
            servers_secret=secret,
            workers=case.workers,
            lookups_in_flight=case.lookups_in_flight,
        )
        steps = max(self._options.window_steps, 6 * int(min(case.most, 16) + 1))
        hidden = case.hidden or config.model.hidden
        return replace(config, steps=steps, model=ModelConfig(hidden=hidden))

    def _step_s(self, case: WireCase) -> float:
        """Seconds a step of one short run, after its first third."""
        from persia_sim.base.staleness import staleness_in_steps
        from runtime.executors.open import assemble_for, merged_trace
        from runtime.executors.threads import ConcurrentRun
        from runtime.rank.components import assemble

        config = self._config(case)
        with slow_wire(case.round_trip_s / 2) as wire:
            if case.round_trip_s:
                components = assemble(config, self._source, open_rows=rows_behind(wire))
            else:
                components = assemble_for(config, self._source)
            try:
                components.meter.start()
                ConcurrentRun(components).run()
                rate = components.meter.samples_per_s(skip=components.meter.updates // 3)
                if config.sync.mode.reads_late_rows:
                    about = {"mode": str(config.sync.mode), "ranks": config.sync.ranks}
                    trace = components.recorder.finish(**about, tau=config.sync.window)
                    late = staleness_in_steps(merged_trace(trace, components.store.recorded()))
                    self._late[case.key] = float(late.missing_steps[late.step > 16].mean())
            finally:
                components.close()
        return config.batch / rate

    def report(self, windows: Sequence[Window]) -> str:
        """Every case beside the law, and how many agree."""
        medians = {name: summarize(windows, name).median for name in self.candidates}
        lines = []
        near = 0
        for case in self._cases:
            compute_s = medians[case.alone.key]
            measured_s = medians[case.key]
            law_s = case.predicted_s(compute_s)
            near += abs(measured_s / law_s - 1) <= GOAL
            late = self._late.get(case.key)
            numbers = [f"{1e3 * x:.1f}" for x in (compute_s, measured_s, law_s)]
            lines.append(
                [
                    case.name,
                    f"{1e3 * case.round_trip_s:g}",
                    str(case.lookups_in_flight),
                    *numbers,
                    f"{measured_s / law_s:.2f}",
                    f"{self._options.batch / measured_s:,.0f}",
                    "" if late is None else f"{late:.1f}",
                ]
            )
        header = ["", "round trip [ms]", "lookups", "C [ms]", "step [ms]", "law 15 [ms]"]
        header += ["measured / law", "samples/s", "steps late"]
        goal = f"{near} of {len(lines)} within {GOAL:.0%} of law 15"
        return f"{aligned(header, lines)}\n{goal}\n{_machine()}"


def _machine() -> str:
    """Which machine, how busy, and when."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    day = time.strftime("%Y-%m-%d %H:%M")
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load}, {day}"


@functools.cache
def _host() -> tuple[tuple[str, ...], Path]:
    """Where servers start that are reached over TCP, in this process; and its secret."""
    from runtime.hosts.launch.hosts import ProcessHost, read_secret

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    secret = Path(folder.name) / "secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(16).hex())
    host = ProcessHost("127.0.0.1:0", read_secret(secret))
    threading.Thread(target=host.serve, daemon=True, name="host of servers").start()
    return (host.name,), secret
