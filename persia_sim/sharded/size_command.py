"""`persia-sim size`: which machines reach a rate, cheapest first, hybrid and sharded alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from persia_sim.base.command_line import Unset
from persia_sim.base.facts import aligned
from persia_sim.base.rules import price, require
from persia_sim.base.vocabulary import DEFAULT_TAU
from persia_sim.cluster.machine import Host
from persia_sim.cluster.memory import FORMATS
from persia_sim.presets.catalogue import MACHINES, rows_of
from persia_sim.presets.from_file import find, find_workload, read_host
from persia_sim.sharded.presets import find_software
from persia_sim.sharded.sizing import MOST_GPUS, Asked, Choice, choices, front, simulated, what_ifs

RATES = (1, 1e12)
_SIMULATED = 3
"""Choices of a system that are simulated: the cheapest by the closed form."""
_OF_THE_FRONT = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Rates of the Pareto front over the one that is asked for."""
_HALVINGS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeOptions:
    """Find the cheapest machines that train so many samples a second, cheapest first: hybrid with
    CPU hosts, and tables on the GPUs; then the Pareto front of rate and price, and what would halve
    the price."""

    at_least: float
    """Samples per second, such as 2e6."""
    workload: str = "criteo-ad"
    """taobao-ad, avazu-ad, criteo-ad, kwai-video, criteo-syn1 to criteo-syn5, or a .toml file."""
    batch_per_rank: Annotated[int | None, Unset("the workload's")] = None
    """Samples of a GPU in a step, in [1, 65535]."""
    tau: int | None = DEFAULT_TAU
    """Window of hybrid in steps, >= 0."""
    fresh: tuple[str, ...] = ()
    """Tables of hybrid whose rows are exact: names of tables or fields, a number of fields, or
    all."""
    budget: Annotated[str | None, Unset("without limit")] = None
    """Most dollars an hour, such as 200/h."""
    machines: Annotated[tuple[str, ...], Unset("all of `machines list` that have a price")] = ()
    """Machines to choose from, with and without GPUs: names, or .toml files with a price. Example:
    p5.48xlarge c2-standard-30."""
    software: str = "torchrec"
    """Software of the GPUs that hold tables: torchrec, hugectr and so on, or a .toml file."""
    row_format: Annotated[str | None, Unset("f32-adagrad; fp16-lean for criteo-syn1 to 5")] = None
    """How hybrid's servers keep rows: fp16-lean, f32-adagrad, f32-adam or f32-sgd."""


def run_size(options: SizeOptions) -> str:
    """Search, simulate the cheapest, and say it on one screen."""
    asked = _asked(options)
    machines = _machines(options)
    budget = _budget(options.budget)

    # The cheapest of both systems by the closed form, then as simulated.
    choices_of_all = choices(asked, machines)
    _refuse_nothing(asked, choices_of_all)
    tried: list[Choice] = []
    for system in dict.fromkeys(choice.system for choice in choices_of_all):
        cheapest = [choice for choice in choices_of_all if choice.system == system][:_SIMULATED]
        tried += [done for choice in cheapest if (done := simulated(asked, choice))]
    tried.sort(key=lambda choice: choice.usd_per_hour)
    within = [choice for choice in tried if choice.usd_per_hour <= budget]
    head = f"{asked.samples_per_s:,.0f} samples/s of {asked.workload.name}, cheapest first"
    lines = [f"{head}; simulated, at list prices"]
    if within:
        lines.append(_table(within))
        lines += _undecided(asked, within)
    if len(within) < len(tried):
        more = len(tried) - len(within)
        lines.append(f"{more} more cost more than ${budget:,.0f} an hour")
    if not within:
        lines.append(_over_budget(asked, machines, budget, tried))

    # Other rates, and what would have to change.
    lines += ["", "Pareto front of rate and price around that, by the closed form"]
    lines.append(_table(_around(asked, machines)))
    if tried:
        lines += ["", _halving(asked, tried[0])]
    moved = next((c.may_be.decisive for c in tried if c.software is None), "")
    exact = f" (fresh: {' '.join(asked.fresh)})" if asked.fresh else ""
    lines.append(
        f"{f'what moves the rate of hybrid most: {moved}; ' if moved else ''}its rows are "
        f"{asked.tau if asked.tau is not None else 'any number of'} steps late{exact}, and those of"
        f" {asked.software.name} are exact"
    )
    return "\n".join(lines)


def _asked(options: SizeOptions) -> Asked:
    """What is wanted; raises ValueError naming what cannot be."""
    # A rate that a cluster could have, of a workload and a way to keep rows that are known.
    least, most = RATES
    rule = f"must lie in [{least:,}, {most:g}]"
    require(least <= options.at_least <= most, "--at-least", options.at_least, rule)
    work = find_workload(options.workload)
    if options.batch_per_rank is not None:
        work = replace(work, batch_per_rank=options.batch_per_rank)
    rows = options.row_format or rows_of(options.workload)
    work.parted(options.fresh)
    find(rows, "--row-format", FORMATS, _no_file)

    # What is searched for.
    return Asked(
        workload=work,
        samples_per_s=options.at_least,
        tau=options.tau,
        fresh=options.fresh,
        rows=rows,
        software=find_software(options.software),
    )


def _no_file(path: Path) -> Any:
    raise ValueError(f"{path} is a file: `size` takes names here; `persia-sim` takes files")


def _machines(options: SizeOptions) -> list[Host]:
    """The machines to choose from, each with a price."""
    if not options.machines:
        return [host for host in MACHINES.values() if host.usd_per_hour]
    result = [find(name, "--machines", MACHINES, read_host) for name in options.machines]
    for host in result:
        remedy = "write usd_per_hour into a file with `base` of that name"
        require(host.usd_per_hour > 0, f"price of {host.name}", "not known", "it is needed", remedy)
    with_gpus = any(host.gpu is not None for host in result)
    remedy = "name one (`persia-sim machines list`)"
    require(with_gpus, "--machines", ", ".join(options.machines), "none has GPUs", remedy)
    return result


def _budget(text: str | None) -> float:
    """Dollars an hour."""
    if text is None:
        return float("inf")
    number = text.strip().removeprefix("$").removesuffix("/h")
    try:
        usd = float(number)
    except ValueError:
        usd = -1.0
    require(usd > 0, "--budget", repr(text), "must be dollars an hour, > 0", "write 200 or 200/h")
    return usd


def _refuse_nothing(asked: Asked, choices_of_all: Sequence[Choice]) -> None:
    rule = f"no number of these machines reaches it (up to {MOST_GPUS:,} GPUs)"
    remedy = "ask for less, name other --machines, or a larger --batch-per-rank"
    require(len(choices_of_all) > 0, "--at-least", f"{asked.samples_per_s:,.0f}", rule, remedy)


def _table(choices_of_all: Sequence[Choice]) -> str:
    # A line a choice: what it is, how fast, what it costs, and what holds it back.
    header = ["system", "GPUs", "samples/s", "90 % band", "$/hour", "$/million", "bound by", "of"]
    lines = []
    for choice in choices_of_all:
        low, high = choice.band
        machines = " + ".join(f"{n} x {host.name} ({role})" for role, n, host in choice.machines)
        lines.append(
            [
                choice.system,
                f"{choice.gpus:,}",
                _rate(choice),
                f"{low:,.0f} to {high:,.0f}",
                f"{choice.usd_per_hour:,.2f}",
                price(choice.usd_per_million).removeprefix("$"),
                choice.binds,
                machines,
            ]
        )
    return aligned(header, lines)


def _rate(choice: Choice) -> str:
    """The rate, with its 95 % interval where it is simulated."""
    rate = f"{choice.samples_per_s:,.0f}"
    if choice.half_width is None:
        return rate
    return f"{rate} +-{choice.half_width / choice.samples_per_s:.1%}"


def _undecided(asked: Asked, shown: Sequence[Choice]) -> list[str]:
    """A line for each choice that may reach the rate and may not."""
    return [
        f"not decided: the 95 % interval of {choice.system} for ${choice.usd_per_hour:,.2f} an hour"
        f" is not clear of {asked.samples_per_s:,.0f} in the longest simulation; ask for"
        " a little more to be sure"
        for choice in shown
        if choice.undecided
    ]


def _around(asked: Asked, machines: Sequence[Host]) -> list[Choice]:
    """The Pareto front of choices for other rates."""
    choices_of_all: list[Choice] = []
    for times in _OF_THE_FRONT:
        choices_of_all += choices(
            replace(asked, samples_per_s=times * asked.samples_per_s), machines
        )
    return front(choices_of_all)


def _over_budget(
    asked: Asked, machines: Sequence[Host], budget: float, tried: Sequence[Choice]
) -> str:
    """What the rate costs, and what the budget buys."""
    cheapest = f"; the cheapest cost ${tried[0].usd_per_hour:,.2f}" if tried else ""
    too_dear = f"no machines reach it for ${budget:,.2f} an hour{cheapest}"
    low = 0.0
    high = asked.samples_per_s
    bought = None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        of_rate = choices(replace(asked, samples_per_s=max(1.0, middle)), machines)
        affordable = [choice for choice in of_rate if choice.usd_per_hour <= budget]
        low, high = (middle, high) if affordable else (low, middle)
        bought = affordable[0] if affordable else bought
    if bought is None:
        return f"{too_dear}, and it buys no machines at all"
    return f"{too_dear}. It buys about {bought.samples_per_s:,.0f} samples/s:\n{_table([bought])}"


def _halving(asked: Asked, choice: Choice) -> str:
    """What would have to be otherwise for half of the price."""
    shares = what_ifs(asked, choice)
    prices = [f"{share:.2f} with {name}" for name, share in shares.items() if share < 0.995]
    enough = [name for name, share in shares.items() if share <= 0.5]
    first = f"{choice.system} costs ${choice.usd_per_hour:,.2f} an hour"
    if not prices:
        return f"{first}; no change that was tried lowers it"
    verdict = f"{' or '.join(enough)} would halve it" if enough else "none of these alone halves it"
    return f"{first}; the price would be multiplied by {', '.join(prices)}; {verdict}"
