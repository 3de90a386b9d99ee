"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.tree import ROOT, sources

WITH_EXAMPLES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sources()
    if file.suffix == ".py" and ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_give_what_they_say(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0, "see the output above"
