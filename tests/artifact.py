"""`python -m tests.artifact` writes the claims table of ARTIFACT.md from the stored results."""

from __future__ import annotations

from pathlib import Path

from experiments.catalogue import STUDIES
from experiments.paper.claims import claims
from experiments.paper.record import Table
from experiments.paper.verdicts import Claim, Found
from tests.tree import ROOT

ARTIFACT = ROOT / "ARTIFACT.md"
START, END = "<!-- claims -->", "<!-- end of claims -->"


def table() -> str:
    """A line a claim: what the text says, command, minutes, both verdicts with their numbers."""
    lines = [
        "| claim | command | minutes | against its own plots | independent evidence here |",
        "| --- | --- | --- | --- | --- |",
    ]
    for claim in claims(Path("no-run-at-all")):
        commands = "<br>".join(f"`{t.command}`" for t in claim.tables)
        minutes = ", ".join(_minutes(t) for t in claim.tables)
        lines.append(
            f"| {claim.says} Taken as: {claim.rule}. | {commands} | {minutes}"
            f" | {_judged(claim, 'plots')} | {_judged(claim, 'found')} |"
        )
    return "\n".join(lines)


def _minutes(found: Table) -> str:
    """Of the study without options; one with options is a part of it."""
    whole = STUDIES[found.study].minutes
    return f"below {whole:g}" if " --" in found.command else f"{whole:g}"


def _judged(claim: Claim, kind: str) -> str:
    """The verdict, and the numbers behind it."""
    verdict = claim.plots_verdict if kind == "plots" else claim.verdict
    found = [f"**{verdict}**"]
    for part in claim.parts:
        for number in getattr(part, kind):
            label = part.label if len(claim.parts) > 1 else number.label
            found.append(_number(number, label, claim.scale))
    return "<br>".join(found)


def _number(found: Found, label: str, scale: float) -> str:
    value, low, high = (f"{scale * x:.2f}" for x in (found.value, found.low, found.high))
    seeds = f", n = {found.n}" if found.n is not None else ""
    return f"{label}: {value} ({low} to {high}){seeds}"


def written(text: str) -> str:
    """A text with the table put between its two marks."""
    head, rest = text.split(START)
    return f"{head}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    ARTIFACT.write_text(written(ARTIFACT.read_text()))
