"""One screen, or one page, about a run, in the order in which one decides."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from persia_sim.base.rules import counted, price
from persia_sim.bounds.closed_form import Answer
from persia_sim.bounds.transfers import uplink_bytes
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.demand import GPU, SERVERS, WORKERS
from persia_sim.cluster.incidents import Crash, Target, slow_downs
from persia_sim.cluster.memory import Capacity, binary, fill_s, lasting
from persia_sim.cluster.placement import workers_of
from persia_sim.cluster.scenario import WorkerChoice
from persia_sim.cluster.stamps import Mark
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import Run
from persia_sim.report.critical_path import blame_of_resources, critical_path
from persia_sim.report.measure import (
    NARROW,
    Estimate,
    bound_of,
    first_incident_s,
    rank_durations,
    steady_steps,
    step_time,
    throughput,
)
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
    for role in ("GPU host", "worker host", "server host", "dense server", "uplink"):
        for way in ("out", "in"):
            shares = [
                sent / run.link_capacity[name] / scenario.steps * paces.get(name, 1 / step.mean)
                for name, sent in run.link_bytes.items()
                if name.startswith(role) and name.endswith(way)
            ]
            if shares:
                use[f"{role}{'' if role == 'uplink' else ' NIC'}, {way}"] = max(shares)
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
    crossed = uplink_bytes(scenario, run.need) if cluster.racks else {}
    return paces | {n: float(b @ rates / b.sum()) for n, b in crossed.items() if b.any()}


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
    return sum(
        size
        for name, size in run.link_bytes.items()
        if name.endswith(" in") and not name.startswith("uplink")
    )


def uplink_rates(run: Run) -> str:
    """Gbit/s of the racks' uplinks, from the slowest to the fastest."""
    rates = [rack.uplink_bytes_per_s * 8 / 1e9 for rack in run.scenario.cluster.racks]
    low, high = (f"{rate:g}" if rate < 1e12 else "any" for rate in (min(rates), max(rates)))
    return low if low == high else f"{low} to {high}"


def crossing_share(run: Run) -> float:
    """The share of all bytes that crosses the racks' uplinks."""
    between = sum(size for name, size in run.link_bytes.items() if name.startswith("uplink")) / 2
    return between / sent_bytes(run) if between else 0.0


def _racks(run: Run) -> str:
    count = len(run.scenario.cluster.racks)
    share = crossing_share(run)
    return f"{count}, uplinks {uplink_rates(run)} Gbit/s; {share:.1%} of the bytes cross them"


ROUGH = 0.1
"""A wider interval says of itself that it is hardly known: no number of steps follows from it."""
_THREE_DIGITS = 0.05
_TWO_DIGITS = 0.5
"""Relative half widths up to which a figure has so many digits; beyond, it has one."""


def more_steps(rate: Estimate, run: Run, narrow: float) -> str:
    """What makes a rate's interval this narrow, in words; "" where it is as narrow, is not known,
    or where a longer run would be another one."""
    if not narrow < rate.relative < inf or first_incident_s(run) < inf:
        return ""

    # The width falls with the root of the steps, if it is known itself.
    if rate.relative > ROUGH:
        return (
            f"too wide to tell how many steps {100 * narrow:g} % takes: without --steps a run"
            " goes on by itself"
        )
    more = rate.values * ((rate.relative / narrow) ** 2 - 1)
    digits = 10 ** max(0, len(str(int(more))) - 2)
    steps = run.scenario.steps + digits * ceil(more / digits)
    return f"{100 * narrow:g} % takes about --steps {steps}"


def as_sure(value: float, rate: Estimate) -> tuple[str, float]:
    """A figure that follows from a rate, rounded to the digits that the rate's interval leaves it,
    and "about " where these are fewer than three.

    >>> as_sure(1.8367, Estimate(1.0, 0.01, 100)), as_sure(1.8367, Estimate(1.0, 0.2, 100))
    (('', 1.8367), ('about ', 1.8))
    >>> as_sure(1.8367, Estimate(1.0, 0.97, 100))
    ('about ', 2.0)
    """
    if rate.half_width == inf or rate.relative <= _THREE_DIGITS:
        return "", value
    digits = 2 if rate.relative <= _TWO_DIGITS else 1
    return "about ", float(f"{value:.{digits}g}")


def _interval(rate: Estimate, run: Run, narrow: float) -> str:
    if rate.half_width == inf:
        return f"({counted(rate.values, 'step')} without the warm-up: too few for an interval)"
    interval = f"+-{rate.relative:.2%} (95 %, {rate.values} steps, warm-up removed)"
    if rate.relative >= 1:  # one crash, say: how many there are in so many steps is not known
        interval = f"(95 % interval wider than the rate: {rate.values} steps are too few)"
    more = more_steps(rate, run, narrow)
    return f"{interval}; {more}" if more else interval


def si(value: float, unit: str = "") -> str:
    """A figure with the prefix of its unit.

    >>> si(1.88e6, "samples/s"), si(915e6, "B")
    ('1.88 Msamples/s', '915 MB')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _shares(shares: dict[str, float], count: int) -> str:
    top = sorted(shares.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {share:.1%}" for name, share in top if share >= 5e-4)


def _faults(run: Run) -> str:
    """What slow-downs, crashes and checkpoints did, on one line."""
    losses = run.losses
    slow = len(run.scenario.disturbances)
    slow -= sum(isinstance(event, Crash) for event in run.scenario.disturbances)
    return (
        f"{slow} slow, {counted(losses.crashes, 'crash')}: out of service "
        f"{losses.outage_s:.2f} s, training stopped {losses.down_s:.2f} s, redone "
        f"{losses.redone_s:.2f} s; pushes lost {losses.lost_pushes} and parts of others "
        f"{losses.lost_parts}, forgotten {losses.forgotten_pushes}; "
        f"{counted(losses.checkpoints, 'checkpoint')}, {losses.writing_s:.2f} s "
        f"(of {run.makespan_s:.2f} s)"
    )


def _memory(cap: Capacity, work: Workload, samples_per_s: float) -> str:
    """What the servers hold, on one line."""
    need = binary(cap.bytes_per_server)
    limit = binary(cap.limit_bytes_per_server)
    if cap.fits:
        room = f"{need} of {limit} a server"
    else:
        room = f"{limit} a server, where all rows would need {need}"
    full_s = fill_s(work, samples_per_s, 0.9 * cap.resident_rows)
    as_what = f" as {cap.rows}" if cap.rows else ""
    is_full = cap.filled_rows > 0.999 * cap.resident_rows  # else none are evicted
    evicted = cap.evicted_rows * is_full
    return (
        f"{room}, {cap.row_bytes:.0f} B a row{as_what}; resident "
        f"{cap.filled_rows:.3g}, evicted {evicted:.3g}, misses {cap.miss_rate:.2%}; "
        f"90 % full after {lasting(full_s)}"
    )


_CLEARLY = 1.5
"""Times as slow; less is lost in noise, or in what else is waited for."""


def remedy(result: Report) -> str:
    """What helps against what is waited for most, where its share in use does not say it: a slow
    process is the one to replace; workers that are idle are met in turn, or a core is slow."""
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

    # Workers that are to blame and idle: batches meet at few of them, or one core is slow.
    busy = max(result.use.get(f"worker {part}", 0.0) for part in ("cores", "memory"))
    if top != WORKERS or busy > 0.6:
        return ""
    if scenario.worker_choice is not WorkerChoice.SPREAD and result.bound.binds == "worker cores":
        return "batches meet at few workers while others idle: --worker-choice spread helps"
    late = scenario.mode.reads_late_rows and result.bound.binds
    wider = {"window": " or a wider window", "permits": " or more permits"}.get(late or "", "")
    return f"one core serves a batch: faster ones{wider} help, more do not"


FITS = "Does it fit?"
SPEED = "How fast?"
BINDS = "What binds?"
HELPS = "What would help?"
COSTS = "What does it cost?"
DETAILS = "Details"
Answers = dict[str, list[tuple[str, str]]]
"""Question -> what a line is called, and what it says; in the order in which one decides."""


def answers(result: Report, narrow: float = NARROW) -> Answers:
    """What a run says to each question; ``narrow``: width of the rate's interval, relative, that
    was asked for."""
    # The texts that need more than a figure.
    rate = result.samples_per_s
    step = result.step_s
    bound = result.bound
    held = result.capacity
    cluster = result.run.scenario.cluster
    early = step.mean < 0.9995 * bound.step_s
    advice = remedy(result)
    exposed_ms = ", ".join(
        f"{name} {seconds * 1e3:.2f}"
        for name, seconds in sorted(result.exposed_s.items(), key=lambda item: -item[1])
    )
    memory = "" if held is None else _memory(held, result.run.scenario.workload, rate.mean)
    about, mean = as_sure(rate.mean, rate)
    _, step_s = as_sure(step.mean, rate)
    step_ms = f"{about}{1e3 * step_s:g} ms" if about else f"{1e3 * step_s:.2f} ms"
    not_priced = f"not known: no usd_per_hour of {', '.join(cluster.unpriced)}"
    dollars = (
        f"${result.usd_per_hour:,.0f} an hour, "
        f"{about}{price(as_sure(result.usd_per_million_samples, rate)[1])} per million samples"
    )

    # A line for each answer, by the question that it answers.
    by_question = {
        FITS: [("memory", memory)],
        SPEED: [
            (
                "throughput",
                f"{about}{si(mean, 'samples/s')}  {_interval(rate, result.run, narrow)}",
            ),
            (
                "step",
                f"{step_ms}; bound {bound.step_s * 1e3:.2f} ms ({bound.binds}"
                + (", not reached yet: use more --steps)" if early else ")"),
            ),
        ],
        BINDS: [
            ("to blame", f"{_shares(result.blame, 6)}{f'; {advice}' * bool(advice)}"),
            ("at stages", _shares(result.stages, 5)),
            ("exposed, ms", exposed_ms or "nothing"),
            ("in use", _shares(result.use, 6)),
        ],
        HELPS: [],
        COSTS: [
            ("cost", not_priced if cluster.unpriced else ""),
            ("cost", dollars if result.usd_per_hour else ""),
        ],
        DETAILS: _details(result),
    }

    # A figure that is hardly meant is asked about below the line that it enters.
    doubts = doubts_of(cluster)
    return {
        question: [
            (name, f"{line}\n{doubts[name]}" if name in doubts else line)
            for name, line in lines
            if line
        ]
        for question, lines in by_question.items()
    }


def doubts_of(cluster: Cluster) -> dict[str, str]:
    """Line of the screen -> figures of machines behind it that hardly are what was meant."""
    roles = cluster.nn, cluster.embedding_workers, cluster.servers
    hosts = dict.fromkeys(kind.host for role in roles for kind in role.kinds)
    by_line: dict[str, str] = {}
    for host in hosts:
        for line, doubt in host.doubts.items():
            by_line[line] = f"{by_line[line]}\n{doubt}" if line in by_line else doubt
    return by_line


def _details(result: Report) -> list[tuple[str, str]]:
    run = result.run
    late = result.staleness
    scenario = result.run.scenario
    knobs = [f"tau {scenario.tau if scenario.tau is not None else 'unbounded'}"]
    if not scenario.mode.reads_late_rows:
        knobs = [f"ahead {scenario.window}, {scenario.lookahead}"] if scenario.window else []
    if scenario.permits:
        knobs.append(counted(scenario.permits, "permit"))

    # What the figures rest on.
    spreads = ", ".join(f"{n} {spread:.0%}" for n, spread in scenario.costs.spreads.items())
    outside = ", ".join(run.need.extrapolated)

    # Empty lines are left out by the caller.
    return [
        (
            "mode",
            f"{', '.join([str(scenario.mode), *knobs])}; {scenario.discipline} network; "
            f"{counted(scenario.steps, 'step')}, seed {scenario.seed}",
        ),
        (
            "staleness",
            ""
            if late is None
            else f"steps {late.steps_mean:.2f} (p99 {late.steps_p99:.0f}, oldest "
            f"{late.steps_oldest}); pushes {late.pushes_mean:.1f} (p99 {late.pushes_p99:.0f}); "
            f"by row {late.rows.mean:.2f} (fresh {late.rows.fresh:.1%}, p50 {late.rows.p50:.0f}, "
            f"p90 {late.rows.p90:.0f}, p99 {late.rows.p99:.0f}, hottest {late.rows.hottest:.1f})",
        ),
        ("in flight", f"at most {counted(run.max_in_flight, 'batch')}"),
        ("sent", f"{si(sent_bytes(run) / scenario.steps, 'B')} a step"),
        ("racks", _racks(run) if scenario.cluster.racks else ""),
        ("faults", _faults(run) if scenario.disturbances or scenario.checkpoints else ""),
        ("measured", f"within {spreads} of the laws (one standard deviation)" if spreads else ""),
        ("borrowed", "; ".join(borrowed(result))),
        ("extrapolated", f"{outside}: outside the fitted range" if outside else ""),
    ]


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


def _head(run: Run) -> tuple[str, str]:
    """The cluster and the workload."""
    scenario = run.scenario
    cluster = run.scenario.cluster
    work = run.scenario.workload
    return (
        f"{cluster.name}: {' + '.join(f'{n} x {gpu.name}' for n, gpu in cluster.gpus)}, "
        f"{counted(cluster.embedding_workers.processes, 'embedding worker')}, "
        f"{counted(cluster.servers.processes, 'server')} on "
        f"{counted(cluster.servers.all_hosts, 'host')}",
        f"{work.name}: {work.rows:.3g} rows x {work.dim} = {work.rows * work.dim:.3g} parameters, "
        f"dense {si(work.dense_params).rstrip()}, batch {scenario.batch:,} "
        f"({work.batch_per_rank:,} a rank)",
    )


def text(result: Report, questions: Answers | None = None) -> str:
    """The report for a terminal; ``questions``: its answers with what was asked beside them."""
    lines = [line for section in (questions or answers(result)).values() for line in section]
    below = f"\n{'':13}"
    printed = [f"{name:12} {content.replace(chr(10), below)}" for name, content in lines]
    return "\n".join([*_head(result.run), *printed])
