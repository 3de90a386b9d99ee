"""The list of studies and how one is started; a study's module is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from experiments.folders import ensure_writable
from persia_sim.words.rules import refuse_doubled
from runtime.guarded import guarded


class Study(NamedTuple):
    """One study: its module has `Options`, a dataclass, and `run(options)`."""

    says: str
    minutes: str
    """On 2 cores."""


STUDIES = {
    "paper": Study("every piece below, the paper's claims judged, one page: report.html", "20"),
    "demo": Study("AUC lost by hybrid and async against sync, with intervals", "4"),
    "staleness-sweep": Study("the same over any modes, bounds, seeds and factors", "any"),
    "treatments": Study("what is done about late rows, and what others run: gaps", "11"),
    "lateness": Study("what late rows and late dense weights cost, rates of their own", "500"),
    "convergence": Study("AUC by samples and by simulated seconds, with rivals, 4 data sets", "15"),
    "time-to-auc": Study("AUC against the wall clock of a simulated cluster", "4"),
    "convergence-bound": Study("the bound of late rows against measured gradients; alpha", "4"),
    "row-frequency": Study("the gap, missed pushes and drift by how often ids occur", "10"),
    "scale-workers": Study("simulated throughput against GPUs beside published", "1"),
    "scale-model-size": Study("the same against 6.25 to 100 T parameters; suspects", "2"),
    "modes-timeline": Study("stages of a few steps in every mode, simulated and recorded", "1"),
    "ablation": Study(
        "each optimisation off in turn: throughput, and AUC where it may change", "6"
    ),
    "sharded-map": Study("hybrid against tables on the GPUs: who wins where, in rate and $", "1"),
    "predict-published": Study("published GPU-sharded training, predicted from CSVs", "1"),
    "fit": Study("the constants of GPU-sharded training, fitted; errors held out", "3"),
    "cluster-sweep": Study("simulated clusters: grid or Latin hypercube, Pareto front", "any"),
    "checkpoint-interval": Study("throughput lost to crashes and checkpoints, in three modes", "6"),
    "fault-drill": Study("processes killed at random: what goes on, what is lost", "30"),
    "simulator-speed": Study("events and CPU time against the size of the cluster", "1"),
}
"""Name -> study; its module in experiments/studies, its CSV and its figure have the same stem."""

BENCHES = {
    "bench-engines": Study(
        "sync against dense alone, latency against its law, transport, threads and processes", "11"
    ),
    "bench-embedding": Study("the store's kernels against numpy, torch and a dict", "5"),
    "bench-sweep": Study("core-seconds of a sweep's point against plain torch", "15"),
    "bench-snapshot": Study("the pause of a snapshot of the rows, and steps around it", "1"),
    "bench-memory": Study("a million steps: memory beside the rows", "60"),
    "validate": Study("runs of this host against their predictions, with bands", "15"),
    "bench-peers": Study("whole steps against FBGEMM, TorchRec and torch", "40"),
}
"""The same for speeds, in experiments/benching."""


RUNS = "runs"
"""No study: what lies in run folders."""


def module_of(name: str) -> str:
    """The module of a study or bench.

    >>> module_of("time-to-auc")
    'experiments.studies.time_to_auc'
    """
    room = "studies" if name in STUDIES else "benching"
    return f"experiments.{room}.{name.replace('-', '_')}"


def main(arguments: Sequence[str]) -> int:
    """Run one study; the exit code is 0, 2 for a mistake or failed points, 130 on Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help", "list"):
        return guarded(_print_list)
    name, rest = arguments[0], list(arguments[1:])
    if name == RUNS:
        return guarded(lambda: _run_folders(rest))
    known = [*STUDIES, *BENCHES, RUNS]
    if name not in known:
        import difflib  # late: only a misspelling needs it

        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        print(f"error: no study {name!r}; {hint}", file=sys.stderr)
        return 2
    return guarded(lambda: _run(name, rest))


def _run(name: str, arguments: list[str]) -> None:
    import tyro

    refuse_doubled(arguments)
    module = importlib.import_module(module_of(name))
    options = tyro.cli(
        module.Options,
        args=arguments,
        prog=f"python -m experiments {name}",
        config=(tyro.conf.EnumChoicesFromValues,),
    )
    if not getattr(options, "dry_run", False):
        ensure_writable(options.out)
    module.run(options)


def _run_folders(arguments: list[str]) -> None:
    from experiments.registry.command import main as run_folders

    refuse_doubled(arguments)
    run_folders(arguments)


def _print_list() -> None:
    everything = STUDIES | BENCHES
    width = max(map(len, everything))
    print("usage: python -m experiments STUDY [options]    (STUDY --help lists them)\n")
    for name, study in everything.items():
        print(f"  {name:<{width}}  {study.says} ({study.minutes} min on 2 cores)")
    print(f"\n  {RUNS:<{width}}  run folders: list DIR, compare A B, report DIR ({RUNS} --help)")
    sys.stdout.flush()  # here, where a reader that has gone (`| head`) is no error
