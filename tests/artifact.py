"""`python -m tests.artifact` writes the claims table of ARTIFACT.md from the stored results."""

from __future__ import annotations

from pathlib import Path

from experiments.catalogue import STUDIES
from experiments.paper.claims import claims
from experiments.paper.record import Table
from experiments.paper.verdicts import FITTED, Claim, Finding
from tests.tree import ROOT

ARTIFACT = ROOT / "ARTIFACT.md"
START, END = "<!-- claims -->", "<!-- end of claims -->"


def table() -> str:
    """A line a claim: what the text says, studies, minutes, both verdicts with their numbers."""
    lines = [
        "| claim | study (minutes) | against its own plots | independent evidence here |",
        "| --- | --- | --- | --- |",
    ]
    for claim in claims(Path("no-run-at-all")):
        studies = "<br>".join(_study(t) for t in claim.tables)
        lines.append(
            f"| {claim.says} Taken as: {claim.rule}. | {studies}"
            f" | {_judged(claim, 'plots')} | {_judged(claim, 'evidence')} |"
        )
    return "\n".join(lines)


def _study(found: Table) -> str:
    """With its minutes: those of the study without options; one with options is a part of it."""
    whole = STUDIES[found.study].minutes
    below = "below " if " --" in found.command else ""
    return f"`{found.command.removeprefix('persia-experiments ')}` ({below}{whole:g})"


def _judged(claim: Claim, kind: str) -> str:
    """The verdict, and the numbers behind it; numbers that were fitted to are in the report."""
    verdict = claim.plots_verdict if kind == "plots" else claim.verdict
    if verdict.why == FITTED:
        return "**none possible: fitted**"
    found = [f"**{verdict}**"]
    for part in claim.parts:
        for number in getattr(part, kind):
            label = part.label if len(claim.parts) > 1 else number.label
            found.append(_number(number, label, claim.scale))
    return "<br>".join(found)


def _number(found: Finding, label: str, scale: float) -> str:
    value, low, high = (f"{scale * x:.2f}" for x in (found.value, found.low, found.high))
    seeds = f", n = {found.n}" if found.n is not None else ""
    return f"{label}: {value} [{low}, {high}]{seeds}"


def written(text: str) -> str:
    """A text with the table put between its two marks."""
    head, rest = text.split(START)
    return f"{head}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    ARTIFACT.write_text(written(ARTIFACT.read_text()))
