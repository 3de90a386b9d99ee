"""A config from a file: what a run wrote down, or what a person wrote in TOML."""

from __future__ import annotations

from pathlib import Path

from persia_sim.words.documents import read_document
from persia_sim.words.records import parse
from runtime.config.train import TrainConfig


def read_config(path: Path) -> TrainConfig:
    """The config in a .json or .toml file; groups and options that it leaves out have defaults.

    Raises ValueError naming the file, the option, its value and what it may be.
    """
    return parse(TrainConfig, read_document(path), str(path))
