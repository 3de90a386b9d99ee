"""The options of a run by the names that are typed, and those in which two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.registry.found import CONFIG, Run
from runtime.config import read_config
from runtime.config.options import option_values

ABSENT = "(not there)"


def typed_options(run: Run) -> dict[str, str]:
    """Every option of a run; what its config does not name has today's default.

    Raises ValueError where this version does not know an option of it.
    """
    config = read_config(run.folder / CONFIG)
    return {f"--{name}": str(value) for name, value in option_values(config)}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name and both values wherever they differ, in the first one's order."""
    names = dict.fromkeys([*first, *second])
    pairs = ((name, first.get(name, ABSENT), second.get(name, ABSENT)) for name in names)
    return [(name, str(a), str(b)) for name, a, b in pairs if a != b]
