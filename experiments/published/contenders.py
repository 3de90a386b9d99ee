"""Who takes part in the convergence study: data sets, and systems with an order and a clock.

A contender learns in the order of events of its simulated run and is timed by the simulated rate of
the cluster that published the set, one host of 8 V100s. Both come from scenarios made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

from experiments.published.auc_gaps import SYNC_OF, Curve, Key
from experiments.published.descriptions import number, read_csv
from experiments.published.rivals import GPU_CV, RIVALS, scenario_of
from experiments.targets import NO_SKILL, first_crossing
from persia_sim.model.scenario import Noise, Scenario
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.words.vocabulary import Mode

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
    contender, chosen = CONTENDERS[name], SETS[data_set]
    cluster = CLUSTERS[chosen.cluster]().with_ranks(RANKS)
    work = workloads()[chosen.workload]
    work = replace(work, batch_per_rank=work.batch_per_rank * batch_times)
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
    lines = []
    for data_set, chosen in SETS.items():
        sync = curves[(chosen.workload, *SYNC_OF[chosen.workload])]
        known = dict(zip(sync.step.tolist(), sync.auc.tolist(), strict=True))
        for name, contender in CONTENDERS.items():
            found = [k for k in contender.published if (chosen.workload, *k) in curves]
            if not found:
                continue
            curve = curves[(chosen.workload, *found[0])]
            for step, auc in zip(curve.step.tolist(), curve.auc.tolist(), strict=True):
                lines.append(
                    {
                        "data_set": data_set,
                        "line": name,
                        "system": " ".join(found[0]),
                        "share_of_pass": step / chosen.pass_steps,
                        "auc": auc,
                        "gap_to_sync": auc - known[step] if step in known else "",
                    }
                )
    return lines


def published_seconds(curves: Mapping[Key, Curve], share: float) -> dict[tuple[str, str], float]:
    """Set and line -> when its published curve had made this share of sync's climb, at the
    published rate of 8 GPUs; NaN where it never did. Of lines whose curve and rate are published.
    """
    lines = read_csv(Path(__file__).with_name("throughput_public.csv"), "published")
    rates = {
        (line["dataset"], line["system"], line["mode"]): number(line, "samples_per_s")
        for line in lines
        if int(line["gpus"]) == RANKS
    }
    found = {}
    for (data_set, chosen), (name, contender) in product(SETS.items(), CONTENDERS.items()):
        rate = rates.get((chosen.workload, *(contender.rival or ("Persia", name))))
        if rate is None:
            continue
        sync = curves[(chosen.workload, *SYNC_OF[chosen.workload])]
        goal = NO_SKILL + share * (sync.auc[-1] - NO_SKILL)
        own = curves[(chosen.workload, *contender.published[0])]
        crossing = first_crossing(own.samples.tolist(), own.auc.tolist(), goal)
        found[data_set, name] = crossing.at / rate if crossing.reached else nan
    return found
