"""How options become a scenario."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from persia_sim.cli.options import Options
from persia_sim.model.incidents import MOST_S, Checkpoints, Crash, SlowDown, Target
from persia_sim.model.profile import read_profile
from persia_sim.model.scenario import Averaging, Discipline, Noise, Scenario
from persia_sim.presets import catalogue as presets
from persia_sim.presets.from_file import read_cluster, read_workload
from persia_sim.words.rules import require
from persia_sim.words.vocabulary import DEFAULT_TAU

Chosen = TypeVar("Chosen")


def pick(name: str, known: Mapping[str, Chosen], what: str) -> Chosen:
    """The entry of a table, or an error that names the nearest and lists all."""
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{what} is {name!r}: {hint}choose one of {', '.join(known)}")
    return known[name]


_PLACE = rf"({'|'.join(Target)}):(\d+)"
_KINDS = f"KIND is {', '.join(Target)}"
_SECONDS = r"(\d+(?:\.\d*)?(?:e-?\d+)?)"


def disturbances_of(options: Options) -> tuple[SlowDown | Crash, ...]:
    """Read --slow and --crash."""
    found: list[SlowDown | Crash] = []
    for text in options.slow:
        match = re.fullmatch(f"{_PLACE}x{_SECONDS}(?:@{_SECONDS}-{_SECONDS})?", text)
        if not match:
            raise ValueError(
                f"--slow is {text!r}: {_KINDS}; write KIND:INDEXxFACTOR@FROM-TO, as rank:0x3@1-4"
            )
        kind, index, factor, start, end = match.groups()
        when = {} if start is None else {"start_s": float(start), "end_s": float(end)}
        slow = SlowDown(target=Target(kind), index=int(index), factor=float(factor), **when)
        found.append(slow)
    names = ("detect_s", "restart_s", "load_s")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if given and not options.crash:
        name = f"--{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{name} is set but --crash is not: add --crash KIND:INDEX@SECONDS, as "
                         f"server:0@2.5, or drop {name}")  # fmt: skip
    times = {"detect_s": 1.0, "restart_s": 5.0, "load_s": 2.0} | given
    for text in options.crash:
        match = re.fullmatch(f"{_PLACE}@{_SECONDS}", text)
        if not match:
            raise ValueError(
                f"--crash is {text!r}: {_KINDS}; write KIND:INDEX@SECONDS, as server:0@2.5"
            )
        kind, index, at = match.groups()
        full = options.full_recovery and kind == "server"
        found.append(
            Crash(target=Target(kind), index=int(index), at_s=float(at), full=full, **times)
        )
    if options.full_recovery and not any(isinstance(e, Crash) and e.full for e in found):
        raise ValueError("--full-recovery is set but --crash names no server: add --crash "
                         "server:INDEX@SECONDS, or drop --full-recovery")  # fmt: skip
    return tuple(found)


def checkpoints_of(options: Options) -> Checkpoints | None:
    """Read --checkpoint-every-s and --checkpoint-s."""
    if options.checkpoint_every_s is None:
        if options.checkpoint_s is not None:
            raise ValueError(
                "--checkpoint-s is set but --checkpoint-every-s is not: add it, or drop "
                "--checkpoint-s"
            )
        return None
    write_s = 1.0 if options.checkpoint_s is None else options.checkpoint_s
    return Checkpoints(interval_s=options.checkpoint_every_s, write_s=write_s)


MOST = {"ranks": 16_384, "workers": 10_000, "servers": 10_000, "loaders": 100_000,
        "steps": 1_000_000}  # fmt: skip
"""Beyond these a simulation takes days or more memory than a host has."""
MOST_BATCHES = 5_000_000


def _refuse_absurd(options: Options) -> None:
    """Sizes that no machine simulates are refused before anything of that size is made."""
    for name, most in MOST.items():
        value = getattr(options, name)
        require(value is None or value <= most, name, value, f"must be <= {most:,}")
    unshared = options.dense_on_nics and options.discipline is Discipline.UNSHARED
    remedy = "choose fluid or fifo"
    require(not unshared, "dense_on_nics", True, "unshared NICs slow nobody down", remedy)
    if options.restart_s is not None:
        ok = 0 <= options.restart_s <= MOST_S
        require(ok, "restart_s", options.restart_s, f"must lie in [0, {MOST_S:g}]")


def _window(options: Options) -> int | None:
    """The bound where the mode reads one; the default is nobody's choice."""
    read = options.mode.reads_late_rows or options.tau != DEFAULT_TAU
    return options.tau if read else None


def scenario_of(options: Options) -> Scenario:
    """Apply the options to the presets."""
    _refuse_absurd(options)
    if options.cluster.endswith(".toml"):
        cluster, costs = read_cluster(Path(options.cluster))
    else:
        cluster = pick(options.cluster, presets.CLUSTERS, "--cluster")()
        costs = presets.costs_of(cluster.name)
    if options.workload.endswith(".toml"):
        workload = read_workload(Path(options.workload))
    else:
        workload = pick(options.workload, presets.workloads(), "--workload")
    cluster = cluster.resized(options.ranks, options.workers, options.servers, options.loaders)
    counts = {"ranks": cluster.ranks, "workers": cluster.embedding_workers.all_hosts,
              "servers": cluster.servers.all_hosts, "loaders": cluster.loaders}  # fmt: skip
    for name, value in counts.items():
        ok = value <= MOST[name]
        require(ok, f"{name} of {cluster.name}", f"{value:,}", f"must be <= {MOST[name]:,}")
    if options.batch_per_rank is not None:
        workload = replace(workload, batch_per_rank=options.batch_per_rank)
    if options.profile is not None:
        cluster, costs = read_profile(options.profile).apply(cluster, workload, costs)
    batches = cluster.ranks * options.steps
    rule = f"must be <= {MOST_BATCHES:,} (about 1 kB of memory and 0.4 ms of time each)"
    require(batches <= MOST_BATCHES, "ranks x steps", f"{batches:,}", rule, "lower --steps")
    averaging = None
    if options.average_every_s is not None:
        averaging = Averaging(period_s=options.average_every_s)
    return Scenario(
        cluster=cluster,
        workload=workload,
        costs=costs,
        mode=options.mode,
        tau=_window(options),
        permits=options.permits,
        ahead=options.ahead,
        lookahead=options.lookahead,
        merge_pushes=options.merge_pushes,
        averaging=averaging,
        discipline=options.discipline,
        dense_on_nics=options.dense_on_nics,
        dense_home=options.dense_home,
        worker_choice=options.worker_choice,
        noise=Noise(gpu_cv=options.gpu_cv, server_cv=options.server_cv),
        disturbances=disturbances_of(options),
        checkpoints=checkpoints_of(options),
        steps=options.steps,
        seed=options.seed,
        trace_shards=options.trace_shards,
    )
