"""One piece of the report: its picture with caption, command, machine, checksums and terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.paper import html
from experiments.paper.evidence import Row, read_rows
from experiments.paper.pieces import Piece
from experiments.paper.record import Record, command

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


def title(piece: Piece) -> str:
    """The heading of a piece."""
    return html.tag("h3", html.text(piece.title), id=piece.study)


def absent(piece: Piece, arguments: Sequence[str], why: str | None) -> str:
    """What stands in the place of a piece without result; ``why``: its last lines."""
    told = (
        html.paragraph("This piece failed. Its last lines:") + html.tag("pre", html.text(why))
        if why
        else html.paragraph("This piece has not been run.")
    )
    told += html.tag("p", html.tag("code", html.text(command(piece.study, arguments))))
    return title(piece) + html.tag("div", told, class_="missing")


def figure(piece: Piece, record: Record, folder: Path) -> str:
    """A piece that has been run: its picture, or its first table, and what made it."""
    tables = {name: read_rows(folder / name) for name in piece.csv}
    first = next(iter(tables.values()))
    body = []
    if piece.png and (folder / piece.png).is_file():
        body.append(html.picture(folder / piece.png, f"{piece.title}. {piece.caption}"))
        body.append(_caption(piece, record, tables))
        shown = _table(piece.csv[0], first)
        body.append(html.tag("details", html.tag("summary", "The numbers"), shown))
    else:
        body += [_table(piece.csv[0], first), _caption(piece, record, tables)]
    return title(piece) + html.tag("figure", *body)


def _caption(piece: Piece, record: Record, tables: Mapping[str, Sequence[Row]]) -> str:
    sums = "<br>".join(
        f"{html.text(name)} {html.tag('code', sum_)}" for name, sum_ in record.sha256.items()
    )
    data = [f"{name}: {terms}" for name, terms in described(_data(tables))]
    about = [
        ("command", html.tag("code", html.text(command(piece.study, record.arguments)))),
        ("run", html.text(f"{record.date}, {record.seconds:.0f} s, commit {record.commit}")),
        ("machine", html.text(record.machine)),
        ("data", "<br>".join(map(html.text, data or [piece.source]))),
        ("sha256", sums),
    ]
    return html.tag("figcaption", html.paragraph(piece.caption), html.facts(about))


def _data(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """The data sets that the tables' column `data` names."""
    named = (row["data"] for rows in tables.values() for row in rows if "data" in row)
    return list(dict.fromkeys(named))


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


def _table(name: str, rows: Sequence[Row]) -> str:
    header = list(rows[0]) if rows else []
    cells = [[html.text(_short(row[key])) for key in header] for row in rows[:SHOWN_ROWS]]
    more = len(rows) - SHOWN_ROWS
    note = f"{name}: {len(rows)} lines" + (f", the first {SHOWN_ROWS} shown" if more > 0 else "")
    return html.table(header, cells, "numbers") + html.paragraph(note, class_="soft")


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
