"""Old words for options and their values: read from files, refused where they are typed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest

from experiments.points import Point
from persia_sim.base.command_line import (
    note_renamed,
    option_values,
    read_options,
    values_as_first_named,
)
from persia_sim.base.schema import Checked, Renamed, parse
from runtime.config import TrainConfig
from runtime.train_options import read_train


@dataclass(frozen=True, kw_only=True)
class Order(Checked):
    """What a guest wants."""

    cups: Annotated[int, Renamed(was="mugs")] = 1
    drink: Annotated[str, Renamed(values={"java": "coffee"})] = "coffee"


def test_a_file_may_use_the_old_words():
    assert parse(Order, {"mugs": 3, "drink": "java"}, "old.toml") == Order(cups=3, drink="coffee")
    assert parse(Order, {"cups": 3, "drink": "tea"}, "new.toml") == Order(cups=3, drink="tea")


def test_both_words_at_once_are_refused():
    with pytest.raises(ValueError, match=r"both\.toml: cups stands beside mugs, its old name"):
        parse(Order, {"cups": 2, "mugs": 3}, "both.toml")


def test_an_old_word_that_is_typed_is_refused_with_the_new_one():
    with pytest.raises(ValueError, match="--mugs is called --cups now; type that"):
        read_options(Order, ["--mugs", "3"], "serve")
    with pytest.raises(ValueError, match="--drink java is called coffee now; type that"):
        read_options(Order, ["--drink", "java"], "serve")


def test_names_that_are_made_of_options_keep_the_first_words():
    order = Order(cups=3)
    assert dict(option_values(order)) == {"cups": 3, "drink": "coffee"}
    assert dict(values_as_first_named(order)) == {"mugs": 3, "drink": "java"}


def test_a_caller_from_python_is_told_the_new_word():
    with pytest.raises(ValueError, match="drink java is called coffee now; write that"):
        Order(drink="java")


OLD = {
    "engine": {"executor": "lag"},
    "data": {"passes": 2},
    "model": {"name": "ffnn"},
    "evaluation": {"part": "validation"},
    "rows": {"optimizer": {"kind": "adam_row"}},
    "tables": {"users": {"optimizer": {"kind": "adagrad_row"}}},
}
"""The config.json of a run of before, of which every word has another one now."""


def test_a_run_of_before_is_read():
    config = parse(TrainConfig, OLD, "config.json")
    assert (config.data.epochs, config.model.name) == (2, "mlp")
    assert (config.engine.executor, config.evaluation.eval_split) == ("constant_lag", "validation")
    assert config.rows.optimizer.kind == "rowwise_adam"
    assert config.tables_apart()["users"].optimizer.kind == "rowwise_adagrad"


def test_a_run_in_the_words_of_today_has_the_folder_that_it_had_before():
    old = parse(TrainConfig, OLD, "config.json")
    new = replace(old, tables={"users": {"optimizer": {"kind": "rowwise_adagrad"}}})
    assert dict(values_as_first_named(old)) == dict(values_as_first_named(new))
    assert Point(label="one", config=old).folder(Path()).name == "one-a1d8e77a"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--executor", "lag"], "--executor lag is called constant_lag now; type that"),
        (
            ["--rows.optimizer.kind", "adagrad_row"],
            "--rows.optimizer.kind adagrad_row is called rowwise_adagrad now; type that",
        ),
        (
            ["--tables.users.optimizer.kind", "adam_row"],
            "--tables.users.optimizer.kind adam_row is called rowwise_adam now; type that",
        ),
    ],
)
def test_an_old_word_of_train_is_refused_with_the_new_one(words, error):
    with pytest.raises(ValueError, match=error):
        read_train(words)


def test_an_old_name_that_never_meant_anything_else_may_be_typed(capsys):
    note_renamed.cache_clear()
    config = read_train(["--data.passes", "3", "--part", "validation"]).run
    assert (config.data.epochs, config.evaluation.eval_split) == (3, "validation")
    told = capsys.readouterr().err
    assert told.count("note: --data.passes is called --data.epochs now") == 1
    assert told.count("note: --part is called --eval-split now") == 1
