"""The report: claims first, then every piece with what made it; what is missing stands visibly."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.catalogue import SECTIONS, Size, Study
from experiments.paper.record import Record, command, folder_of, kept, read_rows
from experiments.paper.verdicts import RULE, Claim, Verdict, Word
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
MARKS = {"supported": "\N{CHECK MARK}", "contradicted": "\N{MULTIPLICATION X}", "undecided": "?"}
"""Before each number; the word stands above, for all numbers of a cell."""
LEGEND = (
    "Each number: its value with its interval, behind the mark of its own verdict"
    f" ({', '.join(f'{mark} {verdict}' for verdict, mark in MARKS.items())})."
)
SHOWN_ROWS = 12
"""Of a table; the rest is in its file."""
LICENCES = {
    "kuairand-pure-14d": "KuaiRand-Pure, 25 April to 8 May 2022 (Gao et al., CIKM 2022),"
    " CC BY-SA 4.0",
    "kuairand-pure": "KuaiRand-Pure (Gao et al., CIKM 2022), CC BY-SA 4.0",
    "kuairand-1k": "KuaiRand-1K (Gao et al., CIKM 2022), CC BY-SA 4.0",
    "census-income-kdd": "Census-Income (KDD), UCI Machine Learning Repository, CC BY 4.0",
    "adult": "Adult, UCI Machine Learning Repository, CC BY 4.0",
    "nycflights13": "Flights from New York City in 2013 (US Bureau of Transportation Statistics;"
    " nycflights13, H. Wickham), CC0",
    "tennis": "Tennis matches (Jeff Sackmann, Tennis Abstract, github.com/JeffSackmann),"
    " CC BY-NC-SA 4.0",
    "criteo": "Criteo display advertising challenge, on its publisher's terms",
    "avazu": "Avazu click-through rate prediction, on its publisher's terms",
    "taobao": "Ad display/click data on Taobao, on its publisher's terms",
}
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
    content = page(report)
    with atomic_write(path) as file:
        file.write(content.encode())
    return path


def page(report: Report) -> str:
    """The page as HTML."""
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
    code = Markup("<code>{}</code>")
    return rendered(
        Path(__file__).with_name("report.html"),
        claims=report.claims,
        summary=summary(report.claims),
        state=f"{report.size.capitalize()} report: {len(records)} of {len(report.plan)} pieces run"
        f"{when}.",
        missing=_missing(report, records),
        sections={section: own for section, own in sections.items() if own},
        again=f"persia-experiments paper --size {report.size}",
        sums=[
            (piece.name, name, code.format(sha256), record.day, record.commit)
            for piece, record in records.items()
            for name, sha256 in record.sha256.items()
        ],
        anchor=lambda title: title.lower().replace(" ", "-"),
        signed=lambda claim, value: f"{claim.scale * value:.2f}".replace("-", "\N{MINUS SIGN}"),
        rule=RULE,
        legend=LEGEND,
        marks=MARKS,
    )


def rendered(template: Path, **values: Any) -> str:
    """A page of the project's style; whatever is no markup is escaped."""
    templates = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    style = Markup(Path(__file__).with_name("page.css").read_text())
    return templates.get_template(template.name).render(style=style, **values)


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
    picture = folder / piece.png
    return {
        "piece": piece,
        "record": record,
        "command": command(piece.name, record.arguments),
        "data": [f"{name}: {terms}" for name, terms in described(named)] or [piece.source],
        "picture": base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else "",
        "header": header,
        "rows": [[_short(row[key]) for key in header] for row in rows[:SHOWN_ROWS]],
        "note": f"{piece.csv[0]}: {len(rows)} lines{more}",
    }


def described(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name once, with whose data it is and on which terms.

    A name may say more than the data set (a split, some days): the longest known beginning counts.

    >>> described(["synthetic:avazu-ad:1:3", "tennis-random"])[1][1][:14]
    'Tennis matches'
    """
    return [(name, _terms(name)) for name in dict.fromkeys(names)]


def _terms(name: str) -> str:
    if name.startswith(("synthetic", "planted")):
        return SYNTHETIC
    known = [key for key in LICENCES if name.startswith(key)]
    return LICENCES[max(known, key=len)] if known else "a data set of the user's, on its terms"


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
