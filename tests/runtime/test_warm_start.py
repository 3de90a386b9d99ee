"""A run that begins with the rows and weights of another one, and with nothing else of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from persia_sim.base.vocabulary import Mode
from runtime.__main__ import main
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import read_checkpoint
from runtime.config import ModelConfig, TrainConfig
from runtime.embedding.config import Capacity, RowOptimizer
from runtime.run.saver import Saving
from runtime.run.session import Outcome, train
from tests.runtime.clicks_of_a_user import EDITS, edited, write_clicks
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, on_engine, state_of

SGD = {"optimizer": RowOptimizer(kind="sgd", lr=0.5)}
PLAIN = ModelConfig(hidden=(8,), optimizer="sgd", lr=0.1)


class Part(ArraySource):
    """Some samples of a source, which is judged by all of them."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(300)
        self._first, self._last = first, last

    def chunks(self, part):
        if part != "train":
            yield from super().chunks(part)
        else:
            yield self._all.rows(self._first, self._last)


def trained(settings: TrainConfig, source: ArraySource, run: Path, start=None) -> Outcome:
    return train(settings, source, saving=Saving(run, start))


@pytest.mark.parametrize("engine", ["constant_lag", "threads", "processes"])
def test_without_state_two_runs_are_one(engine, tmp_path):
    """SGD keeps nothing of the past, so half the data and then the other half are the whole."""
    chosen = config(model=PLAIN, checkpoint_every="end", **SGD)
    whole = trained(chosen, Part(0, 288), tmp_path / "whole")
    trained(chosen, Part(0, 144), tmp_path / "first")
    options = on_engine(engine, 2) | {"warm_start": tmp_path / "first"}
    second = config(model=PLAIN, checkpoint_every="end", **SGD, **options)
    outcome = trained(second, Part(144, 288), tmp_path / "second")
    assert_same_bytes(whole, outcome)
    outcome.store.close()


@pytest.mark.parametrize(
    ("kind", "fresh"), [("rowwise_adagrad", {"initial_accumulator": 0.25}), ("ftrl", {})]
)
def test_values_are_the_others_and_all_else_is_new(kind, fresh, tmp_path):
    """Other shards, seed, optimiser and limits; with next to no rate the values stay."""
    adam = RowOptimizer(kind="adam", lr=0.05)
    first = config(
        optimizer=adam, ranks=2, shards=3, mode=Mode.HYBRID, tau=1, dense_lag=2,
        checkpoint_every=5,
    )  # fmt: skip
    origin = trained(first, ArraySource(300), tmp_path / "origin")
    still = RowOptimizer(kind=kind, lr=1e-30, **fresh)
    second = config(
        optimizer=still, shards=2, seed=7, model=replace(PLAIN, lr=1e-30),
        warm_start=tmp_path / "origin",
    )  # fmt: skip
    expiring = replace(second.rows, capacity=Capacity(expire_after_steps=20))
    outcome = train(replace(second, rows=expiring, steps=1), ArraySource(300))
    before, after = state_of(origin), state_of(outcome)
    assert [
        n for n in before if not n.endswith("state") and not np.array_equal(before[n], after[n])
    ] == []
    touched = (after["rows.state"] != still.initial_accumulator).any(axis=1).sum()
    assert 0 < touched < len(after["rows.state"])  # by the one step; the others are as created


def test_a_run_that_began_warm_resumes_and_replays(tmp_path):
    trained(config(checkpoint_every="end"), Part(0, 144), tmp_path / "origin")
    chosen = config(
        ranks=2,
        mode=Mode.ASYNC,
        tau=1,
        checkpoint_every=3,
        keep_checkpoints=9,
        warm_start=tmp_path / "origin",
    )
    whole = trained(chosen, Part(144, 288), tmp_path / "whole")
    whole.trace.save(tmp_path / "trace.npz")
    again = config(ranks=2, mode=Mode.ASYNC, tau=1, executor="replay", trace=tmp_path / "trace.npz")
    replayed = train(replace(again, warm_start=tmp_path / "origin"), Part(144, 288))
    assert_same_bytes(whole, replayed)
    with pytest.raises(ValueError, match="warm_start"):
        train(again, Part(144, 288))
    shutil.rmtree(tmp_path / "origin")  # a checkpoint has all of it
    cut = read_checkpoint(complete_checkpoints(tmp_path / "whole")[0])
    assert_same_bytes(whole, trained(chosen, Part(144, 288), tmp_path / "resumed", cut))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ("order", "the columns stand in another order (item where user was)"),
        ("column gone", "column item is gone"),
        ("modulo", "column item: modulo was 50, is 5"),
    ],
)
def test_other_columns_are_refused(edit, told, tmp_path, capsys):
    schema = write_clicks(tmp_path / "data")
    words = ["train", "--batch", "64", "--model.hidden", "8", "--data.name", str(schema)]
    origin = str(tmp_path / "origin")
    assert main([*words, "--out", origin, "--checkpoint-every", "end"]) == 0
    schema.write_text(edited(schema.read_text(), EDITS[edit]))
    capsys.readouterr()
    new = tmp_path / "new"
    assert main([*words, "--out", str(new), "--warm-start", origin]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said
    assert not (new / "config.json").exists()


@pytest.mark.parametrize(
    ("split", "more", "told"),
    [
        ('{ column = "day", test_from = 5 }', [], "240 samples of the test part were trained on"),
        ('{ column = "day", test_from = 9 }', [], None),
        (
            '{ column = "day", test_from = 8, validation_fraction = 0.5 }',
            ["--eval-split", "validation", "--executor", "concurrent", "--loaders", "1"],
            "320 samples of the validation part were trained on",
        ),
    ],
)
def test_a_row_that_has_trained_is_not_judged_by(split, more, told, tmp_path, capsys):
    """By hand: 80 rows a day, and the first eight days have trained."""
    schema = write_clicks(tmp_path / "data")
    words = ["train", "--batch", "64", "--model.hidden", "8", "--data.name", str(schema)]
    origin = str(tmp_path / "origin")
    assert main([*words, "--out", origin, "--checkpoint-every", "end"]) == 0
    text = edited(schema.read_text(), ('{ column = "day", test_from = 8 }', split))
    schema.write_text(text)
    new = tmp_path / "new"
    code = main([*words, "--out", str(new), "--warm-start", origin, *more])
    assert code == (0 if told is None else 2), capsys.readouterr().err
    assert (told or "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ('["place", "label"]', "the labels stand in another order"),
        ('["label", "other"]\nregression = ["other"]', "a number is no click"),
        ('["label", "other"]', None),
    ],
)
def test_a_head_never_begins_another_label_unsaid(labels, told, tmp_path, capsys):
    """Two heads of one shape fit each other's weights, whatever they say."""
    schema = write_clicks(tmp_path / "data")
    table = pd.read_csv(schema.with_name("clicks.csv"))
    table.assign(place=table.label, other=table.label).to_csv(schema.with_name("clicks.csv"))
    heads = '["label", "place"]\ntasks = ["label", "place"]'
    two = schema.read_text().replace('["label"]', heads)
    schema.write_text(two)
    words = ["train", "--batch", "64", "--model.hidden", "8", "--data.name", str(schema)]
    origin = str(tmp_path / "origin")
    assert main([*words, "--out", origin, "--checkpoint-every", "end"]) == 0
    schema.write_text(two.replace('["label", "place"]', labels, 1))
    code = main([*words, "--out", str(tmp_path / "new"), "--warm-start", origin])
    assert code == (0 if told is None else 2)
    assert (told or "head of another label: place -> other") in "".join(capsys.readouterr())
    assert main(["evaluate", origin, "--data", str(schema)]) == code
    also = {None: "judged by another label than it was trained on: place -> other",
            "a number is no click": "regression: has beside them place"}  # fmt: skip
    assert also.get(told, told) in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rows": {"dim": 8}}, "table rows was saved with dim=4, the store has dim=8"),
        (
            {"model": ModelConfig(hidden=(9,))},
            r"of another network: [\w.]+ is \[8, \d+\] there, and \[9, \d+\] in model",
        ),
        ({"model": ModelConfig(name="dlrm", hidden=(8,))}, "another network: .* is absent there"),
        ({"warm_start": Path("nowhere")}, "nowhere does not exist"),
    ],
)
def test_another_model_is_refused(changes, told, tmp_path):
    trained(config(checkpoint_every="end"), Part(0, 48), tmp_path)
    chosen = config(warm_start=tmp_path)
    rows = replace(chosen.rows, **changes.pop("rows", {}))
    with pytest.raises(ValueError, match=told):
        train(replace(chosen, rows=rows, **changes), Part(0, 48))
