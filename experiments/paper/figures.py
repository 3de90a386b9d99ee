"""One piece of the report: its picture with caption, command, machine, checksums and terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.paper import html
from experiments.paper.evidence import Row, read_rows
from experiments.paper.licences import PUBLISHED, described
from experiments.paper.pieces import Piece
from experiments.paper.record import Record, command

SHOWN_ROWS = 12
"""Of a table; the rest is in its file."""


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
        ("data", "<br>".join(map(html.text, data)) or html.text(PUBLISHED)),
        ("sha256", sums),
    ]
    return html.tag("figcaption", html.paragraph(piece.caption), html.facts(about))


def _data(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """The data sets that tables name; a table of training runs that names none is synthetic."""
    names: list[str] = []
    for rows in tables.values():
        columns = [name for name in ("data", "data_set", "dataset") if rows and name in rows[0]]
        names += [row[column] for column in columns for row in rows]
    trained = any(rows and {"auc", "test_auc"} & set(rows[0]) for rows in tables.values())
    return list(dict.fromkeys(names)) or (["synthetic"] if trained else [])


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
