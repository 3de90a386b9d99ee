"""Old words for options and their values: read from files, refused where they are typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from persia_sim.base.command_line import option_values, read_options, values_as_first_named
from persia_sim.base.schema import Checked, Renamed, parse
from runtime.config import TrainConfig


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


def test_a_run_of_before_is_read():
    document = {"data": {"passes": 2}, "model": {"name": "ffnn"}}
    config = parse(TrainConfig, document, "config.json")
    assert (config.data.epochs, config.model.name) == (2, "mlp")
