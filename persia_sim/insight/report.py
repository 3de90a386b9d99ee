"""One screen about a run: throughput, staleness, use of resources, blame, memory and money."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from persia_sim.engine.run import Run
from persia_sim.insight.critical_path import critical_path
from persia_sim.insight.measure import Estimate, step_time, throughput
from persia_sim.insight.row_staleness import RowStaleness, row_staleness
from persia_sim.model.incidents import Crash
from persia_sim.model.memory import Capacity, fill_s
from persia_sim.model.stamps import Mark
from persia_sim.oracle.closed_form import Answer, answer
from persia_sim.words.staleness import staleness_in_pushes, staleness_in_steps


@dataclass(frozen=True, slots=True)
class Staleness:
    """How late rows were, over all lookups of a run."""

    steps_mean: float
    steps_p99: float
    steps_oldest: int
    pushes_mean: float
    pushes_p99: float
    rows: RowStaleness
    """Missed pushes that touched the same row, over the distinct rows of all batches."""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run."""

    run: Run
    samples_per_s: Estimate
    step_s: Estimate
    bound: Answer
    staleness: Staleness | None
    use: dict[str, float]
    """Share of the makespan in which each resource is busy; of NICs, the busiest."""
    blame: dict[str, float]
    """Share of the makespan on the critical path."""
    exposed_s: dict[str, float]
    """Seconds a step in which a rank's training loop stands still, by what it waits for."""
    usd_per_hour: float
    usd_per_million_samples: float
    capacity: Capacity | None


def report(run: Run, capacity: Capacity | None = None) -> Report:
    """Derive all figures from a run."""
    scenario = run.scenario
    rate = throughput(run)
    use = {name: busy / run.makespan_s for name, busy in run.busy_s.items() if busy}
    for role in ("GPU host", "worker host", "server host", "dense server"):
        for way in ("out", "in"):
            shares = [
                sent / run.link_capacity[name] / run.makespan_s
                for name, sent in run.link_bytes.items()
                if name.startswith(role) and name.endswith(way)
            ]
            if shares:
                use[f"{role} NIC, {way}"] = max(shares)
    blame = critical_path(run)
    total = sum(blame.values())
    dollars = scenario.cluster.usd_per_hour
    return Report(
        run=run,
        samples_per_s=rate,
        step_s=step_time(run),
        bound=answer(scenario, run.need),
        staleness=staleness(run) if run.trace is not None else None,
        use=use,
        blame={part: seconds / total for part, seconds in blame.items()},
        exposed_s=exposed(run),
        usd_per_hour=dollars,
        usd_per_million_samples=dollars / 3600 / rate.mean * 1e6,
        capacity=capacity,
    )


def staleness(run: Run) -> Staleness:
    """Statistics of the run's trace."""
    if run.trace is None:
        raise ValueError("the run has no trace: simulate with trace=True")
    in_steps = staleness_in_steps(run.trace)
    pushes = staleness_in_pushes(run.trace).missed_pushes
    mean = float(pushes.mean()) if len(pushes) else 0.0
    return Staleness(
        float(in_steps.missing_steps.mean()),
        float(np.percentile(in_steps.missing_steps, 99)),
        int(in_steps.oldest_missing_steps.max()),
        mean,
        float(np.percentile(pushes, 99)) if len(pushes) else 0.0,
        row_staleness(pushes, run.scenario.workload),
    )


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
    found: dict[str, float] = {}
    before = free
    for mark, name in names.items():
        now = np.maximum(stamps[mark][:, 1:], before)
        found[name] = float((now - before).mean())
        before = now
    found["dense sync and other ranks"] = float(
        (stamps[Mark.UPDATED] - stamps[Mark.BACKWARD_END]).mean()
    )
    return {name: seconds for name, seconds in found.items() if seconds > 1e-12}


def sent_bytes(run: Run) -> float:
    """Payload bytes of all messages of a run; each enters one NIC (a loader leaves none)."""
    return sum(size for name, size in run.link_bytes.items() if name.endswith(" in"))


def _interval(rate: Estimate) -> str:
    if rate.half_width == inf:
        return f"({rate.values} steps without the warm-up: too few for an interval)"
    return f"+-{rate.relative:.2%} (95 %, {rate.values} steps, warm-up removed)"


def _si(value: float, unit: str = "") -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _shares(shares: dict[str, float], count: int) -> str:
    top = sorted(shares.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {share:.1%}" for name, share in top if share >= 5e-4)


def _faults(run: Run) -> str:
    """What slow-downs, crashes and checkpoints did, on one line."""
    losses, slow = run.losses, len(run.scenario.disturbances)
    slow -= sum(isinstance(event, Crash) for event in run.scenario.disturbances)
    return (
        f"faults       {slow} slow, {losses.crashes} crashes: down {losses.down_s:.2f} s, redone "
        f"{losses.redone_s:.2f} s, pushes lost {losses.lost_pushes}, forgotten "
        f"{losses.forgotten_pushes}; {losses.checkpoints} checkpoints, {losses.writing_s:.2f} s "
        f"(of {run.makespan_s:.2f} s)"
    )


def text(result: Report) -> str:
    """The report for a terminal."""
    run, scenario = result.run, result.run.scenario
    cluster, work = scenario.cluster, scenario.workload
    rate, step, bound = result.samples_per_s, result.step_s, result.bound
    knobs = [f"tau {scenario.tau if scenario.tau is not None else 'unbounded'}"]
    if not scenario.mode.reads_late_rows:
        knobs = [f"ahead {scenario.window}"] if scenario.window else []
    if scenario.permits:
        knobs.append(f"{scenario.permits} permits")
    lines = [
        f"{cluster.name}: {cluster.ranks} x {cluster.gpu.name}, "
        f"{cluster.embedding_workers.processes} embedding workers, "
        f"{cluster.servers.processes} servers on {cluster.servers.hosts} hosts",
        f"{work.name}: {work.rows:.3g} rows x {work.dim} = {work.rows * work.dim:.3g} parameters, "
        f"dense {work.dense_params / 1e6:.1f} M, batch {scenario.batch:,} "
        f"({work.batch_per_rank:,} a rank)",
        f"mode         {', '.join([str(scenario.mode), *knobs])}; {scenario.discipline} network; "
        f"{scenario.steps} steps, seed {scenario.seed}",
        f"throughput   {_si(rate.mean, 'samples/s')}  {_interval(rate)}",
        f"step         {step.mean * 1e3:.2f} ms; bound {bound.step_s * 1e3:.2f} ms ({bound.binds})",
    ]
    if result.staleness is not None:
        late = result.staleness
        lines.append(
            f"staleness    steps {late.steps_mean:.2f} (p99 {late.steps_p99:.0f}, oldest "
            f"{late.steps_oldest}); pushes {late.pushes_mean:.1f} (p99 {late.pushes_p99:.0f}); "
            f"by row {late.rows.mean:.2f} (fresh {late.rows.fresh:.1%}, p50 {late.rows.p50:.0f}, "
            f"p90 {late.rows.p90:.0f}, p99 {late.rows.p99:.0f}, hottest {late.rows.hottest:.1f})"
        )
    exposed_ms = ", ".join(
        f"{name} {seconds * 1e3:.2f}"
        for name, seconds in sorted(result.exposed_s.items(), key=lambda item: -item[1])
    )
    lines += [
        f"in flight    at most {run.max_in_flight} batches",
        f"to blame     {_shares(result.blame, 5)}",
        f"exposed, ms  {exposed_ms or 'nothing'}",
        f"in use       {_shares(result.use, 6)}",
        f"sent         {_si(sent_bytes(run) / scenario.steps, 'B')} a step",
    ]
    if scenario.disturbances or scenario.checkpoints:
        lines.append(_faults(run))
    if result.capacity is not None:
        cap = result.capacity
        hours = fill_s(work, rate.mean, cap.resident_rows) / 3600
        lines.append(
            f"memory       {cap.bytes_per_server / 2**30:,.0f} of "
            f"{cap.limit_bytes_per_server / 2**30:,.0f} GiB a server, {cap.row_bytes:.0f} B a row; "
            f"resident {cap.resident_rows:.3g}, evicted {cap.evicted_rows:.3g}, misses "
            f"{cap.miss_rate:.2%}; to fill >= {hours:.1f} h"
        )
    if result.usd_per_hour:
        lines.append(
            f"cost         ${result.usd_per_hour:,.0f} an hour, "
            f"${result.usd_per_million_samples:.3f} per million samples"
        )
    if run.need.extrapolated:
        lines.append(f"extrapolated {', '.join(run.need.extrapolated)}: outside the fitted range")
    return "\n".join(lines)
