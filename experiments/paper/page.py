"""The report: claims first, then every piece with what made it; what is missing stands visibly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.paper import html
from experiments.paper.claims_table import claims_table
from experiments.paper.figures import absent, figure
from experiments.paper.pieces import SECTIONS, Piece, Size
from experiments.paper.record import Record, folder_of, kept
from experiments.paper.verdicts import Claim, Verdict, Word
from persia_sim.words.files import atomic_write

WORDS: dict[Word, str] = {
    "supported": "supported",
    "contradicted": "contradicted",
    "more seeds": "need more seeds",
    "none possible": "not decidable",
}
OF_PLOTS: dict[Word, str] = {
    "supported": "supported", "contradicted": "contradicted", "not told": "not told by them",
}  # fmt: skip
"""What a summary counts, in these words."""
CENTRAL = "kept"
"""Key of the claim that the paper stands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page is made of."""

    size: Size
    out: Path
    plan: Mapping[Piece, Sequence[str]]
    """The pieces of this report, with their arguments."""
    left_out: Mapping[Piece, str]
    """The others, and why."""
    failed: Mapping[Piece, str]
    """Last lines of those that failed just now."""
    claims: Sequence[Claim]

    def records(self) -> dict[Piece, Record]:
        """Of the pieces that have been run."""
        found = {piece: kept(piece, self.out) for piece in self.plan if piece not in self.failed}
        return {piece: record for piece, record in found.items() if record is not None}


def write_report(report: Report, path: Path) -> Path:
    """Write the page, whole or not at all."""
    content = page(report)
    with atomic_write(path) as file:
        file.write(content.encode())
    return path


def page(report: Report) -> str:
    """The page as HTML."""
    records = report.records()
    parts = [
        _head(report, records),
        _missing(report, records),
        _section("Claims", claims_table(report.claims)),
    ]
    for section in SECTIONS:
        own = [piece for piece in report.plan if piece.section == section]
        if own:
            parts.append(_section(section, *(_piece(piece, report, records) for piece in own)))
    parts.append(_provenance(report, records))
    return html.page("PERSIA's claims, tested", *parts)


def _section(title: str, *inside: str) -> str:
    return html.tag("section", html.tag("h2", html.text(title)), *inside, id=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _head(report: Report, records: Mapping[Piece, Record]) -> str:
    days = sorted({record.day for record in records.values()})
    when = (
        f" between {days[0]} and {days[-1]}" if len(days) > 1 else f" on {days[0]}" if days else ""
    )
    sections = [s for s in SECTIONS if any(piece.section == s for piece in report.plan)]
    links = [
        html.tag("a", html.text(name), href=f"#{_anchor(name)}")
        for name in ("Claims", *sections, "Where it comes from")
    ]
    return html.tag(
        "header",
        html.tag("h1", "PERSIA's claims, tested: what late rows cost and what they gain"),
        *(html.paragraph(line, class_="lead") for line in summary(report.claims)),
        html.paragraph(
            "Hybrid training of recommender models: asynchronous embedding rows, synchronous dense"
            " network (Lian et al., KDD 2022, arXiv 2111.05897)."
            f" {report.size.capitalize()} report: {len(records)} of {len(report.plan)} pieces run"
            f"{when}. Numbers of a piece come from the command beside it, stored and published ones"
            " say so.",
            class_="soft",
        ),
        html.tag("nav", html.bullets(links), aria_label="Sections"),
    )


def summary(claims: Sequence[Claim]) -> list[str]:
    """The three lines that a reader in a hurry takes away."""
    old = sum("stored" in claim.sources for claim in claims)
    central = next((str(c.verdict) for c in claims if c.key == CENTRAL), "not among them")
    return [
        f"{len(claims)} claims against the paper's own plots:"
        f" {counted([claim.plots_verdict for claim in claims], OF_PLOTS)}.",
        f"By independent evidence here: {counted([claim.verdict for claim in claims], WORDS)}"
        f" ({old} of them by stored tables).",
        f"The central claim, that hybrid keeps what async loses: {central}.",
    ]


def counted(verdicts: Sequence[Verdict], words: Mapping[Word, str]) -> str:
    """How many of each word, none left out.

    >>> counted([Verdict("supported"), Verdict("more seeds", seeds=3)], WORDS)
    '1 supported, 0 contradicted, 1 need more seeds, 0 not decidable'
    """
    found = Counter(verdict.word for verdict in verdicts)
    return ", ".join(f"{found[word]} {said}" for word, said in words.items())


def _missing(report: Report, records: Mapping[Piece, Record]) -> str:
    """What a reader must know to be absent, before anything else."""
    lines = [
        f"{piece.title} ({piece.study}) failed: its last lines stand in its place."
        for piece in report.failed
    ]
    lines += [
        f"{piece.title} ({piece.study}) has not been run."
        for piece in report.plan
        if piece not in records and piece not in report.failed
    ]
    lines += [
        f"{piece.title} ({piece.study}) is left out: {why}"
        for piece, why in report.left_out.items()
    ]
    if not lines:
        return ""
    return html.tag(
        "aside", html.tag("h3", "What is missing"), *map(html.paragraph, lines), class_="missing"
    )


def _piece(piece: Piece, report: Report, records: Mapping[Piece, Record]) -> str:
    if piece in records:
        return figure(piece, records[piece], folder_of(piece, report.out))
    return absent(piece, report.plan[piece], report.failed.get(piece))


def _provenance(report: Report, records: Mapping[Piece, Record]) -> str:
    header = ["piece", "table", "sha256", "date", "commit"]
    rows = [
        [
            html.text(piece.study),
            html.text(name),
            html.tag("code", html.text(sum_)),
            html.text(record.day),
            html.text(record.commit),
        ]
        for piece, record in records.items()
        for name, sum_ in record.sha256.items()
    ]
    again = f"python -m experiments paper --size {report.size}"
    return _section(
        "Where it comes from",
        html.tag(
            "p",
            html.text("This page and its tables are made by "),
            html.tag("code", html.text(again)),
            html.text(
                "; a second run does only what is missing. The numbers of the claims are in "
            ),
            html.tag("code", "claims.csv"),
            html.text(" beside the page."),
        ),
        html.table(header, rows, "plain") if rows else html.paragraph("Nothing has been run yet."),
    )
