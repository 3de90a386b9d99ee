"""The list of studies and how one is started; a study's module is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from runtime.commands import guarded


class Study(NamedTuple):
    """One study: its module has `Options`, a dataclass, and `run(options)`."""

    module: str
    says: str
    minutes: str
    """On 2 cores."""


STUDIES = {
    "demo": Study(
        "experiments.studies.demo", "AUC lost by hybrid and async against sync, with intervals", "4"
    ),
    "staleness-sweep": Study(
        "experiments.studies.staleness_sweep",
        "the same over any modes, bounds, seeds and factors",
        "any",
    ),
    "synthetic-gap": Study(
        "experiments.studies.synthetic_gap",
        "where the gap opens in 10,000 steps of the planted truth",
        "60",
    ),
    "bench-sync": Study(
        "experiments.benching.bench_sync", "concurrent sync against the dense network alone", "3"
    ),
    "bench-embedding": Study(
        "experiments.benching.bench_embedding",
        "the store's kernels against numpy, torch and a dict",
        "5",
    ),
    "bench-peers": Study(
        "experiments.benching.bench_peers", "whole steps against FBGEMM, TorchRec and torch", "40"
    ),
    "time-to-auc": Study(
        "experiments.studies.time_to_auc", "AUC against the wall clock of a simulated cluster", "4"
    ),
    "scale-workers": Study(
        "experiments.studies.scale_workers",
        "simulated throughput against GPUs beside published",
        "1",
    ),
    "scale-model-size": Study(
        "experiments.studies.scale_model_size",
        "the same against 6.25 to 100 T parameters; suspects",
        "2",
    ),
    "cluster-sweep": Study(
        "experiments.studies.cluster_sweep",
        "simulated clusters: grid or Latin hypercube, Pareto front",
        "any",
    ),
    "checkpoint-interval": Study(
        "experiments.studies.checkpoint_interval",
        "crashes in simulated runs against the intervals of Young and Daly",
        "2",
    ),
    "simulator-speed": Study(
        "experiments.studies.simulator_speed",
        "events and CPU time against the size of the cluster",
        "1",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run one study; the exit code is 0, 1 when points failed, 2 for a mistake, 130 on Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help", "list"):
        print(_list())
        return 0
    name, rest = arguments[0], list(arguments[1:])
    if name not in STUDIES:
        import difflib  # late: only a misspelling needs it

        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(STUDIES)}"
        print(f"error: no study {name!r}; {hint}", file=sys.stderr)
        return 2
    return guarded(lambda: _run(name, rest))


def _run(name: str, arguments: list[str]) -> None:
    import tyro

    module = importlib.import_module(STUDIES[name].module)
    options = tyro.cli(
        module.Options,
        args=arguments,
        prog=f"python -m experiments {name}",
        config=(tyro.conf.EnumChoicesFromValues,),
    )
    module.run(options)


def _list() -> str:
    width = max(len(name) for name in STUDIES)
    lines = ["usage: python -m experiments STUDY [options]    (STUDY --help lists them)", ""]
    lines += [
        f"  {name:<{width}}  {study.says} ({study.minutes} min on 2 cores)"
        for name, study in STUDIES.items()
    ]
    return "\n".join(lines)
