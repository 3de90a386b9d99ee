"""What `--help` says: an example wherever the type does not say what is to be typed."""

from __future__ import annotations

import importlib
import re
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import BENCHES, STUDIES, module_of
from persia_sim.base.command_line import (
    AsGroup,
    Option,
    alternatives,
    help_of,
    item_kind,
    options_of,
)
from persia_sim.cli import Options, listing
from persia_sim.cli.sharded import ShardedOptions
from persia_sim.cli.size import SizeOptions
from runtime import model_commands
from runtime.data import download
from runtime.engines.launch import hosts
from runtime.train_options import Train

STUDY_OPTIONS = [importlib.import_module(module_of(name)).Options for name in STUDIES | BENCHES]
COMMANDS: list[Any] = [
    Train,
    Options,
    ShardedOptions,
    SizeOptions,
    *STUDY_OPTIONS,
    *(
        record
        for module in (model_commands, download, hosts, listing)
        for record in vars(module).values()
        if is_dataclass(record) and record.__module__ == module.__name__
    ),
]
EXAMPLE = re.compile(
    r"\bExample: |\bsuch as |\bas ~?[\w-]*[./:*\d][\w.:/-]*\w"  # as runs/mine
    r"|\.toml|\b[\w-]+, [\w-]+(?:,| or| and)|: \w+[:,]"  # the choices themselves; end: when
)


def says_too_little(option: Option) -> bool:
    """Whether a text or a path is asked for, no value is the default, and no example is there."""
    if isinstance(option.kind, AsGroup) or not option.is_taken:
        return False
    kinds = [*alternatives(option.kind), item_kind(option.kind)]
    is_free = any(kind in (str, Path) for kind in kinds)
    has_default = option.default is not MISSING and option.default not in (None, (), "")
    return is_free and not has_default and not EXAMPLE.search(option.text)


@pytest.mark.parametrize("record", COMMANDS, ids=lambda record: record.__module__)
def test_what_the_type_does_not_say_has_an_example(record):
    short = [f"--{option.name}: {option.text}" for option in options_of(record)
             if says_too_little(option)]  # fmt: skip
    assert not short, "add an example value: " + "; ".join(short)


@pytest.mark.parametrize("record", COMMANDS, ids=lambda record: record.__module__)
def test_help_shows_no_option_that_is_refused_whatever_is_typed(record):
    assert "--rows.name" not in help_of(record, "command")
