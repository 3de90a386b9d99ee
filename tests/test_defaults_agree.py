"""A run and a simulation of the same options describe the same thing: their defaults agree.

`persia_sim.base.vocabulary` holds the numbers; whatever both halves mean by a word is read from
there. Only the runtime has `average_every_steps` (of the executor constant_lag, which has no
clock), a default of `batch` (the simulator's comes from the workload, per rank), and what is done
about late rows (a simulation has no values that could be late).
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

from experiments.benching.bench_peers import Options as BenchPeers
from persia_sim import __main__ as simulator
from persia_sim.base import vocabulary
from persia_sim.base.command_line import options_of
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.cluster.scenario import Averaging, Queues, Scenario
from persia_sim.sharded.command import ShardedOptions
from runtime.config import SyncConfig, TrainConfig
from runtime.dense import averaging
from runtime.train_options import Train, read_train

CONTRACT = {"tau": 4, "ahead": 4, "merge_pushes": True}
MODES = list(Mode)


def simulated(mode: Mode) -> Scenario:
    return scenario_of(SimulateOptions(mode=mode))


def default(group: type, name: str) -> object:
    return inspect.signature(group).parameters[name].default


@pytest.mark.parametrize("word", CONTRACT)
def test_a_training_run_has_the_defaults_of_the_contract(word):
    assert default(SyncConfig, word) == getattr(TrainConfig().sync, word) == CONTRACT[word]
    assert getattr(vocabulary, f"DEFAULT_{word.upper()}", CONTRACT[word]) == CONTRACT[word]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_means_the_same_in_both_halves(mode):
    here, there = SyncConfig(mode=mode), simulated(mode)
    assert there.merges == here.merges == mode.has_barrier
    assert there.lookahead == here.lookahead == "reread"
    assert there.window == here.window == (4 if mode.reads_late_rows else 0)
    if mode.reads_late_rows:
        assert scenario_of(SimulateOptions(mode=mode, tau=None)).window is None
        assert SyncConfig(mode=mode, tau=None).window is None
    else:
        assert there.tau is None
    if mode.averages_replicas:
        assert there.rounds.period_s == Averaging().period_s == averaging.PERIOD_S == 0.5


def test_as_many_lookups_are_in_flight_in_both_halves():
    engine = TrainConfig().engine
    assert Queues().lookups_in_flight == engine.lookups_in_flight == 10


@pytest.mark.parametrize("typed", ["none", "None", "unbounded"])
def test_both_commands_read_the_same_word_for_no_bound(typed, monkeypatch, capsys):
    words = ["--tau", typed, "--cluster", "this-host", "--workload", "taobao-ad", "--steps", "8"]
    monkeypatch.setattr(sys, "argv", ["persia_sim", *words, "--row-format", "f32-adagrad"])
    assert simulator.main() == 0 and "hybrid, tau unbounded\n" in capsys.readouterr().out
    run = ["--mode", "hybrid", "--executor", "concurrent", "--data.name", "synthetic"]
    for tau in (["--tau", typed], [f"--tau={typed}"]):
        assert read_train([*run, *tau]).run.sync.tau is None
    assert read_train(run).run.sync.tau == default(SimulateOptions, "tau") == 4


def test_a_bound_that_the_mode_does_not_read_is_refused_unless_it_is_the_modes_own(
    monkeypatch, capsys
):
    """Sync misses nothing, so a bound of 0 says what it does anyway."""
    for typed in ("4", "none"):
        monkeypatch.setattr(sys, "argv", ["persia_sim", "--mode", "sync", "--tau", typed])
        assert simulator.main() == 2
        assert ": sync does not read it; drop it" in capsys.readouterr().err


def test_an_option_of_the_simulator_that_is_typed_twice_is_refused(monkeypatch, capsys):
    for words in (["--tau", "4", "--tau=8"], ["sharded", "--gpus", "8", "--gpus", "8"],
                  ["--batch-per-rank", "8", "--batch_per_rank", "9"]):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["persia_sim", *words])
        assert simulator.main() == 2
        assert "and only one of them can count; give it once" in capsys.readouterr().err


def test_only_the_runtime_has_these_words():
    known = (
        inspect.signature(SimulateOptions).parameters.keys()
        | inspect.signature(Scenario).parameters
    )
    treatments = {"sync_steps", "dense_lag", "delay_compensation", "lr_by_staleness"}
    assert treatments <= inspect.signature(SyncConfig).parameters.keys()
    assert not known & ({"average_every_steps", "batch"} | treatments)
    sync = SyncConfig()
    assert (sync.average_every_steps, TrainConfig().batch) == (32, 128)


def test_what_help_says_of_a_default_is_the_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["persia_sim", "--help"])
    monkeypatch.setenv("COLUMNS", "240")
    with pytest.raises(SystemExit):
        simulator.main()
    said = " ".join(capsys.readouterr().out.split())
    assert f"Lookahead only; None means {CONTRACT['ahead']} there." in said
    assert "A choice in raw_hybrid and hybrid only; None means yes there." in said
    assert f"--average-every-s FLOAT|None (default: {averaging.PERIOD_S})" in said
    assert default(SimulateOptions, "tau") == CONTRACT["tau"], "which help shows as it is"


CHANGED = """
from persia_sim.base import vocabulary as words
words.DEFAULT_TAU, words.DEFAULT_AHEAD, words.DEFAULT_AVERAGE_EVERY_S = 7, 9, 0.25

import json
from experiments.studies.convergence import Options as ConvergenceOptions
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.sharded.command import ShardedOptions
from persia_sim.report.sweep import Point
from runtime.config import SyncConfig
from runtime.dense.averaging import PERIOD_S

sync = SyncConfig()
hybrid, lookahead, averaging = (
    scenario_of(SimulateOptions(mode=mode))
    for mode in (words.Mode.HYBRID, words.Mode.LOOKAHEAD, words.Mode.ASYNC_AVERAGING)
)
print(json.dumps({
    "tau": [sync.tau, hybrid.tau, Point().tau, ConvergenceOptions().tau],
    "ahead": [sync.ahead, lookahead.steps_ahead],
    "average_every_s": [PERIOD_S, averaging.rounds.period_s],
}))
"""


@pytest.mark.long
def test_both_halves_follow_when_the_vocabulary_changes():
    """One place: a number written a second time would stay behind."""
    ran = subprocess.run([sys.executable, "-c", CHANGED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = {word: set(values) for word, values in json.loads(ran.stdout).items()}
    assert found == {"tau": {7}, "ahead": {9}, "average_every_s": {0.25}}


@pytest.mark.parametrize(
    ("options", "old", "new"),
    [
        (SimulateOptions, "--trace", "--write-trace"),  # `train --trace` reads one
        (SimulateOptions, "--timeline", "--write-timeline"),  # `train --timeline` is a switch
        (ShardedOptions, "--timeline", "--print-stages"),
        (BenchPeers, "--profile", "--where-time-goes"),  # of persia-sim: measured costs
        (Train, "--cluster", "--ray"),  # of persia-sim: a description
        (SimulateOptions, "--servers", "--server-hosts"),  # of train: processes
        (SimulateOptions, "--workers", "--worker-hosts"),
    ],
)
def test_a_word_of_one_half_is_no_option_of_the_other(options, old, new):
    names = {f"--{option.name}" for option in options_of(options)}
    assert new in names and old not in names
