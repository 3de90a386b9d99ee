"""What a refusal must name: the option or key as it may be written, its value, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def assert_names(told: str, name: str, value: object = "", *others: str) -> None:
    """Hold a message to the name (with dashes, underscores or spaces), the value, and others."""
    names = {name, name.replace("-", "_"), name.replace("-", " "), name.replace("_", "-")}
    assert any(one in told for one in names), f"{name} is not named: {told}"
    values = {str(value), repr(value)} | ({f"{value:,}"} if type(value) is int else set())
    assert any(one in told or one in told.replace(",", "") for one in values), f"{value}: {told}"
    assert all(other in told for other in others), f"{others} are not named: {told}"
    assert "Traceback" not in told


def assert_names_last(told: str, typed: str | Mapping[str, Any], *others: str) -> None:
    """The same of the last of several options that are typed, or of the last key."""
    if isinstance(typed, Mapping):
        name, value = list(typed.items())[-1]
        assert_names(told, name, value, *others)
    else:
        words = typed.split()
        last = max(k for k, word in enumerate(words) if word.startswith("--"))
        assert_names(told, words[last].removeprefix("--"), "", *words[last + 1 :], *others)
