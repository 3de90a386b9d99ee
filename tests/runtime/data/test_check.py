"""`data check`: values that break their rule are counted, and what no run notices is told."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime.__main__ import main
from runtime.data.open import open_source
from runtime.data.split import CODES
from runtime.preparing.check import check

EXAMPLES = Path(__file__).parents[3] / "examples"
HEADER, *CLICKS = (EXAMPLES / "clicks.csv").read_text().splitlines()[:2001]


def checked(folder, rows, schema=None):
    schema = (EXAMPLES / "clicks.toml").read_text() if schema is None else schema
    schema = schema.replace("2026-03-09", "2026-03-01")  # these are rows of one day
    schema = re.sub(r"split = .*", "split = { test_fraction = 0.2, random_seed = 1 }", schema)
    (folder / "clicks.toml").write_text(schema)
    (folder / "clicks.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    found, _ = check(open_source(str(folder / "clicks.toml"), skip_bad_rows=True))
    return {one.name: one for one in found}


def with_value(row, column, value):
    cells = row.split(",")
    cells[HEADER.split(",").index(column)] = value
    return ",".join(cells)


def test_a_good_table_has_nothing_to_look_at(capsys):
    assert main(["data", "check", str(EXAMPLES / "clicks.toml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["column", "kind"] and len(lines) == 9
    assert all(line.split()[-1] == "0" for line in lines[1:-1])
    assert lines[-1] == "nothing else to look at"


@pytest.mark.parametrize(
    ("name", "told"),
    [("dwell_time", "after the label"), ("revenue", "after the label"),
     ("position", "not known before"), ("price", "nothing else to look at")],
)  # fmt: skip
def test_a_feature_that_is_known_too_late_by_its_name_is_something_to_look_at(
    tmp_path, capsys, name, told
):
    """Its values tell nothing here: they are drawn without the label."""
    for file in ("clicks.csv", "clicks.toml"):
        text = (EXAMPLES / file).read_text().replace("price", name)
        (tmp_path / file).write_text(text)
    assert main(["data", "check", str(tmp_path / "clicks.toml")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert told in last and (last.startswith(f"{name}: ") == (name != "price"))


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [("price", "cheap", "finite number"), ("price", "1e99", "float32"), ("clicked", "2", "0 or 1")],
)
def test_bad_values_are_counted_with_the_first_one(tmp_path, column, value, rule):
    places = [4, 5, 900]
    rows = [with_value(r, column, value) if k in places else r for k, r in enumerate(CLICKS)]
    found = checked(tmp_path, rows)
    assert {name: one.bad for name, one in found.items() if one.bad} == {column: len(places)}
    assert f"clicks.csv, row 5: {value!r}" in found[column].notes and rule in found[column].notes


def test_absent_values_and_unseen_ids_are_shares(tmp_path):
    gone = [with_value(r, "price", "") if k % 4 == 0 else r for k, r in enumerate(CLICKS)]
    found = checked(tmp_path, gone)
    prices = [row.split(",")[5] for row in gone]
    assert found["price"].absent == prices.count("")
    (parts,) = open_source(str(tmp_path / "clicks.toml")).placed().values()
    items = np.array([row.split(",")[2] for row in gone])
    train, test = (set(items[parts == CODES[part]]) for part in ("train", "test"))
    assert found["item"].unseen == pytest.approx(len(test - train) / len(test))
    assert len(found["item"].train_ids) == len(train)


def test_ids_that_are_written_otherwise_in_the_test_part_are_told(tmp_path):
    schema = (EXAMPLES / "clicks.toml").read_text()
    half = [with_value(row, "user", f"U{k}") for k, row in enumerate(CLICKS)]
    found = checked(tmp_path, half, schema)
    assert found["user"].unseen == 1.0 and "never trained" in found["user"].notes


def test_a_separator_that_never_occurs_is_told(tmp_path):
    schema = (EXAMPLES / "clicks.toml").read_text().replace('separator = "|"', 'separator = ";"')
    found = checked(tmp_path, CLICKS, schema)
    assert "separator" in found["tags"].notes and not found["history"].notes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["check", "synthetic"], "made on the fly"), (["check", "nothing.toml"], "nothing.toml"),
     (["check"], "NAME is missing"), (["schema"], "FILE is missing"), (["chekc"], "check SCHEMA"),
     (["schema", "nothing.csv"], "nothing.csv")],
)  # fmt: skip
def test_a_mistake_ends_in_a_sentence(words, sentence, capsys):
    assert main(["data", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda rows: [*rows[:99], "2026-03-01,u62,i11,toys", *rows[100:]],
         "1 broken line (wrong number of columns), first: clicks.csv, row 100"),
        (lambda rows: [r.replace("2026-03", "2025-03") for r in rows], "the test part is empty"),
        (lambda rows: [with_value(r, "clicked", "1") for r in rows],
         "the train part holds one class of column clicked"),
    ],
)  # fmt: skip
def test_what_training_would_refuse_is_found(tmp_path, capsys, edit, sentence):
    days = [with_value(r, "day", f"2026-03-0{1 + 8 * (k % 2)}") for k, r in enumerate(CLICKS)]
    (tmp_path / "clicks.csv").write_text("\n".join([HEADER, *edit(days)]) + "\n")
    (tmp_path / "clicks.toml").write_text((EXAMPLES / "clicks.toml").read_text())
    assert main(["data", "check", str(tmp_path / "clicks.toml")]) == 0
    assert sentence in capsys.readouterr().out.splitlines()[-1]
    assert main(["train", "--data", str(tmp_path / "clicks.toml"), "--steps", "1",
                 "--out", str(tmp_path / "run")]) == 2  # fmt: skip


NESTED = {
    "lists": pa.array([["a"], None, ["b", "c"]] * 20),
    "structs": pa.array([{"a": 1}, None, {"a": 2}] * 20),
    "maps": pa.array([[("k", 1)], None, [("k", 2)]] * 20, pa.map_(pa.string(), pa.int64())),
    "lists of lists": pa.array([[["a"]], None, [["b"]]] * 20),
    "bytes": pa.array([b"\xff", None, b"\xfe"] * 20),
}


@pytest.mark.parametrize("kind", ["categorical", "numeric"])
@pytest.mark.parametrize("held", NESTED)
def test_a_column_of_what_is_no_single_value_is_told_of(held, kind, tmp_path, capsys):
    """Whatever holds it; and training says it, too, in a sentence."""
    table = {"user": [f"u{k}" for k in range(60)], "label": [0, 1] * 30, "x": NESTED[held]}
    pq.write_table(pa.table(table), tmp_path / "mine.parquet")
    schema = tmp_path / "mine.toml"
    schema.write_text(
        'name = "mine"\nfile = "mine.parquet"\nlabels = ["label"]\n'
        "split = { test_fraction = 0.5, random_seed = 1 }\n"
        f'columns = ["user", {{ name = "x", kind = "{kind}" }}]\n'
    )
    assert main(["data", "check", str(schema)]) == 0
    fits = (held, kind) == ("lists", "multi")
    assert bool(re.search(r"^x: \d+ bad, first: mine.parquet, row \d", capsys.readouterr().out,
                          re.MULTILINE)) == (not fits)  # fmt: skip
    words = ["--steps", "1", "--batch", "8", "--out", str(tmp_path / "run")]
    assert main(["train", "--data.name", str(schema), *words]) == (0 if fits else 2)
    assert ("column x" in capsys.readouterr().err) == (not fits)
