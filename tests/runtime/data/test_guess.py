"""`data schema`: what is guessed of a table can be read, and says what is uncertain."""

import bz2
import gzip
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.__main__ import main
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.data.schema import read_schema
from runtime.preparing.guess import guessed

CLICKS = Path(__file__).parents[3] / "examples" / "clicks.csv"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=6)
CELLS = st.one_of(TEXT, st.integers(-9, 9999).map(str), st.floats(-9, 9).map(str), st.just(""))
ROWS = range(60)
BITS = [k % 2 for k in ROWS]


def clicks(**columns):
    return pd.DataFrame({**columns, "user": "u1", "clicked": BITS})


def written(folder, table, name="mine.csv"):
    file = folder / name
    table.to_parquet(file) if name.endswith("parquet") else table.to_csv(file, index=False)
    (folder / "mine.toml").write_text(guessed(file))
    return read_schema(folder / "mine.toml")[0]


def line_of(name, folder):
    """What the schema that was guessed last says of a column."""
    (line,) = [row for row in (folder / "mine.toml").read_text().splitlines() if f'"{name}"' in row]
    return line


def test_the_example_is_guessed_as_it_was_written():
    (mine, _), own = read_schema(CLICKS.with_suffix(".toml")), guessed(CLICKS)
    kinds = {c.name: (c.kind, c.separator) for c in mine.columns}
    for name, (kind, separator) in kinds.items():
        (line,) = [line for line in own.splitlines() if f'"{name}"' in line and "group" not in line]
        assert kind == "categorical" or f'kind = "{kind}"' in line
        assert separator in (None, ",") or f'separator = "{separator}"' in line
    assert f"labels = {list(mine.labels)}".replace("'", '"') in own
    assert "test_from = 2026-03-09" in own and 'group = "user"' in own


@settings(max_examples=20)
@given(
    st.lists(TEXT.filter(lambda name: name.strip()), min_size=2, max_size=5, unique=True).flatmap(
        lambda names: st.lists(st.tuples(*[CELLS for _ in names]), min_size=2, max_size=8).map(
            lambda rows: pd.DataFrame(rows, columns=names)
        )
    )
)
@example(pd.DataFrame([("0.", "a"), ("0", "b")], columns=["USER", "user"]))
@example(pd.DataFrame([("a,b", "a"), ("b,c", "b")], columns=["user", "member"]))
def test_whatever_is_guessed_names_each_column_once(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("guess")
    table["clicked"] = [k % 2 for k in range(len(table))]
    table["who"] = [f"u{k}" for k in range(len(table))]
    schema = written(folder, table)
    times = {schema.split.column} - {None}
    names = [*(c.name for c in schema.columns), *schema.labels, *times]
    assert sorted(names) == sorted(table.columns)


ANY_TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
"""Line ends, quotes, brackets and what steers a terminal among them."""
FILE_NAMES = ANY_TEXT.map(lambda name: name.replace("/", "_").replace("\0", "_"))
KEYS = {"name", "file", "labels", "group", "split", "columns"}
DATES = st.sampled_from(["2026-03-01", "2026-13-45", "0000-00-00", "\u0662026-03-01"])


@settings(max_examples=30, deadline=None)
@given(
    file=FILE_NAMES,
    names=st.lists(ANY_TEXT, min_size=2, max_size=5, unique=True),
    cells=st.lists(st.one_of(CELLS, DATES, st.sampled_from("01")), min_size=10, max_size=10),
)
@example(file="clicks", names=["label", "other\nmd5 = []  #"], cells=["0", "0", "1", "1"] * 2)
@example(file='a\nmd5 = []\nname = "b', names=["label", "day"], cells=["0", "2026-03-01"] * 4)
@example(file="a", names=["day", "x"], cells=["2026-13-45", "a", "2026-13-46", "b"])
@example(file="a", names=["day", "x"], cells=["\u0662026-03-01", "a", "\u0662026-03-02", "b"])
def test_no_name_and_no_value_writes_a_key_of_its_own_into_the_schema(
    tmp_path_factory, file, names, cells
):
    """As pandas hands the names on; a file called so is a name of the file system, too."""
    rows = [cells[k : k + len(names)] for k in range(0, len(cells), len(names))]
    table = pd.DataFrame([row for row in rows if len(row) == len(names)], columns=names)
    path = tmp_path_factory.mktemp("guess") / f"{file}.parquet"
    table.to_parquet(path)
    found = tomllib.loads(guessed(path))
    assert found.keys() <= KEYS
    assert found["file"] == path.name and found["name"] == path.name.partition(".")[0]
    columns = [c if isinstance(c, str) else c["name"] for c in found["columns"]]
    times = {found["split"].get("column")} - {None}
    labels = [] if found["labels"] == ["?"] and "?" not in names else found["labels"]
    assert {*columns, *labels} <= {*names} and times <= {*names}
    assert found.get("group", columns[0] if columns else "") in {*columns, ""}


def test_a_file_whose_name_no_schema_can_hold_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / os.fsdecode(b"clicks\xff.csv")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"its name is not text in UTF-8.*; rename it"):
        guessed(path)


@pytest.mark.parametrize("name", ["mine.csv", "mine.parquet"])
def test_a_guessed_schema_reads_its_table(tmp_path, name):
    rows = 50
    table = pd.DataFrame(
        {
            "day": pd.date_range("2026-01-01", periods=rows).strftime("%Y-%m-%d"),
            "user_id": [k % 7 for k in range(rows)],
            "price": [0.5 * k for k in range(rows)],
            "tags": ["a;b" if k % 3 else "c" for k in range(rows)],
            "bought": [k % 2 for k in range(rows)],
            "clicked": [k % 5 // 4 for k in range(rows)],
        }
    )
    schema = written(tmp_path, table, name)
    assert schema.labels == ("clicked",), "the likelier of two names"
    assert {c.name: c.kind for c in schema.columns} == {
        "user_id": "categorical", "price": "numeric", "tags": "multi",
    }, "bought is an outcome, too"  # fmt: skip
    (labels,) = re.findall("(?m)^labels = .*", (tmp_path / "mine.toml").read_text())
    assert "bought" in labels, "it is told as a label"
    source = open_source(str(tmp_path / "mine.toml"))
    assert sum(batch.size for batch in source.chunks("train")) == 40
    assert sum(batch.size for batch in source.chunks("test")) == 10


def test_a_time_with_zeros_before_it_splits_as_the_number_that_it_is(tmp_path):
    """TOML has no number 08."""
    table = clicks(month=[f"{1 + k // 6:02}" for k in ROWS])
    assert written(tmp_path, table).split.threshold == 9


def test_outcomes_beside_the_label_are_no_columns(tmp_path):
    """Nobody knows them when the label is asked for: they gave an AUC of 0.89 for 0.70."""
    table = pd.DataFrame({"is_click": [0, 1] * 30, "long_view": [0, 0, 1] * 20, "user": "u1",
                          "is_like": [1, 0, 0] * 20, "mobile": [0, 1, 1] * 20})  # fmt: skip
    assert [column.name for column in written(tmp_path, table).columns] == ["user", "mobile"]
    text = (tmp_path / "mine.toml").read_text()
    for name in ("long_view", "is_like"):
        assert (
            f"# Left out: {name} is an outcome by its name, and may be a label of its own." in text
        )


def test_a_first_line_of_values_is_said(tmp_path):
    (tmp_path / "mine.csv").write_text("16,12,1\n" + "17,13,0\n16,14,1\n" * 30)
    text = guessed(tmp_path / "mine.csv")
    assert "# The first line looks like values, so the names of the columns are made up." in text
    assert tomllib.loads(text)["header"] == ["c1", "c2", "c3"]
    (tmp_path / "mine.csv").write_text("16,u2,1\n" + "17,u3,0\n16,u4,1\n" * 30)
    assert (
        "# The first line looks like values (16, u2, 1): if it is, name the columns: header"
        in guessed(tmp_path / "mine.csv")
    )
    (tmp_path / "mine.csv").write_text("0,1,2\n" + "17,13,0\n16,14,1\n" * 30)
    assert "header = [" not in guessed(tmp_path / "mine.csv").partition("name = ")[2]
    (tmp_path / "mine.csv").write_text("u,i,y\n" + "17,13,0\n16,14,1\n" * 30)
    assert "first line" not in guessed(tmp_path / "mine.csv")


_COLONS = "".join(f"{k % 5}::{k % 7}::{k % 2}\n" for k in ROWS).encode()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", ["it is empty"]),
        (b"a\n1\n", ["1 column: is"]),
        (b"a,b\n", ["holds no rows"]),
        (b"\xff\xfe\x00a,b\n1,2\n", ["is no UTF-8 text", "UTF-16"]),
        (gzip.compress(b"a,b\n1,2\n"), ["gzip", "end in .gz"]),
        (bz2.compress(b"a,b\n1,2\n"), ["bzip2", "end in .bz2"]),
        (b"PAR1\x15\x04", ["parquet file", "end in .parquet"]),
        (b"PK\x03\x04\x14\x00", ["zip archive", "unpack"]),
        (b'{"user": 1, "y": 0}\n{"user": 2, "y": 1}\n', ["JSON", "parquet or CSV"]),
        (b'[{"user": 1, "y": 0}]\n', ["JSON", "parquet or CSV"]),
        (_COLONS, ["'::'", "one character", "sed"]),
        (b"1 |u 5:1 |i 7:0.5\n0 |u 6:1 |i 8:0.5\n", ["Vowpal Wabbit", "namespace"]),
        (b"1 1:5:1 2:7:1\n0 1:6:1 2:8:1\n", ["libffm"]),
    ],
    ids=["empty", "a column", "no rows", "utf16", "gz", "bz2", "parquet", "zip", "jsonl", "json",
         "colons", "vw", "libffm"],
)  # fmt: skip
def test_what_is_no_table_is_named_with_what_to_do(tmp_path, content, named):
    (tmp_path / "mine.csv").write_bytes(content)
    with pytest.raises(DataError) as raised:
        guessed(tmp_path / "mine.csv")
    text = str(raised.value)
    assert all(word in text for word in named), text
    assert "mine.csv" in text and ("UTF-16" in text) == ("UTF-16" in named)


@pytest.mark.parametrize("mark", ["\t", ";"])
@pytest.mark.parametrize("header", ["user@item@click\n", ""])
def test_tabs_and_semicolons_are_seen_without_being_asked_for(tmp_path, mark, header):
    rows = "".join(f"{k % 5}@{k % 7}@{k % 2}\n" for k in ROWS)
    (tmp_path / "mine.csv").write_text((header + rows).replace("@", mark))
    text = guessed(tmp_path / "mine.csv")
    (tmp_path / "mine.toml").write_text(text)
    schema = tomllib.loads(text)
    assert schema["delimiter"] == mark
    assert schema.get("header") == (None if header else ["c1", "c2", "c3"])
    read = open_source(str(tmp_path / "mine.toml")).provenance()
    assert read.test_rows > 0 and read.files[0]["rows"] == 60


def test_numbers_with_a_decimal_comma_are_no_list_of_ids(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("user;cost;clicked\n" + "".join(f"u{k};{k},50;{k % 2}\n" for k in range(40)))
    (line,) = [line for line in guessed(file).splitlines() if '"cost"' in line]
    assert "multi" not in line and "decimal comma" in line
    file.write_text("user,cost,clicked\n" + "".join(f'u{k},"{k},50",{k % 2}\n' for k in range(40)))
    (line,) = [line for line in guessed(file).splitlines() if '"cost"' in line]
    assert 'kind = "multi"' in line


@pytest.mark.parametrize(
    ("bought", "told"),
    [(["yes", "no"], " bought holds no and yes: a label must be 0 and 1"), ([2.5, 3.5, 4.5], "")],
)
def test_a_table_without_a_label_says_so_and_which_column_may_become_one(tmp_path, bought, told):
    table = pd.DataFrame({"user": ROWS, "bought": bought * (60 // len(bought)), "age": ROWS})
    table.to_csv(tmp_path / "mine.csv", index=False)
    (line,) = [x for x in guessed(tmp_path / "mine.csv").splitlines() if x.startswith("labels")]
    asked = 'labels = ["?"]  # no column holds 0 and 1 in every row: which is learned?'
    assert line.startswith(asked + told) and ("bought" in line) == bool(told)


@pytest.mark.parametrize("mark", [",", "\t"])
def test_of_ratings_the_command_is_given_that_makes_a_label_of_them(mark, tmp_path):
    """What it writes is guessed as a log of clicks, whose rating no column gives away."""
    ratings = pd.DataFrame({"user": "u1", "item": ROWS, "rating": [1 + k % 9 / 2 for k in ROWS]})
    ratings.to_csv(tmp_path / "ratings.csv", index=False, sep=mark)
    text = guessed(tmp_path / "ratings.csv")
    assert 'regression = ["rating"]' in text
    (command,) = re.findall("^#   python (.*)", text, re.MULTILINE)
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True, cwd=tmp_path)
    (tmp_path / "liked.toml").write_text(guessed(tmp_path / "liked.csv"))
    schema, _ = read_schema(tmp_path / "liked.toml")
    assert (schema.labels, schema.feature_columns) == (("liked",), ("user", "item"))
    liked = pd.read_csv(tmp_path / "liked.csv").liked
    assert (liked == (ratings.rating >= ratings.rating.median())).all()


def test_a_schema_written_elsewhere_is_told_the_path_of_its_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "x" / "log.csv").write_bytes(CLICKS.read_bytes())
    monkeypatch.chdir(tmp_path / "here")
    assert main(["data", "schema", "../x/log.csv"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("file =")]
    assert line.startswith('file = "log.csv"  # beside') and line.endswith(" ../x/log.csv")
    # As the comment says, the file is found from here.
    Path("here.toml").write_text(text.replace(line, 'file = "../x/log.csv"'))
    assert open_source("here.toml").provenance().test_rows > 0
    monkeypatch.chdir(tmp_path / "x")
    assert main(["data", "schema", "log.csv"]) == 0
    assert 'file = "log.csv"  # beside this schema\n' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mine.csv", "mine.parquet"])
@pytest.mark.parametrize("as_date", [False, True])
def test_the_split_is_of_all_rows_where_only_the_first_are_looked_at(
    tmp_path, monkeypatch, name, as_date
):
    monkeypatch.setattr("runtime.preparing.guess.ROWS", 100)
    days = [1 + k // 25 for k in range(400)]  # the first 100 rows are the first 4 of 16 days
    times = [f"2026-03-{day:02d}" if as_date else day for day in days]
    table = pd.DataFrame({"day": times, "user": "u1", "clicked": [k % 2 for k in range(400)]})
    schema = written(tmp_path, table, name)
    source = open_source(str(tmp_path / "mine.toml"))
    assert source.provenance().test_rows == 75, "of whole days the nearest to a fifth"
    assert "the last 19 % tests" in (tmp_path / "mine.toml").read_text()
    assert schema.split.column == "day"


def test_a_number_that_no_clock_counts_is_no_time_of_a_row(tmp_path, monkeypatch):
    """Behind the rows that are looked at; the others split as before."""
    monkeypatch.setattr("runtime.preparing.guess.ROWS", 40)
    table = clicks(time=[*map(str, range(1, 60)), str(10**25)])
    assert written(tmp_path, table).split.threshold == 48


def test_one_day_with_most_rows_leaves_both_parts_some(tmp_path):
    table = pd.DataFrame({"day": ["2026-03-01"] * 95 + ["2026-03-02"] * 5, "user": "u1",
                          "clicked": [k % 2 for k in range(100)]})  # fmt: skip
    written(tmp_path, table)
    assert open_source(str(tmp_path / "mine.toml")).provenance().test_rows == 5


PACKED = gzip.compress(b"user,label\n" + b"".join(b"u%d,%d\n" % (k, k % 2) for k in range(9000)))


@pytest.mark.parametrize(
    "content",
    [PACKED[: len(PACKED) // 2], PACKED[:3], PACKED[:-4] + b"\0\0\0\0",
     PACKED[:5000] + b"\xff\x00\xff" + PACKED[5003:], b"user,label\nu1,1\n"],
    ids=["cut", "cut in its head", "checksum", "damaged", "not packed"],
)  # fmt: skip
def test_a_packed_table_that_is_damaged_ends_in_a_sentence(content, tmp_path, capsys):
    """In every command that reads it."""
    (tmp_path / "mine.csv.gz").write_bytes(content)
    assert main(["data", "schema", str(tmp_path / "mine.csv.gz")]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"error: {tmp_path / 'mine.csv.gz'} cannot be read"), found
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nfile = "mine.csv.gz"\nlabels = ["label"]\ncolumns = ["user"]\n'
        "split = { test_fraction = 0.5, random_seed = 1 }\n"
    )
    for words in (["data", "check"], ["train", "--out", str(tmp_path / "run"), "--data.name"]):
        assert main([*words, str(tmp_path / "mine.toml")]) == 2
        assert "mine.csv.gz" in capsys.readouterr().err


def test_a_packed_line_without_an_end_is_not_unpacked_whole(tmp_path, monkeypatch):
    """A megabyte of it is gigabytes: what trains has a bound for a line, and so has the guess."""
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 1 << 16)
    endless = b"user,label\n" + b"u" * (1 << 20)
    (tmp_path / "mine.csv.gz").write_bytes(gzip.compress(endless))
    (tmp_path / "mine.csv").write_bytes(endless)
    for name in ("mine.csv.gz", "mine.csv"):
        with pytest.raises(DataError, match="a line is longer than 65,536 bytes"):
            guessed(tmp_path / name)


DAYS = pd.date_range("2026-03-01", periods=60, freq="6h")
TABLES = {
    "labels are floats": {"clicked": pa.array(BITS, pa.float64())},
    "labels are booleans": {"clicked": pa.array(BITS).cast(pa.bool_())},
    "instants": {"at": DAYS},
    "instants with a zone": {"at": DAYS.tz_localize("Asia/Tokyo")},
    "dates with a zone": {"at": [f"{d.isoformat()}+02:00" for d in DAYS]},
    "dates of two zones": {
        "at": [f"{d.isoformat()}{('+02:00', '+0100')[k % 2]}" for k, d in enumerate(DAYS)],
    },
    "dates of which some have a zone": {
        "at": [f"{d.isoformat()}{('Z', '')[k % 2]}" for k, d in enumerate(DAYS)],
    },
    "one day": {"day": ["2026-03-01"] * 60},
    "one number of a time": {"hour": [7] * 60},
    "bytes": {"x": pa.array([b"\xff"] * 60)},
    "bytes of texts": {"x": pa.array([b"a b", b"c"] * 30)},
    "spans": {"x": pa.array([k * 17_000 for k in ROWS], pa.duration("s"))},
    "decimals": {"x": pa.array(ROWS).cast(pa.decimal128(21, 2))},
    "structs": {"x": pa.array([{"a": k} for k in ROWS])},
    "lists": {"x": pa.array([["a", "b"]] * 60)},
    "lists of structs": {"x": pa.array([[{"a": 1}]] * 60)},
    "numbers of which some are absent": {"x": [None, 7] * 30},
}


@pytest.mark.parametrize("held", TABLES)
def test_a_schema_that_is_guessed_trains(held, tmp_path):
    """Nothing is mended by a person, and each row is read."""
    columns = {"user": [f"u{k % 7}" for k in ROWS], "clicked": BITS, **TABLES[held]}
    pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    (tmp_path / "mine.toml").write_text(guessed(tmp_path / "mine.parquet"))
    source = open_source(str(tmp_path / "mine.toml"), keep=False)
    rows = [sum(batch.size for batch in source.chunks(part)) for part in ("train", "test")]
    assert sum(rows) == 60 and min(rows) > 0


@pytest.mark.parametrize(
    ("head", "row", "left_out"),
    [
        ("user,clicked,item,", "u{0},{1},i{0},", "a column has no name (an index?)"),
        (",user,clicked,item", "{0},u{0},{1},i{0}", "a column has no name (an index?)"),
        ("user,clicked,item,item", "u{0},{1},i{0},x", "item is the name of 2 columns"),
        ("user,clicked,item\nu1\nu2,0,i5,7", "u{0},{1},i{0}", "2 broken lines: see `data check`"),
    ],
)
def test_what_training_cannot_read_is_left_out_and_said(head, row, left_out, tmp_path):
    rows = "".join(row.format(k % 7, k % 2) + "\n" for k in ROWS)
    (tmp_path / "mine.csv").write_text(f"{head}\n{rows}")
    found = guessed(tmp_path / "mine.csv")
    assert f"# Left out: {left_out}." in found
    (tmp_path / "mine.toml").write_text(found)
    source = open_source(str(tmp_path / "mine.toml"), skip_bad_rows=True, keep=False)
    assert sum(batch.size for batch in source.chunks("train")) > 0


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("is_mobile", "label"), "label"), (("is_member", "purchase"), "purchase"),
        (("weekend", "is_click"), "is_click"), (("weekend", "is_attributed"), "is_attributed"),
        (("is_new", "y"), "y"), (("is_new", "converted"), "converted"),
    ],
)  # fmt: skip
def test_the_label_is_what_a_person_would_take_for_one(tmp_path, names, label):
    columns = {name: [(k // (2 + j)) % 2 for k in ROWS] for j, name in enumerate(names)}
    assert written(tmp_path, pd.DataFrame({"user": "u1", **columns})).labels == (label,)


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("user_agent", "visitorid"), "visitorid"), (("qid", "user_id"), "user_id"),
        (("user_agent", "qid"), "qid"), (("item", "srch_id"), "srch_id"),
        (("user_agent", "item"), None), (("query_id", "doc"), "query_id"),
        (("session_id", "user_id"), "user_id"), (("session_id", "item"), "session_id"),
    ],
)  # fmt: skip
def test_the_group_is_a_user_or_a_list_that_was_shown(tmp_path, names, group):
    columns = {name: [f"v{k // (2 + j) % 9}" for k in ROWS] for j, name in enumerate(names)}
    table = pd.DataFrame({**columns, "clicked": BITS})
    assert written(tmp_path, table).group == group


def test_the_time_of_an_outcome_splits_only_where_no_other_does(tmp_path):
    """Of two times that of the event, whichever column comes first."""
    events = [1_600_000_000 + 60 * k for k in ROWS]
    table = clicks(conversion_timestamp=[e + 900 for e in events], timestamp=events)
    schema = written(tmp_path, table)
    assert schema.split.column == "timestamp"
    assert "conversion_timestamp" not in {c.name for c in schema.columns}
