"""What the pages' blocks have in common: lines of the stored tables, numbers with their intervals,
tables of Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from experiments.paper.record import STORED, Row, read_rows

NAMES = {
    "movielens-latest-small-2016": "MovieLens",
    "kuairand-pure-14d": "KuaiRand, click",
    "oulad-assessments": "OULAD",
    "tennis": "tennis",
    "tennis-whole": "tennis, all of it",
    "synthetic:zipf-1.8": "drawn, Zipf 1.8",
    "synthetic:zipf-1.1": "drawn, Zipf 1.1",
}
"""What a page calls a data set."""


def rows_of(end: str) -> list[Row]:
    """A stored table of the study; none where nothing is known yet."""
    path = STORED / f"lateness{end}.csv"
    return read_rows(path) if path.is_file() else []


def number(row: Row | None, name: str = "gap_to_sync", scale: float = 1e3) -> str:
    """A value with the half width of its interval."""
    if row is None or not row[name] or math.isnan(float(row[name])):
        return ""
    return f"{scale * float(row[name]):+.1f} ± {scale * float(row[f'{name}_half_width_95']):.1f}"


def first_task(rows: Iterable[Row]) -> list[Row]:
    """The lines of each data set's first task."""
    tasks: dict[str, str] = {}
    return [row for row in rows if tasks.setdefault(row["data"], row["task"]) == row["task"]]


def the(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The line with these cells; None where there is none."""
    for row in rows:
        if all(
            math.isclose(float(row[k]), v) if isinstance(v, int | float) else row[k] == v
            for k, v in wanted.items()
        ):
            return row
    return None


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; columns that are empty throughout are left out."""
    lines = [list(line) for line in lines]
    used = [k for k in range(len(header)) if any(line[k] for line in lines)]
    cells = [[line[k] for k in used] for line in [list(header), ["---"] * len(header), *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def percent(share: float, digits: int = 0) -> str:
    """A share as a page writes it."""
    return f"{100 * share:.{digits}f} %"
