"""The command: what it does beside simulating a point, and what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from persia_sim.base.chrome import is_chrome_trace
from persia_sim.base.command_line import Unset
from persia_sim.base.facts import Facts, on_screen
from persia_sim.base.files import refuse_loss
from persia_sim.base.rules import SECONDS, require
from persia_sim.base.trace import Trace
from persia_sim.cluster.incidents import slow_downs
from persia_sim.cluster.memory import Capacity, capacity
from persia_sim.cluster.scenario import DEFAULT_STEPS, Discipline, Scenario
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import find_rows
from persia_sim.presets.point import Point, scenario_of

if TYPE_CHECKING:
    from persia_sim.bounds.closed_form import Answer
    from persia_sim.report.measure import Estimate
    from persia_sim.report.report import Report
    from persia_sim.sharded.plan import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions(Point):
    """Simulate one configuration and print one screen about it.

    `persia-sim sharded` does so for tables on the GPUs (TorchRec, HugeCTR), `persia-sim calibrate`
    reads what your own program takes from a trace of it, `persia-sim size` finds
    the cheapest machines for a rate, `persia-sim machines list` (or clusters, workloads) has the
    names that files accept, and `persia-sim init [FOLDER]` writes commented examples of them. An
    option that the mode does not read is an error.
    """

    row_format: Annotated[str | None, Unset("f32-adagrad; fp16-lean for criteo-syn1 to 5")] = None
    """How servers keep rows: fp16-lean, f32-adagrad, f32-adam, f32-sgd, or a .toml file."""
    evict: bool = False
    """Keep the most recently used rows when not all fit, instead of refusing."""
    after_samples: Annotated[float | None, Unset("full, or as full as they will be")] = None
    """Samples since the servers were empty, such as 1e9."""
    sensitivity: bool = False
    """Also run it with each resource ten per cent faster (a run for each)."""
    compare: Literal["sharded"] | None = None
    """Also say what tables on these GPUs would give, and how many GPUs have room for them."""
    software: Annotated[str | None, Unset("the costs' own; of tables on GPUs torchrec")] = None
    """What trains the dense network, and with --compare the tables on GPUs: torchrec, hugectr and
    so on, or a .toml file, as `persia-sim calibrate` writes it."""
    precision: Annotated[float | None, Unset("1% where --steps is not typed")] = None
    """Go on, with more steps, until half of the rate's 95 % interval is this share of it."""
    json: bool = False
    """Print the figures as JSON, in SI units and unrounded, instead of a screen."""
    write_timeline: Path | None = None
    """Write a Chrome trace (open it in Perfetto) of the steps in --timeline-steps. Example:
    run.json.gz."""
    timeline_steps: Annotated[tuple[int, int] | None, Unset("ten from the middle")] = None
    """First and last step of the timeline, as 40 49."""
    write_trace: Path | None = None
    """Write the order of events, which the replay can execute. Example: order.npz."""

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Have a run go on until its rate is narrow, unless a number of steps or an event is
        given."""
        from persia_sim.report.measure import NARROW  # not for --help

        return values if values.keys() & {"steps", *_TIMED} else {"precision": NARROW} | values


USUAL = "torchrec"
"""The software of tables on GPUs where nobody names one."""
_TIMED = ("slow",)
UNASKED_STEPS = 1_600
UNASKED_BATCHES = 100_000
"""Until a run goes on by itself at most; batches of all ranks, of which 2,500 take a second."""
BAR_AFTER_S = 1.0
"""Runs shorter than this show no progress."""


@contextmanager
def progress(scenario: Scenario) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, after a second; else lines."""
    from persia_sim.base.progress import Progress
    from persia_sim.engine.rank import pushes_of

    with Progress(total=pushes_of(scenario), unit=" pushes", delay=BAR_AFTER_S, leave=False) as bar:
        yield bar.update


def _begun(options: SimulateOptions) -> tuple[SimulateOptions, Scenario]:
    """The scenario that a run begins with: where many ranks make each step dear, a run of open
    length has few steps at first."""
    from persia_sim.report.measure import first_steps

    scenario = scenario_of(options)
    open_length = options.precision is not None and options.timeline_steps is None
    if open_length and options.steps == DEFAULT_STEPS:
        options = replace(options, steps=first_steps(scenario))
        scenario = replace(scenario, steps=options.steps)
    return options, scenario


def run(options: SimulateOptions) -> str:
    """Simulate and describe; writes the files that were asked for."""
    from persia_sim.bounds.closed_form import answer
    from persia_sim.cluster.demand import demand
    from persia_sim.report.measure import NARROW, until_narrow
    from persia_sim.report.report import report
    from persia_sim.report.screen import DETAILS, HELPS, SPEED, facts

    # What is asked, and whether the rows fit; mistakes are told before the run.
    options, scenario = _begun(options)
    software = _software(options)
    if options.software is not None and software is not None:
        scenario = _trained_by(software, scenario, options)
    row_format = find_rows(options.row_format or rows_of(options.workload))
    held = capacity(scenario.cluster, scenario.workload, row_format, options.after_samples)
    if not options.evict and not held.fits:
        _refuse_rows(held, scenario, software if options.compare else None)
    first, last = _check_before(options)
    if options.compare is not None and software is not None:
        from persia_sim.sharded.compare import comparison, job_of

        job_of(scenario, software)  # what has no other side is told before the run
    _check_step(answer(scenario, demand(scenario, held.miss_rate)))

    # Run, until the rate is narrow enough if no number of steps is given.
    most_steps = min(UNASKED_STEPS, UNASKED_BATCHES // scenario.cluster.ranks)
    narrow = options.precision
    done = until_narrow(scenario, narrow or 0, most_steps * bool(narrow), held.miss_rate, progress)
    scenario = done.scenario
    _check_incidents(scenario, done.makespan_s)

    # The answers, and what was asked for beside them.
    result = report(done, held)
    answers = facts(result, narrow or NARROW)
    helps = answers[HELPS]
    details = answers[DETAILS]
    changes: dict[str, dict[str, Estimate]] = {}
    answers[SPEED] += _shared_otherwise(result)
    if options.profile is not None:
        details.append(("costs", scenario.costs.source))

    # What would help: a run for each change.
    if options.sensitivity:
        from persia_sim.base.progress import Progress
        from persia_sim.report.sensitivity import choices, gains, without_slow

        tries = {"10 % faster": None, "twice": choices(scenario), "without": without_slow(scenario)}
        for change, tried in tries.items():
            if tried == {}:
                continue
            watch = partial(Progress, desc=change, unit=" runs", leave=False)
            changes[change] = gains(scenario, held.miss_rate, tried, watch)
        helps += [(name, _shown(by_resource)) for name, by_resource in changes.items()]
    on_gpus = None
    if options.compare is not None and software is not None:
        on_gpus = comparison(done, software, miss_rate=held.miss_rate)
        helps.append(("compared", "\n".join(on_gpus.lines)))

    # Files that were asked for.
    if options.write_trace is not None and done.trace is not None:
        done.trace.save(options.write_trace)
        replay = f"persia-runtime train --mode {scenario.mode} --ranks {scenario.cluster.ranks}"
        replay += f" --executor replay --trace {quote(str(options.write_trace))}"
        order = f"{len(done.trace)} events in {options.write_trace}; to train in it:\n{replay}"
        details.append(("order", order))
    if options.write_timeline is not None:
        from persia_sim.report.timeline import write_timeline

        count = write_timeline(done, options.write_timeline, first, last)
        details.append(("timeline", f"{count} spans in {options.write_timeline}"))

    # As a screen, or as JSON.
    if options.json:
        from persia_sim.report.figures import as_json, figures

        return as_json(figures(result, changes, on_gpus))
    return on_screen(answers)


def _software(options: SimulateOptions) -> Software | None:
    """What trains with tables on GPUs, where anything asks for it."""
    if options.compare is None and options.software is None:
        return None
    from persia_sim.sharded.presets import find_software  # late, as all that one option asks for

    return find_software(options.software or USUAL)


def _trained_by(software: Software, scenario: Scenario, options: SimulateOptions) -> Scenario:
    """The scenario whose ranks run the dense network as this software does."""
    from persia_sim.sharded.compare import dense_as, job_of

    rule = "--profile has measured the dense network"
    require(options.profile is None, "--software", options.software, rule, "drop one of them")
    return replace(scenario, costs=dense_as(scenario.costs, job_of(scenario, software)))


FAR_BELOW = 0.9
"""Of the closed form that the NICs set; below, their queues cost so much that how they are shared
has a say."""
_OTHERWISE = {
    Discipline.FLUID: Discipline.FIFO,
    Discipline.FLUID_EACH: Discipline.FLUID,
    Discipline.FIFO: Discipline.FLUID,
}


def _shared_otherwise(result: Report) -> Facts:
    """The rate of another discipline, where this one's is far below what the NICs allow."""
    from persia_sim.engine.simulate import simulate
    from persia_sim.report.measure import throughput
    from persia_sim.report.screen import si

    # Only where nothing but the NICs sets the bound and nothing happens to the run.
    scenario = result.run.scenario
    other = _OTHERWISE.get(scenario.discipline)
    share = result.samples_per_s.mean / result.bound.samples_per_s
    if other is None or share >= FAR_BELOW or "NIC" not in result.bound.binds:
        return []
    if scenario.disturbances:
        return []
    rate = throughput(simulate(replace(scenario, discipline=other), need=result.run.need)).mean
    below = f"this rate is {1 - share:.0%} below what the NICs allow"
    return [("NICs shared otherwise", f"{below}; as {other} it is {si(rate, 'samples/s')}")]


def _refuse_rows(held: Capacity, scenario: Scenario, compared: Software | None) -> None:
    """Raise ValueError for rows that the servers cannot hold; who compares is told of the GPUs,
    too."""
    if compared is None:
        held.refuse(scenario.cluster)
        return
    from persia_sim.sharded.compare import room_on_gpus  # late, as all that one option asks for

    on_gpus = room_on_gpus(scenario, compared)
    try:
        held.refuse(scenario.cluster)
    except ValueError as error:
        raise ValueError(f"{error}; {on_gpus}") from None


UNDECIDED = 0.02
"""A change that may be worth more, but whose interval holds zero, is not decided."""
SHOWN_UNDECIDED = 3


def _shown(gains: dict[str, Estimate]) -> str:
    """Gains beyond their interval, the largest first; then those that so few steps leave open."""
    decided = []
    undecided = []
    for name, gain in sorted(gains.items(), key=lambda item: -item[1].mean):
        has_interval = gain.half_width < inf  # else the steps are too few for an interval
        text = f"{gain.mean:+.1%}" + (f" +-{gain.half_width:.1%}" if has_interval else "")
        if abs(gain.mean) > max(5e-4, gain.half_width if has_interval else 0.0):
            decided.append(f"{name} {text}")
        elif has_interval and abs(gain.mean) + gain.half_width > UNDECIDED:
            undecided.append(f"{name} ({text})")

    # What is open is no answer: it is said to be open, the likeliest gains first.
    if undecided:
        more = len(undecided) - SHOWN_UNDECIDED
        rest = f" and {more} more" if more > 0 else ""
        names = ", ".join(undecided[:SHOWN_UNDECIDED])
        decided.append(f"not decided at these steps: {names}{rest}; use more --steps")
    return ", ".join(decided) or "nothing helps alone"


def _check_before(options: SimulateOptions) -> tuple[int, int]:
    """What can be told before the run; returns the steps of the timeline."""
    require(options.steps >= 2, "steps", options.steps, "a time between steps needs >= 2")
    narrow = options.precision is None or 0 < options.precision < 1
    require(narrow, "precision", options.precision, "must lie in (0, 1), as 1% or 0.01")

    # Events at fixed times and a run of open length do not go together.
    for name in _TIMED if options.precision else ():
        rule = f"--{name.replace('_', '-')} has its times, so the run does not go on"
        require(
            not getattr(options, name), "precision", options.precision, rule, "drop one of them"
        )

    # Options that only mean something beside another.
    if options.trace_shards and options.write_trace is None:
        raise ValueError("--trace-shards is set but --write-trace is not: name the file to write")
    if options.timeline_steps is not None and options.write_timeline is None:
        raise ValueError(
            "--timeline-steps is set but --write-timeline is not: name the file to write"
        )
    _refuse_outputs(options)

    # The steps of the timeline lie inside the run.
    middle = options.steps // 2
    end = options.steps - 1
    first, last = options.timeline_steps or (middle, min(middle + 9, end))
    rule = f"must be a range inside [0, {end}]"
    require(0 <= first <= last <= end, "timeline steps", (first, last), rule)
    return first, last


def _refuse_outputs(options: SimulateOptions) -> None:
    """Each can be written, is a file of its own, and takes the place of none of another kind."""
    # Before minutes of simulation: an output that cannot be written would lose them.
    seen: dict[Path, str] = {}
    for path, flag, kind, is_kind in (
        (options.write_timeline, "--write-timeline", "timeline", is_chrome_trace),
        (options.write_trace, "--write-trace", "trace", Trace.is_stored_in),
    ):
        if path is None:
            continue
        folder = path.parent
        require(folder.is_dir(), flag, path, f"there is no folder {folder}", "make it first")
        refuse_loss(flag, path, kind, is_kind)
        ok = os.access(folder, os.W_OK)
        rule = f"the folder {folder} cannot be written to"
        require(ok, flag, path, rule)
        other = seen.setdefault(path.resolve(), flag)
        require(other == flag, flag, path, f"{other} names the same file", "name another")


def _check_step(bound: Answer) -> None:
    """Numbers that are each possible may together describe nothing that ends."""
    value = f"{bound.step_s:.3g} s ({bound.binds})"
    rule = f"must lie in (0, {SECONDS[1]:g}]"
    ok = 0 < bound.step_s <= SECONDS[1]
    require(ok, "a step", value, rule, "look at the rates and sizes behind it")


def _check_incidents(scenario: Scenario, end_s: float) -> None:
    """What never happened was not meant."""
    ends = f"the run ends at {end_s:.4g} s"
    remedy = "choose an earlier time or more --steps"
    for event in slow_downs(scenario.disturbances):
        name = f"slow-down of {event.target} {event.index} (seconds)"
        require(event.start_s <= end_s, name, f"{event.start_s:g}", ends, remedy)
    if scenario.averaging is not None:
        period_s = scenario.averaging.period_s
        require(period_s <= end_s, "average_every_s", period_s, ends, remedy)
