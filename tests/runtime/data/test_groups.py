"""A group that is no feature: judged by, carried along, and divided by no split that says so."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from runtime.__main__ import main
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.open import open_source
from runtime.data.schema import read_schema
from tests.runtime.clicks_of_a_user import write_clicks

PARTS = ("train", "validation", "test")
USERS = [None, "u1", "u2", "u3", "7", "7.0"]


def schema_text(columns: str, more: str = "") -> str:
    return (
        'name = "s"\nfile = "s.csv"\nlabels = ["y"]\ngroup = "user"\n'
        f"split = {{ test_fraction = 0.4, random_seed = 5{more} }}\ncolumns = [{columns}]\n"
    )


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    users = [USERS[n] or "" for n in draw.integers(0, 6, 300)]
    rows = [f"{user},{n % 11},{draw.integers(0, 2)}" for n, user in enumerate(users)]
    (tmp_path / "s.csv").write_text("\n".join(["user,item,y", *rows]) + "\n")
    return tmp_path


def opened(folder, text, **options):
    (folder / "s.toml").write_text(text)
    return open_source(str(folder / "s.toml"), **options)


def groups_of(source, part):
    return np.concatenate([source.layout.groups(chunk) for chunk in source.chunks(part)])


def test_the_groups_are_those_of_the_same_column_as_a_feature(folder):
    own = opened(folder, schema_text('"user", "item"'))
    apart = opened(folder, schema_text('"item"'))
    for part in ("train", "test"):
        _, one = np.unique(groups_of(own, part), return_inverse=True)
        _, other = np.unique(groups_of(apart, part), return_inverse=True)
        pairs = set(zip(one.tolist(), other.tolist(), strict=True))
        assert len(pairs) == 5, "7 and 7.0 are one user, and those without one another"
    (chunk,) = apart.chunks("test")
    assert [field.name for field in apart.layout.fields] == ["item"]
    order = np.arange(chunk.size)[::-1]
    assert (chunk.take(order).groups == chunk.groups[::-1]).all()
    assert (chunk.rows(3, 9).groups == chunk.groups[3:9]).all()
    assert (
        chunk.concat([chunk.rows(0, 5), chunk.rows(5, chunk.size)]).groups == chunk.groups
    ).all()


def test_groups_are_kept_with_a_parse(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    source = opened(folder, schema_text('"item"'), keep=True)
    first = groups_of(source, "test")
    monkeypatch.setattr(FileSource, "turns", None)
    again = groups_of(opened(folder, schema_text('"item"'), keep=True), "test")
    np.testing.assert_array_equal(first, again)


def test_a_split_by_group_divides_none(folder):
    source = opened(folder, schema_text('"item"', ", by_group = true"))
    parts = [groups_of(source, part) for part in ("train", "test")]
    absent = np.bincount(np.unique(np.concatenate(parts), return_inverse=True)[1])
    shared = set(parts[0].tolist()) & set(parts[1].tolist())
    assert sum(map(len, parts)) == 300 and len(absent) == 5
    assert len(shared) == 1, "samples without a user are drawn one by one"
    assert "0.4 of the groups" in source.provenance().split


@pytest.mark.parametrize("user", ["u{}", ""])
def test_groups_are_drawn_with_the_shares_of_the_parts_and_anew_by_each_seed(user, folder):
    """Of 4,000 users, or of as many samples without one, within 4 standard errors."""
    n = 4000
    lines = [f"{user.format(k)},{k},{k % 3 % 2}" for k in range(n)]
    (folder / "s.csv").write_text("\n".join(["user,item,y", *lines]) + "\n")
    text = schema_text('"item"', ", by_group = true, validation_fraction = 0.3")
    source = opened(folder, text)
    items = {part: {*np.concatenate([c.ids for c in source.chunks(part)])} for part in PARTS}
    other = opened(folder, text.replace("random_seed = 5", "random_seed = 6"))
    tested_twice = items["test"] & {*np.concatenate([c.ids for c in other.chunks("test")])}
    for found, share in (
        (items["train"], 0.6 * 0.7),
        (items["validation"], 0.6 * 0.3),
        (items["test"], 0.4),
        (tested_twice, 0.4 * 0.4),
    ):
        assert abs(len(found) / n - share) < 4 * math.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("rows", [None, 100])
def test_a_validation_part_divides_no_group_either(rows, folder):
    more = ", by_group = true, validation_fraction = 0.3"
    many = [f"u{n % 50},{n % 11},{n % 3 % 2}" for n in range(2000)]
    (folder / "s.csv").write_text("\n".join(["user,item,y", *many]) + "\n")
    source = opened(folder, schema_text('"item"', more), rows=rows)
    sizes, groups = {}, {}
    for part in PARTS:
        found = groups_of(source, part)
        sizes[part], groups[part] = len(found), set(found.tolist())
    assert not groups["train"] & groups["validation"]
    assert not groups["test"] & (groups["train"] | groups["validation"])
    assert all(groups.values()) and len(set().union(*groups.values())) == 50
    assert sizes["train"] + sizes["validation"] == (rows or 2000 - sizes["test"])
    plain = opened(folder, schema_text('"item"', ", by_group = true"))
    assert set(groups_of(plain, "test").tolist()) == groups["test"], "the test part is as it was"
    assert "0.3 of the groups that train" in source.provenance().split


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (schema_text('"item", { name = "user", kind = "multi" }'), "one value a sample"),
        (schema_text('"item"').replace('"user"', '"y"'), "no label"),
        (schema_text('"item"', ", by_group = true").replace('group = "user"\n', ""), "is none"),
        (schema_text('"item"').replace("random_seed = 5", "by_group = true"), "random_seed"),
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_is_refused(folder, text, told):
    (folder / "s.toml").write_text(text)
    with pytest.raises(DataError, match=told):
        read_schema(folder / "s.toml")


def test_a_run_is_judged_within_groups_that_it_does_not_read(tmp_path, capsys):
    schema = write_clicks(tmp_path)
    text = schema.read_text()
    assert 'group = "user"' not in text
    schema.write_text(f'group = "day"\n{text}')
    run = str(tmp_path / "run")
    words = ["train", "--data.name", str(schema), "--batch", "32", "--model.hidden", "8"]
    words += ["--steps", "6", "--checkpoint-every", "end", "--out", run]
    words += ["--executor", "concurrent", "--loaders", "1"]
    assert main(words) == 0
    assert main(["evaluate", run]) == 0
    assert "GAUC" in capsys.readouterr().out
    assert (
        main(["predict", run, "--data", str(tmp_path / "clicks.csv"), "--out", f"{run}.csv"]) == 0
    )


@pytest.mark.parametrize("way", ["test_only", "valid_and_test"])
@pytest.mark.parametrize("column", [None, "time", "day"])
def test_leave_one_out_takes_the_last_row_of_each_group(tmp_path, way, column):
    """Against pandas: by number, by date or by place, of equal ones the later; the first stays."""
    draw = np.random.default_rng(3)
    table = pd.DataFrame({"user": draw.choice([*"abcdefgh", ""], 60), "row": np.arange(60.0)})
    table["time"] = draw.integers(0, 20, 60) + 2**60
    table["day"] = pd.Timestamp("2026-01-01") + pd.to_timedelta(draw.integers(0, 9, 60), "D")
    table["y"] = np.arange(60) % 2
    table.loc[60] = ["alone", 60.0, 0, pd.Timestamp("2026-01-01"), 1]
    for part, rows in enumerate((table.iloc[:30], table.iloc[30:])):  # groups go across files
        rows.to_csv(tmp_path / f"s-{part}.csv", index=False)
    (tmp_path / "s.toml").write_text(
        'name = "s"\nfile = "s-*.csv"\nlabels = ["y"]\ngroup = "user"\n'
        f'split = {{ leave_one_out = "{way}"{f", column = {column!r}" if column else ""} }}\n'
        'columns = ["user", { name = "row", kind = "numeric", log = false }]\n'
    )
    table = pd.concat([pd.read_csv(f) for f in sorted(tmp_path.glob("s-*.csv"))])
    by = table.assign(row=table.row.astype(int)).dropna(subset="user")
    by = by.sort_values(column, kind="stable") if column else by
    behind = by.groupby("user").cumcount(ascending=False)
    is_first = by.groupby("user").cumcount() == 0
    expected = {
        "test": {*by.row[(behind == 0) & ~is_first]},
        "validation": {*by.row[(behind == 1) & ~is_first]} if way == "valid_and_test" else set(),
    }
    expected["train"] = {*range(61)} - expected["test"] - expected["validation"]
    source = open_source(str(tmp_path / "s.toml"))
    found = {part: [b.dense[:, 0] for b in source.chunks(part)] for part in expected}
    rows = {part: [*map(int, np.concatenate(of))] if of else [] for part, of in found.items()}
    assert {part: {*of} for part, of in rows.items()} == expected
    assert all(of == sorted(of) for of in rows.values()), "each in the order of the files"
    assert 60 in rows["train"], "a group of one row trains"


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ('leave_one_out = "test_only", column = "y2"', "the split orders each group by this"),
        ('leave_one_out = "test_only", test_fraction = 0.1', "leave_one_out"),
        ('leave_one_out = "valid_and_test", validation_fraction = 0.1', "both say what validates"),
    ],
)
def test_leave_one_out_says_what_is_wrong(folder, split, said):
    (folder / "s.csv").write_text("user,item,y,y2\na,1,0,1\na,2,1,x\na,3,1,3\na,1,0,2\n")
    text = schema_text('"item"').replace("test_fraction = 0.4, random_seed = 5", split)
    with pytest.raises(DataError, match=said):
        list(opened(folder, text).chunks("train"))


def test_leave_one_out_asks_for_a_group(folder):
    text = schema_text('"item"').replace('group = "user"\n', "")
    with pytest.raises(DataError, match="leave_one_out splits by the schema's group"):
        opened(
            folder,
            text.replace("test_fraction = 0.4, random_seed = 5", 'leave_one_out = "test_only"'),
        )
