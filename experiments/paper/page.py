"""The report: claims first, then every piece with what made it; what is missing stands visibly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.catalogue import SECTIONS, Size, Study
from experiments.paper.record import PieceRecord, command, folder_of, read_rows, valid_record
from experiments.paper.verdicts import RULE, Claim, Verdict, Word
from persia_sim.base import page as pages
from runtime.data.catalogue import CATALOGUE

WORDS: dict[Word, str] = {
    "supported": "supported",
    "contradicted": "contradicted",
    "more seeds": "need more seeds",
    "none possible": "not decidable",
}
OF_PLOTS: dict[Word, str] = {
    "supported": "supported",
    "contradicted": "contradicted",
    "not decided": "not decided by them",
}
"""Verdicts that a summary counts, in its words."""
CENTRAL = "kept"
"""Key of the claim that the paper stands on."""
MARKS = {"supported": "\N{CHECK MARK}", "contradicted": "\N{MULTIPLICATION X}", "undecided": "?"}
"""Marks before each number; the word stands above, for all numbers of a cell."""
LEGEND = (
    "Each number: its value with its interval, behind the mark of its own verdict"
    f" ({', '.join(f'{mark} {verdict}' for verdict, mark in MARKS.items())})."
)
TEMPLATE = Path(__file__).with_name("report.html")
CODE = Markup("<code>{}</code>")
SHOWN_ROWS = 12
"""Rows of a table that the page shows; the rest is in its file."""
OF_THE_USER = "the user's own, on its terms"
SYNTHETIC = "made by this project from a planted truth; no terms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a page is made of."""

    size: Size
    out: Path
    plan: Mapping[Study, Sequence[str]]
    """The pieces of this report, with their arguments."""
    left_out: Mapping[Study, str]
    """The pieces without a part in it, and why."""
    failed: Mapping[Study, str]
    """Last lines of the pieces that failed just now."""
    claims: Sequence[Claim]

    def records(self) -> dict[Study, PieceRecord]:
        """Records of the pieces that have been run."""
        records = {}
        for piece in self.plan:
            record = None if piece in self.failed else valid_record(piece, self.out)
            if record is not None:
                records[piece] = record
        return records


def write_report(report: Report, path: Path) -> Path:
    """Write the page, whole or not at all."""
    return pages.write_page(path, TEMPLATE, **_values(report))


def _values(report: Report) -> dict[str, Any]:
    """The values that the template needs."""
    # When the pieces were run.
    records = report.records()
    days = sorted({record.day for record in records.values()})
    when = ""
    if len(days) == 1:
        when = f" on {days[0]}"
    elif days:
        when = f" between {days[0]} and {days[-1]}"

    # Every piece in its section, also one that has not been run.
    sections = {
        section: [
            _shown(piece, records.get(piece), report)
            for piece in report.plan
            if piece.section == section
        ]
        for section in SECTIONS
    }

    return {
        "claims": report.claims,
        "summary": summary(report.claims),
        "state": f"{report.size.capitalize()} report: {len(records)} of {len(report.plan)} pieces"
        f" run{when}.",
        "missing": _missing(report, records),
        "sections": {section: pieces for section, pieces in sections.items() if pieces},
        "again": f"persia-experiments paper --size {report.size}",
        "sums": [
            (piece.name, name, CODE.format(sha256), record.day, record.commit)
            for piece, record in records.items()
            for name, sha256 in record.sha256.items()
        ],
        "signed": lambda claim, value: f"{claim.scale * value:.2f}".replace("-", "\N{MINUS SIGN}"),
        "rule": RULE,
        "legend": LEGEND,
        "marks": MARKS,
    }


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
    counts = Counter(verdict.word for verdict in verdicts)
    return ", ".join(f"{counts[word]} {text}" for word, text in words.items())


def _missing(report: Report, records: Mapping[Study, PieceRecord]) -> list[str]:
    """Sentences on what is absent, which a reader must know before anything else."""
    never = dict.fromkeys(report.plan.keys() - records.keys() - report.failed.keys())
    reasons = [
        *((piece, "failed: its last lines stand in its place.") for piece in report.failed),
        *((piece, "has not been run.") for piece in report.plan if piece in never),
        *((piece, f"is left out: {why}") for piece, why in report.left_out.items()),
    ]
    return [f"{piece.title} ({piece.name}) {why}" for piece, why in reasons]


def _shown(piece: Study, record: PieceRecord | None, report: Report) -> dict[str, Any]:
    """The page's values for a piece; of one that has been run its picture, or its first table."""
    # One that has not been run is shown by the command that would run it.
    if record is None:
        again = command(piece.name, report.plan[piece])
        return {"piece": piece, "record": None, "command": again, "why": report.failed.get(piece)}

    # The first table is shown, as far as a person reads it.
    folder = folder_of(piece, report.out)
    tables = {name: read_rows(folder / name) for name in piece.csv}
    rows = tables[piece.csv[0]]
    header = list(rows[0]) if rows else []
    more = f", the first {SHOWN_ROWS} shown" if len(rows) > SHOWN_ROWS else ""

    # Where the numbers come from: data sets that any table names, checksums of the tables.
    named = (row["data"] for rows in tables.values() for row in rows if "data" in row)
    data = [f"{name}: {terms}" for name, terms in described(named)] or [piece.source]
    sums = (Markup("{} <code>{}</code>").format(*pair) for pair in record.sha256.items())
    picture = folder / piece.png
    return {
        "piece": piece,
        "record": record,
        "facts": [
            ("command", CODE.format(command(piece.name, record.arguments))),
            ("run", f"{record.date}, {record.seconds:.0f} s, commit {record.commit}"),
            ("machine", record.machine),
            ("data", "\n".join(data)),
            ("sha256", Markup("\n").join(sums)),
        ],
        "picture": picture.read_bytes() if picture.is_file() else None,
        "header": header,
        "rows": [[_short(row[key]) for key in header] for row in rows[:SHOWN_ROWS]],
        "note": f"{piece.csv[0]}: {len(rows)} lines{more}",
    }


def described(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name once, with whose data it is and on which terms.

    A name may say more than the data set (a split, some days): the longest known beginning counts.
    A line over "2 streams" names no data of its own.

    >>> described(["synthetic:avazu-ad:1:3", "tennis-random"])[1][1][:14]
    'Tennis matches'
    """
    terms = []
    for name in dict.fromkeys(name for name in names if not name.endswith(" streams")):
        longest = max((key for key in CATALOGUE if name.startswith(key)), key=len, default="")
        if longest:
            terms.append((name, CATALOGUE[longest].about))
        elif name.startswith(("synthetic", "planted")):
            terms.append((name, SYNTHETIC))
        else:
            terms.append((name, OF_THE_USER))
    return terms


def _short(value: str) -> str:
    """A number to four significant digits; anything else as it is.

    >>> _short("0.00013266"), _short("1879595.2"), _short("64"), _short("sync")
    ('0.0001327', '1,879,595', '64', 'sync')
    """
    try:
        number = float(value)
    except ValueError:
        return value
    if value.lstrip("-").isdigit() or number != number:
        return value
    return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"
