"""Points of paired comparisons: settings that differ in one thing, each with the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.gaps import Setting
from experiments.points import Point, data_sha256
from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig

_ROWS_OF_AN_ORDINARY_SET = 165_000  # KuaiRand's training part; only the progress bar asks


def over_seeds(label: str, config: TrainConfig, seeds: int, decides: str) -> list[Point]:
    """The config with seeds 0, 1, ...; ``decides``: the checksum of its data, and of what else it
    reads."""
    return [
        Point(label=f"{label}-seed{seed}", config=replace(config, seed=seed), data_sha256=decides)
        for seed in range(seeds)
    ]


def setting_point(
    base: TrainConfig, setting: Setting, seed: int, checksum: str, prefix: str = ""
) -> Point:
    """The base in one mode under one bound; a mode that reads no late rows keeps the base's."""
    mode, tau = setting
    sync, label = replace(base.sync, mode=Mode(mode)), f"{prefix}{mode}"
    if sync.mode.reads_late_rows:
        sync, label = replace(sync, tau=tau), f"{label}-tau{tau}"
    config = replace(base, sync=sync, seed=seed)
    return Point(label=f"{label}-seed{seed}", config=config, data_sha256=checksum)


def setting_points(
    base: TrainConfig, settings: Sequence[Setting], seeds: int, prefix: str = ""
) -> list[Point]:
    """One point per seed and setting; seed by seed, so that pairs are complete early."""
    checksum = data_sha256(base)
    return [
        setting_point(base, setting, seed, checksum, prefix)
        for seed in range(seeds)
        for setting in settings
    ]


def expected_samples(config: TrainConfig) -> int:
    """Samples of one run, for the progress bar; an estimate when only a pass would tell."""
    if config.steps is not None:
        return config.steps * config.batch
    return (config.data.rows or _ROWS_OF_AN_ORDINARY_SET) * config.data.passes
