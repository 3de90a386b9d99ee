"""The examples in docstrings run, and what others call has one."""

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


def test_examples_are_found():
    assert {"persia_sim.base.window", "runtime.data.ids"} <= set(WITH_EXAMPLES)


PUBLIC = {
    "runtime.run.session": "train",
    "runtime.config.train": "TrainConfig",
    "runtime.inference": "open_model",
    "persia_sim.engine.simulate": "simulate",
    "persia_sim.cluster.cluster": "Cluster",
    "persia_sim.cluster.workload": "Workload",
    "experiments.gaps": "paired_interval",
}
"""Module -> what others call of it."""


@pytest.mark.parametrize("module", PUBLIC)
def test_what_others_call_has_an_example(module):
    assert ">>> " in getattr(importlib.import_module(module), PUBLIC[module]).__doc__
    assert module in WITH_EXAMPLES, "its examples are run below"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_give_what_they_say(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0, "see the output above"
