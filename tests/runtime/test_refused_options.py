"""Options of `train` that cannot be meant: exit 2, and a sentence that names option and value."""

from __future__ import annotations

import pytest

from tests.refusals import assert_names, assert_names_last

UNREAD = (
    "sync --tau 4", "sync --ahead=4", "sync --merge-pushes", "sync --timeline",
    "sync --trace t.npz", "sync --latency-s 0.1", "sync --sync-steps 3",
    "sync --permits 2", "hybrid --ahead 2", "hybrid --permits 2", "hybrid --match global",
    "async --no-merge-pushes",
    "async --sync-steps 3", "async --dense-lag 1", "async_averaging --dense-lag 1",
    "sync --delay-compensation 1", "lookahead --lr-by-staleness",
)  # fmt: skip
"""A mode, and an option that it does not read with the default executor."""
REFUSED = (
    "--ranks 0", "--mode hybrid --tau -1", "--mode hybird", "--mode hybrid --sync-steps -1",
    "--mode hybrid --dense-lag 1001", "--mode hybrid --delay-compensation -0.5",
    "--mode hybrid --delay-compensation nan", "--rows.optimizer.lr=-1",
    "--data.validation-fraction 1.0", "--ranks 2:8", "--servers 2:8",
    "--tables.users.dim=0", "--tables.users.optimizer.lr=-1.0",
    *(f"--ray {where}" for where in ("local", "local:0", "local:65", "local:x", "here", "a:b")),
    *(
        f"--ray auto --{name}={typed}"
        for name in ("ranks", "servers")
        for typed in ("0:3", "4:3", ":3", "x:3", "-1:3", "1:2:3")
    ),
)  # fmt: skip
"""The last option is named, with its value."""
WITH_REMEDY = {
    "--tua 3": "--tau", "--executor replay": "--trace", "--mode hybrid --tau none": "a number",
    "--stop-after 2 --evaluate-every-steps 10": "--eval-split validation",
    "--stop-after 2 --eval-split validation": "--evaluate-every-steps",
    "--data.shuffle --data.shuffle-buffer 16": "remove one",
    "--executor concurrent --workers 1": "--servers",
    "--data synthetic --data.validation-fraction 0.1": "synthetic stream",
    "--rows.optimizer.l1=0.9": "kind ftrl",
    "--mode hybrid --executor concurrent --servers 1 --delay-compensation 2": "--servers",
}  # fmt: skip
"""What must be named: the option to type instead or with it, or the value that it needs."""


@pytest.mark.parametrize("words", UNREAD)
def test_an_option_that_the_mode_does_not_read_is_named_with_it(words, refused):
    mode, option, *_ = words.replace("=", " ").split()
    told = refused("train", "--mode", *words.split())
    assert_names(told, option.replace("--no-", "--"), "", f"not used by mode {mode}")


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_that_cannot_be_meant_is_named(words, refused):
    assert_names_last(refused("train", *words.split()), words.replace("=", " "))


@pytest.mark.parametrize("words", WITH_REMEDY)
def test_an_option_that_lacks_another_is_told_what_to_type(words, refused):
    assert WITH_REMEDY[words] in refused("train", *words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--out", ""], "--out is empty"), (["--out="], "--out is empty"),
        (["--config", ""], "--config is empty"),
        (["--config", "nowhere.toml"], "nowhere.toml"), (["--mode"], "sync|lookahead"),
        (["--data.shuffle=yes"], "takes no value, got 'yes'"),
        (["--no-trace-order="], "takes no value, got ''"),
        (["--mode", "hybrid", "--tau", "3", "4"], "'4' behind --tau"),
        (["--model.hidden", "8", "x"], "--model.hidden[1]"),
    ],
)  # fmt: skip
def test_an_option_with_too_few_or_too_many_values_is_named(words, named, refused):
    assert named in refused("train", *words)


TWICE = (
    "train --preset persia-default --preset deeprec-async", "train --config a.toml --config=b.toml",
    "train --executor constant_lag --seed 1 --executor constant_lag",
    "train --data.shuffle --data.no-shuffle", "train --merge_pushes --merge-pushes",
    "train --no-merge-pushes --merge-pushes", "evaluate run --data a --data b",
    "export run --out a --out=b", "profile --dim 8 --dim 16",
    "data list --data-dir a --data-dir b",
)  # fmt: skip


@pytest.mark.parametrize("words", TWICE)
def test_no_command_takes_an_option_twice(words, refused):
    told = refused(*words.split())
    assert "is typed " in told and "only one of them can count" in told
