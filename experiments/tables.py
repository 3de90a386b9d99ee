"""What a study leaves: tables on a terminal and as CSV, and the figure of one."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_figs import figure_of
from persia_sim.base.files import atomic_write
from persia_sim.base.rules import printable


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    cells = [list(map(printable, row)) for row in (header, *rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *others]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


Column = str | Callable[[Any], str]
"""How a cell shows its row: a format of the row's fields, or a function of it."""


def table(rows: Sequence[Any], columns: Mapping[str, Column]) -> str:
    """Rows (mappings or objects) as a person reads them; ``columns``: header -> cell.

    >>> print(table([{"mode": "sync", "auc": 0.71234}], {"mode": "{mode}", "AUC": "{auc:.3f}"}))
    mode    AUC
    ----  -----
    sync  0.712
    """

    def cell(show: Column, row: Any) -> str:
        return show(row) if callable(show) else show.format_map(_Fields(row))

    return aligned(list(columns), [[cell(show, r) for show in columns.values()] for r in rows])


class _Fields(dict[str, Any]):
    """The fields of a mapping, or of an object."""

    def __init__(self, row: Any) -> None:
        super().__init__(row if isinstance(row, Mapping) else {})
        self._row = row

    def __missing__(self, name: str) -> Any:
        return getattr(self._row, name)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A line per mapping, the first one's keys as header, whole or not at all; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(path) as file:
        file.write(lines.getvalue().encode())
    return path


def leave(
    options: Any,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    drawn_first: int = 0,
    as_a: str = "",
) -> None:
    """Write a study's tables, draw its figure from so many first of them, and say where they lie.

    ``tables``: by what stands behind the study's name in that of the CSV. ``as_a``: as in `drawn`.
    """
    stem = f"{options.out / options.study.replace('-', '_')}"
    paths = [write_csv(Path(f"{stem}{end}.csv"), rows) for end, rows in tables.items()]
    print(f"{'tables' if paths[1:] else 'table'}: {'   '.join(map(str, paths))}")
    if drawn_first:
        print(f"figure: {drawn(*paths[:drawn_first], as_a=as_a)}")


def drawn(path: Path, *others: Any, as_a: str = "") -> Path:
    """Draw the figure of a table beside it; it is that of the table's name, or of another kind."""
    from paper_figs.style import as_png  # late: matplotlib takes a second

    picture = as_png(figure_of(as_a or path.stem)(path, *others))
    with atomic_write(path.with_suffix(".png")) as file:
        file.write(picture)
    return path.with_suffix(".png")
