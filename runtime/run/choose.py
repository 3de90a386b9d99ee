"""Which schedule is fastest here: hybrid hides latency, but on two busy cores it has none to hide.

A small MLP over a local store, or an MLP that already fills every core, gains nothing from more
threads; then an exact schedule is both faster and free of staleness.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from persia_sim.words.vocabulary import Mode
from runtime.config import SyncConfig, TrainConfig
from runtime.data.source import Source
from runtime.engines.parts import assemble_for
from runtime.engines.threads import ConcurrentRun

CANDIDATES = (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID)
WINDOWS = 3
STEPS = 30


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest candidate, and what each did."""

    config: TrainConfig
    samples_per_s: dict[Mode, float]
    """Median over the windows."""

    def describe(self) -> str:
        """One line: the speeds, and what follows."""
        speeds = ", ".join(f"{m} {s:,.0f}" for m, s in self.samples_per_s.items())
        chosen, hybrid = self.config.sync.mode, self.samples_per_s[Mode.HYBRID]
        gain = hybrid / max(s for m, s in self.samples_per_s.items() if m is not Mode.HYBRID)
        why = f"hybrid would be {gain:.2f} of the best exact schedule"
        return f"auto: {speeds} samples/s; {why}: training in {chosen}"


def fastest(config: TrainConfig, source: Source) -> Choice:
    """Time every candidate in turn, several times, on rows and weights that are thrown away."""
    speeds: dict[Mode, list[float]] = {mode: [] for mode in CANDIDATES}
    for _ in range(WINDOWS):
        for mode in CANDIDATES:
            speeds[mode].append(_samples_per_s(_as_mode(config, mode), source))
    medians = {mode: median(found) for mode, found in speeds.items()}
    best = max(medians, key=lambda mode: medians[mode])
    return Choice(_as_mode(config, best), medians)


def _as_mode(config: TrainConfig, mode: Mode) -> TrainConfig:
    """The same run in another mode; options that the mode does not have are left behind."""
    own = config.sync
    if mode is not Mode.HYBRID:
        kept = {name: getattr(own, name) for name in ("ranks", "row_gradients", "dense_lag")}
        own = SyncConfig(**kept)
    return replace(config, sync=replace(own, mode=mode))


def _samples_per_s(config: TrainConfig, source: Source) -> float:
    parts = assemble_for(replace(config, steps=STEPS), source)
    try:
        parts.meter.start()
        ConcurrentRun(parts).run()
        return parts.meter.samples_per_s()
    finally:
        parts.close()
