"""A study as a file: which lines it makes, what each is held against, and what it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.option_values import of, typed_values
from experiments.points import Line
from experiments.study_file import SWEEPS, read_study
from persia_sim.base.vocabulary import Mode
from runtime.config import SyncConfig

SYNTHETIC = {"data.name": "synthetic"}
SYNC = {"name": "sync"}
HYBRID = {"name": "hybrid {sync.tau}", "sync": {"mode": "hybrid", "tau": [4, 16]}}


def lines(*tables: dict[str, Any], typed: tuple[str, ...] = (), **keys: Any) -> list[Line]:
    study = {"versus": "sync", "base": SYNTHETIC, "line": list(tables), **keys}
    return list(read_study(study, typed=typed_values(typed)).lines)


def test_a_list_is_crossed_and_each_line_is_held_against_the_one_that_it_names():
    late = {"name": "hybrid {sync.tau}, late", "versus": ["hybrid {sync.tau}", "sync"],
            "sync": {"mode": "hybrid", "tau": [4, 16], "dense_lag": 1}}  # fmt: skip
    found = lines(SYNC, HYBRID, late)
    assert [(line.name, line.versus) for line in found] == [
        ("sync", ()), ("hybrid 4", ("sync",)), ("hybrid 16", ("sync",)),
        ("hybrid 4, late", ("hybrid 4", "sync")), ("hybrid 16, late", ("hybrid 16", "sync")),
    ]  # fmt: skip
    assert [line.config.sync for line in found[:2]] == [
        SyncConfig(), SyncConfig(mode="hybrid", tau=4)
    ]  # fmt: skip
    assert found[4].config.sync == SyncConfig(mode="hybrid", tau=16, dense_lag=1)


def test_what_the_base_crosses_makes_groups_where_all_lines_read_it_and_names_where_some_do():
    base = SYNTHETIC | {"model.lr": [1e-3, 2e-3], "sync.tau": [4, 16], "sync.dense_lag": [0, 1]}
    late = {"name": "hybrid {sync.tau}", "sync.mode": "hybrid"}
    found = lines(SYNC, late, base=base)
    first, second = found[:5], found[5:]
    for rate, group in ((1e-3, first), (2e-3, second)):
        assert {line.group_name for line in group} == {f"model.lr={rate:g}"}
        assert {line.config.model.lr for line in group} == {rate}
        assert [line.name for line in group] == [
            "sync",
            "hybrid 4, sync.dense_lag 0", "hybrid 4, sync.dense_lag 1",
            "hybrid 16, sync.dense_lag 0", "hybrid 16, sync.dense_lag 1",
        ]  # fmt: skip
        assert {line.versus for line in group[1:]} == {("sync",)}


def test_a_reference_is_the_one_that_has_the_same_of_what_is_crossed():
    base = SYNTHETIC | {"sync.dense_lag": [0, 1]}
    treated = {"name": "weighed", "versus": "hybrid", "sync": {"mode": "hybrid", "wire": "half"}}
    hybrid = {"name": "hybrid", "sync.mode": "hybrid"}
    found = {line.name: line.versus for line in lines(SYNC, hybrid, treated, base=base)}
    assert found["weighed, sync.dense_lag 1"] == ("hybrid, sync.dense_lag 1",)
    assert found["weighed, sync.dense_lag 0"] == ("hybrid, sync.dense_lag 0",)


def test_a_preset_is_what_train_has_of_that_name_with_the_ranks_of_the_base():
    base = SYNTHETIC | {"sync.ranks": 4, "batch": 64}
    sync, preset = lines(SYNC, {"preset": "torchrec-semisync-stash"}, base=base)
    asked = preset.config.sync
    assert (asked.ranks, asked.sync_steps, asked.dense_lag, preset.config.batch) == (4, 900, 1, 64)
    assert (preset.name, preset.versus, sync.config.sync.mode) == (
        "torchrec-semisync-stash", ("sync",), Mode.SYNC,
    )  # fmt: skip


def test_a_value_that_is_a_list_itself_is_crossed_as_a_list_of_lists():
    both = {"name": "{model.hidden}", "versus": "", "model": {"hidden": [[8], [16, 4]]}}
    assert [line.config.model.hidden for line in lines(both)] == [(8,), (16, 4)]
    one = {"name": "{model.hidden}", "versus": "", "model": {"hidden": [16, 4]}}
    assert [line.name for line in lines(one)] == ["16 4"]


def test_a_value_given_twice_is_one_line():
    twice = HYBRID | {"sync": {"mode": "hybrid", "tau": [4, 4]}}
    assert [line.name for line in lines(SYNC, twice)] == ["sync", "hybrid 4"]


def test_sync_stays_the_reference_that_it_is_but_for_its_ranks():
    base = SYNTHETIC | {"sync": {"ranks": 4, "wire": "half", "dense_lag": 1}}
    sync, hybrid, *_ = lines(SYNC, HYBRID, base=base)
    assert sync.config.sync == SyncConfig(ranks=4)
    assert (hybrid.config.sync.wire, hybrid.config.sync.dense_lag) == ("half", 1)
    said = lines(SYNC | {"sync.wire": "half"}, HYBRID, base=base)[0]
    assert said.config.sync == SyncConfig(ranks=4, wire="half")


def test_what_is_typed_stands_over_a_file_of_training_and_that_over_the_base(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        'batch = 64\nseed = 7\n[sync]\nmode = "hybrid"\ntau = 9\ndense_lag = 2\n'
        '[model]\nlr = 4e-3\n[tables.rows]\ndim = 4\n[checkpoint]\ncheckpoint_every = "end"\n'
    )
    study = {"base": SYNTHETIC | {"batch": 32, "model.lr": 1.0}, "line": [SYNC, HYBRID]}
    found = read_study(study, run, typed_values(["model.lr=5e-4", "steps=3"]))
    for line in found.lines:
        config = line.config
        assert (config.batch, config.steps, config.model.lr, config.seed) == (64, 3, 5e-4, 0)
        assert config.tables == {"rows": {"dim": 4}} and config.checkpoint.checkpoint_every is None
    assert [line.config.sync.dense_lag for line in found.lines] == [0, 2, 2]
    assert [line.config.sync.mode for line in found.lines] == ["sync", "hybrid", "hybrid"]
    (note,) = found.notes
    for name in ("sync.mode", "sync.tau", "seed", "checkpoint.checkpoint_every"):
        assert name in note


@pytest.mark.parametrize(
    ("study", "said"),
    [
        # key, line, value, remedy
        ({"lines": []}, ["lines", "did you mean line?"]),
        ({"base": {"sync.taus": 4}}, ["base", "sync.taus = 4", "did you mean sync.tau?"]),
        ({"line": [SYNC, {"name": "x", "sync": {"moed": 1}}]},
         ["line 'x'", "sync.moed = 1", "did you mean sync.mode?"]),
        ({"line": [{"name": "x", "sync.tau": []}]}, ["line 'x'", "sync.tau = []", "give values"]),
        ({"line": [{"name": "x", "sync.tau": "four"}]}, ["line 'x'", "sync.tau = 'four'", "whole"]),
        ({"line": [{"name": "x", "versus": "", "sync.tau": 9}]},
         ["line 'x'", "tau", "mode sync", "remove"]),
        ({"line": [{"name": "x", "seed": [1, 2]}]}, ["line 'x'", "seed = [1, 2]", "--seeds"]),
        ({"line": [{"name": "x", "preset": "torchrec-semisink"}]},
         ["line 'x'", "preset", "torchrec-semisink", "did you mean torchrec-semisync?"]),
        ({"line": [{"name": "{tau}"}]}, ["{tau}", "did you mean sync.tau?"]),
        ({"line": [SYNC, HYBRID | {"versus": "snyc"}]},
         ["line 'hybrid 4'", "'snyc'", "did you mean sync?"]),
        ({"line": [SYNC, {"name": "again", "sync.mode": "sync"}]},
         ["line 'again'", "line 'sync'", "same point", "remove one"]),
        ({"line": [SYNC, HYBRID, HYBRID | {"sync": {"mode": "hybrid", "tau": 4, "dense_lag": 1}}]},
         ["line 'hybrid 4'", "two lines", "give each its own"]),
        ({"base": SYNTHETIC | {"sync.ahead": 7}}, ["base", "sync.ahead = [7]", "no line takes it"]),
        ({"base": SYNTHETIC | {"sync.mode": "async"}, "line": [{"name": "a", "sync.mode": "sync"}]},
         ["base", "sync.mode", "every line itself"]),
        ({"base": SYNTHETIC | {"model.lr": [*range(1, 1200)]}}, ["combinations", "1,000", "1199"]),
        ({"versus": 4}, ["versus", "4"]),
        ({"beside": "model.name"}, ["beside", "'model.name'", "give it a list"]),
        ({"seeds": 0}, ["seeds", "0", ">= 1"]),
        ({"search": {"trials": 4}}, ["search.trials", "4", ">= 5"]),
        ({"line": [{"name": "a", "versus": "b"}, {"name": "b", "versus": "a", "batch": 64}]},
         ["line 'a'", "'b'", "against each other"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_study_that_cannot_be_is_refused_with_key_line_value_and_remedy(study, said, tmp_path):
    given = {"versus": "sync", "base": SYNTHETIC, "line": [SYNC, HYBRID]} | study
    with pytest.raises(ValueError) as told:
        read_study(given)
    missing = [part for part in said if part not in str(told.value)]
    assert not missing, str(told.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["foo=1"], "known: .*, and .* more"),
        (["sync.tua=4"], "did you mean sync.tau"),
        (["model.lr"], "NAME=VALUE"),
        (["model.lr=1e-3", "model.lr=2e-3"], "each name once"),
        (["rows.optimizer.lr=0"], "rows.optimizer.lr=0 cannot be: .*> 0"),
        (["sync.match=foo"], "sync.match=foo cannot be"),
        (["seed=3"], "seed = 3: .*--seeds"),
    ],
)
def test_what_is_typed_of_options_that_are_none_or_cannot_be_is_refused(words, said):
    with pytest.raises(ValueError, match=said) as told:
        typed_values(words)
    assert len(str(told.value)) < 1000


def test_a_study_that_is_not_there_names_the_nearest_that_comes_with_the_package(tmp_path):
    with pytest.raises(ValueError, match=r"no study 'dmeo.toml'.*did you mean demo.toml"):
        read_study("dmeo.toml")


def test_code_that_a_study_of_strangers_names_is_typed_by_who_runs_it(tmp_path, monkeypatch):
    """As a file of options: it is not run for standing in a file that came with it."""
    monkeypatch.chdir(tmp_path)
    archive = tmp_path / "archive"
    archive.mkdir()
    monkeypatch.syspath_prepend(archive)
    (archive / "their_net.py").write_text("raise SystemExit('run')\n")
    study = archive / "study.toml"
    study.write_text('[base]\ndata.name = "synthetic"\nmodel.name = "their_net:Net"\n[[line]]\n')
    with pytest.raises(ValueError, match=r"--set model\.name=their_net:Net"):
        read_study(study)
    typed = typed_values(["model.name=their_net:Net"])
    assert read_study(study, typed=typed).lines[0].config.model.name == "their_net:Net"


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.toml")), ids=lambda file: file.stem)
def test_each_study_of_the_package_has_lines_one_of_which_is_held_against_none(file, monkeypatch):
    monkeypatch.setattr("experiments.study_file.find_data", lambda *_: SyntheticData)
    found = read_study(file, typed=typed_values(["data.name=synthetic"])).lines
    assert len(found) >= 2 and any(not line.versus for line in found)
    json.dumps([str(of(line.config, "sync.mode")) for line in found])


class SyntheticData:
    name = "synthetic"


def test_treatments_are_held_against_their_own_mode_and_bound_untreated():
    found = read_study(
        SWEEPS / "treatments.toml", typed=typed_values(["data.name=synthetic"])
    ).lines
    by_name = {line.name: line for line in found}
    assert len(found) == 24
    for line in found:
        treated, comma, _ = line.name.partition(", ")
        untreated = (treated,) if treated == "sync" else (treated, "sync")
        assert line.versus == (untreated if comma else () if treated == "sync" else ("sync",))
        if comma:
            own, other = line.config.sync, by_name[treated].config.sync
            assert (own.mode, own.tau) == (other.mode, other.tau) and own != other


def test_a_data_set_that_is_not_here_has_its_place_taken_by_what_the_study_says(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.delenv("PERSIA_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = read_study("demo.toml").lines
    assert {(line.config.data.name, line.config.steps) for line in lines} == {("synthetic", 1300)}
    assert "no real data found" in capsys.readouterr().out
    monkeypatch.setenv("PERSIA_DATA_DIR", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="gone"):
        read_study("demo.toml")


def test_of_several_data_sets_those_that_are_here_are_taken_and_the_others_told():
    typed = {"data.name": ["synthetic", "gone.toml"]}
    study = read_study({"line": [SYNC, HYBRID]}, typed=typed)
    assert {line.config.data.name for line in study.lines} == {"synthetic"}
    assert any("gone.toml is left out" in note for note in study.notes)
    with pytest.raises(ValueError, match="none of them is here"):
        read_study({"line": [SYNC]}, typed={"data.name": ["gone.toml", "gone too.toml"]})


def test_a_file_is_found_before_one_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo.toml").write_text('[base]\ndata.name = "synthetic"\n[[line]]\nname = "mine"\n')
    assert [line.name for line in read_study("demo.toml").lines] == ["mine"]
