"""Single tables of a schema have options of their own, from a file, a command line or Python."""

import json

import pytest

from persia_sim.base.rules import Refused
from runtime.__main__ import main
from runtime.config import TrainConfig, read_config
from runtime.run.folder import plain

SCHEMA = """
name = "mine"
file = "mine.csv"
labels = ["clicked"]
split = { test_fraction = 0.2, random_seed = 1 }
columns = [{ name = "user", table = "users" }, "item"]
"""


@pytest.fixture
def schema(tmp_path):
    rows = [f"u{k % 7},i{k % 11},{k % 3 // 2}" for k in range(400)]
    (tmp_path / "mine.csv").write_text("\n".join(["user,item,clicked", *rows]) + "\n")
    (tmp_path / "mine.toml").write_text(SCHEMA)
    return tmp_path / "mine.toml"


def tables_of_run(folder):
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return json.loads((checkpoint / "state.json").read_text())["tables"]


@pytest.mark.parametrize("typed", [True, False])
def test_what_a_table_does_not_say_it_has_from_rows(schema, tmp_path, typed):
    given = ["--tables.users.dim", "12", "--tables.users.optimizer.lr", "0.5"]
    if not typed:
        file = tmp_path / "run.toml"
        file.write_text("[tables.users]\ndim = 12\noptimizer = { lr = 0.5 }\n")
        given = ["--config", str(file)]
    folder = tmp_path / "run"
    words = ["train", "--data.name", str(schema), "--rows.optimizer.kind", "adagrad", *given]
    assert main([*words, "--checkpoint-every", "end", "--out", str(folder)]) == 0
    tables = tables_of_run(folder)
    assert (tables["users"]["dim"], tables["rows"]["dim"]) == (12, 8)
    optimizers = [tables[name]["optimizer"] for name in ("users", "rows")]
    assert [one["kind"] for one in optimizers] == ["adagrad", "adagrad"]
    assert [one["lr"] for one in optimizers] == [0.5, 0.05]
    assert main(["evaluate", str(folder)]) == 0
    assert read_config(folder / "config.json").tables == {
        "users": {"dim": 12, "optimizer": {"lr": 0.5}}
    }


def test_the_config_of_a_run_comes_back_from_its_file(tmp_path):
    config = TrainConfig(tables={"users": {"dim": 12}})
    (tmp_path / "config.json").write_text(json.dumps(plain(config)))
    assert read_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"users": {"dimm": 4}}, "tables.users.dimm is not known; did you mean dim"),
        ({"users": {"dim": 0}}, "tables.users.dim must be >= 1, got 0"),
        ({"users": {"optimizer": {"lr": -1.0}}}, "tables.users.optimizer.lr must be > 0"),
        ({"users": {"optimizer": 3}}, "tables.users.optimizer must be a table"),
        ({"users": 3}, "tables.users must be a table"),
        ({"users": {"name": "x"}}, "tables.users.name is given by the data's schema"),
        (
            {"users": {"dtype": "float64"}},
            "tables.users.dtype is float64 with --precision float32, which says",
        ),
    ],
)
def test_a_mistake_in_a_table_is_named_with_the_table(tables, sentence):
    with pytest.raises(Refused) as refused:
        TrainConfig(tables=tables)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("option", ["--tables.users.dimm", "--tables.nobody.dim", "--tables.users"])
def test_an_option_that_no_table_has_ends_in_a_sentence(schema, tmp_path, refused, option):
    words = ["train", "--data.name", str(schema), "--out", str(tmp_path / "run"), option, "4"]
    told = refused(*words)
    assert "dimm" in told or "nobody" in told or "--tables.users" in told
