"""AUC along the runs of a sweep, by setting, and its gap to sync; runs that still go on, too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.registry.compare import OF_ENDED, SweepSetting, options_of, tell_apart
from experiments.registry.runs import RunFolder
from runtime.run.folder import Line, read_metrics

Curve = Mapping[int, float]
"""Samples -> AUC, or a difference of two."""


@dataclass(slots=True)
class SweepCurve:
    """The evaluations along the runs of a setting."""

    setting: SweepSetting
    ended: dict[int, Curve] = field(default_factory=dict)
    """By seed, of runs that have ended."""
    going_on: dict[int, Curve] = field(default_factory=dict)
    """By seed, of runs that have not."""

    @property
    def by_seed(self) -> dict[int, Curve]:
        """The runs that stand for the setting: as soon as one has ended, those that have."""
        return self.ended or self.going_on

    def mean(self) -> Curve:
        """Mean AUC over seeds, wherever each of them was evaluated."""
        return _mean(list(self.by_seed.values()))

    def gap_to(self, other: SweepCurve) -> Curve:
        """Mean of the differences to another setting over the seeds of both."""
        mine, others = self.by_seed, other.by_seed
        return _mean(
            [
                {n: auc - others[seed][n] for n, auc in one.items() if n in others[seed]}
                for seed, one in mine.items()
                if seed in others
            ]
        )


def _mean(curves: Sequence[Curve]) -> Curve:
    """The mean wherever all curves have a point."""
    if not curves:
        return {}
    shared = sorted(set.intersection(*(set(one) for one in curves)))
    return {n: float(np.mean([one[n] for one in curves])) for n in shared}


def lines_of(run: RunFolder) -> list[Line]:
    """The evaluations of a run so far; none where they cannot be read."""
    try:
        return read_metrics(run.folder)
    except (ValueError, OSError):
        return []


def curves_of(runs: Iterable[RunFolder], task: str) -> list[SweepCurve]:
    """The curves of a task that all runs have so far, by setting; sync first."""
    by_options: dict[str, SweepCurve] = {}
    for run in runs:
        aucs = {line.samples: line.tasks.get(task, {}).get("auc") for line in lines_of(run)}
        known = {samples: float(auc) for samples, auc in aucs.items() if auc is not None}
        if run.state == "damaged" or not known or not isinstance(run.seed, int):
            continue

        # Runs of one config, but for their seeds; what only ended ones know does not count.
        options = {n: v for n, v in options_of(run) if not n.startswith(OF_ENDED)}
        key = json.dumps(options, sort_keys=True)
        one = by_options.setdefault(key, SweepCurve(SweepSetting(options)))
        seeds = one.ended if run.state == "done" else one.going_on
        seeds[run.seed] = known

    # They are called as the settings of the table are.
    settings = [one.setting for one in by_options.values()]
    list(tell_apart(settings))
    return sorted(
        by_options.values(),
        key=lambda one: (one.setting.mode != "sync", one.setting.mode, one.setting.rows_late or 0),
    )
