"""Named presets of what others run: what each sets in either executor, and who wins over it."""

from __future__ import annotations

import pytest

from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import Mode
from runtime.__main__ import main
from runtime.config import SyncConfig, TrainConfig
from runtime.config.presets import PRESETS, with_preset
from runtime.train_options import read_train
from tests.runtime.worlds import ArraySource, config, run

MOST_MISSED = {
    "torchrec-semisync": 0,  # within its start of 900 steps
    "torchrec-semisync-stash": 0,
    "tfra-half-sync": 1,
    "ascend-prefetch6": 0,
    "deeprec-async": 4,
    "persia-default": 9,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_in_the_lag_executor_and_is_as_late_as_it_says(name):
    sync = with_preset(config(ranks=2), name).sync
    world = run(config(**{f: getattr(sync, f) for f in SyncConfig.__slots__}), ArraySource(480))
    assert staleness_in_steps(world.trace).missing_steps.max() == MOST_MISSED[name]


def test_of_the_concurrent_executor_a_preset_has_the_originals_bound():
    persia = with_preset(TrainConfig(), "persia-default", "concurrent").sync
    assert (persia.tau, persia.permits, persia.merges) == (None, 10, False)
    assert with_preset(TrainConfig(), "tfra-half-sync", "concurrent").sync.window is None
    semisync = with_preset(TrainConfig(), "torchrec-semisync-stash", "concurrent").sync
    assert (semisync.tau, semisync.sync_steps, semisync.dense_lag) == (1, 900, 1)


def test_a_preset_comes_after_the_file_and_before_the_command_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('seed = 3\nbatch = 64\n[sync]\nmode = "async"\nranks = 4\ntau = 7\n')
    words = ["--config", str(file), "--preset", "torchrec-semisync", "--sync-steps", "10"]
    found = read_train(words).run
    assert (found.seed, found.batch, found.sync.ranks) == (3, 64, 4)
    assert (found.sync.mode, found.sync.tau, found.sync.sync_steps) == (Mode.HYBRID, 1, 10)


def test_what_stands_for_a_bound_depends_on_the_executor_that_was_typed():
    lag = read_train(["--preset", "persia-default"]).run
    threads = read_train(["--preset=persia-default", "--executor", "concurrent"]).run
    assert (lag.sync.tau, lag.sync.permits) == (9, None)
    assert (threads.sync.tau, threads.sync.permits) == (None, 10)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "torchrec-semisink"], "torchrec-semisync"),
        (["--preset", "deeprec-async", "--executor", "replay", "--trace", "t"], "not of a replay"),
        (["--preset", "persia-default", "--mode", "sync"], "--preset persia-default sets it"),
        (["--preset", "deeprec-async", "--dense-lag", "2"], "dense-lag is not used by mode async"),
    ],
)
def test_a_mistake_about_presets_is_a_sentence(words, said, refused):
    assert said in refused("train", *words)


def test_a_run_that_goes_on_keeps_its_own_options(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="remove --preset"):
        read_train(["--resume", str(tmp_path), "--preset", "deeprec-async"])


def test_help_lists_the_presets(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert name in told
        assert preset.source and preset.says
