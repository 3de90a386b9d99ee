"""The screen about a run: one fact on a line, called by its name in full."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

from persia_sim.base.facts import Facts, column
from persia_sim.base.rules import counted, price
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.memory import binary, fill_s, lasting
from persia_sim.engine.simulate import Run
from persia_sim.report.measure import NARROW, Estimate, first_incident_s
from persia_sim.report.report import Report, borrowed, may_be, remedy, sent_bytes

SIMULATED = "What is simulated?"
FITS = "Does it fit?"
SPEED = "How fast?"
BINDS = "What binds?"
HELPS = "What would help?"
COSTS = "What does it cost?"
LATE = "How late are the rows?"
DETAILS = "Details"
Answers = dict[str, list[tuple[str, str]]]
"""Question -> what a line is called, and what it says; in the order in which one decides."""
_MOST_SHARES = 6
_LEAST_SHARE = 5e-4
ROUGH = 0.1
"""A wider interval says of itself that it is hardly known: no number of steps follows from it."""
_THREE_DIGITS = 0.05
_TWO_DIGITS = 0.5
"""Relative half widths up to which a figure has so many digits; beyond, it has one."""


def facts(result: Report, narrow: float = NARROW) -> Answers:
    """Every fact of a run by the question that it answers, in the order in which one decides;
    ``narrow``: width of the rate's interval, relative, that was asked for."""
    by_question = {
        SIMULATED: _simulated(result.run),
        FITS: _memory(result),
        SPEED: _speed(result, narrow),
        BINDS: _binding(result),
        HELPS: [("advice", remedy(result))],
        COSTS: _cost(result),
        LATE: _staleness(result),
        DETAILS: _details(result),
    }

    # A figure that is hardly meant is asked about below the line that it enters.
    doubts = doubts_of(result.run.scenario.cluster)
    return {
        question: [
            (name, f"{content}\n{doubts[name]}" if name in doubts else content)
            for name, content in lines
            if content
        ]
        for question, lines in by_question.items()
    }


def doubts_of(cluster: Cluster) -> dict[str, str]:
    """Line of the screen -> figures of machines behind it that hardly are what was meant."""
    roles = cluster.nn, cluster.embedding_workers, cluster.servers
    hosts = dict.fromkeys(role.host for role in roles)
    by_line: dict[str, str] = {}
    for host in hosts:
        for line, doubt in host.doubts.items():
            by_line[line] = f"{by_line[line]}\n{doubt}" if line in by_line else doubt
    return by_line


def si(value: float, unit: str = "") -> str:
    """A figure with the prefix of its unit.

    >>> si(1.88e6, "samples/s"), si(915e6, "B")
    ('1.88 Msamples/s', '915 MB')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _simulated(run: Run) -> Facts:
    """The cluster, the workload, the mode, and how long it was simulated."""
    scenario = run.scenario
    cluster = scenario.cluster
    work = scenario.workload

    # What the mode lets a rank do: how far rows may lag, or how far it looks ahead.
    if scenario.mode.reads_late_rows:
        tau = "unbounded" if scenario.tau is None else str(scenario.tau)
        knobs = f", tau {tau}"
    else:
        knobs = (
            f", {scenario.steps_ahead} steps ahead, {scenario.lookahead}"
            if scenario.steps_ahead
            else ""
        )
    if scenario.fresh:
        knobs += f", fresh {' '.join(scenario.fresh)}"
    if scenario.permits:
        knobs += f", {counted(scenario.permits, 'permit')} a rank"

    # The machines, the model, the run.
    gpus = f"{cluster.ranks} x {cluster.gpu.name}"
    servers = counted(cluster.servers.processes, "server")
    dims = ", ".join(f"{dim:g}" for dim in sorted({table.dim for table in work.alike}))
    return [
        ("cluster", cluster.name),
        ("GPUs", gpus),
        ("embedding workers", f"{cluster.embedding_workers.processes:,}"),
        ("embedding servers", f"{servers} on {counted(cluster.servers.hosts, 'host')}"),
        ("workload", work.name),
        ("embedding tables", f"{_number(work.rows)} rows of {dims} numbers"),
        (
            "parameters",
            f"{_number(work.rows * work.kept_dim)} in rows, {_number(work.weights)} dense",
        ),
        ("batch", f"{scenario.batch:,} samples, {work.batch_per_rank:,} on each rank"),
        ("mode", f"{scenario.mode}{knobs}"),
        ("run", f"{counted(scenario.steps, 'step')}, seed {scenario.seed}"),
        ("NICs", f"shared as {scenario.discipline}"),
    ]


def _number(value: float) -> str:
    """A number with its prefix: 31.2 G."""
    return si(value).rstrip()


def _memory(result: Report) -> Facts:
    """What the servers hold."""
    # How full a server is, or what would be missing.
    held = result.capacity
    if held is None:
        # A line a fact.
        return []
    limit = binary(held.limit_bytes_per_server)
    need = binary(held.bytes_per_server)
    room = f"{need} of {limit} on each server"
    if not held.fits:
        room = f"all of {limit} on each server; all rows would need {need}"

    # Rows are evicted once the servers are full.
    is_full = held.filled_rows > 0.999 * held.resident_rows
    evicted = held.evicted_rows * is_full
    full_s = fill_s(
        result.run.scenario.workload, result.samples_per_s.mean, 0.9 * held.resident_rows
    )
    return [
        ("memory", room),
        ("size of a row", f"{held.row_bytes:.0f} B" + (f" as {held.rows}" if held.rows else "")),
        ("rows on the servers", f"{_number(held.filled_rows)}; {_number(evicted)} evicted"),
        (
            "ids without a row",
            f"{100 * held.miss_rate:.2f} % of a batch; their rows start anew",
        ),
        ("time until 90 % full", f"{lasting(full_s)} from empty servers"),
    ]


def _speed(result: Report, narrow: float) -> Facts:
    """Rate and step time, with their interval and bound."""
    rate = result.samples_per_s
    bound = result.bound

    # How exactly the rate is known, and how many steps more would tell.
    if rate.half_width == inf:
        interval = f"unknown: {counted(rate.values, 'step')} without the warm-up are too few"
    elif rate.relative >= 1:
        interval = f"wider than the rate itself: {counted(rate.values, 'step')} are too few"
    else:
        steps = counted(rate.values, "step")
        interval = f"+-{100 * rate.relative:.2f} % of it, from {steps} without the warm-up"
    if more := more_steps(rate, result.run, narrow):
        interval += f"\n{more}"
    early = result.step_s.mean < 0.9995 * bound.step_s

    # The rate, and what no queue could make faster. Figures have the digits that
    # the interval leaves them.
    drawn = may_be(result)
    ends = f"{si(drawn.low, 'samples/s')} to {si(drawn.high, 'samples/s')}"
    about, mean = as_sure(rate.mean, rate)
    _, step_s = as_sure(result.step_s.mean, rate)
    return [
        ("throughput", about + si(mean, "samples/s")),
        ("its 95 % interval", interval),
        ("what it may be", f"{ends} (90 %), as constants are uncertain\nmost: {drawn.decisive}"),
        ("step", f"{about}{1e3 * step_s:g} ms" if about else f"{1e3 * step_s:.2f} ms"),
        (
            "shortest step possible",
            f"{1e3 * bound.step_s:.2f} ms, set by: {bound.binds}"
            + (
                "\nqueues still fill, and steps are shorter until then: use more --steps"
                if early
                else ""
            ),
        ),
    ]


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


def _listed(shares: Mapping[str, float]) -> str:
    """The largest shares, one on a line."""
    top = sorted(shares.items(), key=lambda item: -item[1])[:_MOST_SHARES]
    return column([(f"{100 * x:.1f} %", name) for name, x in top if x >= _LEAST_SHARE])


def _binding(result: Report) -> Facts:
    """What the run's time is spent on, and what stands still."""
    waits = sorted(result.exposed_s.items(), key=lambda item: -item[1])
    idle = column([(f"{1e3 * seconds:.2f} ms", name) for name, seconds in waits])
    return [
        ("critical path, resources", _listed(result.blame)),
        ("critical path, stages", _listed(result.stages)),
        ("ranks stand still for", idle or "nothing"),
        ("busy resources", _listed(result.use)),
    ]


def _cost(result: Report) -> Facts:
    """Dollars, where every machine has a price."""
    unpriced = result.run.scenario.cluster.unpriced
    if unpriced:
        return [("cost", f"unknown: no usd_per_hour of {', '.join(unpriced)}")]
    if not result.usd_per_hour:
        return []
    about, usd = as_sure(result.usd_per_million_samples, result.samples_per_s)
    return [
        ("cost of an hour", f"${result.usd_per_hour:,.0f}"),
        ("cost of 10^6 samples", about + price(usd)),
    ]


def _staleness(result: Report) -> Facts:
    """How many steps, pushes, and pushes of one row a lookup misses."""
    late = result.staleness
    if late is None:
        return []
    rows = late.rows

    # Of lookups in steps and in pushes, then of single rows.
    return [
        (
            "staleness",
            f"{late.steps_mean:.2f} steps on average; 99 % of lookups miss at most"
            f" {late.steps_p99:.0f}; the oldest step missed is {late.steps_oldest:.0f} back",
        ),
        (
            "pushes missed",
            f"{late.pushes_mean:.1f} on average; 99 % of lookups miss at most"
            f" {late.pushes_p99:.0f}",
        ),
        ("pushes of a row missed", f"{rows.mean:.2f} on average"),
        ("rows that miss none", f"{100 * rows.fresh:.1f} %"),
        (
            "rows by pushes missed",
            f"half miss at most {rows.p50:.0f}, 90 % at most {rows.p90:.0f}, 99 % at most"
            f" {rows.p99:.0f}",
        ),
        ("most popular row", f"misses {rows.hottest:.1f} pushes on average"),
    ]


def _details(result: Report) -> Facts:
    """What was in flight and sent, what failed, and what the figures rest on."""
    run = result.run
    scenario = run.scenario
    outside = ", ".join(run.need.extrapolated)
    return [
        ("batches in flight", f"at most {run.max_in_flight:,}"),
        ("sent in a step", si(sent_bytes(run) / scenario.steps, "B")),
        *([("slow-downs", f"{len(scenario.disturbances)}")] if scenario.disturbances else []),
        ("borrowed constants", "\n".join(borrowed(result))),
        ("extrapolated laws", f"{outside}: outside the range of their fit" if outside else ""),
    ]
