"""The claims as the first table of the report: the text, its own plots, what is found, verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.paper import html
from experiments.paper.verdicts import RULE, Claim, Found, Part, Verdict

MARKS = {"supported": "\N{CHECK MARK}", "contradicted": "\N{MULTIPLICATION X}", "undecided": "?"}
"""Before each number; the word stands above, for all numbers of a cell."""
LEGEND = (
    "Each number: its value with its interval, behind the mark of its own verdict"
    f" ({', '.join(f'{mark} {verdict}' for verdict, mark in MARKS.items())})."
)
HEADER = ("The text", "Its own plots", "Independent evidence here", "By which command")


def claims_table(claims: Sequence[Claim]) -> str:
    """The rule, the table and its notes."""
    notes = dict.fromkeys(claim.note for claim in claims if claim.note)
    return "".join(
        [
            html.paragraph(RULE, class_="soft"),
            html.paragraph(LEGEND, class_="soft"),
            html.table(HEADER, [_cells(claim) for claim in claims], "stacked"),
            *(html.paragraph(note, class_="soft") for note in notes),
        ]
    )


def _cells(claim: Claim) -> list[str]:
    commands = (
        html.tag("code", html.text(t.command)) + html.paragraph(t.source, class_="soft")
        for t in claim.tables
    )
    unit = f" Numbers in {claim.unit}." if claim.unit else ""
    taken = html.paragraph(f"Taken to claim {claim.rule}.{unit}", class_="soft")
    return [
        html.tag("strong", html.text(claim.says)) + taken,
        _verdict(claim.plots_verdict) + _numbers(claim, "plots"),
        _verdict(claim.verdict) + _numbers(claim, "found"),
        "".join(commands) or "no table yet",
    ]


def _verdict(verdict: Verdict) -> str:
    word, _, why = str(verdict).partition(": ")
    told = html.tag("span", html.text(word), class_=f"verdict {verdict.kind}")
    return told + (html.paragraph(why, class_="soft") if why else "")


def _numbers(claim: Claim, kind: str) -> str:
    """The numbers of a claim; one of several parts is called by the part's name."""
    items = []
    for part in claim.parts:
        numbers: tuple[Found, ...] = getattr(part, kind)
        for found in numbers:
            label = part.label if len(claim.parts) > 1 else found.label
            items.append(_number(claim, part, found, label))
    return html.bullets(items)


def _number(claim: Claim, part: Part, found: Found, label: str) -> str:
    """One number with its interval, behind the mark of its verdict."""
    value, low, high = (_signed(claim.scale * x) for x in (found.value, found.low, found.high))
    seeds = f", n = {found.n}" if found.n is not None else ""
    verdict = claim.verdict_of(part, found)
    mark = html.tag("span", MARKS[verdict.kind], class_=f"mark {verdict.kind}", title=str(verdict))
    return f"{mark} {html.text(f'{label}: {value} [{low}, {high}]{seeds}')}"


def _signed(value: float) -> str:
    """Two decimals and a minus sign that is one."""
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
