"""Quotes left open: found line by line, wherever blocks end, and by the parser's own rule."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.errors import DataError, OpenQuotes

LINES = st.lists(st.text('",a;', max_size=8), max_size=12)


def is_open(line: str) -> bool:
    """The rule of a parser, letter by letter: a quote opens a value at its beginning only."""
    quoted, begins, escaped = False, True, False
    for letter, following in pairwise(f"{line}\n"):
        if escaped:
            escaped = False
        elif quoted and letter == '"':
            escaped = following == '"'
            quoted = escaped
        elif not quoted:
            quoted, begins = begins and letter == '"', letter == ","
    return quoted


def passed(text: str, size: int, *, skip: bool) -> str:
    lines = OpenQuotes(Path("d.csv"), ",", 2, header=False, skip=skip)
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    return b"".join(lines(block.encode(), 1000) for block in [*blocks, ""]).decode()


@given(LINES, st.integers(1, 50), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_the_lines_with_an_open_quote_are_found_and_no_others(lines, size, end, ends):
    text = end.join(lines) + (end if ends else "")
    left = [",," if is_open(line) else line for line in lines]
    found = passed(text, size, skip=True)
    assert found.splitlines() == (end.join(left) + (end if ends else "")).splitlines()
    first = next((n for n, line in enumerate(lines) if is_open(line)), None)
    if first is None:
        assert passed(text, size, skip=False) == text
        return
    row = sum(bool(line) for line in lines[:first]) + 1
    with pytest.raises(DataError, match=f"row {row}: .* a quote is left open"):
        passed(text, size, skip=False)


def test_a_file_without_line_ends_is_not_kept_in_memory():
    lines = OpenQuotes(Path("d.csv"), ",", 2, header=True, skip=False)
    given_out = [len(lines(b"x" * 100, 100)) for _ in range(30)]
    assert sum(given_out) >= 30 * 100 - 300
