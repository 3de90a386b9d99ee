"""The figures of a run, and the sentences that its screen and its JSON share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from persia_sim.bounds.closed_form import Answer
from persia_sim.cluster.incidents import Target, slow_downs
from persia_sim.cluster.memory import Capacity
from persia_sim.cluster.placement import workers_of
from persia_sim.cluster.stamps import Mark
from persia_sim.cluster.validity import GPU, SERVERS, WORKERS
from persia_sim.engine.simulate import Run
from persia_sim.report.critical_path import blame_of_resources, critical_path
from persia_sim.report.measure import (
    Estimate,
    bound_of,
    rank_durations,
    steady_steps,
    step_time,
    throughput,
)
from persia_sim.report.ranges import OnServers, Range, range_of
from persia_sim.report.row_staleness import Staleness, staleness


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run."""

    run: Run
    samples_per_s: Estimate
    step_s: Estimate
    bound: Answer
    staleness: Staleness | None
    use: dict[str, float]
    """Share of the time in which each resource is busy at the steady rate (what a step asks of it
    over the step time); of NICs, the busiest."""
    blame: dict[str, float]
    """Share of the makespan on the critical path, by resource."""
    stages: dict[str, float]
    """Share of the makespan on the critical path, by the stage of a batch's life."""
    exposed_s: dict[str, float]
    """Seconds a step in which a rank's training loop stands still, by what it waits for."""
    usd_per_hour: float
    usd_per_million_samples: float
    capacity: Capacity | None


def report(run: Run, capacity: Capacity | None = None) -> Report:
    """Derive all figures from a run."""
    scenario = run.scenario

    # Rates: samples, steps, and how busy each resource is at them.
    rate = throughput(run)
    step = step_time(run)
    use = {n: busy / scenario.steps / step.mean for n, busy in run.busy_s.items() if busy}
    first = steady_steps(run).start
    took_s = rank_durations(run, first).mean(1)
    paces = _paces(run, 1 / took_s)

    # NICs: the busiest of a role, at the pace of the ranks that it serves.
    for role in ("GPU host", "worker host", "server host"):
        for way in ("out", "in"):
            shares = [
                sent / run.link_capacity[name] / scenario.steps * paces.get(name, 1 / step.mean)
                for name, sent in run.link_bytes.items()
                if name.startswith(role) and name.endswith(way)
            ]
            if shares:
                use[f"{role} NIC, {way}"] = max(shares)
    if "GPU" in use:
        use["GPU"] = float((run.computed_s[:, first:].mean(1) / took_s).mean())

    # What the cluster costs.
    dollars = scenario.cluster.usd_per_hour
    return Report(
        run=run,
        samples_per_s=rate,
        step_s=step,
        bound=bound_of(run),
        staleness=staleness(run) if run.trace is not None else None,
        use=use,
        blame=_of_all(blame_of_resources(run)),
        stages=_of_all(critical_path(run)),
        exposed_s=exposed(run),
        usd_per_hour=dollars,
        usd_per_million_samples=dollars / 3600 / rate.mean * 1e6,
        capacity=capacity,
    )


def may_be(result: Report) -> Range:
    """The rate as a range over what nobody knows of machines and constants, on as many hosts as the
    cluster has, in proportion to the closed form's."""
    miss_rate = result.capacity.miss_rate if result.capacity is not None else 0.0
    side = OnServers(scenario=result.run.scenario, miss_rate=miss_rate)
    return range_of(side, value=result.samples_per_s.mean, simulated=False)


def _paces(run: Run, rates: np.ndarray) -> dict[str, float]:
    """Steps a second, the mean over the batches that meet a link, of these ``rates`` [ranks]: where
    ranks wait for nobody, those of a host with a fast NIC or few ranks are quicker."""
    scenario = run.scenario
    cluster = run.scenario.cluster
    each = np.repeat(rates, scenario.steps)
    workers = cluster.embedding_workers.host_of
    served = [workers[workers_of(scenario, r)] for r in range(cluster.ranks)]
    hosts_of_ranks = np.repeat(cluster.nn.host_of[: cluster.ranks], scenario.steps)
    paces = dict[str, float]()
    for role, hosts in ("GPU host", hosts_of_ranks), ("worker host", np.array(served).ravel()):
        means = np.bincount(hosts, each) / np.maximum(np.bincount(hosts), 1)
        for host, mean in enumerate(means.tolist()):
            paces |= {f"{role} {host} out": mean, f"{role} {host} in": mean}
    return paces


def _of_all(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: each / total for name, each in seconds.items()}


def exposed(run: Run) -> dict[str, float]:
    """What a rank's loop waits for between two steps, by where the awaited batch is then.

    The loop is idle from the end of a step until the next batch is taken; that gap is cut at the
    batch's own instants.
    """
    stamps = run.stamps
    free = stamps[Mark.UPDATED][:, :-1]
    names = {
        Mark.LOADED: "load",
        Mark.LOOKUP: "window, permit or lookup task",
        Mark.READ: "lookup at servers",
        Mark.ROWS: "rows to the rank",
        Mark.ON_GPU: "copy to the GPU",
        Mark.START: "refresh or dense pull",
    }

    # The idle time before a step is cut at the instants of the batch that ends it.
    waits: dict[str, float] = {}
    before = free
    for mark, name in names.items():
        now = np.maximum(stamps[mark][:, 1:], before)
        waits[name] = float((now - before).mean())
        before = now

    # Behind the backward pass it waits for the sum.
    waits["dense sync and other ranks"] = float(
        (stamps[Mark.UPDATED] - stamps[Mark.BACKWARD_END]).mean()
    )
    return {name: seconds for name, seconds in waits.items() if seconds > 1e-12}


def sent_bytes(run: Run) -> float:
    """Payload bytes of all messages of a run; each enters one NIC (a loader leaves none)."""
    return sum(size for name, size in run.link_bytes.items() if name.endswith(" in"))


_CLEARLY = 1.5
"""Times as slow; less is lost in noise, or in what else is waited for."""


def remedy(result: Report) -> str:
    """What helps against what is waited for most, where its share in use does not say it: a slow
    process is the one to replace; of workers that are idle a core is slow."""
    scenario = result.run.scenario
    top = max(result.blame, key=lambda name: result.blame[name])
    target = {GPU: Target.RANK, WORKERS: Target.WORKER, SERVERS: Target.SERVER}.get(top)

    # A slow process is the one to replace.
    slow = [each for each in slow_downs(scenario.disturbances, _CLEARLY) if each.target is target]
    if slow:
        alone = target is Target.RANK and not scenario.mode.has_barrier
        names = ", ".join(f"{each.target} {each.index} ({each.factor:g} times)" for each in slow)
        advice = "nobody waits for it" if alone else "replace what is slow"
        if alone and scenario.cluster.loaders % scenario.cluster.ranks:
            advice = "loaders serve it in turn with others, which wait: --loaders a multiple of"
            advice += f" the {scenario.cluster.ranks} ranks helps"
        return f"slow: {names}: {advice}"

    # Workers that are to blame and idle: one core is slow.
    busy = max(result.use.get(f"worker {part}", 0.0) for part in ("cores", "memory"))
    if top != WORKERS or busy > 0.6:
        return ""
    late = scenario.mode.reads_late_rows and result.bound.binds
    wider = {"window": " or a wider window", "permits": " or more permits"}.get(late or "", "")
    return f"one core serves a batch: faster ones{wider} help, more do not"


def borrowed(result: Report) -> list[str]:
    """Constants of other machines, and how much of this step is made of them."""
    need = result.run.need
    sentences = list(need.borrowed)
    if need.launching_s:
        share = need.launching_s / result.step_s.mean
        sentences.append(f"{share:.0%} of this step is launching")
    if need.strange and result.run.scenario.costs.machines:
        share = sum(result.blame.get(name, 0.0) for name in need.strange)
        sentences.append(f"{share:.0%} of this step rests on constants of other machines")
    return sentences
