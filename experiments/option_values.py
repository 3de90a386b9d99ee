"""Options of training by their names: ``sync.tau = [4, 16]`` in a file, ``sync.tau=4,16`` typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from persia_sim.base.command_line import (
    AsGroup,
    Option,
    alternatives,
    item_kind,
    options_of,
    read_words,
)
from persia_sim.base.files import read_document
from persia_sim.base.rules import Refused
from persia_sim.base.schema import fit, nearest, shown
from runtime.config import TrainConfig, read_config
from runtime.config.training_file import PREDICTED
from runtime.models.imported import refuse_code_named_in

OF_THE_STUDY = {
    "seed": "the study pairs its own seeds, in a sweep as many as --seeds says",
    "engine.executor": "a study has the executor constant_lag",
    "engine.trace": "a study has the executor constant_lag",
}
"""Options of training that no line has, and why."""
NOT_OF_A_CONFIG = ("sync.mode", "sync.tau", *OF_THE_STUDY)
"""Options that are not read of `--config`, nor are those of checkpoints: the study has its own."""


@cache
def training_options() -> dict[str, Option]:
    """Every option of training by its path, as in run.toml: ``sync.tau``."""
    return {option.path: option for option in options_of(TrainConfig)}


def of(config: TrainConfig, path: str) -> Any:
    """The value of an option by its path."""
    return reduce(getattr, path.split("."), config)


def flat(table: Mapping[str, Any], where: str, but: Sequence[str] = ()) -> dict[str, Any]:
    """The options of a table and of the tables in it, by path. Raises `Refused` for what is none.

    >>> flat({"sync": {"mode": "hybrid", "tau": [4, 16]}, "batch": 64}, "base")
    {'sync.mode': 'hybrid', 'sync.tau': [4, 16], 'batch': 64}
    """
    options = training_options()
    groups = {path[:end] for path in options for end, sign in enumerate(path) if sign == "."}
    found: dict[str, Any] = {}

    def walk(prefix: str, inner: Mapping[str, Any]) -> None:
        for key, value in inner.items():
            path = f"{prefix}{key}"
            if path in groups and isinstance(value, Mapping):
                walk(f"{path}.", value)
            elif path not in options:
                named = f"{path} = {shown(value)}"
                raise Refused(where, f"has {named}, no option of train; {nearest(path, options)}")
            else:
                found[path] = value

    walk("", {key: value for key, value in table.items() if key not in but})
    return found


def values_of(path: str, value: Any, where: str) -> list[Any]:
    """The values that an option takes in turn: those of a list, which is crossed; of an option that
    is a list itself, those of a list of lists."""
    option = training_options()[path]
    if path in OF_THE_STUDY or path.startswith("checkpoint."):
        why = OF_THE_STUDY.get(path, "a study keeps no checkpoints")
        raise Refused(where, f"has {path} = {shown(value)}: {why}; remove it")
    if isinstance(option.kind, AsGroup) or not isinstance(value, list):
        values = [value]
    elif item_kind(option.kind):
        values = value if value and all(isinstance(one, list) for one in value) else [value]
    else:
        values = value
    if not values:
        raise Refused(where, f"has {path} = []: crossed, it gives no point; give values, or remove")
    values = [_none(option, one) for one in values]
    if isinstance(option.kind, AsGroup):
        return values
    try:
        return [fit(one, option.kind, path) for one in values]
    except ValueError as error:
        raise Refused(where, f"cannot have {path} = {shown(value)}: {error}") from None


def _none(option: Option, value: Any) -> Any:
    """None for the word, of an option that may be none: TOML has no other way to say it."""
    is_word = isinstance(value, str) and value.lower() == "none"
    return None if is_word and type(None) in alternatives(option.kind) else value


def typed_values(words: Sequence[str]) -> dict[str, list[Any]]:
    """Option -> values, from ``NAME=VALUE,VALUE``; further words of a value that is a list follow.

    Raises `Refused` for what is no option of training, or no value of it.

    >>> typed_values(["sync.dense_lag=0,1", "model.hidden=256", "128,64"])
    {'sync.dense_lag': [0, 1], 'model.hidden': [(256, 128), (64,)]}
    """
    # A word without a name belongs to the value before it.
    joined: list[str] = []
    for word in words:
        if "=" in word or not joined:
            joined.append(word)
        else:
            joined[-1] += f" {word}"

    options = training_options()
    found: dict[str, list[Any]] = {}
    for word in joined:
        path, equals, texts = word.partition("=")
        if path not in options:
            raise Refused("set", f"names {path!r}, no option of train; {nearest(path, options)}")
        if not equals or path in found:
            raise Refused("set", f"must be NAME=VALUE,VALUE with each name once, got {word!r}")
        try:
            values = [_from_text(options[path], text) for text in texts.split(",")]
        except ValueError as error:
            raise Refused("set", f"{word} cannot be: {error}") from None
        found[path] = [one for value in values for one in values_of(path, value, "set")]
    return found


def _from_text(option: Option, text: str) -> Any:
    if bool in alternatives(option.kind):
        return fit({"true": True, "false": False}.get(text.lower(), text), bool, option.path)
    value = read_words(TrainConfig, [f"--{option.name}", *text.split()], "train")[option.path]
    return [list(value)] if item_kind(option.kind) else value


def options_in(config: Path | None, typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options that a file of training says, but for those that a study has itself; and which
    these are."""
    if config is None:
        return {}, []
    start = read_config(config)  # which refuses what the file cannot say
    if "model.name" not in typed:
        remedy = f"type --set model.name={start.model.name}"
        refuse_code_named_in(config, start.model.name, trust=False, remedy=remedy)
    said = flat(read_document(config), str(config), but=(PREDICTED,))
    left = [p for p in said if p in NOT_OF_A_CONFIG or p.startswith("checkpoint.")]
    return {path: of(start, path) for path in said if path not in left}, left
