"""What a person reads at the end of a run or a simulation: one fact on a line, in one column; and
tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

Facts = list[tuple[str, str]]
"""What a fact is called, and what it says; a list has one entry on each line, and an empty fact is
not shown."""


def on_screen(questions: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The facts for a terminal: below each question what answers it, all in one column.

    >>> print(on_screen({"How fast?": [("step", "3 ms"), ("bound by", "GPU\\nNICs")], "Why?": []}))
    How fast?
      step      3 ms
      bound by  GPU
                NICs
    """
    asked = {q: [fact for fact in facts if fact[1]] for q, facts in questions.items()}
    asked = {question: facts for question, facts in asked.items() if facts}
    width = max((len(name) for facts in asked.values() for name, _ in facts), default=0)
    below = f"\n{'':{width + 4}}"
    blocks = []
    for question, facts in asked.items():
        lines = [f"  {name:{width}}  {content}".replace("\n", below) for name, content in facts]
        blocks.append("\n".join([question, *lines]))
    return "\n\n".join(blocks)


def column(entries: Iterable[tuple[str, str]]) -> str:
    """Figures below each other, each with what it is of, as one fact.

    >>> print(column([("58.9 %", "server NICs"), ("5.0 %", "GPU")]))
    58.9 %  server NICs
     5.0 %  GPU
    """
    lines = list(entries)
    width = max((len(figure) for figure, _ in lines), default=0)
    return "\n".join(f"{figure:>{width}}  {name}" for figure, name in lines)


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in columns; words stand left, numbers right, and the last column is as it comes.

    >>> print(aligned(["a", "n", "source"], [["bc", "10", "x"], ["d", "9", "y z"]]))
    a    n  source
    bc  10  x
    d    9  y z
    """
    columns = list(zip_longest(header, *lines, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    rows = []
    for line in (header, *lines):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def _is_number(cell: str) -> bool:
    return not cell or cell == "unknown" or cell.replace(",", "").replace(".", "").isdigit()
