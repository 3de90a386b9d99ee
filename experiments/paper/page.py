"""The report: claims first, then every piece with what made it; what is missing stands visibly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.catalogue import SECTIONS, Size, Study
from experiments.paper.record import Record, command, folder_of, kept, read_rows
from experiments.paper.verdicts import RULE, Claim, Verdict, Word
from persia_sim.words import page as pages
from runtime.data.catalogue import CATALOGUE

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
MARKS = {"supported": "\N{CHECK MARK}", "contradicted": "\N{MULTIPLICATION X}", "undecided": "?"}
"""Before each number; the word stands above, for all numbers of a cell."""
LEGEND = (
    "Each number: its value with its interval, behind the mark of its own verdict"
    f" ({', '.join(f'{mark} {verdict}' for verdict, mark in MARKS.items())})."
)
TEMPLATE = Path(__file__).with_name("report.html")
CODE = Markup("<code>{}</code>")
SHOWN_ROWS = 12
"""Of a table; the rest is in its file."""
OWN = "the user's own, on its terms"
SYNTHETIC = "made by this project from a planted truth; no terms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page is made of."""

    size: Size
    out: Path
    plan: Mapping[Study, Sequence[str]]
    """The pieces of this report, with their arguments."""
    left_out: Mapping[Study, str]
    """The others, and why."""
    failed: Mapping[Study, str]
    """Last lines of those that failed just now."""
    claims: Sequence[Claim]

    def records(self) -> dict[Study, Record]:
        """Of the pieces that have been run."""
        found = {piece: kept(piece, self.out) for piece in self.plan if piece not in self.failed}
        return {piece: record for piece, record in found.items() if record is not None}


def write_report(report: Report, path: Path) -> Path:
    """Write the page, whole or not at all."""
    return pages.write_page(path, TEMPLATE, **_values(report))


def _values(report: Report) -> dict[str, Any]:
    """What the template asks for."""
    records = report.records()
    days = sorted({record.day for record in records.values()})
    when = f" between {days[0]} and {days[-1]}" if days[1:] else f" on {days[0]}" if days else ""
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
        "sections": {section: own for section, own in sections.items() if own},
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
    found = Counter(verdict.word for verdict in verdicts)
    return ", ".join(f"{found[word]} {said}" for word, said in words.items())


def _missing(report: Report, records: Mapping[Study, Record]) -> list[str]:
    """What a reader must know to be absent, before anything else."""
    never = dict.fromkeys(report.plan.keys() - records.keys() - report.failed.keys())
    told = [
        *((piece, "failed: its last lines stand in its place.") for piece in report.failed),
        *((piece, "has not been run.") for piece in report.plan if piece in never),
        *((piece, f"is left out: {why}") for piece, why in report.left_out.items()),
    ]
    return [f"{piece.title} ({piece.name}) {why}" for piece, why in told]


def _shown(piece: Study, record: Record | None, report: Report) -> dict[str, Any]:
    """What the page says of a piece; of one that has been run its picture, or its first table."""
    if record is None:
        said = command(piece.name, report.plan[piece])
        return {"piece": piece, "record": None, "command": said, "why": report.failed.get(piece)}
    folder = folder_of(piece, report.out)
    tables = {name: read_rows(folder / name) for name in piece.csv}
    named = (row["data"] for rows in tables.values() for row in rows if "data" in row)
    rows = tables[piece.csv[0]]
    header = list(rows[0]) if rows else []
    more = f", the first {SHOWN_ROWS} shown" if len(rows) > SHOWN_ROWS else ""
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
    found = []
    for name in dict.fromkeys(name for name in names if not name.endswith(" streams")):
        known = max((key for key in CATALOGUE if name.startswith(key)), key=len, default="")
        made = SYNTHETIC if name.startswith(("synthetic", "planted")) else OWN
        found.append((name, CATALOGUE[known].about if known else made))
    return found


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
