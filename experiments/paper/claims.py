"""The paper's claims beside what its plots show and what is found here, number by number.

`claims.csv` says of each claim what the paper's number is, which command makes ours, and where it
stands: the file, and the lines of it. No number of ours is typed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.catalogue import PIECES
from experiments.lateness.runs import RunsFile
from experiments.lateness.streams import STREAMS, TIME, Cell
from experiments.lateness.table import LatenessStudy, StreamSetting
from experiments.paper.record import STORED, Row, read_rows
from experiments.statistics import Interval

CLAIMS = Path(__file__).with_name("claims.csv")
PAIRED = "lateness_runs.csv"
"""The file whose runs are paired: cells of it are compared over the same seeds and test users."""
PLOTTED = {"hybrid": ("Persia", "hybrid"), "async": ("XDL", "async"),
           "paddle": ("PaddlePaddle", "async")}  # fmt: skip
"""System and mode of a published curve, by the name that `claims.csv` has for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A line of `claims.csv`."""

    claim: str
    """The claim, after the paper's text."""
    paper: str
    """The paper's number, as it says it."""
    low: float
    """What the claim is taken as: the least number that agrees with it; infinite for any."""
    high: float
    command: str
    """The study that makes our number, with its options; empty where nothing can."""
    file: str
    value: str
    """Where it stands. Of paired runs a cell, rows late / dense late in updates; of any other table
    "column: name=value; name=value"."""
    against: str
    """What is taken off it (of paired runs), or what it is divided by."""
    plots: str
    """The published curves that show it: one, or "first - second"; of throughput the column
    `published` of the same lines does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number with its 95 % interval; gaps of AUC are in thousandths."""

    label: str
    """Data set, label and window; empty where the claim says all of it."""
    value: float
    low: float = math.nan
    """NaN where there is no interval."""
    high: float = math.nan
    seeds: int = 0
    """0 where the interval is no matter of seeds."""
    is_fitted: bool = False
    """Whether constants of the simulator were fitted to the published value of it."""

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.label}: {self.value:.2f}{interval}".removeprefix(": ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is known of a claim."""

    claim: Claim
    plots: Sequence[Number]
    """By the paper's own plots, with the error of reading them."""
    here: Sequence[Number]
    lacks: str = ""
    """The run or the table that it would take, where there is no number of ours."""
    file: Path | None = None
    """The table that our numbers were read from."""

    @property
    def judged(self) -> list[tuple[Number, str]]:
        """Our numbers, each with its `verdict`."""
        return [(number, verdict(self.claim, number)) for number in self.here]


def read_claims() -> list[Claim]:
    """All claims, in the paper's order."""
    ends = {"low": -math.inf, "high": math.inf}
    claims = []
    for row in read_rows(CLAIMS):
        limits = {name: float(row[name] or end) for name, end in ends.items()}
        claims.append(Claim(**{**row, **limits}))  # type: ignore[arg-type]
    return claims


def verdict(claim: Claim, number: Number) -> str:
    """How a number stands to what the claim is taken as: its whole interval "inside" or "outside",
    or "open". A number that was fitted to the paper's own is "fitted": it says nothing."""
    if number.is_fitted:
        return "fitted"
    if claim.low <= number.low and number.high <= claim.high:
        return "inside"
    if number.high < claim.low or number.low > claim.high:
        return "outside"
    return "open"


def answers(out: Path) -> list[Answer]:
    """Every claim with its numbers: of tables in ``out`` where their piece has run there, else of
    the stored ones."""
    return [_answer(claim, out) for claim in read_claims()]


def _answer(claim: Claim, out: Path) -> Answer:
    if not claim.file:
        return Answer(claim=claim, plots=(), here=(), lacks="the paper's data, which are private")

    # The table, as it was made last.
    file = _path(claim.file, out)
    if not file.is_file():
        lacks = f"{claim.file}, which persia-experiments {claim.command} makes"
        return Answer(claim=claim, plots=(), here=(), lacks=lacks)

    # Gaps of AUC, paired; or one number over another.
    if claim.file == PAIRED:
        plots = list(_plotted_gaps(claim.plots)) if claim.plots else []
        here = _paired(file, _cell(claim.value), _cell(claim.against))
        lacks = "" if here else f"runs of rows / dense {claim.value} late beside {claim.against}"
    else:
        rows = read_rows(file)
        plots, here = (_ratio(rows, claim, published) for published in (True, False))
        lacks = "" if here else f"a line of {claim.file} with {claim.value}"
    return Answer(claim=claim, plots=plots, here=here, lacks=lacks, file=file)


def _path(name: str, out: Path) -> Path:
    for piece in PIECES:
        if name in piece.csv and (out / piece.name / name).is_file():
            return out / piece.name / name
    return STORED / name


def _cell(text: str) -> Cell:
    rows, dense = text.split("/")
    return Cell(rows_late=int(rows), dense_late=int(dense))


@cache  # the file holds some thousand runs
def _study(file: Path) -> LatenessStudy:
    return LatenessStudy(RunsFile(file), list(STREAMS.values()))


def _paired(file: Path, cell: Cell, against: Cell) -> list[Number]:
    """One cell minus another on each real stream in time order, over the seeds and the test users
    that both have, at the rates that the study's rule chose for each: a number for each label and
    window that the two were judged on."""
    study = _study(file)
    numbers = []
    for setting in study.settings():
        is_asked = setting.order == TIME and setting.start == 0.0 and not setting.stream.is_drawn
        terms = [study.terms(setting, cell), study.terms(setting, against, factor=-1.0)]
        if not is_asked or not all(terms):
            continue
        for task in _tasks(study, setting):
            gap = study.gap(*terms, task=task)
            if gap.n:
                label = f"{setting.stream.key}, {task}, {setting.window}"
                numbers.append(_number(label, gap))
    return numbers


def _tasks(study: LatenessStudy, setting: StreamSetting) -> Sequence[str]:
    """The labels that runs of a stream were judged by."""
    records = (r for r in study.file if r.run.stream == setting.stream.key)
    return tuple(next(records).auc)


def _number(label: str, gap: Interval) -> Number:
    low, high = (1e3 * (gap.mean + sign * gap.half_width) for sign in (-1, 1))
    return Number(label=label, value=1e3 * gap.mean, low=low, high=high, seeds=gap.n)


def _plotted_gaps(curves: str) -> list[Number]:
    """Gaps to sync at the end of published curves, or of one less those of another; intervals are
    the error of reading, which adds up."""
    from experiments.published.curves import all_gaps, published_curves  # late: pandas

    gaps = all_gaps(published_curves())
    names = curves.split(" - ")
    numbers = []
    for data in dict.fromkeys(data for data, *_ in gaps):
        found = [gaps.get((data, *PLOTTED[name])) for name in names]
        at_ends = [(gap.at_end, gap.error_at_end) for gap in found if gap is not None]
        if len(at_ends) < len(names) or any(math.isnan(at_end) for at_end, _ in at_ends):
            continue
        value = 1e3 * (at_ends[0][0] - sum(at_end for at_end, _ in at_ends[1:]))
        error = 1e3 * sum(error for _, error in at_ends)
        numbers.append(Number(label=data, value=value, low=value - error, high=value + error))
    return numbers


def _ratio(rows: Sequence[Row], claim: Claim, published: bool) -> list[Number]:
    """One number of a table over another, with the interval of both where they have one; none where
    a line is not there. ``published``: by the published values of the same two lines."""
    sides = []
    for place in (claim.value, claim.against):
        column, _, wanted = place.partition(": ")
        pairs = [pair.split("=", 1) for pair in wanted.split("; ")]
        lines = [row for row in rows if all(row[name] == value for name, value in pairs)]
        column = "published" if published else column
        if not lines or not lines[0].get(column):
            return []
        half_width = float(lines[0].get(f"{column}_half_width_95") or math.nan)
        sides.append((lines[0], float(lines[0][column]), half_width))

    (top, above, above_half), (bottom, below, below_half) = sides
    return [
        Number(
            label="",
            value=above / below,
            low=(above - above_half) / (below + below_half),
            high=(above + above_half) / (below - below_half),
            seeds=0 if published else int(top.get("seeds") or 0),
            is_fitted=not published and "fit" in (top.get("kind"), bottom.get("kind")),
        )
    ]


def screen(found: Sequence[Answer]) -> str:
    """The claims for a terminal, each with its numbers below it."""
    blocks = []
    for answer in found:
        claim = answer.claim
        plots = f"; its plots: {'; '.join(map(str, answer.plots))}" if answer.plots else ""
        lines = [claim.claim, f"  the paper: {claim.paper}{plots}"]
        for number, word in answer.judged:
            seeds = f", n = {number.seeds}" if number.seeds else ""
            lines.append(f"  {number}{seeds}  {word}")
        if answer.lacks:
            lines.append(f"  no number of ours: it lacks {answer.lacks}")
        if answer.file is not None:
            whose = "stored" if answer.file.parent == STORED else "of this run"
            lines.append(f"  by {claim.file} ({whose}): persia-experiments {claim.command}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def markdown(found: Sequence[Answer]) -> str:
    """The claims as a table of a page: our numbers by verdict, of many the least and the largest.
    `screen` has all of them."""
    header = ("claim", "the paper", "its plots", "here", "command")
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    for answer in found:
        claim = answer.claim
        by_verdict: dict[str, list[Number]] = {}
        for number, word in answer.judged:
            by_verdict.setdefault(word, []).append(number)
        here = [f"**{word}** {_from_to(numbers)}" for word, numbers in by_verdict.items()]
        here += [f"lacks {answer.lacks}"] if answer.lacks else []
        command = f"`{claim.command}`" if claim.command else ""
        cells = [claim.claim, claim.paper, "; ".join(map(str, answer.plots)), "<br>".join(here)]
        lines.append(f"| {' | '.join([*cells, command])} |")
    return "\n".join(lines)


def _from_to(numbers: Sequence[Number]) -> str:
    if len(numbers) < 3:
        return "; ".join(map(str, numbers))
    least, largest = (end(numbers, key=lambda number: number.value) for end in (min, max))
    return f"in {len(numbers)}, from {least} to {largest}"
