"""The example in plain PyTorch computes what the default executor does, in each of its modes."""

import ast
import importlib.util
import io
import sys
import tokenize
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import updates_missed
from runtime.config import DataConfig, EngineConfig, SyncConfig, read_config
from runtime.data.batch import Batch
from runtime.executors.open import source_of
from runtime.rank.components import assemble
from runtime.run.evaluate import threads_of
from runtime.run.session import train

EXAMPLES = Path(__file__).parents[1] / "examples"
FILE = EXAMPLES / "hybrid_in_100_lines.py"
MODES = [("sync", 0), ("hybrid", 4), ("async", 0), ("async", 4)]

SCHEMA = f"""
name = "clicks"
like = "{EXAMPLES / "clicks.toml"}"
file = "{EXAMPLES / "clicks.csv"}"
columns = ["user", "item", {{ name = "price", kind = "numeric", fill = 0.0 }}]
"""
"""The columns of clicks.csv that the example reads."""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread():
    """Two for such small operations would wait for each other where the machine is busy."""
    with threads_of(EngineConfig(threads=1)):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The options of examples/run.toml, for the columns of the example."""
    schema = tmp_path_factory.mktemp("schema") / "clicks.toml"
    schema.write_text(SCHEMA)
    return replace(read_config(EXAMPLES / "run.toml"), data=DataConfig(name=str(schema)))


@pytest.fixture(scope="module")
def source(config):
    return source_of(config)


def part_of(source, part):
    """The samples of a part, in their order, as one batch."""
    return Batch.concat(list(source.chunks(part)))


def test_the_example_reads_the_samples_that_the_testbed_reads(example, source):
    *parts, count = example.read_clicks()
    numbers = {}
    for (ids, price, clicked), name in zip(parts, ("train", "test"), strict=True):
        batch = part_of(source, name)
        np.testing.assert_array_equal(clicked.numpy(), batch.labels)
        np.testing.assert_allclose(price.numpy(), batch.dense, rtol=1e-6)
        for number, hashed in zip(ids.flatten().tolist(), batch.ids.tolist(), strict=True):
            assert numbers.setdefault(hashed, number) == number
    assert sorted(numbers.values()) == list(range(count))


@pytest.mark.long
@pytest.mark.parametrize(("mode", "tau"), MODES)
def test_the_example_trains_as_the_default_executor(example, config, source, mode, tau):
    window = {} if mode == "sync" else {"tau": tau}
    config = replace(config, sync=SyncConfig(mode=Mode(mode), ranks=example.RANKS, **window))
    assert config.engine.executor == "constant_lag"
    training_part, test_part, count = example.read_clicks()

    # The same initial values: those of the testbed, which the example numbers otherwise.
    components = assemble(config, source)
    rows, network = example.initial_values(count)
    for part, (ids, _, _) in (("train", training_part), ("test", test_part)):
        handle = components.store.peek(part_of(source, part))
        plan = handle.plans["rows"]
        rows[ids.flatten()] = torch.from_numpy(handle.values["rows"][plan.inverse])
    weights = components.learner.model.parameters()
    with torch.no_grad():
        for weight, initial in zip(network.parameters(), weights, strict=True):
            weight.copy_(initial)
    components.close()

    losses = example.train(training_part, rows, network, mode, tau)
    auc, log_loss = example.evaluate(test_part, rows, network)
    outcome = train(config, source)
    outcome.store.close()
    score = outcome.final.tasks["clicked"]
    np.testing.assert_allclose(losses, outcome.losses, rtol=0, atol=1e-5)
    assert auc == pytest.approx(score.auc, abs=5e-5)
    assert log_loss == pytest.approx(score.log_loss, abs=1e-5)


@pytest.mark.parametrize(("mode", "tau"), MODES)
def test_the_example_is_as_late_as_the_mode_says(example, mode, tau):
    assert example.updates_late(mode, tau) == updates_missed(Mode(mode), tau, ranks=example.RANKS)


def test_the_example_prints_a_line_for_each_mode(example, monkeypatch, capsys):
    training_part, test_part, count = example.read_clicks()
    few = tuple(column[: 2 * example.BATCH] for column in training_part)
    monkeypatch.setattr(example, "read_clicks", lambda: (few, test_part, count))
    example.main()
    heading, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:5] == ["mode", "rows", "late", "dense", "late"]
    assert [line[0] for line in lines] == [mode for mode, _ in MODES]
    for *_, auc, log_loss in lines:
        assert 0 < float(auc) < 1 and float(log_loss) > 0


def lines_of_code(text):
    """The lines on which something stands that is neither a comment nor a docstring."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code | {tokenize.ENDMARKER}:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def test_the_example_has_100_lines_of_code_at_most():
    assert lines_of_code('"""What."""\n\nx = 1  # Why.\n# How.\ny = (\n    2\n)\n') == 4
    assert lines_of_code(FILE.read_text()) <= 100


def test_the_example_imports_torch_and_numpy_alone():
    names = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
    outside = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert outside == {"numpy", "torch"}
