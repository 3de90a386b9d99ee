"""Options that a replay may have otherwise than its trace: the bytes are those of the recorded run,
whatever they are. The table of them (`runtime/executors/replayable.toml`) is not believed here."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from persia_sim.base.rules import Refused
from persia_sim.base.vocabulary import DEFAULT_TAU, Mode
from runtime.config import DataConfig, TrainConfig
from runtime.executors.replayable import DECIDES_NO_BYTE
from runtime.run.saver import Saving
from runtime.run.session import Outcome, train
from tests.experiments.clicks import clicks_file
from tests.runtime.clicks_of_a_user import write_clicks
from tests.runtime.worlds import (
    ArraySource,
    assert_same_bytes,
    changed,
    config,
    on_engine,
    with_another,
)

SOURCE = ArraySource(150)
HYBRID: dict[str, Any] = {"mode": Mode.HYBRID, "tau": DEFAULT_TAU, "ranks": 2}
AVERAGING: dict[str, Any] = {"mode": Mode.ASYNC_AVERAGING, "tau": DEFAULT_TAU, "ranks": 2}
LOOKAHEAD: dict[str, Any] = {"mode": Mode.LOOKAHEAD, "ranks": 2}
THREADS = {"executor": "concurrent"}
RECORDED: dict[str, dict[str, Any]] = {
    "tau": HYBRID | {"tau": 1},
    "permits": HYBRID | THREADS | {"permits": 3},
    "ahead": LOOKAHEAD | {"ahead": 2},
    "queue-batches": HYBRID | THREADS | {"queue_batches": 1},
    "lookups-in-flight": HYBRID | THREADS | {"lookups_in_flight": 2},
    "latency-s": HYBRID | THREADS | {"latency_s": 1e-3},
    "sync-steps": HYBRID | {"sync_steps": 3},
    "average-every-steps": AVERAGING | {"average_every_steps": 2},
    "lookahead": LOOKAHEAD | THREADS | {"lookahead": "forwarded"},
    "executor": HYBRID | THREADS,
    "servers": HYBRID | on_engine("processes", 2),
    "workers": HYBRID | on_engine("workers", 2),
    "fuse-ranks": HYBRID | {"fuse_ranks": True},
    "test-rows": HYBRID | {"test_rows": 20},
    "keep-best": HYBRID | {"checkpoint_every": 2, "keep_best": "auc", "eval_split": "validation"},
    "timeline": HYBRID | THREADS | {"timeline": True},
    "checkpoint-every": HYBRID | {"checkpoint_every": 2},
    "keep-checkpoints": HYBRID | {"checkpoint_every": 2, "keep_checkpoints": 1},
}
"""What another value of the option needs beside it; of all others, nothing."""
ELSEWHERE = {
    "trace": "the order itself, which every replay here has",
    "servers-at": "law 12, as tls, the secret and loaders: hosts/test_several_hosts.py",
    "servers-secret": "given with servers-at",
    "tls": "given with servers-at",
    "loaders": "hosts/loading/test_loaded_source.py",
    "warm-start": "below: the folder of the same model may be another one",
    "data.validation-fraction": "below: part of the schema, which is refused",
}


def recorded(chosen: TrainConfig, source: ArraySource | None, folder: Path) -> Outcome:
    """The run, whose order lies in the folder then."""
    found = train(chosen, source, saving=Saving(folder))
    found.trace.save(folder / "trace.npz")
    return found


def with_option(chosen: TrainConfig, option: str, place: Path) -> TrainConfig:
    """The config with another value of the option, if it may have it there. Raises `Refused`."""
    other = with_another(chosen, option)
    if option == "data.name":
        copy = place / "elsewhere"
        shutil.copytree(Path(chosen.data.name).parent, copy, dirs_exist_ok=True)
        return replace(chosen, data=replace(chosen.data, name=str(copy / "clicks.toml")))
    if option == "data.dir":
        return replace(chosen, data=replace(chosen.data, dir=place / "copy"))
    groups = ("sync", "engine", "data", "evaluation", "checkpoint")
    return replace(other, **{name: replace(getattr(other, name)) for name in groups})


def of_mode(chosen: TrainConfig, trace: Path) -> TrainConfig:
    """A replay with nothing but what counts: mode, ranks and shards."""
    sync = chosen.sync
    tau = {"tau": DEFAULT_TAU} if sync.mode.reads_late_rows else {}
    shards = chosen.engine.shard_count
    given = {"mode": sync.mode, "ranks": sync.ranks, "shards": shards, "data": chosen.data} | tau
    return config(executor="replay", trace=trace, **given)


@pytest.mark.parametrize("option", [name for name in DECIDES_NO_BYTE if name not in ELSEWHERE])
@pytest.mark.law6
def test_a_replay_has_the_bytes_of_its_run_whatever_this_option_is(option, tmp_path):
    """It was another one as the run was recorded, or is another one in the replay."""
    source, data = SOURCE, DataConfig()
    if option.startswith("data."):
        source, data = None, DataConfig(name=str(write_clicks(tmp_path / "data", 200)))
    if option == "data.dir":
        clicks_file(tmp_path / "sets", 200)
        shutil.copytree(tmp_path / "sets", tmp_path / "copy")
        data = DataConfig(name="kuairand-pure-14d", dir=tmp_path / "sets")
    usual = config(data=data, **HYBRID)
    chosen = config(data=data, **RECORDED[option]) if option in RECORDED else usual
    run, trace = recorded(chosen, source, tmp_path / "run"), tmp_path / "run" / "trace.npz"
    again = of_mode(chosen, trace)
    if option not in RECORDED:
        # It may be an option of runs that are recorded alone, or of replays alone.
        with suppress(Refused):
            assert_same_bytes(run, train(with_option(again, option, tmp_path), source))
        with suppress(Refused):
            kept = option != "trace-order"  # of what was not kept there is no replay
            other = with_option(usual, option, tmp_path) if kept else usual
            run, trace = recorded(other, source, tmp_path / "other"), tmp_path / "other/trace.npz"
            again = changed(again, trace=trace)
    assert_same_bytes(run, train(again, source))
    run.store.close()


def test_no_trace_asks_for_what_a_replay_does_not_read():
    """Nobody could give it."""
    again = config(executor="replay", trace=Path("order.npz"), **HYBRID)
    unread = [option.replace("_", "-").split(".") for option in again.unread()]
    assert {name for group, name in unread if group == "engine"} <= DECIDES_NO_BYTE.keys()


def test_a_model_to_begin_with_may_lie_in_another_folder_and_be_no_other_one(tmp_path):
    for name, steps in (("one", 2), ("other", 3)):
        train(config(checkpoint_every="end", steps=steps), SOURCE, saving=Saving(tmp_path / name))
    copy = shutil.copytree(tmp_path / "one", tmp_path / "copy")
    chosen = config(**HYBRID, warm_start=tmp_path / "one")
    run = recorded(chosen, SOURCE, tmp_path / "run")
    again = of_mode(chosen, tmp_path / "run" / "trace.npz")
    assert_same_bytes(run, train(replace(again, warm_start=copy), SOURCE))
    for other in (tmp_path / "other", None):
        with pytest.raises(ValueError, match="warm_start"):
            train(replace(again, warm_start=other), SOURCE)


def test_another_share_of_validation_rows_is_another_split_and_is_refused(tmp_path):
    data = DataConfig(name=str(write_clicks(tmp_path / "data", 200)))
    recorded(config(data=data, **HYBRID), None, tmp_path / "run")
    fewer = config(data=replace(data, validation_fraction=0.25), **HYBRID)
    with pytest.raises(ValueError, match="validation_fraction was"):
        train(of_mode(fewer, tmp_path / "run" / "trace.npz"))
