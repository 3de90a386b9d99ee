"""A scenario by names and numbers: what a command line, a sweep and a caller write."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from persia_sim.base.command_line import TypedAs, Unset
from persia_sim.base.rules import require
from persia_sim.base.vocabulary import DEFAULT_AVERAGE_EVERY_S
from persia_sim.cluster.incidents import SlowDown, Target
from persia_sim.cluster.scenario import Averaging, Knobs, Noise, Scenario
from persia_sim.presets.from_file import find_cluster, find_workload
from persia_sim.presets.profile import read_profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(Knobs):
    """One configuration; each field is an option of the command and may be a factor of a sweep."""

    cluster: str = "gcp-100t"
    """v100-2021-09, v100-paper, gcp-100t, h100-host, h100-16-cores, h200-16-cores, this-host, or a
    .toml file."""
    workload: str = "criteo-syn5"
    """taobao-ad, avazu-ad, criteo-ad, kwai-video, criteo-syn1 to criteo-syn5, or a .toml file."""
    ranks: Annotated[int | None, Unset("the preset's")] = None
    """GPUs."""
    batch_per_rank: Annotated[int | None, Unset("the workload's")] = None
    """Samples of a rank in a step, in [1, 65535]."""
    servers: Annotated[int | None, Unset("the preset's"), TypedAs("server-hosts")] = None
    """Server hosts."""
    workers: Annotated[int | None, Unset("the preset's"), TypedAs("worker-hosts")] = None
    """Embedding worker hosts."""
    loaders: Annotated[int | None, Unset("as many a rank as the preset has")] = None
    """Data loader processes."""
    average_every_s: Annotated[float | None, Unset(str(DEFAULT_AVERAGE_EVERY_S))] = None
    """Seconds between two rounds (async_averaging)."""
    gpu_cv: float = 0.05
    """Coefficient of variation of a rank's compute time."""
    server_cv: float = 0.0
    """Coefficient of variation of one request at one server."""
    slow: tuple[str, ...] = ()
    """Stragglers, KIND:INDEXxFACTOR and perhaps @FROM-TO in seconds: rank:0x3 worker:5x2@1-4."""
    profile: Path | None = None
    """Measured costs (JSON, written by `persia-runtime profile`) instead of the catalogue's.
    Example: profile.json."""

    @property
    def label(self) -> str:
        """What is chosen, in words: the same for equal points and different for others."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        chosen = [f"{each.name} {value}" for each, value in values if value != each.default]
        return ", ".join(chosen) or "the defaults"


_PLACE = rf"({'|'.join(Target)}):(\d+)"
_SECONDS = r"(\d+(?:\.\d*)?(?:e-?\d+)?)"


def _parts(option: str, text: str, pattern: str, form: str) -> tuple[str, ...]:
    match = re.fullmatch(_PLACE + pattern, text)
    if match is None:
        kinds = ", ".join(Target)
        raise ValueError(f"{option} is {text!r}: KIND is {kinds}; write KIND:INDEX{form}")
    return match.groups()


def _slow_downs(point: Point) -> tuple[SlowDown, ...]:
    """Read --slow."""
    slow_downs = []
    for text in point.slow:
        pattern = f"x{_SECONDS}(?:@{_SECONDS}-{_SECONDS})?"
        form = "xFACTOR@FROM-TO, as rank:0x3@1-4"
        kind, index, factor, start, end = _parts("--slow", text, pattern, form)
        when = {} if start is None else {"start_s": float(start), "end_s": float(end)}
        slow = SlowDown(target=Target(kind), index=int(index), factor=float(factor), **when)
        slow_downs.append(slow)
    return tuple(slow_downs)


MOST = {
    "ranks": 16_384,
    "workers": 10_000,
    "servers": 10_000,
    "loaders": 100_000,
    "steps": 1_000_000,
}
"""Beyond these a simulation takes days or more memory than a host has."""
MOST_BATCHES = 5_000_000


def _refuse_absurd(point: Point) -> None:
    """Sizes that no machine simulates are refused before anything of that size is made."""
    for name, most in MOST.items():
        value = getattr(point, name)
        require(value is None or value <= most, name, value, f"must be <= {most:,}")


def scenario_of(point: Point) -> Scenario:
    """The scenario that a point names. Raises ValueError naming what cannot be."""
    _refuse_absurd(point)

    # The presets or files that the point names.
    cluster, costs = find_cluster(point.cluster)
    workload = find_workload(point.workload)

    # What it changes in them.
    cluster = cluster.resized(point.ranks, point.workers, point.servers, point.loaders)
    counts = {
        "ranks": cluster.ranks,
        "workers": cluster.embedding_workers.hosts,
        "servers": cluster.servers.hosts,
        "loaders": cluster.loaders,
    }
    for name, value in counts.items():
        rule = f"must be <= {MOST[name]:,}"
        require(value <= MOST[name], f"{name} of {cluster.name}", f"{value:,}", rule)
    if point.batch_per_rank is not None:
        workload = replace(workload, batch_per_rank=point.batch_per_rank)

    # Measured costs take the place of the catalogue's.
    if point.profile is not None:
        cluster, costs = read_profile(point.profile).apply(cluster, workload, costs)

    # As much as can be simulated.
    batches = cluster.ranks * point.steps
    rule = f"must be <= {MOST_BATCHES:,} (about 1 kB of memory and 0.4 ms of time each)"
    require(batches <= MOST_BATCHES, "ranks x steps", f"{batches:,}", rule, "lower --steps")
    every_s = point.average_every_s
    return Scenario(
        cluster=cluster,
        workload=workload,
        costs=costs,
        averaging=None if every_s is None else Averaging(period_s=every_s),
        noise=Noise(gpu_cv=point.gpu_cv, server_cv=point.server_cv),
        disturbances=_slow_downs(point),
        **{knob.name: getattr(point, knob.name) for knob in fields(Knobs)},
    )
