"""`python -m tests.results_page` writes the tables of lateness in docs/results from the CSVs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from experiments.lateness.streams import STREAMS
from experiments.paper.record import STORED, Row, read_rows
from tests.tree import ROOT

PAGE = ROOT / "docs" / "results" / "README.md"
NAMES = {
    "movielens-latest-small-2016": "MovieLens",
    "kuairand-pure-14d": "KuaiRand, click",
    "oulad-assessments": "OULAD",
    "tennis": "tennis",
    "synthetic:zipf-1.8": "drawn, Zipf 1.8",
    "synthetic:zipf-1.1": "drawn, Zipf 1.1",
}
CELLS = ((7, 0), (16, 0), (64, 0), (0, 7), (7, 7), (39, 7))
HEADS = {
    (7, 0): "rows 7 late", (16, 0): "rows 16 late", (64, 0): "rows 64 late",
    (0, 7): "dense 7 late", (7, 7): "both 7 late", (39, 7): "rows 39, dense 7 late",
}  # fmt: skip


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


def order_table() -> str:
    """Time order, shuffled, and behind buffers, at sync's rates."""
    rows, lines = first_task(rows_of("")), []
    plain = [r for r in rows if r["window"] == "test" and float(r["optimizer_start"]) == 0
             and r["rates"] == "of sync" and r["redrawn"] == "False"]  # fmt: skip
    for data in STREAMS:
        orders = dict.fromkeys(r["order"] for r in plain if r["data"] == data)
        for order in orders:
            own = [r for r in plain if (r["data"], r["order"]) == (data, order)]
            sync = the(own, rows_late=0, dense_late=0)
            if sync is None:
                continue
            words = {"time": "time order", "shuffled": "shuffled"}.get(
                order, f"buffer of {order.removeprefix('buffer-')}"
            )
            known = sync["b_16"] and not math.isnan(float(sync["b_16"]))
            lines.append(
                [
                    NAMES.get(data, data),
                    words,
                    f"{float(sync['b_16']):.3f}" if known else "",
                    f"{float(sync['test_auc']):.4f}",
                    *(number(the(own, rows_late=r, dense_late=d)) for r, d in CELLS),
                ]
            )
    return markdown(
        ["stream", "order", "b(16)", "AUC of sync", *(HEADS[cell] for cell in CELLS)], lines
    )


def chosen_table() -> str:
    """Every stream in its own order, at the rates that the rule chose."""
    rows, lines = first_task(rows_of("")), []
    for data, stream in STREAMS.items():
        for start in stream.starts:
            own = [
                r
                for r in rows
                if r["data"] == data
                and math.isclose(float(r["optimizer_start"]), start)
                and (r["order"], r["window"]) == ("time", "test")
                and int(r["updates"]) != stream.long_updates
            ]
            sync = the(own, rows_late=0, dense_late=0, batch=stream.batch)
            if sync is None:
                continue
            doubled = the(own, rows_late=0, dense_late=0, batch=2 * stream.batch)
            chosen = [r for r in own if r["chosen"] == "True"]
            cells = [number(the(chosen, rows_late=r, dense_late=d)) for r, d in CELLS]
            if any(cells):
                name = NAMES.get(data, data) + (f", Adagrad from {start:.3g}" if start else "")
                rates = f"{float(sync['row_lr']):g} / {float(sync['lr']):g}"
                lines.append([name, rates, f"{float(sync['test_auc']):.4f}", *cells,
                              number(doubled)])  # fmt: skip
    head = ["stream", "sync's rates, rows / dense", "AUC of sync"]
    return markdown([*head, *(HEADS[c] for c in CELLS), "batch x 2"], lines)


def hypothesis_table() -> str:
    """The six with their outcomes."""
    lines = [
        [r["hypothesis"], r["what"], f"**{r['outcome']}**", r["missing"]]
        for r in rows_of("_hypotheses")
        if r["outcome"]
    ]
    return markdown(["", "it says", "outcome", "not run yet"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "order": order_table,
    "chosen": chosen_table,
    "hypotheses": hypothesis_table,
}


def written(text: str) -> str:
    """A text with each table put between its marks."""
    for name, table in TABLES.items():
        start, end = f"<!-- lateness: {name} -->", f"<!-- end of {name} -->"
        head, rest = text.split(start)
        text = f"{head}{start}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
