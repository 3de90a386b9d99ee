from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime.data.catalogue import CATALOGUE, FOLDER
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.data.schema import read_schema
from runtime.data.split import Split
from runtime.preparing.download import run


@pytest.fixture(autouse=True)
def no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PERSIA_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_flights(folder: Path, delayed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = CATALOGUE["nycflights13"]().read_columns
    columns = {name: ["1"] * 40 for name in names} | {"label": [delayed, 1 - delayed] * 20}
    pq.write_table(pa.table(columns), folder / "data.parquet")


def label_of(data_dir: Path | None = None) -> float:
    chunk = next(iter(open_source("nycflights13", data_dir).chunks("train")))
    return float(chunk.labels[0, 0])


def test_a_column_in_a_schema_file_may_be_a_name_alone(tmp_path):
    head = 'name = "s"\nsplit = { test_fraction = 0.2 }\n'
    for number, columns in enumerate(['["a", { name = "b" }]', '[{ name = "a" }, "b"]']):
        (tmp_path / f"{number}.toml").write_text(f"{head}columns = {columns}\n")
    one, other = (read_schema(tmp_path / f"{number}.toml")[0] for number in range(2))
    assert one == other and [c.name for c in one.columns] == ["a", "b"]


def test_every_schema_of_the_catalogue_is_sound():
    assert len(CATALOGUE) == len(list(FOLDER.iterdir())) == 17
    for name, ready in CATALOGUE.items():
        schema, features = ready(), {c.name for c in ready().columns}
        assert schema.name == name
        assert ready.about.endswith(".") and not ready.about.startswith("#")
        assert not features & {*schema.labels, "time_ms"}
        assert schema.split.column not in features or name == "avazu", "the split must not leak"
    assert CATALOGUE["kuairand-pure-14d"]().layout.tasks == ("click", "long_view")


def test_data_is_found_in_the_named_directory_then_the_variable_then_the_downloads(
    tmp_path, monkeypatch
):
    write_flights(tmp_path / "cache" / "persia-testbed" / "nycflights13", 0)
    assert label_of() == 0
    write_flights(tmp_path / "variable" / "nycflights13", 1)
    monkeypatch.setenv("PERSIA_DATA_DIR", str(tmp_path / "variable"))
    assert label_of() == 1
    write_flights(tmp_path / "named", 0)
    assert label_of(tmp_path / "named") == 0
    assert label_of(tmp_path / "empty") == 0, "the downloads come last"


def test_missing_data_names_every_place_and_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSIA_DATA_DIR", "/variable")
    with pytest.raises(DataError) as caught:
        open_source("tennis", tmp_path / "named")
    text = str(caught.value)
    words = ["tennis/data.parquet", str(tmp_path / "named"), "PERSIA_DATA_DIR (/variable)"]
    for word in [*words, str(tmp_path / "cache"), "persia-runtime data get"]:
        assert word in text


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(DataError, match="did you mean kuairand-pure-14d"):
        open_source("kuairand-pure-14")
    with pytest.raises(DataError, match="did you mean criteo-ad"):
        open_source("synthetic:criteo")


def test_a_table_in_place_of_its_schema_is_told_how_to_get_one(tmp_path):
    (tmp_path / "my clicks.csv").write_text("user,clicked\nu1,1\n")
    with pytest.raises(DataError, match=r"data schema '.*my clicks.csv' > NEW.toml"):
        open_source(str(tmp_path / "my clicks.csv"))


SCHEMA = """
name = "mine"
file = "clicks.csv"
labels = ["clicked"]
split = { column = "day", test_from = 2 }
delimiter = ";"
[[columns]]
name = "user"
[[columns]]
name = "tags"
kind = "multi"
pooling = "mean"
[[columns]]
name = "price"
kind = "numeric"
fill = 0
"""


def write_schema(folder: Path, text: str = SCHEMA) -> str:
    (folder / "mine.toml").write_text(text)
    (folder / "clicks.csv").write_text(
        "user;tags;price;day;clicked\n1;a,b;;1;0\n2;c;3;1;1\n2;c;3;2;1\n2;c;3;2;0\n"
    )
    return str(folder / "mine.toml")


def test_a_schema_file_opens_the_data_beside_it(tmp_path):
    source = open_source(write_schema(tmp_path))
    (train,) = source.chunks("train")
    assert train.labels.tolist() == [[0], [1]]
    assert len(train.ids) == 5
    assert train.dense.tolist() == [[0], [pytest.approx(np.log(4))]]
    assert [f.pooling for f in source.layout.fields] == ["sum", "mean"]
    assert source.provenance().name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pooling", "poling", r"columns\[.\].poling is not known; did you mean pooling"),
        ("delimiter", "delimeter", "delimeter is not known; did you mean delimiter"),
        ("test_from = 2", "test_frm = 2", "split.test_frm is not known; did you mean test_from"),
        (
            "test_from = 2",
            "test_from = true",
            "split.test_from must be a whole number or a number",
        ),
        (
            '"multi"',
            '"many"',
            "must be one of categorical, bucket, multi, sequence, n",
        ),
        ('"mean"', '"sequence"', "write kind='sequence'"),
        ('["clicked"]', '"clicked"', "labels must be a list, got 'clicked'"),
        ('["clicked"]', '["price"]', "are labels, leave them out of the columns"),
        ('name = "mine"', "", "name is missing"),
        ('name = "mine"', "name = mine", "is not well-formed TOML"),
        ("test_from = 2", "test_fraction = 0.2, test_from = 2", "either column and test_from"),
        ('file = "clicks.csv"', 'file = "click.csv"', "no file"),
    ],
)
def test_a_mistake_in_a_schema_file_is_named(tmp_path, old, new, message):
    assert old in SCHEMA
    with pytest.raises(DataError, match=message) as caught:
        list(open_source(write_schema(tmp_path, SCHEMA.replace(old, new, 1))).chunks("train"))
    assert str(tmp_path) in str(caught.value)


def test_a_schema_like_another_has_its_keys_but_for_its_own(tmp_path):
    write_schema(tmp_path)
    other = tmp_path / "other.toml"
    other.write_text('name = "other"\nlike = "mine.toml"\nsplit = { test_fraction = 0.5 }\n')
    (mine, _), (found, folder) = read_schema(tmp_path / "mine.toml"), read_schema(other)
    assert found == replace(mine, name="other", split=Split(test_fraction=0.5))
    assert folder == tmp_path
    for like in ('"other.toml"', "3", '"gone.toml"'):
        (tmp_path / "third.toml").write_text(f'name = "third"\nlike = {like}\n')
        message = "cannot read the schema .*gone" if "gone" in like else "like must be the name of"
        with pytest.raises(DataError, match=message):
            read_schema(tmp_path / "third.toml")


def test_the_list_says_where_each_set_lies(tmp_path, capsys):
    write_flights(tmp_path / "named" / "nycflights13", 0)
    run(["list", "--data-dir", str(tmp_path / "named")])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(CATALOGUE) < set(lines)
    assert str(tmp_path / "named" / "nycflights13") in lines["nycflights13"]
    assert lines["tennis"].split()[1] == "-"
    assert "data get" in lines["kuairand-pure"]
    assert "6,250,000,000,000 distinct ids" in lines["synthetic:criteo-syn5"]


def test_getting_says_where_the_data_lies(tmp_path, capsys):
    write_flights(tmp_path / "kuairand-pure", 0)  # as if fetched before
    run(["get", "kuairand-pure", "--to", str(tmp_path)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"kuairand-pure lies in {tmp_path / 'kuairand-pure' / 'data.parquet'}"


def test_choosing_data_loads_no_heavy_package():
    code = (
        "import sys, runtime.data.open, runtime.preparing.download; "
        "print(sorted({'torch', 'pandas', 'pyarrow', 'sklearn'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"
