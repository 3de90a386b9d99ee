"""Files that are no data: each is refused at the door, in words, and none is waited for."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.__main__ import main
from runtime.data.errors import DataError, OpenQuotes
from runtime.data.open import open_source
from runtime.preparing.check import check

SCHEMA = """
name = "s"
file = "d.csv"
split = { test_fraction = 0.5 }
[[columns]]
name = "x"
[[columns]]
name = "n"
kind = "numeric"
log = false
"""
ROWS = b"x,n,label\na,1,0\nb,2,1\nc,3,0\nd,4,1\n"


def opened(folder: Path, text: bytes = ROWS, schema: str = SCHEMA, **options: Any) -> Any:
    (folder / "s.toml").write_text(schema)
    (folder / "d.csv").write_bytes(text)
    return open_source(str(folder / "s.toml"), **options)


def numbers(source: Any, part: str = "train") -> list[float]:
    return [float(x) for batch in source.chunks(part) for x in batch.dense[:, 0]]


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # a socket's path has at most 107 bytes
        made.bind(path.name)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "is a named pipe": os.mkfifo,
    "is a folder": os.mkdir,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
    "is a socket": a_socket,
    "no file": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("message", NO_FILES)
@pytest.mark.parametrize("name", ["d.csv", "d.csv.gz", "d.parquet", "s.toml"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path, monkeypatch, message, name
):
    monkeypatch.chdir(tmp_path)
    opened(tmp_path, schema=SCHEMA.replace("d.csv", name if name != "s.toml" else "d.csv"))
    (tmp_path / name).unlink(missing_ok=True)
    NO_FILES[message](tmp_path / name)
    for use in (lambda s: next(s.chunks("train")), lambda s: s.provenance()):
        with pytest.raises(DataError, match=message) as caught:
            use(open_source(str(tmp_path / "s.toml")))
        assert name in str(caught.value)


BAD_TEXTS: list[tuple[bytes, str]] = [
    (ROWS.replace(b"\n", b"\r"), "ends its lines with a carriage return alone"),
    (ROWS.decode().encode("utf-16"), "begins as UTF-16 or a binary file does"),
    (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)), "begins as UTF-16 or a binary"),
    (b"PAR1" + bytes(64), "is a parquet file, and not named so: let its name end in .parquet"),
    (
        ROWS + b"d,4,1\nd,5,0\n" * 500 + b"b\0,2,1\n",
        r"row 1005, column x: 'b\\x00'; a text",
    ),
    (b"x\xff,n,label\n", "is no UTF-8 text: invalid start byte at byte 1 of the header"),
    (ROWS.replace(b"x,n", b'"x,n'), "the header line cannot be read: unexpected end of data"),
    (b"x,x,n,label\n" + b"a,b,1,0\na,b,1,1\n" * 2, "has 2 columns 'x': which one"),
    (b"\n" + ROWS, "the first line is empty, and should hold the columns' names"),
    (b"", "it is empty"),
    (b"x,n,label\n", "holds no rows: nothing but a header line.* write the rows"),
    (b"x," * (1 << 19) + b"n", "the first line is longer than 1,048,576 bytes"),
    (ROWS + b"x" * (13 << 20) + b"\n", "a line is longer than 4,194,304 bytes"),
    (ROWS + b'"' + b"x" * (9 << 20) + b"\n", "row 5: '\"xxx.*a quote is left open at the end"),
    (ROWS + "caf\xe9,1,0\n".encode("latin-1"), "column x: a text is not in UTF-8.* save the file"),
    (ROWS + b"a,1_000,1\n", "row 5, column n: '1_000'; a numeric column needs a finite number"),
    (ROWS + b"a,1e300,1\n", "row 5, column n: '1e300'; a numeric column needs a finite number"),
    (ROWS + b"a,1,nan\n", "row 5, column label: 'nan'; a label must be 0 or 1"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_TEXTS, ids=range(len(BAD_TEXTS)))
def test_a_text_that_cannot_be_meant_is_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        source = opened(tmp_path, rows)
        numbers(source), numbers(source, "test")
    assert str(tmp_path / "d.csv") in str(caught.value)


def test_a_number_that_float32_cannot_hold_is_refused_whatever_its_logarithm(tmp_path):
    schema = SCHEMA.replace("log = false", "log = true")
    with pytest.raises(DataError, match="row 2, column n: '1e300'"):
        numbers(opened(tmp_path, ROWS.replace(b"b,2,", b"b,1e300,"), schema))


def test_a_line_end_in_quotes_may_lie_at_the_border_of_two_blocks(tmp_path, monkeypatch):
    rows = b"x,n,label\n" + b"".join(b'"a\n%d",%d,%d\n' % (n, n, n % 2) for n in range(500))
    expected = [float(n) for n in range(250)]
    schema = "line_breaks = true" + SCHEMA
    for block_bytes in (100, 117, 4096):
        monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", block_bytes)
        assert numbers(opened(tmp_path, rows, schema)) == expected


def test_a_quote_is_a_character_like_any_other_where_the_schema_says_so(tmp_path):
    lines = [f"{'x' if n else chr(34) + 'Open'},{n},{n % 2}" for n in range(20)]
    text = "\n".join(["x,n,label", *lines, ""]).encode()
    noted = check(opened(tmp_path, text, skip_bad_rows=True))[1]
    assert noted[0].startswith(
        "1 broken line (a quote is left open: 1, are quotes characters like any other?"
        " then quotes = false), first: "
    )
    source = opened(tmp_path, text, "quotes = false" + SCHEMA)
    assert numbers(source) + numbers(source, "test") == [float(n) for n in range(20)]


BAD_SCHEMAS: list[tuple[bytes, str]] = [
    (SCHEMA.encode("utf-16"), "is not text in UTF-8; save it as UTF-8"),
    (b"\x7fELF\x02\x01\x01\0\0", "is not text in UTF-8|is not well-formed TOML"),
    (SCHEMA.encode() + b'title = "caf\xe9"', "is not text in UTF-8"),
    (b"a = " + b"[" * 5000, "nested too deeply|is not well-formed"),
    (b"a = " + b"9" * 5000, "is not well-formed TOML"),
    (b"#" * (2 << 20), "2,097,152 bytes, a schema at most 1,048,576: is it the data itself"),
    (SCHEMA.encode().replace(b'name = "s"', b'name = "s"\nfolder = "f"'), "folder is not read"),
    (
        SCHEMA.encode().replace(b"[[columns]]", b"[columns]", 1).split(b"[[col")[0],
        "columns must be a list",
    ),
    (b'split = 3\nname = "s"', "split must be a table of names and values, got 3"),
    (b'columns = [3]\nname = "s"', r"columns\[0\] must be a table of names and values, got 3"),
    (b"", "name is missing"),
]


@pytest.mark.parametrize(("text", "message"), BAD_SCHEMAS, ids=range(len(BAD_SCHEMAS)))
def test_a_schema_file_that_cannot_be_read_is_refused(tmp_path, text, message):
    opened(tmp_path)
    (tmp_path / "s.toml").write_bytes(text)
    with pytest.raises(DataError, match=message) as caught:
        open_source(str(tmp_path / "s.toml"))
    assert str(tmp_path / "s.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("0011", "the train part holds one class of column label: 2 rows of 0 and 0 of 1"),
        ("0100", "the test part holds one class of column label: 2 rows of 0 and 0 of 1"),
        ("0111", "the test part holds one class of column label: 0 rows of 0 and 2 of 1"),
    ],
)
def test_one_class_in_a_part_is_refused_before_anything_is_trained(tmp_path, labels, message):
    rows = "x,n,label\n" + "".join(f"a,{n},{label}\n" for n, label in enumerate(labels))
    source = opened(tmp_path, rows.encode())
    for use in (lambda: next(source.chunks("train")), source.provenance):
        with pytest.raises(DataError, match=message):
            use()


@pytest.mark.parametrize("block_bytes", [64, 4 << 20])
def test_the_first_rows_of_one_class_are_refused_with_their_count(
    tmp_path, monkeypatch, block_bytes
):
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", block_bytes)
    rows = b"x,n,label\n" + b"a,1,0\n" * 9 + b"b,2,1\n" * 9 + b"a,1,0\n" * 9 + b"b,2,1\n" * 9
    assert len(numbers(opened(tmp_path, rows, rows=10))) == 10
    with pytest.raises(DataError, match="9 rows of 0 and 0 of 1"):
        numbers(opened(tmp_path, rows, rows=9))
    with pytest.raises(ValueError, match="rows must be >= 1, got 0"):
        opened(tmp_path, rows, rows=0)


def test_bad_rows_are_counted_as_far_as_was_read_and_said_of_which_part(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 64)
    lines = [f"a,{n},{n % 2}" for n in range(200)]
    lines[2], lines[3], lines[90], lines[150], lines[199] = "a,x,0", "torn", "a,x,1", "a,x,0", "b"
    source = opened(tmp_path, ("x,n,label\n" + "\n".join(lines)).encode(), skip_bad_rows=True)
    assert source.provenance().rows_skipped == 0, "nothing was read yet"
    stream = source.chunks("train")
    first = next(stream)
    seen = source.provenance()
    assert first.size < 20
    assert seen.rows_skipped == 2
    assert seen.skipped_where.startswith("1 of train (file read up to row ")
    assert seen.skipped_where.endswith("), 1 of no part")
    stream.close()
    assert source.provenance() == seen, "the count of what was read outlives the stream"
    assert len(numbers(source)) == 97
    next(source.chunks("train"))
    next(source.chunks("test"))
    seen = source.provenance()
    assert seen.rows_skipped == 4
    assert seen.skipped_where == "2 of train (whole file read), 2 of no part"
    numbers(source, "test")
    seen = source.provenance()
    assert seen.rows_skipped == 5
    assert seen.skipped_where == (
        "2 of train (whole file read), 1 of test (whole file read), 2 of no part"
    )
    assert (seen.train_rows, seen.test_rows) == (99, 99)


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
    lines = OpenQuotes(Path("d.csv"), ",", 2, header=False, skipped=[] if skip else None)
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
    lines = OpenQuotes(Path("d.csv"), ",", 2, header=True, skipped=None)
    given_out = [len(lines(b"x" * 100, 100)) for _ in range(30)]
    assert sum(given_out) >= 30 * 100 - 300


@pytest.mark.parametrize(
    ("line", "header", "sentence"),
    [
        ("u1|i1|1", '["user", "item", "clicked"]', "all 9 lines .* columns than 3 .the first: 1."),
        ("u1,i1,1", '["user", "item", "clicked", "x"]', "all 9 lines .* than 4 .the first: 3."),
        ("u1,i1,1", '["user", "clicked"]', "all 9 lines .* than 2 .the first: 3."),
    ],
)
@pytest.mark.parametrize("words", [["data", "check"], ["train", "--data.skip-bad-rows", "--data"]])
def test_a_wrong_delimiter_is_called_that(line, header, sentence, words, tmp_path, capsys):
    """Not a file that holds no rows."""
    (tmp_path / "mine.txt").write_text(f"{line}\n" * 9)
    (tmp_path / "mine.toml").write_text(
        f'name = "mine"\nfile = "mine.txt"\nheader = {header}\nlabels = ["clicked"]\n'
        'split = { test_fraction = 0.5, random_seed = 1 }\ncolumns = ["user"]\n'
    )
    assert main([*words, str(tmp_path / "mine.toml")]) == 2
    told = capsys.readouterr().err
    assert re.search(sentence, told) and "is delimiter, ',', right, and does header" in told
