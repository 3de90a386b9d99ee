"""A config from Python, from a file and from the command line is held to the same rules."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.files import read_document
from persia_sim.base.vocabulary import Mode
from runtime.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
    read_config,
)
from runtime.config.training_file import predicted_in
from runtime.run.folder import plain, read_summary


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ModelConfig(optimizer="Adam"),
            ["optimizer", "'Adam'", "adam, adamw, sgd"],
        ),
        (lambda: EngineConfig(precision="fp16"), ["precision", "'fp16'", "bfloat16"]),
        (
            lambda: EngineConfig(executor="threads"),
            ["executor", "'threads'", "constant_lag, concurrent"],
        ),
        (lambda: SyncConfig(match="all"), ["match", "'all'", "update, global"]),
        (lambda: SyncConfig(row_gradients="max"), ["row_gradients", "'max'", "mean, sum"]),
        (lambda: TrainConfig(nonfinite="ignore"), ["nonfinite", "'ignore'", "stop, skip"]),
        (lambda: TrainConfig(steps=10.5), ["steps", "10.5", "whole number"]),
        (lambda: TrainConfig(steps=True), ["steps", "True", "whole number"]),
        (lambda: TrainConfig(data="path"), ["data", "'path'", "DataConfig"]),
        (lambda: TrainConfig(seed=2**64), ["seed", str(2**64), "64 bits"]),
        (lambda: ModelConfig(lr=float("nan")), ["lr", "nan", "finite"]),
        (lambda: ModelConfig(hidden=(8, 0)), ["hidden[1]", "0", ">= 1"]),
        (lambda: DataConfig(epochs=0), ["epochs", "0", ">= 1"]),
        (lambda: EngineConfig(latency_s=3e7), ["latency_s", "30000000", "<= 60"]),
        (lambda: SyncConfig(ranks=10**6), ["ranks", "1000000", "<= 4,096"]),
        (
            lambda: TrainConfig(batch=4, sync=SyncConfig(ranks=8)),
            ["batch 4", "batch >= 8"],
        ),
        (lambda: TrainConfig(sync=SyncConfig(mode="hybrid", permits=2)), ["permits", "concurrent"]),
    ],
)
def test_a_wrong_value_from_python_names_field_value_and_rule(make, words):
    with pytest.raises(ValueError) as told:
        make()
    assert all(word in str(told.value) for word in words), told.value


def test_other_forms_of_a_value_become_the_declared_one():
    engine = EngineConfig(executor="replay", trace="order.npz", latency_s=0)
    assert (engine.trace.name, type(engine.latency_s)) == ("order.npz", float)
    assert SyncConfig(mode="hybrid").mode is Mode.HYBRID
    assert ModelConfig(hidden=[3, 2]).hidden == (3, 2)


@given(
    mode=st.sampled_from([Mode.RAW_HYBRID, Mode.HYBRID]),
    tau=st.none() | st.integers(0, 99),
    merge=st.booleans(),
    hidden=st.lists(st.integers(1, 99), min_size=1).map(tuple),
    lr=st.floats(1e-9, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_written_config_reads_back(tmp_path_factory, mode, tau, merge, hidden, lr, seed):
    config = TrainConfig(
        sync=SyncConfig(mode=mode, tau=tau, merge_pushes=merge, ranks=3),
        engine=EngineConfig(executor="concurrent", timeline=True),
        model=ModelConfig(hidden=hidden, lr=lr),
        seed=seed,
    )
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(plain(config)))
    assert read_config(path) == config


def test_toml_has_the_same_groups_and_what_it_leaves_out_has_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('steps = 7\n[sync]\nmode = "hybrid"\ntau = 2\n[rows.optimizer]\nlr = 0.5\n')
    config = read_config(path)
    assert (config.steps, config.sync.mode, config.sync.tau) == (7, Mode.HYBRID, 2)
    assert config.rows.optimizer.lr == 0.5
    assert config.model == ModelConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["the document", "table"]),
        ("null", ["the document", "None"]),
        ('{"sync": []}', ["sync", "table"]),
        ('{"snyc": {}}', ["snyc", "did you mean sync?"]),
        ('{"sync": {"taus": 3}}', ["sync.taus", "did you mean tau?"]),
        ('{"sync": {"tau": "3"}}', ["sync.tau", "'3'", "whole number"]),
        ('{"steps": 1.5}', ["steps", "1.5"]),
        ('{"steps": NaN}', ["NaN", "finite"]),
        ('{"model": {"lr": 1e999}}', ["model.lr", "inf"]),
        ('{"steps": 1, "steps": 2}', ["'steps'", "twice"]),
        ("{", ["well-formed JSON"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"model": {"optimizer": "Adam"}}', ["model.optimizer", "'Adam'", "adam"]),
        ('{"sync": {"tau": 2}}', ["tau is not used by mode sync"]),
    ],
)
def test_a_wrong_document_is_told_with_file_key_value_and_rule(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError) as told:
        read_config(path)
    assert all(word in str(told.value) for word in [str(path), *words]), told.value


def test_a_pipe_or_bytes_that_are_no_text_are_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="not a plain file"):
        read_document(tmp_path / "pipe.json")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        read_document(tmp_path / "b.toml")


@pytest.mark.parametrize("text", ["[]", "{", "null", "3", ""])
def test_a_damaged_summary_is_no_summary(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    assert read_summary(tmp_path) is None


PREDICTED = """
[predicted]
cluster = "mine"
ranks = 8
samples_per_s = 1000.0
samples_per_s_low = 700.0
samples_per_s_high = 1500.0
updates_missed = 3.5
"""


def test_what_a_file_predicts_of_its_run_is_no_option_of_it(tmp_path):
    options, both = tmp_path / "options.toml", tmp_path / "both.toml"
    options.write_text("batch = 64\n")
    both.write_text(f"batch = 64\n{PREDICTED}")
    assert read_config(both) == read_config(options)
    predicted = predicted_in(both)
    assert predicted is not None and predicted.updates_missed == 3.5
    assert predicted_in(options) is None


@pytest.mark.parametrize(("given", "said"), [("ranks = 8", "ranks = 0"), ("cluster", "clusters")])
def test_a_prediction_that_cannot_be_is_refused_by_its_name(given, said, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(PREDICTED.replace(given, said))
    with pytest.raises(ValueError, match=r"run\.toml: predicted"):
        predicted_in(path)
