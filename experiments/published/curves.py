"""Published AUC curves: their gaps to sync, and who takes part in the study drawn beside them.

The curves were read off plots; `auc_curves.csv` has the error of each reading and its plot. On the
public sets sync is XDL's, so a gap of Persia's hybrid is of two systems, not of two modes alone. No
seeds were published, so no gap here has an interval, only the error of reading. A contender learns
in the order of events of its simulated run and is timed by the simulated rate of the cluster that
published the set, one host of 8 V100s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.published.descriptions import number, published_rates, read_csv
from experiments.published.rivals import GPU_CV, RIVALS, scenario_of
from experiments.targets import NO_SKILL, first_crossing
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.scenario import Noise, Scenario
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads

CURVES = Path(__file__).with_name("auc_curves.csv")
SYNC_OF = {
    "taobao-ad": ("XDL", "sync"),
    "avazu-ad": ("XDL", "sync"),
    "criteo-ad": ("XDL", "sync"),
    "kwai-video": ("Persia", "sync"),
}
"""The published synchronous curve of a set: system and mode."""

Key = tuple[str, str, str]
"""Data set, system, mode."""
Curve = pd.DataFrame
"""One published line, in order of steps: step (dense updates), samples (NaN where the plot does not
tell them), auc, reading_error (of each AUC, as a bound)."""


@dataclass(frozen=True, slots=True)
class PublishedGap:
    """One curve minus that of sync, in AUC, at the steps that both have."""

    points: pd.DataFrame
    """step, samples, gap (below 0: the curve is below sync), reading_error of both together."""
    at_end: float
    """At the last step; this and the next are NaN where sync is not plotted so far."""
    error_at_end: float
    """How far reading the plot may have moved that gap."""


def published_curves(path: Path = CURVES) -> dict[Key, Curve]:
    """All curves of the file.

    Raises ValueError naming the file where it is missing or a cell is no number.
    """
    points: dict[Key, list[tuple[float, ...]]] = {}
    for line in read_csv(path, "published AUC curves"):
        point = [number(line, "step"), number(line, "samples", nan)]
        point += [number(line, column) for column in ("auc", "reading_error")]
        key = line["data_set"], line["system"], line["mode"]
        points.setdefault(key, []).append(tuple(point))
    columns = ["step", "samples", "auc", "reading_error"]
    return {
        key: pd.DataFrame(sorted(points_of), columns=columns).astype({"step": np.int64})
        for key, points_of in points.items()
    }


def gap_to_sync(curves: Mapping[Key, Curve], data_set: str, system: str, mode: str) -> PublishedGap:
    """One curve against the published sync of its set.

    Raises ValueError naming the curve where it is not published, with those that are.
    """
    # Only what was published can be compared.
    if data_set not in SYNC_OF:
        raise ValueError(f"data_set must be one of {', '.join(SYNC_OF)}, got {data_set!r}")
    if (data_set, system, mode) not in curves:
        there = ", ".join(" ".join(key) for key in curves)
        raise ValueError(f"no curve {data_set} {system} {mode} is published; there are: {there}")

    # At the steps that both curves have; errors of reading add up.
    curve = curves[data_set, system, mode]
    sync = curves[(data_set, *SYNC_OF[data_set])]
    both = curve.merge(sync, on="step", suffixes=("", "_of_sync"))
    points = both[["step", "samples"]].assign(
        gap=both.auc - both.auc_of_sync,
        reading_error=both.reading_error + both.reading_error_of_sync,
    )

    # The gap at the end, where both curves reach it.
    reaches_the_end = len(points) and points.step.iloc[-1] == curve.step.iloc[-1]
    last = points.tail(1) if reaches_the_end else pd.DataFrame([dict.fromkeys(points, nan)])
    return PublishedGap(
        points,
        at_end=float(last.gap.iloc[-1]),
        error_at_end=float(last.reading_error.iloc[-1]),
    )


def all_gaps(curves: Mapping[Key, Curve]) -> dict[Key, PublishedGap]:
    """The gap of every curve that is not itself a set's sync."""
    return {
        key: gap_to_sync(curves, *key) for key in curves if key[1:] != SYNC_OF.get(key[0], key[1:])
    }


RANKS = 8
"""V100s of the published convergence runs, one host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSet:
    """A data set of the paper, or the one that stands in for its private one."""

    title: str
    """What a panel says."""
    cluster: str
    """The simulator's preset of the cluster that its curves were published for."""
    workload: str
    """The simulator's preset of the set, and the first word of its published curves."""
    pass_samples: float | None
    """Training samples of the published pass; None where they are not published."""
    pass_steps: int
    """Dense updates of the published pass: the end of the plot's axis."""


KUAIRAND = "kuairand"
SETS = {
    KUAIRAND: PublishedSet(
        title="KuaiRand; clock of Kwai-Video",
        cluster="v100-paper", workload="kwai-video", pass_samples=None, pass_steps=3600,
    ),
    "taobao-ad": PublishedSet(
        title="synthetic; field counts of Taobao-Ad",
        cluster="v100-2021-09", workload="taobao-ad", pass_samples=20.5e6, pass_steps=5000,
    ),
    "avazu-ad": PublishedSet(
        title="synthetic; field counts of Avazu-Ad",
        cluster="v100-2021-09", workload="avazu-ad", pass_samples=31.9e6, pass_steps=7800,
    ),
    "criteo-ad": PublishedSet(
        title="synthetic; field counts of Criteo-Ad",
        cluster="v100-2021-09", workload="criteo-ad", pass_samples=44.2e6, pass_steps=10800,
    ),
}  # fmt: skip
"""Ends of the axes: read off the convergence plots of the benchmark page, x 4,096 samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One line of a panel."""

    mode: Mode
    """How the simulator runs it."""
    rival: tuple[str, str] | None = None
    """Its system in `rivals.RIVALS`; None: Persia's costs."""
    learns_as: str | None = None
    """Another contender with the same order, hence the same AUC at every sample."""
    published: tuple[tuple[str, str], ...] = ()
    """System and mode of its curve in `auc_curves.csv`; the first that a set has."""

    def has_clock(self, data_set: str) -> bool:
        """Whether its costs hold for a set."""
        return self.rival is None or SETS[data_set].workload in RIVALS[self.rival].holds_for


CONTENDERS = {
    "sync": Contender(mode=Mode.SYNC, published=(("Persia", "sync"),)),
    "hybrid": Contender(mode=Mode.HYBRID, published=(("Persia", "hybrid"),)),
    "async": Contender(mode=Mode.ASYNC),
    "async_averaging": Contender(mode=Mode.ASYNC_AVERAGING, published=(("Persia", "async"),)),
    "xdl_sync": Contender(
        mode=Mode.SYNC, rival=("XDL", "sync"), learns_as="sync", published=(("XDL", "sync"),)
    ),
    "xdl_async": Contender(
        mode=Mode.ASYNC, rival=("XDL", "async"), published=(("XDL", "async"),)
    ),
    "paddle": Contender(
        mode=Mode.HYBRID, rival=("PaddlePaddle", "heter"), published=(("PaddlePaddle", "async"),)
    ),
}  # fmt: skip
"""Name -> line. XDL async has its dense weights on the servers, pushes on arrival, and its own rows
fresh. PaddlePaddle is hybrid with pushes on arrival: nothing was published on why its AUC ends 35
to 68 thousandths below sync."""


def scenario(name: str, data_set: str, *, tau: int, steps: int, batch_times: int = 1) -> Scenario:
    """The simulated run of a contender on 8 GPUs, with so many times the set's batch a rank.

    ``tau`` is the bound of Persia's modes; rivals have their own.
    """
    # The set's cluster and workload on 8 GPUs.
    contender = CONTENDERS[name]
    chosen = SETS[data_set]
    cluster = CLUSTERS[chosen.cluster]().with_ranks(RANKS)
    work = workloads()[chosen.workload]
    work = replace(work, batch_per_rank=work.batch_per_rank * batch_times)

    # A rival is a mode of the simulator with constants of its own.
    if contender.rival is not None:
        return scenario_of(RIVALS[contender.rival], cluster, work, steps)
    return Scenario(
        cluster=cluster,
        workload=work,
        costs=costs_of(chosen.cluster),
        mode=contender.mode,
        tau=tau if contender.mode.reads_late_rows else None,
        noise=Noise(gpu_cv=GPU_CV),
        steps=steps,
    )


def published_lines(curves: Mapping[Key, Curve]) -> list[dict[str, Any]]:
    """Published AUC at each share of the pass; its gap to the set's sync where that is plotted."""
    # Each set's curves beside its own sync.
    lines = []
    for data_set, chosen in SETS.items():
        sync = curves[(chosen.workload, *SYNC_OF[chosen.workload])]
        known = dict(zip(sync.step.tolist(), sync.auc.tolist(), strict=True))
        for name, contender in CONTENDERS.items():
            published = [k for k in contender.published if (chosen.workload, *k) in curves]
            if not published:
                continue
            curve = curves[(chosen.workload, *published[0])]
            for step, auc in zip(curve.step.tolist(), curve.auc.tolist(), strict=True):
                gap = auc - known[step] if step in known else ""
                lines.append(
                    {
                        "data_set": data_set,
                        "line": name,
                        "system": " ".join(published[0]),
                        "share_of_pass": step / chosen.pass_steps,
                        "auc": auc,
                        "gap_to_sync": gap,
                    }
                )
    return lines


def published_seconds(curves: Mapping[Key, Curve], share: float) -> dict[tuple[str, str], float]:
    """Set and line -> when its published curve had made this share of sync's climb, at the
    published rate of 8 GPUs; NaN where it never did. Of lines whose curve and rate are published.
    """
    of_eight = [x for x in published_rates("throughput_public.csv") if int(x["gpus"]) == RANKS]
    rates = {(x["dataset"], x["system"], x["mode"]): number(x, "samples_per_s") for x in of_eight}
    result = {}
    for (data_set, chosen), (name, contender) in product(SETS.items(), CONTENDERS.items()):
        rate = rates.get((chosen.workload, *(contender.rival or ("Persia", name))))
        if rate is None:
            continue
        sync = curves[(chosen.workload, *SYNC_OF[chosen.workload])]
        goal = NO_SKILL + share * (sync.auc.iloc[-1] - NO_SKILL)
        curve = curves[(chosen.workload, *contender.published[0])]
        crossing = first_crossing(curve.samples.tolist(), curve.auc.tolist(), goal)
        result[data_set, name] = crossing.at / rate if crossing.reached else nan
    return result
